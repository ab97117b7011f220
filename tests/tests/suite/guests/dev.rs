//! `export = "dev"` in a guest: by the kernel's NBD client where there is no ublk, and by ublk
//! where there is. Over FUSE and a loop device, it is tested on the host
//! (`crates/cli/tests/suite/dev.rs`).

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{DAEMON, run_on, vm_with};

/// Serves the volume on `/dev/vda` and `/dev/vdb`, whose device is then `$device`.
const SERVE: &str = "
# The volume has the blocks of its backing device, which are larger than the cache's.
bcached make -b 64k --block 512 -C /dev/vda
bcached make --writeback --block 4k -B /dev/vdb --for /dev/vda
options='--cache /dev/vda --backing /dev/vdb --export dev --stop-timeout 1s' patience=60
chosen() {
	serve_device
	sed -n 's/.*\\(its block device is provided by .*\\) \\[event.*/\\1/p' /tmp/log
}
# Another process goes on, and has a device too; whose name it is is said by its link.
take_over() {
	former=$server
	server=$(bcached take-over | sed -n 's/^daemon \\([0-9]*\\) has taken over.*/\\1/p')
	test -n \"$server\" && ! test -d /proc/$former || { cat /tmp/log; return 1; }
	device=$(readlink $link)
}
stops() { kill -TERM $server; wait_for 20 test ! -d /proc/$server; }
unused() { ! ls /sys/block/nbd*/pid 2>/dev/null; }
chosen
link=$(echo /dev/bcache/by-uuid/*)
volume=bcache-$(basename $link | cut -c1-8)
test $link -ef $device
bcached status
";

/// A file system, a stop of the volume with unflushed pages, a SIGKILL under load, and a stop while
/// in use.
const BY_NBD: &str = "
queue=/sys/block/${device#/dev/}/queue
for limit in logical_block_size physical_block_size write_cache fua; do echo $limit $(cat $queue/$limit); done
mkfs.ext4 -q $device; mount -t ext4 -o errors=continue,discard $link /mnt
head -c 20000000 /dev/urandom > /tmp/data
dd if=/tmp/data of=/mnt/a bs=64k conv=fsync 2>/dev/null
bcached status
bcached remove $volume 2>&1 || echo exit $?
fstrim /mnt
umount /mnt; mount -t ext4 $link /mnt
cmp /tmp/data /mnt/a
umount /mnt
# What nobody has flushed is written when the device is taken away: it is open in the daemon, so nobody's closing does that.
dd if=/tmp/data of=$device bs=64k seek=3000 count=100 conv=notrunc 2>/dev/null
bcached stop $volume
wait_for 20 unused
wait_for 20 test ! -L $link
bcached add $volume
wait_for 20 test -L $link
device=$(readlink $link)
dd if=$device of=/tmp/found bs=64k skip=3000 count=100 2>/dev/null
dd if=/tmp/data of=/tmp/wanted bs=64k count=100 2>/dev/null
cmp /tmp/found /tmp/wanted
# Nobody else takes over while it is in use. Else that has what nobody has flushed.
mount -t ext4 $link /mnt
bcached take-over 2>&1 || echo exit $?
umount /mnt
dd if=/tmp/data of=$device bs=64k seek=3200 count=100 conv=notrunc 2>/dev/null
take_over
dd if=$device of=/tmp/found bs=64k skip=3200 count=100 2>/dev/null
cmp /tmp/found /tmp/wanted
bcached status | grep ' (kernel nbd)' > /dev/null
# Killed with requests under way: the device ends, and the next start makes another.
( dd if=/tmp/data of=$device bs=16k seek=4000 oflag=direct conv=notrunc 2>/dev/null || echo dd failed ) &
writer=$!
kill -9 $server; wait_for 20 test ! -d /proc/$server
wait $writer || true
wait_for 20 unused
chosen
mount -t ext4 $link /mnt
cmp /tmp/data /mnt/a
# In use at a stop it ends.
kill -TERM $server; wait $server
grep -o 'event=device-cut' /tmp/log
umount /mnt || umount -l /mnt
wait_for 20 unused || { ls -l /sys/block/nbd*/pid; false; }
test ! -L $link || { ls -l $link; cat /tmp/log; false; }
chosen
kill -TERM $server; wait $server
if grep event=device /tmp/log | grep -v device-way-chosen; then false; fi
unused
test -z \"$(ls /dev/bcache/by-uuid /dev/bcache/by-label 2>/dev/null | grep -v :)\"
bcached check --backing /dev/vdb /dev/vda > /dev/null
echo all is well";

#[test]
fn where_there_is_no_ublk_the_kernels_nbd_client_has_the_device() -> Outcome {
    let Some(vm) = vm_with("bcached", &["drivers/block/nbd"]) else { return Ok(()) };
    let said = run_on(&vm, &[128, 256], &format!("{DAEMON}{SERVE}{BY_NBD}"))?;
    let chosen = "its block device is provided by kernel nbd (ublk: /dev/ublk-control does not exist: load the module (modprobe ublk_drv; Linux 6.5 and \
                  newer))";
    let lines = [
        chosen,
        "logical_block_size 4096",
        "physical_block_size 4096",
        "write_cache write back",
        "fua 1",
        "exit 3",
        "event=device-cut",
        "all is well",
    ];
    for line in lines {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
    let named =
        |line: &String| line.starts_with("volume bcache-") && line.contains(", /dev/nbd0 (kernel nbd)");
    assert!(said.iter().any(named), "{said:#?}");
    let client =
        |line: &String| line.starts_with("client of bcache-") && line.ends_with(": the mount /mnt, writing");
    assert!(said.iter().any(client), "{said:#?}");
    Ok(())
}

/// The same device as with `export = "ublk"`, and as persistent.
#[test]
fn where_there_is_ublk_the_device_outlives_the_daemon() -> Outcome {
    let Some(vm) = vm_with("bcached", &["drivers/block/nbd", "drivers/block/ublk_drv"]) else {
        return Ok(());
    };
    let said = run_on(
        &vm,
        &[128, 256],
        &format!(
            "{DAEMON}{SERVE}
first=$device
mkfs.ext4 -q $device; mount -t ext4 -o errors=panic $link /mnt
head -c 20000000 /dev/urandom > /tmp/data
( dd if=/tmp/data of=/mnt/a bs=16k conv=fsync 2>/dev/null || echo dd failed ) &
writer=$!
kill -9 $server; wait $server || true
sleep 1
test -d /proc/$writer
chosen
test $device = $first
test $link -ef $device
wait $writer
cmp /tmp/data /mnt/a
kill -TERM $server; wait $server
grep -o 'event=ublk-left' /tmp/log
test -b $device
chosen
test $device = $first
cmp /tmp/data /mnt/a
# Mounted and written to while another process takes over: it is the same device.
( dd if=/tmp/data of=/mnt/b bs=16k conv=fsync 2>/dev/null || echo dd failed ) &
writer=$!
take_over
test $device = $first
test $link -ef $device
wait $writer
cmp /tmp/data /mnt/b
umount /mnt
bcached stop $volume
wait_for 20 test ! -e $device
bcached add $volume
wait_for 20 test -L $link
stops
test ! -L $link
test -z \"$(ls /sys/class/ublk-char)\"
unused
echo all is well"
        ),
    )?;
    for line in ["its block device is provided by ublk", "event=ublk-left", "all is well"] {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
    assert!(!said.iter().any(|line| line == "dd failed"), "{said:#?}");
    let named = |line: &String| line.starts_with("volume bcache-") && line.contains(", /dev/ublkb0");
    assert!(said.iter().any(named), "{said:#?}");
    Ok(())
}
