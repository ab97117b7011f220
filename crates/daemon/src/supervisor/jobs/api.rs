//! Jobs as the control thread sees them: it has them begun, and asks how far they are. No function
//! here holds the supervisor's lock while it waits for an engine.

use super::precheck::PendingRequest;
use super::{Job, JobOutcome, JobTarget, blockers, user};
use crate::control_server::{BeginJobHandler, JobHandler, JobsHandler};
use crate::engine_thread::Engine;
use crate::supervisor::devices::probe::PendingProbes;
use crate::supervisor::options::{resolve, resolve_or_gone};
use crate::supervisor::{Event, Shared};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobList, JobReport, JobState};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// Returns the control thread's function that begins a job.
pub fn begin(shared: Arc<Mutex<Shared>>, events: Sender<Event>) -> BeginJobHandler {
    let probes = PendingProbes::default();
    Box::new(move |begin, uid| {
        if begin.verb == JobKind::Replace {
            return crate::supervisor::jobs::replace::begin(&shared, &events, &begin, uid);
        }
        let refused = |failure: &Failure| {
            let (verb, volume) = (begin.verb, &begin.volume);
            tracing::info!(event = "job-refused", uid = user(uid), "{verb} {volume}: {failure}");
        };
        // No volume has the name of one to be added yet; one to be forgotten is named by its cache.
        let is_nothings =
            matches!(begin.verb, JobKind::Add | JobKind::Forget | JobKind::Release | JobKind::Import);
        let volume = match (begin.verb, is_nothings) {
            (_, true) => None,
            (JobKind::Remove, _) => resolve_or_gone(&shared, &begin.volume).inspect_err(refused)?,
            _ => Some(resolve(&shared, &begin.volume).inspect_err(refused)?),
        };
        let job = PendingRequest::new(&shared, &events, &probes, uid).begin(volume, begin)?;
        match job.id {
            Some(number) => show(&shared, number),
            None => Ok(job),
        }
    })
}

/// Returns the control thread's function that shows all jobs.
pub fn all(shared: Arc<Mutex<Shared>>) -> JobsHandler {
    Box::new(move || {
        let numbers: Vec<u64> = lock(&shared).jobs.all.keys().copied().collect();
        let jobs = numbers.into_iter().filter_map(|number| show(&shared, number).ok()).collect();
        Ok(JobList { jobs })
    })
}

/// Returns the running jobs.
pub fn running(shared: &Mutex<Shared>) -> Vec<JobReport> {
    let numbers: Vec<u64> = {
        let shared = lock(shared);
        shared.jobs.all.iter().filter(|(_, job)| job.ended.is_none()).map(|(number, _)| *number).collect()
    };
    numbers.into_iter().filter_map(|number| show(shared, number).ok()).collect()
}

/// Returns the control thread's function that shows one job.
pub fn one(shared: Arc<Mutex<Shared>>) -> JobHandler {
    Box::new(move |number| show(&shared, number))
}

pub fn lock(shared: &Mutex<Shared>) -> std::sync::MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn find(shared: &Mutex<Shared>, number: u64) -> Result<Job, Failure> {
    lock(shared).jobs.all.get(&number).cloned().ok_or_else(|| {
        Failure::new(Kind::UnknownName, format!("there is no job {number}"))
            .next("`bcached status` shows the running jobs")
    })
}

/// Returns a job as it is at this moment. Holds no lock while it waits for an engine.
pub fn show(shared: &Mutex<Shared>, number: u64) -> Result<JobReport, Failure> {
    let job = find(shared, number)?;
    let state = match job.ended.as_ref().map(|ended| &ended.outcome) {
        None => JobState::Running,
        Some(Ok(())) => JobState::Done,
        Some(Err(failure)) if failure.kind == Kind::Cancelled => JobState::Cancelled,
        Some(Err(_)) => JobState::Failed,
    };
    let mut shown = JobReport::new(job.verb, job.name.clone(), state);
    shown.id = Some(number);
    shown.notes.clone_from(&job.notes);
    shown.dirty_bytes_at_start = job.dirty_at_start;
    (shown.lost_bytes, shown.lost_ranges) = job.lost.clone();
    shown.size_bytes = job.size;
    shown.devices.clone_from(&job.devices);
    let taken = job.ended.as_ref().map_or_else(|| job.began.elapsed(), |ended| ended.after);
    shown.elapsed_seconds = taken.as_secs();
    if let Some(JobOutcome { outcome: Err(failure), .. }) = &job.ended {
        shown.failure = Some(failure.to_error());
    }
    let running = job.engine.as_ref().filter(|_| job.ended.is_none());
    if let Some(status) = running.and_then(Engine::status) {
        let milliseconds = u64::try_from(taken.as_millis()).unwrap_or(u64::MAX);
        let dirty_sectors = match &job.target {
            JobTarget::Volume(_, served) => {
                let info = status.volumes.iter().find(|info| info.id == served.id);
                info.filter(|info| info.is_dirty_known()).map(|info| info.dirty_sectors)
            }
            JobTarget::Unserved(uuid) => {
                let left = status.unserved.iter().find(|left| left.uuid == *uuid);
                left.filter(|left| left.is_counted).map(|left| left.dirty_sectors)
            }
            JobTarget::Cache(_) => Some(status.dirty_sectors).filter(|_| status.is_counted),
            JobTarget::Arrivals(_) => None,
        };
        if let Some(dirty_sectors) = dirty_sectors {
            let dirty = (dirty_sectors * 512).saturating_sub(job.dirty_beside);
            shown = shown.with_progress(dirty, milliseconds);
        }
        let told = blockers::of(&lock(shared).table, (job.verb, &job.target), &status);
        // What the loop has found concerns this job alone, so it comes first.
        shown.blocked_by = job.blocked.clone().or(told);
    } else if running.is_some() {
        shown.blocked_by = Some("its engine does not answer".to_owned());
    } else if job.ended.is_none() {
        shown.blocked_by = job.blocked;
    }
    Ok(shown)
}
