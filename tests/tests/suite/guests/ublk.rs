//! Volumes as block devices of a real kernel, in a guest: the ublk front end on a file, and the
//! daemon.

use bcached_front_ublk::DataTransfer;
use bcached_tests::failure::Outcome;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{self, DAEMON, run_on};

/// Shell functions that serve `/dev/vda` as a device. The server's output goes to `/tmp/said`, and
/// it obeys what is written to descriptor 3.
const SERVE: &str = r#"
mkfifo /tmp/told
serve() {
	: > /tmp/said
	ublk-file /dev/vda < /tmp/told > /tmp/said 2>&1 &
	server=$!
	exec 3> /tmp/told
	wait_for 60 grep -q '^here ' /tmp/said || { cat /tmp/said; return 1; }
	device=$(sed -n 's/^here //p' /tmp/said)
	wait_for 20 test -b $device
	grep -q "^transfer $transfer" /tmp/said || { cat /tmp/said; return 1; }
}
"#;

/// Returns a guest whose kernel can only copy the data of requests, or one whose kernel registers
/// their memory with the ring. The latter has two processors, so a device has two queues.
fn vm_with(transfer: DataTransfer, program: &str) -> Option<Vm> {
    let drivers = ["drivers/block/ublk_drv"];
    match transfer {
        DataTransfer::UserCopy => devices::vm_with(program, &drivers),
        DataTransfer::ZeroCopy => Some(devices::new_vm_having(program, &[], &drivers)?.sized(768, 2)),
    }
}

fn run(
    vm: &Vm,
    transfer: DataTransfer,
    script: &str,
) -> Result<Vec<String>, bcached_tests::failure::Failure> {
    run_on(vm, &[256], &format!("transfer='{}'\n{SERVE}{script}", transfer.word()))
}

#[test]
fn a_volume_is_a_block_device_with_a_file_system_and_goes_when_it_is_told() -> Outcome {
    has_a_file_system(DataTransfer::UserCopy)
}

#[test]
fn a_volume_whose_memory_is_registered_is_one_too() -> Outcome {
    has_a_file_system(DataTransfer::ZeroCopy)
}

#[test]
fn who_writes_to_a_device_does_not_notice_that_its_server_was_killed() -> Outcome {
    outlives_its_server(DataTransfer::UserCopy)
}

#[test]
fn nor_if_its_memory_was_registered() -> Outcome {
    outlives_its_server(DataTransfer::ZeroCopy)
}

#[test]
fn a_volume_of_the_daemon_is_a_block_device_that_outlives_it() -> Outcome {
    outlives_the_daemon(DataTransfer::UserCopy)
}

#[test]
fn so_it_is_where_memory_is_registered() -> Outcome {
    outlives_the_daemon(DataTransfer::ZeroCopy)
}

fn has_a_file_system(transfer: DataTransfer) -> Outcome {
    let Some(vm) = vm_with(transfer, "ublk-file") else { return Ok(()) };
    let said = run(
        &vm,
        transfer,
        "serve
queue=/sys/block/${device#/dev/}/queue
for limit in logical_block_size physical_block_size minimum_io_size optimal_io_size write_cache fua; do
	echo $limit $(cat $queue/$limit)
done
test $(cat $queue/discard_granularity) = 4096
test $(ls -d $queue/../mq/* | wc -l) = $(nproc)
test $(cat /sys/block/${device#/dev/}/size) = 524288
mkfs.ext4 -q $device
mkdir /mnt; mount -t ext4 -o discard $device /mnt
dd if=/dev/urandom of=/mnt/a bs=1M count=60 2>&1
for n in 1 2 3 4 5 6 7 8; do dd if=/mnt/a of=/mnt/b bs=4k seek=$n count=1 conv=notrunc,fsync 2>&1; done
sum=$(md5sum < /mnt/a)
fstrim /mnt
umount /mnt; mount -t ext4 $device /mnt
test \"$sum\" = \"$(md5sum < /mnt/a)\"
rm /mnt/b; umount /mnt
echo remove >&3
wait $server
grep -q '^bounced 0$' /tmp/said
test ! -e $device
test -z \"$(ls /sys/class/ublk-char)\"
echo all is well",
    )?;
    let limits = [
        "logical_block_size 4096",
        "physical_block_size 4096",
        "minimum_io_size 4096",
        "optimal_io_size 4096",
        "write_cache write back",
        "fua 1",
    ];
    for line in limits.into_iter().chain(["all is well"]) {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
    Ok(())
}

/// The server is killed under load, again and again. Its I/O waits for the next server, and nothing
/// above sees an error.
fn outlives_its_server(transfer: DataTransfer) -> Outcome {
    let Some(vm) = vm_with(transfer, "ublk-file") else { return Ok(()) };
    let said = run(
        &vm,
        transfer,
        "serve
first=$device; : > /tmp/done
mkfs.ext4 -q $device
mkdir /mnt; mount -t ext4 -o errors=panic $device /mnt
( for n in 1 2 3 4 5 6 7 8 9 10 11 12; do
	head -c 6000000 /dev/urandom > /tmp/piece; md5sum < /tmp/piece >> /tmp/sums
	dd if=/tmp/piece of=/mnt/$n bs=16k conv=fsync 2>/dev/null || { echo dd failed; exit 1; }
	echo $n >> /tmp/done
done ) &
writer=$!
# Something is in flight at every moment.
head -c 4194304 /dev/urandom > /tmp/direct
( until test -e /tmp/enough; do
	dd if=/tmp/direct of=/mnt/direct bs=256k conv=notrunc oflag=direct 2>/dev/null || { echo direct write failed; exit 1; }
done ) &
direct=$!
for round in 1 2 3 4; do
	sleep 1
	kill -9 $server; wait $server || true
	before=$(wc -l < /tmp/done)
	sleep 1
	test -d /proc/$writer
	serve
	test $device = $first
done
wait $writer
: > /tmp/enough
wait $direct
cmp /tmp/direct /mnt/direct
umount /mnt; mount -t ext4 $device /mnt
for n in 1 2 3 4 5 6 7 8 9 10 11 12; do md5sum < /mnt/$n; done > /tmp/found
cmp /tmp/sums /tmp/found
# One that begins to take it over and comes no further, for want of the node; the next one goes on.
kill -9 $server; wait $server || true
node=/dev/ublkc${device#/dev/ublkb}
mv $node /tmp/node
( sleep 8; mv /tmp/node $node ) &
serve
test $device = $first
umount /mnt; mount -t ext4 $device /mnt
cmp /tmp/direct /mnt/direct
umount /mnt
kill -9 $server; wait $server || true
# An orphan is taken over to be removed.
serve
echo remove >&3
wait $server
test ! -e $device
echo all is well",
    )?;
    assert!(said.iter().any(|line| line == "all is well"), "{said:#?}");
    Ok(())
}

/// The daemon with a volume as a block device. Writes continue when it is killed. A stop leaves the
/// device to the next start if it is in use, and removes it if it is not.
const OUTLIVES: &str = r#"
bcached make --writeback -b 64k -C /dev/vda -B /dev/vdb
options='--cache /dev/vda --backing /dev/vdb --export ublk --stop-timeout 1s' patience=60
serve_device
first=$device
link=$(echo /dev/bcache/by-uuid/*)
test $link -ef $device
mkfs.ext4 -q $device; mount -t ext4 -o errors=panic $link /mnt
bcached status
head -c 20000000 /dev/urandom > /tmp/data
dd if=/tmp/data of=/mnt/a bs=64k conv=fsync 2>/dev/null
bcached remove /dev/vdb 2>&1 || echo exit $?
for round in 1 2 3; do
	( dd if=/tmp/data of=/mnt/b bs=16k conv=fsync 2>/dev/null || echo dd failed ) &
	writer=$!
	kill -9 $server; wait $server || true
	sleep 1
	test -d /proc/$writer
	serve_device
	test $device = $first
	wait $writer
	cmp /tmp/data /mnt/b
done
cmp /tmp/data /mnt/a
kill -TERM $server; wait $server
grep -o 'event=ublk-left' /tmp/log
test -b $device
serve_device
test $device = $first
cmp /tmp/data /mnt/a
umount /mnt
bcached stop bcache-$(basename $link | cut -c1-8)
wait_for 20 test ! -e $device
bcached add bcache-$(basename $link | cut -c1-8)
wait_for 20 test -L $link
mount -t ext4 $link /mnt
cmp /tmp/data /mnt/a
umount /mnt
# Nobody serves it any more, and nobody will.
kill -9 $server; wait $server || true
wait_for 20 sh -c 'bcached doctor | grep "no daemon serves $0: its requests wait"' $device
dd if=$link of=/dev/null bs=4k count=1 iflag=direct & reading=$!
sleep 1
code=0; bcached remove $device || code=$?
test $code = 3
bcached remove --dry-run --in-use $device
bcached remove --in-use $link
if wait $reading; then echo it has read; false; fi
test -z "$(ls /sys/class/ublk-char)"
test ! -e $device
serve_device
kill -TERM $server; wait $server
test ! -e $device
test ! -L $link
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb /dev/vda > /dev/null
echo all is well"#;

fn outlives_the_daemon(transfer: DataTransfer) -> Outcome {
    let Some(vm) = vm_with(transfer, "bcached") else { return Ok(()) };
    let said = run_on(&vm, &[128, 256], &format!("{DAEMON}{OUTLIVES}"))?;
    let in_use = |line: &String| line.contains("it is in use by the mount /mnt");
    assert!(said.iter().any(in_use) && said.iter().any(|line| line == "exit 3"), "{said:#?}");
    let client =
        |line: &String| line.starts_with("client of ") && line.ends_with(": the mount /mnt, writing");
    let volume = |line: &String| line.contains(&format!("/dev/ublkb0 ({})", transfer.word()));
    assert!(said.iter().any(client) && said.iter().any(volume), "{said:#?}");
    for line in ["event=ublk-left", "all is well"] {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
    Ok(())
}
