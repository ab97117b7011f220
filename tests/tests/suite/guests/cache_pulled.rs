//! The cache device is removed while volumes over ublk are in use, in guests. It is a virtio disk
//! that the kernel is told to remove and to find again, then under another name.
//!
//! `docs/failures.md` states the promise: a volume without dirty data notices nothing, a client of
//! a volume with dirty data waits or gets an error, and stale data is never read.

use bcached_front_ublk::DataTransfer;
use bcached_tests::failure::Outcome;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{all_is_well, new_vm_having, vm_having};

/// Two volumes behind a cache, which is configured by UUID, since it returns under another name.
const BEGINS: &str = r#"
bcached make -b 64k -C /dev/vda > /dev/null
bcached make -B /dev/vdb --for /dev/vda --label clean > /dev/null
bcached make -B /dev/vdc --for /dev/vda --writeback --label dirty > /dev/null
uuid=$(bcached show /dev/vda | sed -n 's/^dev.uuid[[:space:]]*\([^ ]*\).*/\1/p')
test -n "$uuid"
cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "UUID=$uuid"
$uncongested
[defaults]
export = "ublk"
sequential_cutoff = 0
writeback_running = false
wait = "5s"
[volume.clean]
backing = "/dev/vdb"
cache_mode = "writethrough"
[volume.dirty]
backing = "/dev/vdc"
cache_mode = "writeback"
end
serve
here=/dev/bcache/by-label
clean=$(readlink $here/clean) dirty=$(readlink $here/dirty)
test "$(bcached status --json | grep -c "\"transfer\": *\"$transfer\"")" = 2
cache=/dev/vda
# pulled: the cache device is, for the kernel, too. plugged: it is back, as $cache.
pulled() {
	echo 1 > $(dirname $(readlink -f /sys/block/${cache#/dev/}/device))/remove
	test ! -e $cache
}
plugged() {
	echo 1 > /sys/bus/pci/rescan
	wait_for 20 found
}
found() {
	for disk in /sys/block/vd*; do
		cache=/dev/${disk##*/}
		case $cache in /dev/vdb | /dev/vdc) continue ;; esac
		test ! -b $cache || return 0
	done
	return 1
}
# count EVENT: how often the log has said so since the daemon began. hears EVENT TIMES: it comes to that. notices TIMES: so often the cache has gone,
# and that is told before the next leaf would have been due (30 s), if one would.
count() { grep -c "event=$1" /tmp/log || true; }
heard() { test $(count $1) -ge $2; }
hears_within() { wait_for $1 heard $2 $3 || { cat /tmp/log; return 1; }; }
hears() { hears_within 60 $1 $2; }
notices() { hears_within 20 cache-stopped-writing $1; hears_within 20 device-gone $1; }
# tells VOLUME WORDS: its status does.
tells() {
	bcached status $1 > /tmp/status || true
	grep -q "$2" /tmp/status || { cat /tmp/status; return 1; }
}
"#;

/// A volume without dirty data continues, whatever happens to the cache.
const CLEAN: &str = r#"
mkfs.ext4 -q $clean; mount -t ext4 -o errors=panic $clean /mnt
dd if=/dev/urandom of=/mnt/a bs=64k count=100 conv=fsync 2> /dev/null
sum=$(md5sum < /mnt/a)
unharmed() { echo 3 > /proc/sys/vm/drop_caches; test "$sum" = "$(md5sum < /mnt/a)"; }
unharmed
( load /mnt/under 4m under --fallocate=none ) & writer=$!
goes_on under
for round in 1 2; do
	pulled
	notices $round
	goes_on under; goes_on under
	unharmed
	tells clean "its cache has stopped writing: the volume continues without it"
	plugged
	hears device-returned $round; hears cache-works-again $round
	goes_on under; goes_on under
	unharmed
done
# Nor does he if the daemon is killed while it is away. What the cache holds of him is void from then on.
pulled
goes_on under
killed
serve
heard volume-without-cache 1
goes_on under
plugged
wait_for 60 bcached status clean > /dev/null
goes_on under
unharmed
: > /tmp/enough
ends $writer
umount /mnt
# It is noticed, too, if nobody wants anything of it.
pulled
notices 1
plugged
hears device-returned 1; hears cache-works-again 1
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb --backing /dev/vdc $cache > /dev/null
# The disk alone has all of it.
losetup -o 8192 /dev/loop0 /dev/vdb
e2fsck -fn /dev/loop0 > /tmp/checked 2>&1 || { cat /tmp/checked; exit 1; }
mount -t ext4 /dev/loop0 /mnt
unharmed
written /mnt/under 4m $(passes under) --verify_only
umount /mnt; losetup -d /dev/loop0"#;

/// A request that needs dirty data waits for the cache, or fails. Whether the cache returns in
/// time, late, or under the next daemon: all flushed data is there.
const DIRTY: &str = r#"
# puts NAME: 64 KiB from a file to their place, and durably so. gets NAME: what is there.
puts() { dd if=/tmp/$1 of=$dirty bs=64k seek=512 count=1 oflag=direct conv=fsync 2> /dev/null; }
gets() { dd if=$dirty of=/tmp/$1 bs=64k skip=512 count=1 iflag=direct 2> /dev/null; }
# either: what was found is of before a write that failed, or that.
either() { cmp -s /tmp/new /tmp/found || cmp /tmp/newer /tmp/found; }
for name in old new newer; do head -c 65536 /dev/urandom > /tmp/$name; done
puts old
written $dirty 16m 1
sync $dirty
tells dirty "16.1 MiB dirty"
# They wait, and go on when it is back. Only what is to be durable has to be asked for once more.
pulled
written $dirty 16m 1 --verify_only & reading=$!
puts new & writing=$!
notices 1
sleep 3
test -d /proc/$reading; test -d /proc/$writing
tells dirty "its cache has stopped writing"
plugged
hears device-returned 1; hears cache-works-again 1
ends $reading
if wait $writing; then echo "the first flush says nothing"; exit 1; fi
heard flush-failed 1
puts new
gets found; cmp /tmp/new /tmp/found
# It does not come in time: they fail, and are told nothing old.
bcached set dirty freeze_timeout=3s > /dev/null
pulled
if puts newer; then false; fi
hears device-gone 2
if gets found; then either; fi
if dd if=$dirty of=/tmp/found bs=64k skip=7 count=1 iflag=direct 2> /dev/null; then echo where from; false; fi
code=0; kill -TERM $server; wait $server || code=$?
test $code = 4 && heard dirty-stays 1 || { cat /tmp/log; exit 1; }
test -z "$(ls /sys/class/ublk-char)"
# The next start serves the other one, and not this one.
serve
tells clean "128 MiB"
tells dirty waiting
test ! -e $here/dirty
plugged
wait_for 60 test -b $here/dirty
dirty=$(readlink $here/dirty)
written $dirty 16m 1 --verify_only
gets found; either
# Killed while it is away, with somebody who waits: he goes on under the next one, when it is back.
( load $dirty 4m dirty --offset=64m ) & writer=$!
goes_on dirty
pulled
written $dirty 16m 1 --verify_only & reading=$!
sleep 1
killed
serve
test -d /proc/$writer && test -d /proc/$reading
plugged
goes_on dirty; goes_on dirty
ends $reading
: > /tmp/enough
ends $writer
written $dirty 4m $(passes dirty) --offset=64m --verify_only
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb --backing /dev/vdc $cache > /dev/null"#;

fn vm_with(transfer: DataTransfer) -> Option<Vm> {
    let (tools, drivers) = (["fio", "e2fsck"], ["drivers/block/ublk_drv", "drivers/block/loop"]);
    match transfer {
        DataTransfer::UserCopy => vm_having("bcached", &tools, &drivers),
        DataTransfer::ZeroCopy => Some(new_vm_having("bcached", &tools, &drivers)?.sized(768, 2)),
    }
}

fn with(transfer: DataTransfer, script: &str) -> Outcome {
    let Some(vm) = vm_with(transfer) else { return Ok(()) };
    all_is_well(&vm, &[96, 128, 128], &format!("transfer='{}'\n{BEGINS}{script}", transfer.word()))
}

#[test]
fn who_has_nothing_dirty_does_not_notice_that_the_cache_is_pulled() -> Outcome {
    with(DataTransfer::UserCopy, CLEAN)
}

#[test]
fn nor_does_he_where_memory_is_registered() -> Outcome {
    with(DataTransfer::ZeroCopy, CLEAN)
}

#[test]
fn what_was_dirty_is_there_when_a_pulled_cache_is_back() -> Outcome {
    with(DataTransfer::UserCopy, DIRTY)
}

#[test]
fn so_it_is_where_memory_is_registered() -> Outcome {
    with(DataTransfer::ZeroCopy, DIRTY)
}
