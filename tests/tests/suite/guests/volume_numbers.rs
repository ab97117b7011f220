//! `number = N` beside the kernel's bcache, which is loaded in each guest. `/dev/bcacheN` is ours
//! only while the module is not loaded; otherwise, the kernel's devices have those names.

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{DAEMON, run_on, vm_with};

const JOB: &str = r#"
bcached make --writeback -b 64k -C /dev/vda -B /dev/vdb --label media > /dev/null
bcached make -b 64k -C /dev/vdc -B /dev/vdd > /dev/null
cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
[volume.media]
backing = "/dev/vdb"
export = "ublk"
number = 0
end
link=/dev/bcache0
serve_device
test -d /sys/module/bcache
test ! -e $link && test ! -L $link
code=0; bcached status > /tmp/status || code=$?
test $code = 0
grep "served, .*, $device (.*), not $link: the kernel's bcache is loaded" /tmp/status > /dev/null
grep -o 'event=number-not-linked' /tmp/log
# It comes by itself, and is the same after a kill: so is the device.
rmmod bcache
wait_for 20 test $link -ef $device
test "$(readlink $link)" = "$(echo /dev/bcache/by-uuid/*)"
killed
serve_device
test $link -ef $device
mkfs.ext4 -q $link; mount -t ext4 -o errors=panic $link /mnt; umount /mnt
# The kernel's own device has its name, and not ours any more.
insmod /modules/bcache.ko
wait_for 20 test ! -L $link
for disk in vdc vdd; do echo /dev/$disk > /sys/fs/bcache/register; done
wait_for 20 test -b $link
test ! -L $link
test "$(cat /sys/block/bcache0/dev)" = "$(stat -c %t:%T $link | sed 's/\(.*\):\(.*\)/echo $((0x\1)):$((0x\2))/' | sh)"
test "$(readlink -f /dev/bcache/by-label/media)" = $device
kill -TERM $server; wait $server
test -b $link && test ! -L $link
test ! -e $device
echo all is well"#;

#[test]
fn a_number_is_ours_while_the_kernels_bcache_is_not_loaded() -> Outcome {
    let Some(vm) = vm_with("bcached", &["drivers/block/ublk_drv"]) else { return Ok(()) };
    let said = run_on(&vm, &[64, 128, 64, 64], &format!("{DAEMON}{JOB}"))?;
    for line in ["event=number-not-linked", "all is well"] {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
    Ok(())
}
