//! Counts memory allocations while a device over ublk is served: see `counted-requests`.

use bcached_front_ublk::DataTransfer;
use bcached_tests::failure::Outcome;
use bcached_tests::uml::built_program;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{new_vm_having, said_when_all_is_well, vm_having};
use std::io::{Seek as _, Write as _};
use std::process::Command;

const PROGRAM: &str = "counted-requests";
/// Requests of each kind: half as many as on the host. Each takes an emulated machine some
/// milliseconds.
const COUNT: &str = "1000";
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
counted-requests --told /tmp/told /run/b/config.toml $BCACHED_CONTROL /dev/ublkb0 $count > /tmp/said 2> /tmp/log &
counting=$!
is_had() { bcached status | grep "/dev/ublkb0 ($transfer)"; }
wait_for 90 is_had
wait $counting || { cat /tmp/said /tmp/log; exit 1; }
echo told:
cat /tmp/told
"#;

/// ublk copies the request's data.
#[test]
fn a_request_of_a_block_device_asks_for_no_memory() -> Outcome {
    let Some(vm) = vm_having(PROGRAM, &["make-bcache"], DRIVERS) else { return Ok(()) };
    counts(vm, DataTransfer::UserCopy)
}

/// The kernel lends the request's memory to the daemon (zero copy).
#[test]
fn nor_does_one_whose_memory_is_lent() -> Outcome {
    let Some(vm) = new_vm_having(PROGRAM, &["make-bcache"], DRIVERS) else { return Ok(()) };
    counts(vm, DataTransfer::ZeroCopy)
}

fn counts(vm: Vm, transfer: DataTransfer) -> Outcome {
    let vm = vm.sized(768, 2).with_files([(built_program("bcached")?, "/bin/bcached".to_owned())]);
    let said = said_when_all_is_well(
        &vm,
        &[256, 256],
        &format!("transfer='{}' count={COUNT}\n{JOB}", transfer.word()),
    )?;
    let told: Vec<&str> =
        said.iter().map(String::as_str).skip_while(|line| *line != "told:").skip(1).collect();
    judge(&told.join("\n"))
}

/// Judges the calls that the guest reported. The program on the host is the same build and has the
/// debug information.
fn judge(told: &str) -> Outcome {
    // A file, not a pipe: the write cannot block on the reader.
    let mut calls = tempfile::tempfile()?;
    calls.write_all(told.as_bytes())?;
    calls.rewind()?;
    let mut judge = Command::new(built_program(PROGRAM)?);
    let output = judge.args(["--judge", COUNT]).stdin(calls).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{told}");
    println!("{said}");
    Ok(())
}
