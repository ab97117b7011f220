//! A kernel that has no more devices available: the daemon logs one sentence that says what to do,
//! and leaves nothing behind. (For ublk, the limit is the number of minor numbers, except on
//! kernels older than these, which count `ublks_max`.)

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{all_is_well, vm_with};

const REFUSED: &str = r#"
bcached make --writeback -b 64k -C /dev/vda -B /dev/vdb -B /dev/vdc > /dev/null
# One of the two volumes has no device; the other one is served all the same.
bcached serve --cache /dev/vda --backing /dev/vdb --backing /dev/vdc --export dev > /tmp/out 2> /tmp/told & server=$!
wait_for 60 grep -q '^ready' /tmp/out || { cat /tmp/told; exit 1; }
test $(grep -c 'not available as a block device: all 1 devices are in use: load the module with more (modprobe nbd nbds_max=64)' /tmp/told) = 1
test $(grep -c 'available as the block device /dev/nbd0' /tmp/told) = 1
dd if=/dev/nbd0 of=/dev/null bs=64k count=100 2> /dev/null
# Something is amiss, which is its exit status.
code=0; bcached status || code=$?
test $code = 1
kill -TERM $server; wait $server
test -z "$(ls -d /sys/block/nbd*/pid 2>/dev/null)"
bcached check /dev/vda /dev/vdb /dev/vdc > /dev/null
"#;

#[test]
fn the_kernel_has_no_more_devices_to_give() -> Outcome {
    let Some(vm) = vm_with("bcached", &["drivers/block/nbd nbds_max=1"]) else { return Ok(()) };
    all_is_well(&vm, &[128, 128, 128], REFUSED)
}
