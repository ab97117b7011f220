//! Typical uses of a block device on volumes over ublk: file systems, `fio`, discards, resizing,
//! detaching the cache, and killing the daemon in the middle of it.

use bcached_tests::failure::Outcome;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{all_is_well, new_vm_having, vm_having};

const UBLK: &str = "drivers/block/ublk_drv";

/// The configuration of a cache, and `add NAME BACKING`, which adds a volume to it.
const CACHE: &str = r#"
bcached make -b 64k -C /dev/vda > /dev/null
cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
$uncongested
[defaults]
export = "ublk"
cache_mode = "writeback"
sequential_cutoff = 0
end
add() {
	bcached make --backing $2 --for /dev/vda --label $1 > /dev/null
	printf '[volume.%s]\nbacking = "%s"\n' $1 $2 >> /run/b/config.toml
	mkdir /mnt/$1
}
here=/dev/bcache/by-label
"#;

fn on_its_volumes(vm: &Vm, disks: &[u64], script: &str) -> Outcome {
    all_is_well(vm, disks, &format!("{CACHE}{script}"))
}

/// There is a file system on each volume, and all of them are being written to when the daemon is
/// killed.
#[test]
fn file_systems_find_their_files_and_themselves_in_order() -> Outcome {
    let tools = ["e2fsck", "mkfs.xfs", "xfs_repair", "mkfs.btrfs", "btrfs"];
    let drivers = [UBLK, "fs/xfs/xfs", "crypto/xor", "lib/raid6/raid6_pq", "fs/btrfs/btrfs"];
    let Some(vm) = vm_having("bcached", &tools, &drivers) else { return Ok(()) };
    on_its_volumes(
        &vm.sized(1024, 1),
        &[256, 256, 384, 256],
        r#"
add ext4 /dev/vdb; add xfs /dev/vdc; add btrfs /dev/vdd
serve
mkfs.ext4 -q $here/ext4
mkfs.xfs -q $here/xfs
mkfs.btrfs -q $here/btrfs 2> /dev/null
for fs in ext4 xfs btrfs; do mount -t $fs $here/$fs /mnt/$fs; done
head -c 6000000 /dev/urandom > /tmp/data
# Many files, some of which go again, and one that is written over in parts.
files() {
	cd /mnt/$1
	mkdir a b
	for n in $(seq 60); do head -c $((n * 997)) /tmp/data > a/$n; mv a/$n b; done
	for n in $(seq 1 3 60); do rm b/$n; done
	cp /tmp/data large
	for n in 3 14 15 92; do dd if=/tmp/data of=large bs=4k seek=$n count=3 conv=notrunc,fsync 2>/dev/null; done
	find . -type f | sort | xargs md5sum > /tmp/sums.$1
	sync
}
writers=
for fs in ext4 xfs btrfs; do ( set -e; files $fs ) & writers="$writers $!"; done
wait_for 60 test -e /mnt/xfs/b/20
killed
sleep 1
for writer in $writers; do test -d /proc/$writer; done
serve
for writer in $writers; do ends $writer; done
check() {
	case $1 in
	ext4) e2fsck -fn $here/ext4 ;;
	xfs) xfs_repair -n $here/xfs ;;
	btrfs) btrfs check $here/btrfs ;;
	esac > /tmp/checked 2>&1 || { cat /tmp/checked; return 1; }
}
unharmed() { ( cd /mnt/$1; md5sum -c /tmp/sums.$1 > /tmp/checked 2>&1 ) || { grep -v ': OK$' /tmp/checked; return 1; }; }
for fs in ext4 xfs btrfs; do
	umount /mnt/$fs
	check $fs
	mount -t $fs $here/$fs /mnt/$fs
	unharmed $fs
	fstrim /mnt/$fs
	umount /mnt/$fs; mount -t $fs $here/$fs /mnt/$fs
	unharmed $fs
	umount /mnt/$fs
	check $fs
done
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb --backing /dev/vdc --backing /dev/vdd /dev/vda > /dev/null"#,
    )
}

/// `fio` can identify each byte that it has written, and the pass in which it was written.
#[test]
fn fio_finds_what_it_wrote_while_the_daemon_was_killed_under_it() -> Outcome {
    let Some(vm) = vm_having("bcached", &["fio", "blkdiscard"], &[UBLK]) else { return Ok(()) };
    on_its_volumes(
        &vm.sized(1024, 1),
        &[128, 128],
        r#"
add raw /dev/vdb
serve
device=$(readlink -f $here/raw)
( load $device 16m raw --offset=64m ) & writer=$!
for round in 1 2 3 4 5; do
	sleep 1
	killed
	sleep 0.5
	test -d /proc/$writer
	serve
	test $(readlink -f $here/raw) = $device
done
: > /tmp/enough
ends $writer
# (By its path: the shell has one of its own, that knows no zeroes.) The zeroes are where they were asked for and nowhere else, after the daemon was killed too; what was written is of the last time.
/bin/blkdiscard --zeroout --offset 1M --length 63M $device
/bin/blkdiscard --zeroout --offset 80M --length 8M $device
/bin/blkdiscard --offset 96M --length 8M $device
killed
serve
are_zeroes() { dd if=$device bs=1M skip=$1 count=$2 iflag=direct 2>/dev/null | cmp -s -n $(($2 << 20)) - /dev/zero; }
are_zeroes 1 63
are_zeroes 80 8
written $device 16m $(passes raw) --offset=64m --verify_only
echo passes $(passes raw)
# A volume in the cache alone has nothing where it was discarded.
bcached add alone --size 16M --cache fast
wait_for 20 test -b $here/alone
device=$(readlink -f $here/alone)
written $device 8m 1
/bin/blkdiscard --offset 1M --length 2M $device
are_zeroes 1 2
killed
serve
are_zeroes 1 2
if are_zeroes 0 1; then echo "more than was discarded"; exit 1; fi
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb /dev/vda > /dev/null"#,
    )
}

/// All of this happens under a mounted file system with a load on it.
#[test]
fn a_mounted_volume_leaves_its_cache_and_comes_to_it_and_grows() -> Outcome {
    let drivers = [UBLK, "drivers/block/loop"];
    let Some(vm) = vm_having("bcached", &["fio", "resize2fs", "e2fsck"], &drivers) else { return Ok(()) };
    on_its_volumes(
        &vm.sized(1024, 1),
        &[128, 192],
        r#"
add tank /dev/vdb
truncate -s 64M /dev/shm/file
add file /dev/shm/file
serve
for name in tank file; do
	mkfs.ext4 -q $here/$name
	mount -t ext4 -o errors=panic $here/$name /mnt/$name
	dd if=/dev/urandom of=/mnt/$name/a bs=64k count=100 conv=fsync 2>/dev/null
done
( load /mnt/tank/under 8m under ) & writer=$!
goes_on under
bcached detach tank
bcached list
goes_on under; goes_on under
bcached attach tank
goes_on under; goes_on under
# Killed in the middle of the next one: it goes on with it.
bcached detach tank --no-wait
killed
serve
bcached wait tank --for detached --timeout 60s
goes_on under; goes_on under
: > /tmp/enough
ends $writer
last=$(passes under)
sum=$(md5sum < /mnt/tank/a)
umount /mnt/tank
bcached stop tank
# The disk alone has all of it.
losetup -o 8192 /dev/loop0 /dev/vdb
e2fsck -fn /dev/loop0 > /tmp/checked 2>&1 || { cat /tmp/checked; exit 1; }
mount -t ext4 /dev/loop0 /mnt/tank
test "$sum" = "$(md5sum < /mnt/tank/a)"
written /mnt/tank/under 8m $last --verify_only
umount /mnt/tank; losetup -d /dev/loop0
# This kernel has no other size for a device that is there, whoever serves it; the next device has it.
size() { blockdev --getsize64 $(readlink -f $here/$1); }
was=$(size file)
sum=$(md5sum < /mnt/file/a)
truncate -s 96M /dev/shm/file
bcached grow file
grep -o 'event=ublk-not-resized' /tmp/log
test $(size file) = $was
killed
serve
test $(size file) = $was
umount /mnt/file
bcached stop file
bcached add file
wait_for 20 test -b $here/file
test $(size file) = $(((96 << 20) - 8192))
mount -t ext4 -o errors=panic $here/file /mnt/file
before=$(stat -f -c %b /mnt/file)
resize2fs $here/file > /tmp/resized 2>&1 || { cat /tmp/resized; exit 1; }
test $(stat -f -c %b /mnt/file) -gt $((before + 8000))
test "$sum" = "$(md5sum < /mnt/file/a)"
dd if=/dev/urandom of=/mnt/file/b bs=1M count=60 conv=fsync 2>/dev/null
umount /mnt/file
e2fsck -fn $here/file > /tmp/checked 2>&1 || { cat /tmp/checked; exit 1; }
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check /dev/vda --backing /dev/shm/file > /dev/null"#,
    )
}

/// Where the kernel supports it (Linux 6.16 and later), the device itself grows, mounted and under
/// load, even after it was taken over from a killed daemon. It also shrinks after its file system.
#[test]
fn a_device_has_another_size_while_it_is_mounted() -> Outcome {
    let drivers = [UBLK];
    let Some(vm) = new_vm_having("bcached", &["fio", "resize2fs", "e2fsck"], &drivers) else { return Ok(()) };
    on_its_volumes(
        &vm.sized(1024, 1),
        &[128],
        r#"
truncate -s 64M /dev/shm/file
add file /dev/shm/file
serve
mkfs.ext4 -q $here/file
mount -t ext4 -o errors=panic $here/file /mnt/file
dd if=/dev/urandom of=/mnt/file/a bs=64k count=100 conv=fsync 2>/dev/null
sum=$(md5sum < /mnt/file/a)
( load /mnt/file/under 8m under ) & writer=$!
goes_on under
size() { blockdev --getsize64 $(readlink -f $here/file); }
# grows MIB: the backing device, the volume, the block device and its file system.
grows() {
	blocks=$(stat -f -c %b /mnt/file)
	truncate -s $1M /dev/shm/file
	bcached grow file > /tmp/told
	test $(wc -l < /tmp/told) = 1 || { cat /tmp/told; exit 1; }
	test $(size) = $((($1 << 20) - 8192))
	resize2fs $here/file > /tmp/resized 2>&1 || { cat /tmp/resized; exit 1; }
	test $(stat -f -c %b /mnt/file) -gt $blocks
	goes_on under
}
grows 96
killed
serve
goes_on under
test $(size) = $(((96 << 20) - 8192))
grows 112
dd if=/dev/urandom of=/mnt/file/b bs=1M count=60 conv=fsync 2>/dev/null
: > /tmp/enough
ends $writer
test "$sum" = "$(md5sum < /mnt/file/a)"
rm /mnt/file/b
umount /mnt/file
e2fsck -fp $here/file > /tmp/checked 2>&1 || { cat /tmp/checked; exit 1; }
resize2fs $here/file 60M > /tmp/resized 2>&1 || { cat /tmp/resized; exit 1; }
bcached shrink file --size 60M
test $(size) = $((60 << 20))
truncate -s $(((60 << 20) + 8192)) /dev/shm/file
mount -t ext4 -o errors=panic $here/file /mnt/file
test "$sum" = "$(md5sum < /mnt/file/a)"
written /mnt/file/under 8m $(passes under) --verify_only
umount /mnt/file
e2fsck -fn $here/file > /tmp/checked 2>&1 || { cat /tmp/checked; exit 1; }
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check /dev/vda --backing /dev/shm/file > /dev/null"#,
    )
}
