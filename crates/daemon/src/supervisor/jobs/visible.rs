//! A job ends when its effect is visible by every way to the volume. Block devices change on
//! threads of their own, so a thread waits for them here.

use crate::supervisor::jobs::JobEvent;
use crate::supervisor::jobs::{Job, JobTable};
use crate::supervisor::table::VolumeState;
use crate::supervisor::{Event, Supervisor};
use bcached_control::jobs::JobKind;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Longest time a block device may take to show the change, and the interval of the looks.
const LIMIT: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);

/// Checks whether the change is visible.
type VisibilityCheck = Box<dyn Fn() -> bool + Send>;

impl JobTable {
    /// Checks whether a job moves the volume of this name from one engine to another.
    pub fn moves(&self, name: &str) -> bool {
        let moves = |job: &Job| matches!(job.verb, JobKind::Attach | JobKind::Detach | JobKind::Replace);
        self.all.values().any(|job| job.ended.is_none() && job.name == name && moves(job))
    }
}

impl Supervisor {
    /// Waits on a thread until the effect of a finished job is visible; the job then ends. Returns
    /// false if it is visible already, or if no thread could be started.
    pub fn begins_to_show(&self, number: u64, job: &Job) -> bool {
        let Some(is_shown) = self.to_be_seen(job).filter(|is_shown| !is_shown()) else { return false };
        let sender = self.sender.clone();
        let body = move || {
            let until = Instant::now() + LIMIT;
            while !is_shown() && Instant::now() < until {
                thread::sleep(LOOK);
            }
            let _gone = sender.send(Event::Job(number, JobEvent::Visible(is_shown())));
        };
        thread::Builder::new().name("shown".to_owned()).spawn(body).is_ok()
    }

    /// Returns the check for what is to become visible, or `None` if nothing becomes visible later.
    fn to_be_seen(&self, job: &Job) -> Option<VisibilityCheck> {
        let name = job.name.clone();
        match job.verb {
            JobKind::Grow | JobKind::Shrink => {
                let sectors = {
                    let shared = self.shared();
                    match &shared.table.volumes.get(job.volume()?)?.state {
                        VolumeState::Served(info) => info.sectors,
                        _ => return None,
                    }
                };
                let device = self.fronts.told_device(&name)?;
                Some(Box::new(move || sectors_of(&device) == Some(sectors)))
            }
            JobKind::Remove | JobKind::Stop => {
                let fronts = self.fronts.clone();
                Some(Box::new(move || !fronts.is_retiring(&name)))
            }
            _ => None,
        }
    }

    /// Ends a job whose effect is visible now, or has not become so within the limit.
    pub fn shown(&self, number: u64, is_shown: bool) {
        let Some(job) = self.shared().jobs.under_way(number).cloned() else { return };
        if !is_shown {
            let note = match job.verb {
                JobKind::Remove | JobKind::Stop => "its block device is still being removed",
                _ => {
                    "its block device does not have the new size yet: the log may say why (device-not-resized)"
                }
            };
            self.shared().jobs.note(number, &[note.to_owned()]);
        }
        self.finish_job(number, &job, Ok(()));
    }
}

/// Returns the size that a block device has for a client that opens it now, in sectors.
fn sectors_of(device: &Path) -> Option<u64> {
    let name = device.file_name()?;
    let size = std::fs::read_to_string(Path::new("/sys/class/block").join(name).join("size")).ok()?;
    size.trim().parse().ok()
}
