//! The logical block size is the same through every front end, compared with the kernel's
//! `/dev/bcacheN`. A partition table and an XFS made through one of them are found through each of
//! the others. On a device with another block size, both would lie elsewhere or be refused.

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{DAEMON, run_on, vm_having};

const JOB: &str = r#"
# The volume has the blocks of its backing device, which are larger than the cache's.
bcached make -b 64k --block 512 -C /dev/vda > /dev/null
bcached make --writeback --block 4k -B /dev/vdb --for /dev/vda --label media > /dev/null
mkdir -p /run/media

# serve_by WAY: the daemon with that export.
serve_by() {
	cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
[volume.media]
backing = "/dev/vdb"
export = "$1"
end
	serve
}
stop_daemon() { kill -TERM $server; wait $server || { cat /tmp/log; return 1; }; }

# come_WAY: $device is the volume. go_WAY: it is nobody's. The recipes are the guide's.
come_kernel() {
	insmod /modules/bcache.ko
	for disk in vda vdb; do echo /dev/$disk > /sys/fs/bcache/register; done
	device=/dev/bcache0
}
go_kernel() {
	echo 1 > /sys/block/bcache0/bcache/stop
	for set in /sys/fs/bcache/*-*-*; do echo 1 > $set/stop; done
	wait_for 20 test ! -e /sys/block/bcache0
	wait_for 20 rmmod bcache
}
come_ublk() { serve_by ublk; device=$(readlink -f /dev/bcache/by-label/media); }
go_ublk() { stop_daemon; }
come_nbd() {
	serve_by nbd
	nbd-client -unix /run/b/nbd.sock -name media -b 4096 /dev/nbd0 > /tmp/said 2>&1 || { cat /tmp/said; return 1; }
	device=/dev/nbd0
}
go_nbd() { nbd-client -d /dev/nbd0 > /dev/null; stop_daemon; }
come_loop() {
	serve_by fuse
	device=$(/bin/losetup --find --show --partscan --sector-size 4096 /run/b/fuse/volumes/media)
}
go_loop() { /bin/losetup -d $device; stop_daemon; }

come() {
	come_$1
	wait_for 20 test "$(blockdev --getsize64 $device)" = $(((400 << 20) - 8192))
	echo $1 has blocks of $(blockdev --getss $device)
	first=$(case $device in *[0-9]) echo ${device}p1 ;; esac)
}
rmmod bcache 2> /dev/null || true
ways="kernel ublk nbd loop"
for maker in $ways; do
	come $maker
	# A table of one partition, whose place and size are in blocks: 256 and 92160.
	dd if=/dev/zero of=$device bs=1M count=2 conv=fsync 2>/dev/null
	{
		dd if=/dev/zero bs=446 count=1
		printf '\0\0\0\0\203\0\0\0\0\001\0\0\0\150\001\0'
		dd if=/dev/zero bs=48 count=1
		printf '\125\252'
		dd if=/dev/zero bs=3584 count=1
	} 2>/dev/null > /tmp/table
	dd if=/tmp/table of=$device bs=4k conv=fsync 2>/dev/null
	blockdev --rereadpt $device
	wait_for 20 test -b $first
	mkfs.xfs -q -f $first
	mount -t xfs $first /mnt
	echo made by $maker > /mnt/file
	umount /mnt
	go_$maker
	for finder in $ways; do
		test $finder != $maker || continue
		come $finder
		wait_for 20 test -b $first
		mount -t xfs -o ro $first /mnt
		echo "$(cat /mnt/file), found by $finder"
		umount /mnt
		go_$finder
	done
done
bcached check --backing /dev/vdb /dev/vda > /dev/null
echo all is well"#;

#[test]
fn what_one_way_in_has_made_is_found_by_the_others_and_by_the_kernel() -> Outcome {
    let tools = ["mkfs.xfs", "nbd-client", "losetup"];
    let drivers =
        ["drivers/block/ublk_drv", "drivers/block/nbd", "drivers/block/loop", "fs/fuse/fuse", "fs/xfs/xfs"];
    let Some(vm) = vm_having("bcached", &tools, &drivers) else { return Ok(()) };
    let said = run_on(&vm.sized(1024, 1), &[128, 400], &format!("{DAEMON}{JOB}"))?;
    let ways = ["kernel", "ublk", "nbd", "loop"];
    for maker in ways {
        for finder in ways.into_iter().filter(|finder| *finder != maker) {
            let found = format!("made by {maker}, found by {finder}");
            assert!(said.contains(&found), "{found}: {said:#?}");
        }
        let block = format!("{maker} has blocks of 4096");
        assert_eq!(said.iter().filter(|line| **line == block).count(), 4, "{said:#?}");
    }
    assert!(said.iter().any(|line| line == "all is well"), "{said:#?}");
    Ok(())
}
