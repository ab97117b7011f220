//! Guests in which volumes are block devices of the kernel, with file systems on them.

use super::{Also, Vm};
use crate::failure::Outcome;
use crate::guest::{self, Job, Machine as _};
use crate::requires;
use crate::uml::built_program;
use std::io;
use std::time::Duration;
use tempfile::NamedTempFile;

/// Shell functions for jobs: the daemon in a guest, with a configuration of its own.
pub const DAEMON: &str = include_str!("daemon.sh");

/// Returns a guest with ext4, one of our programs and the drivers `drivers`, by their paths as in
/// [`Also::modules`].
#[must_use]
pub fn vm_with(program: &str, drivers: &[&'static str]) -> Option<Vm> {
    vm_having(program, &[], drivers)
}

/// Like [`vm_having`], with a later kernel ([`Vm::find_new`]).
///
/// # Panics
/// Our program is not built.
#[must_use]
pub fn new_vm_having(program: &str, tools: &[&str], drivers: &[&'static str]) -> Option<Vm> {
    prepared(Vm::find_new, program, tools, drivers)
}

/// Like [`vm_with`], with additional programs of this machine. If one of them is missing, the test
/// counts as skipped.
///
/// # Panics
/// Our program is not built.
#[must_use]
pub fn vm_having(program: &str, tools: &[&str], drivers: &[&'static str]) -> Option<Vm> {
    prepared(Vm::find, program, tools, drivers)
}

fn prepared(find: fn() -> Option<Vm>, program: &str, tools: &[&str], drivers: &[&'static str]) -> Option<Vm> {
    let tools: Vec<&str> = ["mkfs.ext4"].iter().chain(tools).copied().collect();
    if !requires::programs(&tools) {
        return None;
    }
    let vm = find()?;
    let ext4 = [
        "lib/crc16",
        "arch/x86/crypto/crc32c-intel",
        "crypto/crc32c_generic",
        "fs/mbcache",
        "fs/jbd2/jbd2",
        "fs/ext4/ext4",
    ];
    let modules = ext4.into_iter().chain(drivers.iter().copied()).collect();
    let program = built_program(program).expect("a test with nothing to test");
    let tools = tools.into_iter().filter_map(requires::program);
    Some(vm.with(Also { modules, programs: tools.chain([program]).collect(), ..Also::default() }))
}

/// Runs a job on blank disks of these sizes, in MiB, and returns its output.
///
/// # Errors
/// It failed.
pub fn run_on(vm: &Vm, sizes: &[u64], script: &str) -> Outcome<Vec<String>> {
    Disks::blank(sizes)?.run(vm, script)
}

/// Runs a job with the functions of [`DAEMON`] on blank disks of these sizes, in MiB, and prints
/// its output.
///
/// # Errors
/// It failed.
///
/// # Panics
/// It did not reach its end.
pub fn all_is_well(vm: &Vm, sizes: &[u64], script: &str) -> Outcome {
    println!("{}", said_when_all_is_well(vm, sizes, script)?.join("\n"));
    Ok(())
}

/// Like [`all_is_well`], but returns the job's output.
///
/// # Errors
/// It failed.
///
/// # Panics
/// It did not reach its end.
pub fn said_when_all_is_well(vm: &Vm, sizes: &[u64], script: &str) -> Outcome<Vec<String>> {
    let said = run_on(vm, sizes, &format!("{DAEMON}{script}\necho all is well"))?;
    assert!(said.iter().any(|line| line == "all is well"), "{said:#?}");
    Ok(said)
}

/// Disks that outlive their guests.
#[derive(Debug)]
pub struct Disks(Vec<NamedTempFile>);

impl Disks {
    /// Creates blank disks of these sizes, in MiB.
    ///
    /// # Errors
    /// The files could not be made.
    pub fn blank(sizes: &[u64]) -> Outcome<Self> {
        let blank = |mebibytes: &u64| {
            let image = NamedTempFile::new()?;
            image.as_file().set_len(mebibytes << 20)?;
            Ok(image)
        };
        Ok(Self(sizes.iter().map(blank).collect::<io::Result<_>>()?))
    }

    /// Runs a job on these disks and returns its output.
    ///
    /// # Errors
    /// It failed.
    pub fn run(&self, vm: &Vm, script: &str) -> Outcome<Vec<String>> {
        self.run_within(guest::LIMIT, vm, script)
    }

    /// Like [`run`](Self::run), with another time limit.
    ///
    /// # Errors
    /// It failed, or took longer.
    pub fn run_within(&self, limit: Duration, vm: &Vm, script: &str) -> Outcome<Vec<String>> {
        let images: Vec<_> = self.0.iter().map(NamedTempFile::path).collect();
        let job = Job { images: &images, script, crash_at: None, limit };
        Ok(vm.run(&job)?.output)
    }
}
