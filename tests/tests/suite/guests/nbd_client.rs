//! The guide's method for a block device without ublk, in a guest: `nbd-client` and the kernel's
//! NBD client, over the daemon's socket. Covers a file system, `fio`, several connections, a
//! hand-over under load, a SIGKILL, and reconnecting each time.

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{DAEMON, run_on, vm_having};

const SCRIPT: &str = r#"
bcached make --writeback -b 64k -C /dev/vda -B /dev/vdb --label media > /dev/null
cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
[volume.media]
backing = "/dev/vdb"
cache_mode = "writeback"
sequential_cutoff = 0
end
serve
# comes DEVICE [ARGUMENT..], leaves DEVICE: as the guide has it.
comes() {
	nbd=$1; shift
	nbd-client -unix /run/b/nbd.sock -name media $nbd "$@" > /tmp/said 2>&1 || { cat /tmp/said; return 1; }
	wait_for 20 test "$(blockdev --getsize64 $nbd)" = $(((128 << 20) - 8192))
}
leaves() { nbd-client -d $1 > /dev/null; wait_for 20 gone $1; }
gone() { test ! -e /sys/block/${1#/dev/}/pid && test "$(blockdev --getsize64 $1)" = 0; }
clients() { bcached status | grep -c '^client ' || true; }
comes /dev/nbd0
echo write_cache $(cat /sys/block/nbd0/queue/write_cache)
# (The rest of the device is for what follows.)
mkfs.ext4 -q /dev/nbd0 48M; mount -t ext4 -o errors=continue /dev/nbd0 /mnt
head -c 10000000 /dev/urandom > /mnt/a; sync
sum=$(md5sum < /mnt/a)
written /mnt/file 6m 1
rm -f /mnt/b; fstrim /mnt
umount /mnt
leaves /dev/nbd0
wait_for 20 test $(clients) = 0
# By another device, with four connections, under a load that goes on while another process takes over.
comes /dev/nbd1 -C 4
mount -t ext4 -o errors=panic /dev/nbd1 /mnt
test "$sum" = "$(md5sum < /mnt/a)"
written /mnt/file 6m 1 --verify_only
( load /mnt/file 6m file ) & writer=$!
goes_on file
for round in 1 2; do
	former=$server
	server=$(bcached take-over | tee /tmp/told | sed -n 's/^daemon \([0-9]*\) has taken over.*/\1/p')
	test -n "$server" && test ! -d /proc/$former || { cat /tmp/told /tmp/log; false; }
	goes_on file
done
: > /tmp/enough
ends $writer
last=$(passes file)
umount /mnt
leaves /dev/nbd1
# Killed with requests under way: they wait until the client is sent away, then fail, and what was answered is there for who comes again.
comes /dev/nbd1
written /dev/nbd1 6m 77 --offset=100m
( dd if=/dev/urandom of=/dev/nbd1 bs=64k seek=1000 count=400 oflag=direct conv=notrunc 2> /dev/null ) & writer=$!
killed
nbd-client -d /dev/nbd1 > /dev/null
if wait $writer; then echo "it did not hear of it"; exit 1; fi
wait_for 20 gone /dev/nbd1
serve
comes /dev/nbd0
written /dev/nbd0 6m 77 --offset=100m --verify_only
mount -t ext4 /dev/nbd0 /mnt
test "$sum" = "$(md5sum < /mnt/a)"
written /mnt/file 6m $last --verify_only
umount /mnt
leaves /dev/nbd0
kill -TERM $server; wait $server
bcached check --backing /dev/vdb /dev/vda > /dev/null
echo all is well"#;

#[test]
fn the_kernels_client_comes_and_goes_and_comes_again() -> Outcome {
    let tools = ["fio", "nbd-client"];
    let Some(vm) = vm_having("bcached", &tools, &["drivers/block/nbd"]) else { return Ok(()) };
    let said = run_on(&vm.sized(1024, 1), &[128, 128], &format!("{DAEMON}{SCRIPT}"))?;
    for line in ["write_cache write back", "all is well"] {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
    Ok(())
}
