//! What memory is asked for while a device over ublk is served: see `counted-requests`.

use bcached_front_ublk::Transfer;
use bcached_tests::failure::Outcome;
use bcached_tests::uml::built_program;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{all_is_well, new_vm_having, vm_having};

const PROGRAM: &str = "counted-requests";
const DRIVERS: &[&str] = &["drivers/block/ublk_drv"];

const JOB: &str = r#"
make-bcache --writeback -w 4k -b 256k -C /dev/vda -B /dev/vdb > /dev/null
cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
$uncongested
[volume.tank]
backing = "/dev/vdb"
export = "ublk"
end
counted-requests /run/b/config.toml $BCACHED_CONTROL /dev/ublkb0 > /tmp/said 2> /tmp/log &
counting=$!
is_had() { bcached status | grep "/dev/ublkb0 ($transfer)"; }
wait_for 90 is_had
wait $counting || { cat /tmp/said /tmp/log; exit 1; }
cat /tmp/said
"#;

/// Its data is copied.
#[test]
fn a_request_of_a_block_device_asks_for_no_memory() -> Outcome {
    let Some(vm) = vm_having(PROGRAM, &["make-bcache"], DRIVERS) else { return Ok(()) };
    counts(vm, Transfer::UserCopy)
}

/// The kernel lends its memory.
#[test]
fn nor_does_one_whose_memory_is_lent() -> Outcome {
    let Some(vm) = new_vm_having(PROGRAM, &["make-bcache"], DRIVERS) else { return Ok(()) };
    counts(vm, Transfer::ZeroCopy)
}

fn counts(vm: Vm, transfer: Transfer) -> Outcome {
    let vm = vm.sized(768, 2).with_files([(built_program("bcached")?, "/bin/bcached".to_owned())]);
    all_is_well(&vm, &[256, 256], &format!("transfer='{}'\n{JOB}", transfer.word()))
}
