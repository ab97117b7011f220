//! Guests in which volumes are block devices of the kernel, with file systems on them.

use super::{Also, Vm};
use crate::failure::Failure;
use crate::guest::{Job, Machine as _};
use crate::requires;
use crate::uml::built_program;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

/// A guest with ext4, a program of ours and drivers, by their paths as in [`Also::modules`].
#[must_use]
pub fn vm_with(program: &str, drivers: &[&'static str]) -> Option<Vm> {
    prepared(Vm::find()?, program, drivers)
}

/// The same with a later kernel ([`Vm::find_new`]).
#[must_use]
pub fn new_vm_with(program: &str, drivers: &[&'static str]) -> Option<Vm> {
    prepared(Vm::find_new()?, program, drivers)
}

fn prepared(vm: Vm, program: &str, drivers: &[&'static str]) -> Option<Vm> {
    let mkfs = requires::program("mkfs.ext4")?;
    let ext4 = [
        "lib/crc16",
        "arch/x86/crypto/crc32c-intel",
        "crypto/crc32c_generic",
        "fs/mbcache",
        "fs/jbd2/jbd2",
        "fs/ext4/ext4",
    ];
    let modules = ext4.into_iter().chain(drivers.iter().copied()).collect();
    let program = built_program(program).ok()?;
    Some(vm.with(Also { modules, programs: vec![program, mkfs] }))
}

/// What the job printed, on blank disks of such sizes, in MiB.
///
/// # Errors
/// It failed.
pub fn run_on(vm: &Vm, sizes: &[u64], script: &str) -> Result<Vec<String>, Failure> {
    let images: Vec<_> = sizes
        .iter()
        .map(|mebibytes| {
            let image = tempfile::NamedTempFile::new()?;
            image.as_file().set_len(mebibytes << 20)?;
            Ok(image)
        })
        .collect::<std::io::Result<_>>()?;
    let paths: Vec<_> = images.iter().map(tempfile::NamedTempFile::path).collect();
    let job = Job { images: &paths, script, crash_at: None, limit: LIMIT };
    Ok(vm.run(&job)?.output)
}
