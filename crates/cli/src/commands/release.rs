//! `bcached release`: has the daemon release a set. With `--register`, this process then gives its
//! devices to the kernel's bcache: it has privileges that the daemon's unit does not grant.

use super::jobs;
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::Report;
use bcached_offline::kernel::KernelBcache;

/// Releases a set.
pub fn run(flags: &flags::ReleaseArgs) -> Result<Report, Failure> {
    if flags.register && flags.watch.no_wait {
        return Err(Failure::new(Kind::Usage, "--register and --no-wait exclude each other")
            .why("the devices are given to the kernel after the set is released")
            .next("leave one of them out")
            .option("--register"));
    }
    let kernel = KernelBcache::of_this_machine();
    if flags.register {
        // Checked before anything is done.
        kernel.check_registers()?;
    }
    let (job, report) = jobs::release(&flags.cache, &flags.watch)?;
    let is_waited_for = !flags.watch.dry_run && !flags.watch.no_wait;
    if !flags.register || !is_waited_for || report.has_failed() {
        return Ok(report);
    }
    let (mut given, mut refused) = (Vec::new(), None);
    for device in &job.devices {
        match kernel.register(device) {
            Ok(()) => given.push(device.as_str()),
            Err(failure) => refused = refused.or(Some(failure)),
        }
    }
    Ok(match refused {
        None => report.warning(vec![format!("given to the kernel: {}", given.join(", "))]),
        Some(failure) => {
            let next = failure.next.clone().unwrap_or_default();
            let so_far = if given.is_empty() { "nothing".to_owned() } else { given.join(", ") };
            report.failing(Failure { kind: Kind::Io, ..failure }.next(format!(
                "{next}; the set is released; given to the kernel so far: {so_far}; repeat the command to \
                 continue"
            )))
        }
    })
}
