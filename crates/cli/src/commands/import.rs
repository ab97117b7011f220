//! `bcached import`: stops a set in the kernel, which leaves its dirty data on the cache, and has
//! the daemon serve it. The kernel's part is done by this process, which has the privileges. Before
//! anything is done, the daemon is asked whether it would accept the set.

use super::{jobs, scan};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::Report;
use bcached_offline::kernel::{KernelBcache, KernelSet};
use std::thread;
use std::time::{Duration, Instant};

/// The default limit for the kernel to stop the set.
const LIMIT: Duration = Duration::from_secs(60);

/// The interval between two polls of the kernel.
const LOOK: Duration = Duration::from_millis(50);

/// Imports a set.
pub fn run(flags: &flags::ImportArgs) -> Result<Report, Failure> {
    let watch = &flags.watch;
    let Some(set) = KernelBcache::of_this_machine().set(&flags.set)? else { return without_kernel(flags) };
    let devices: Vec<_> = set.devices().map(|device| device.display().to_string()).collect();
    let limit = watch.timeout.as_deref().map(bcached_config::time).transpose();
    let limit = limit.map_err(|why| Failure::new(Kind::Usage, why).option("--timeout"))?.unwrap_or(LIMIT);
    set.check_stops()?;
    let dry = flags::WatchArgs { dry_run: true, ..watch.clone() };
    let planned = jobs::begin_import(&set.uuid, &devices, &dry)?;
    check_unused(&set)?;
    if watch.dry_run {
        return Report::of(&planned);
    }
    set.stop()?;
    wait(&set, limit)?;
    let begun = jobs::begin_import(&set.uuid, &devices, watch).map_err(|failure| {
        let next = failure.next.clone().map_or_else(String::new, |next| format!("{next}; "));
        let back = way_back(&set);
        failure.next(format!(
            "{next}the kernel has released it: `bcached import {}` continues; {back}",
            set.uuid
        ))
    })?;
    // From here on the set is configured: the kernel must not get devices that a daemon takes at
    // its next start.
    jobs::finish_import(&begun, watch, " --register")
}

fn import(set: &str, devices: &[String], watch: &flags::WatchArgs) -> Result<Report, Failure> {
    let begun = jobs::begin_import(set, devices, watch)?;
    jobs::finish_import(&begun, watch, "")
}

/// Handles a set that the kernel does not have: it may have been stopped already, or `bcached
/// release` released it.
fn without_kernel(flags: &flags::ImportArgs) -> Result<Report, Failure> {
    let digits = |text: &str| text.to_lowercase().replace('-', "");
    let typed = digits(flags.set.strip_prefix("UUID=").unwrap_or(&flags.set));
    let (found, _) = scan::scan(&[]);
    let is_it = |set: &&scan::ScannedSet| typed.len() >= 8 && digits(&set.set_uuid).starts_with(&typed);
    let Some(set) = found.sets.iter().find(is_it) else {
        return import(&flags.set, &[], &flags.watch);
    };
    let devices: Vec<_> =
        set.caches.iter().chain(&set.backings).map(|member| member.device.clone()).collect();
    import(&set.set_uuid, &devices, &flags.watch)
}

fn check_unused(set: &KernelSet) -> Result<(), Failure> {
    let users = set.users();
    if users.is_empty() {
        return Ok(());
    }
    let failure = Failure::new(Kind::InUse, format!("cannot take {} from the kernel", set.uuid))
        .why(users.join(", "))
        .next("unmount it and stop what is on top of it (LVM, md, swap); nothing overrides this");
    Err(Failure { holders: users, ..failure })
}

/// Waits until the kernel has released all devices of the set.
fn wait(set: &KernelSet, limit: Duration) -> Result<(), Failure> {
    let until = Instant::now() + limit;
    loop {
        let left = set.left();
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            let users = set.users();
            let users = if users.is_empty() { String::new() } else { format!(" ({})", users.join(", ")) };
            let seconds = limit.as_secs();
            let what = format!("the kernel has not stopped {} within {seconds} s", set.uuid);
            return Err(Failure::new(Kind::TimeLimit, what)
                .why(format!("still present: {}{users}", left.join(", ")))
                .next(format!("it continues to stop: repeat the command to wait again; {}", way_back(set))));
        }
        thread::sleep(LOOK);
    }
}

fn way_back(set: &KernelSet) -> String {
    let devices: Vec<_> = set.devices().map(|device| device.display().to_string()).collect();
    format!("to give it back, write each of {} to /sys/fs/bcache/register", devices.join(", "))
}
