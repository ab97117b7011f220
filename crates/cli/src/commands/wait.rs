//! `bcached wait`: waits until a volume is in the wanted state. The answer is no (exit status 1) if
//! it will not reach it automatically.

use super::name_lookup::called;
use crate::failure::{Failure, Kind};
use crate::flags::{self, WaitFor};
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::jobs::JobReport;
use bcached_control::names::refusal;
use bcached_control::status::{Status, VolumeStatus};
use std::thread;
use std::time::{Duration, Instant};

/// The interval between two polls.
const LOOK: Duration = Duration::from_millis(200);

/// Waits for the volume.
pub fn run(flags: &flags::WaitArgs) -> Result<Report, Failure> {
    let limit = flags.timeout.as_deref().map(bcached_config::time).transpose();
    let limit = limit.map_err(|why| Failure::new(Kind::Usage, why).option("--timeout"))?;
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    loop {
        let (volume, work) = look(flags)?;
        let reason = volume.reason.clone().unwrap_or_default();
        if is_as_wanted(&volume, flags.wanted) {
            return Report::of(&WaitReport { volume });
        }
        let is_flash_only = volume.backing.is_none() && volume.facts.is_some();
        if is_flash_only && flags.wanted != WaitFor::Served {
            let what = format!("{} will not be {}", volume.name, word(flags.wanted));
            return Err(Failure::new(Kind::No, what)
                .why("it is a flash-only volume")
                .next("its data is in the cache alone: it never becomes clean or detached"));
        }
        if volume.state == "failed" || volume.state == "stopped" {
            let next = match volume.state == "failed" {
                true => format!("correct that and restart the daemon, or `bcached remove {}`", volume.name),
                false => format!("`bcached add {}` serves it again", volume.name),
            };
            let failure = Failure::new(Kind::No, format!("{} is not served", volume.name));
            return Err(failure.why(reason).next(next));
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            let is_asked_for =
                flags.wanted != WaitFor::Detached || !work.is_empty() || volume.facts.is_none();
            let next = match is_asked_for {
                true => "repeat the command; `bcached status` shows what it waits for".to_owned(),
                false => format!("no detach was requested: run `bcached detach {}`", volume.name),
            };
            let what = format!("{} is not {} yet", volume.name, word(flags.wanted));
            return Err(Failure::new(Kind::TimeLimit, what)
                .why(std::iter::once(volume.line()).chain(work).collect::<Vec<_>>().join("; "))
                .next(next));
        }
        thread::sleep(LOOK);
    }
}

/// Returns the volume, and the jobs running on it.
fn look(flags: &flags::WaitArgs) -> Result<(VolumeStatus, Vec<String>), Failure> {
    let status: Status = client::understood(&client::get(&flags.control.socket(), "/v1/status")?)?;
    let names: Vec<_> = status.volumes.iter().map(|volume| volume.name.clone()).collect();
    let jobs = status.jobs.clone();
    let volume = called(&flags.volume, |name| {
        status.clone().volume(name).map_err(|meant| {
            refusal(name, meant.iter().map(String::as_str), names.iter().map(String::as_str))
        })
    })?;
    let work = jobs.iter().filter(|job| job.volume == volume.name).map(JobReport::progress_text).collect();
    Ok((volume, work))
}

fn is_as_wanted(volume: &VolumeStatus, wanted: WaitFor) -> bool {
    let Some(facts) = volume.facts.as_ref().filter(|facts| !facts.outdated) else { return false };
    match wanted {
        WaitFor::Served => true,
        WaitFor::Clean => {
            facts.dirty.dirty_bytes == Some(0) && facts.backing_state.as_deref() != Some("dirty")
        }
        WaitFor::Detached => facts.attached == Some(false),
    }
}

/// The wanted state, in a sentence.
const fn word(wanted: WaitFor) -> &'static str {
    match wanted {
        WaitFor::Served => "served",
        WaitFor::Clean => "clean",
        WaitFor::Detached => "detached",
    }
}

/// The volume, in the wanted state.
#[derive(serde::Serialize)]
struct WaitReport {
    volume: VolumeStatus,
}

impl Printable for WaitReport {
    const SCHEMA: &'static str = "bcached.wait";

    /// Empty: the caller knows what it waited for.
    fn text(&self) -> String {
        String::new()
    }
}
