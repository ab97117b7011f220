//! Volumes over ublk move from one engine to another while `fio` writes to them, in a guest whose
//! kernel registers the memory of requests with a ring. The queue of a device stays on the ring of
//! the engine where it began, and its buffer indices mean other memory on the ring of the other
//! engine.

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{all_is_well, new_vm_having};

const SCRIPT: &str = r#"
two_volumes first second
serve
bcached detach second
# From now on each of both begins on a ring of its own.
killed; serve
here=/dev/bcache/by-label
first=$(readlink $here/first) second=$(readlink $here/second)
test "$(bcached status --json | grep -c '"transfer": *"zero copy"')" -ge 2
( load $first 4m first --offset=16m ) & one=$!
( load $second 4m second --offset=16m ) & other=$!
both() { for pass in 1 2; do goes_on first; goes_on second; done; }
both
bcached detach first; both
bcached attach first; both
bcached attach second; both
bcached detach second; both
: > /tmp/enough
ends $one; ends $other
written $first 4m $(passes first) --offset=16m --verify_only
written $second 4m $(passes second) --offset=16m --verify_only
kill -TERM $server; wait $server
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb --backing /dev/vdc /dev/vda > /dev/null"#;

#[test]
fn memory_of_one_volume_is_never_taken_for_that_of_another() -> Outcome {
    let Some(vm) = new_vm_having("bcached", &["fio"], &["drivers/block/ublk_drv"]) else { return Ok(()) };
    all_is_well(&vm.sized(1024, 2), &[128, 128, 128], SCRIPT)
}
