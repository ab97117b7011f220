//! Jobs: long work on volumes and caches. The loop begins them; the control thread shows and
//! cancels them.
//!
//! The desired state of a volume is kept in the configuration before the work on it begins. A
//! daemon that is stopped, killed or restarted therefore resumes the work. If the work fails or is
//! cancelled, the former state is restored.

pub mod add_remove;
pub mod api;
pub mod attach_detach;
pub mod blockers;
pub mod cancel;
pub mod flash;
pub mod flash_resize;
pub mod forget;
pub mod import;
pub mod precheck;
pub mod record_losses;
pub mod release;
pub mod release_closed;
pub mod replace;
pub mod replace_steps;
pub mod resize;
pub mod visible;

use crate::engine_error;
use crate::engine_thread::{AddedVolume, Engine, ReleasedVolume, VolumeJob};
use crate::supervisor::report::health;
use crate::supervisor::table::{Table, VolumeState};
use crate::supervisor::{Event, Supervisor};
use attach_detach::{JobPlan, JobWork, VolumeMove};
use bcached_config::PersistedVolume;
use bcached_control::failure::Failure;
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_engine::{Error, Status as EngineStatus, VolumeId, VolumeInfo, WritebackError};
use bcached_format::Uuid;
use precheck::DeviceCheck;
use record_losses::PointOfNoReturn;
use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime};

/// Number of ended jobs that are remembered.
const ENDED_MAX: usize = 64;

/// All jobs, by number.
pub struct JobTable {
    last: u64,
    pub all: BTreeMap<u64, Job>,
}

/// No daemon began before this moment, in seconds since 1970.
const FIRST_SECONDS: u64 = 1_760_000_000;

impl Default for JobTable {
    /// Starts the numbers at the current time, beyond any number that an earlier daemon can have
    /// used. A client that waits for one of its jobs thus never meets another one.
    fn default() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { last: now.as_secs().saturating_sub(FIRST_SECONDS), all: BTreeMap::new() }
    }
}

/// A job.
#[derive(Clone)]
pub struct Job {
    pub verb: JobKind,
    pub target: JobTarget,
    pub name: String,
    /// The engine that does the work, or that gives the volume up for it.
    pub engine: Option<Engine>,
    /// The devices that are released.
    devices: Vec<String>,
    /// For work of the loop: what keeps it from going on.
    blocked: Option<String>,
    /// A client has joined the job: it runs once more when it ends, to include what has arrived
    /// since.
    again: bool,
    began: Instant,
    pub dirty_at_start: u64,
    /// Dirty data that the job does not concern, in bytes.
    dirty_beside: u64,
    notes: Vec<String>,
    /// The data that is lost: its amount in bytes, and the file that lists it.
    lost: (Option<u64>, Option<String>),
    /// The intended size of the volume, in bytes.
    pub size: Option<u64>,
    /// What is restored if the job fails.
    pub before: RollbackState,
    /// For a job that loses data: whether it can still be cancelled.
    pub turn: PointOfNoReturn,
    pub ended: Option<JobOutcome>,
}

/// What a job works on.
#[derive(Clone)]
pub enum JobTarget {
    /// The volume of this index, as it was when the job began.
    Volume(usize, Box<VolumeInfo>),
    /// A volume that is not served.
    Unserved(Uuid),
    /// All volumes on the cache of this index, or, when it is replaced, on its former device.
    Cache(usize),
    /// All volumes that are to join the cache of this index.
    Arrivals(usize),
}

#[derive(Clone)]
pub struct JobOutcome {
    at: Instant,
    after: Duration,
    outcome: Result<(), Failure>,
}

/// What was requested for a volume's cache before.
#[derive(Clone, Default)]
pub struct RollbackState {
    /// The request in effect.
    pub wanted: Option<String>,
    /// The request in the file of `set`.
    pub kept: Option<String>,
    /// The file says something else now.
    pub is_kept_anew: bool,
    /// The whole section of the volume in the file, if it is to be restored.
    pub section: Option<PersistedVolume>,
    /// The limit of the served size, in effect and in the file.
    pub limit: (Option<u64>, Option<u64>),
}

/// A request for a job.
pub struct JobRequest {
    pub volume: Option<usize>,
    pub begin: JobSpec,
    pub uid: Option<u32>,
    /// What was found out about devices for it beforehand.
    pub device_check: DeviceCheck,
    pub answer: Sender<Result<JobReport, Failure>>,
}

/// Returns the user whose process made a request, for the log.
pub fn user(uid: Option<u32>) -> String {
    uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string())
}

impl Job {
    /// Returns a job that begins now.
    pub fn new(shown: &JobReport, target: JobTarget, engine: Option<Engine>) -> Self {
        Self {
            verb: shown.verb,
            target,
            name: shown.volume.clone(),
            engine,
            devices: shown.devices.clone(),
            blocked: None,
            again: false,
            began: Instant::now(),
            dirty_at_start: shown.dirty_bytes_at_start,
            dirty_beside: 0,
            notes: shown.notes.clone(),
            lost: (shown.lost_bytes, shown.lost_ranges.clone()),
            size: shown.size_bytes,
            before: RollbackState::default(),
            turn: PointOfNoReturn::default(),
            ended: None,
        }
    }

    /// Returns the trouble that write-back has with the data that the job must write back.
    fn trouble<'a>(&self, status: &'a EngineStatus) -> Option<&'a WritebackError> {
        let mut volumes = status.volumes.iter();
        match &self.target {
            JobTarget::Volume(_, served) => {
                volumes.find(|info| info.id == served.id)?.writeback_trouble.as_ref()
            }
            JobTarget::Unserved(_) | JobTarget::Arrivals(_) => None,
            JobTarget::Cache(_) => volumes.find_map(|info| info.writeback_trouble.as_ref()),
        }
    }

    /// Returns why the job failed.
    fn failure(&self, error: &Error) -> Failure {
        let failure = engine_error::of_job(self.verb, &self.name, error);
        let status =
            self.engine.as_ref().filter(|_| matches!(error, Error::Io { .. })).and_then(Engine::status);
        match status.as_ref().and_then(|status| self.trouble(status)) {
            Some(trouble) => failure.why(format!("{}: {}", health::range(trouble), trouble.error)),
            None => failure,
        }
    }

    /// Returns the index of the volume, if the job works on a served one.
    pub const fn volume(&self) -> Option<usize> {
        match self.target {
            JobTarget::Volume(volume, _) => Some(volume),
            JobTarget::Unserved(_) | JobTarget::Cache(_) | JobTarget::Arrivals(_) => None,
        }
    }
}

impl JobTable {
    /// Returns the running job on a volume.
    pub fn running(&self, volume: usize) -> Option<(u64, &Job)> {
        let is_it = |job: &&Job| job.volume() == Some(volume) && job.ended.is_none();
        self.all.iter().map(|(number, job)| (*number, job)).find(|(_, job)| is_it(job))
    }

    /// Returns the running job that makes a set forget a volume, and the volume's name there.
    pub fn forgetting(&self, uuid: Uuid) -> Option<(u64, String)> {
        let is_it =
            |job: &&Job| matches!(job.target, JobTarget::Unserved(of) if of == uuid) && job.ended.is_none();
        let mut all = self.all.iter().map(|(number, job)| (*number, job));
        all.find(|(_, job)| is_it(job)).map(|(number, job)| (number, job.name.clone()))
    }

    /// Adds a job and returns its number.
    pub fn add(&mut self, job: Job) -> u64 {
        self.last += 1;
        self.all.insert(self.last, job);
        self.last
    }

    /// Returns the verb of a job.
    pub fn verb(&self, number: u64) -> Option<JobKind> {
        self.all.get(&number).map(|job| job.verb)
    }

    /// Returns the name of what a job works on, and the job's turn.
    pub fn name_and_turn(&self, number: u64) -> Option<(String, PointOfNoReturn)> {
        self.all.get(&number).map(|job| (job.name.clone(), job.turn.clone()))
    }

    /// Returns the volume as it was when the job on it began.
    pub fn served(&self, number: u64) -> Option<Box<VolumeInfo>> {
        match &self.all.get(&number)?.target {
            JobTarget::Volume(_, served) => Some(served.clone()),
            JobTarget::Unserved(_) | JobTarget::Cache(_) | JobTarget::Arrivals(_) => None,
        }
    }

    /// Records how many bytes a job loses.
    pub fn loses(&mut self, number: u64, lost: u64) {
        if let Some(job) = self.all.get_mut(&number) {
            match lost {
                0 => job.lost = (None, None),
                _ => job.lost.0 = Some(lost),
            }
        }
    }

    /// Returns the replace job by which volumes leave the former cache of this index.
    pub fn replacing(&self, former: usize) -> Option<u64> {
        let is_it = |job: &Job| {
            matches!(job.target, JobTarget::Cache(of) if of == former && job.verb == JobKind::Replace)
                && job.ended.is_none()
        };
        self.all.iter().find(|(_, job)| is_it(job)).map(|(number, _)| *number)
    }

    /// Returns the job that waits for volumes to join the cache of this index.
    pub fn arriving(&self, cache: usize) -> Option<u64> {
        self.arrivals().into_iter().find(|(_, to, _)| *to == cache).map(|(number, ..)| number)
    }

    /// Returns all jobs that wait for arriving volumes: number, cache, and how long each has
    /// waited.
    pub fn arrivals(&self) -> Vec<(u64, usize, Duration)> {
        let of = |(number, job): (&u64, &Job)| match job.target {
            JobTarget::Arrivals(cache) if job.ended.is_none() => Some((*number, cache, job.began.elapsed())),
            _ => None,
        };
        self.all.iter().filter_map(of).collect()
    }

    /// Adds notes to a job.
    pub fn note(&mut self, number: u64, notes: &[String]) {
        if let Some(job) = self.all.get_mut(&number) {
            job.notes.extend_from_slice(notes);
        }
    }

    /// Returns the job that releases a cache, and the cache's index.
    pub fn releasing(&self) -> Option<(u64, usize)> {
        let cache = |job: &Job| match job.target {
            JobTarget::Cache(cache) if job.verb == JobKind::Release && job.ended.is_none() => Some(cache),
            _ => None,
        };
        self.all.iter().find_map(|(number, job)| Some((*number, cache(job)?)))
    }

    /// Sets what keeps a job of the loop from going on.
    pub fn block(&mut self, number: u64, blocked: Option<String>) {
        if let Some(job) = self.all.get_mut(&number) {
            job.blocked = blocked;
        }
    }

    /// Returns the per-volume parts of a replace job that leave the cache `former`, with their
    /// engines.
    pub fn leaving(&self, former: usize, table: &Table) -> Vec<(u64, Engine)> {
        let is_there =
            |job: &Job| job.volume().and_then(|volume| table.volumes.get(volume)?.cache) == Some(former);
        let parts = self
            .all
            .iter()
            .filter(|(_, job)| job.verb == JobKind::Replace && job.ended.is_none() && is_there(job));
        parts.filter_map(|(number, job)| Some((*number, job.engine.clone()?))).collect()
    }

    /// Returns a job that has not ended.
    pub fn under_way(&self, number: u64) -> Option<&Job> {
        self.all.get(&number).filter(|job| job.ended.is_none())
    }

    /// Marks a job as ended, and drops the oldest ended jobs beyond [`ENDED_MAX`].
    fn end(&mut self, number: u64, outcome: Result<(), Failure>) {
        let Some(job) = self.all.get_mut(&number).filter(|job| job.ended.is_none()) else { return };
        job.ended = Some(JobOutcome { at: Instant::now(), after: job.began.elapsed(), outcome });
        let ends = self.all.iter().filter_map(|(number, job)| Some((job.ended.as_ref()?.at, *number)));
        let mut ends: Vec<(Instant, u64)> = ends.collect();
        ends.sort_unstable();
        for (_, number) in ends.iter().take(ends.len().saturating_sub(ENDED_MAX)) {
            self.all.remove(number);
        }
    }
}

/// An event of a job.
pub enum JobEvent {
    /// An engine has finished its work.
    Ended(Result<(), Error>),
    /// An engine has given up this volume, which moves to this cache or nowhere.
    Released(usize, Option<usize>, Box<Result<ReleasedVolume, Error>>),
    /// The other engine has taken up this volume, or says why not.
    Moved(usize, Box<Result<AddedVolume, Error>>),
    /// The volume of this UUID has been forgotten, or why not.
    Forgotten(Uuid, Result<(), Failure>),
    /// Its result is visible to clients, or not yet.
    Visible(bool),
    /// The volume has been shrunk, and this many bytes are lost; or why not.
    Shrunk(Result<u64, Failure>),
    /// A client no longer wants to wait for a job that ends by itself.
    StopWaiting,
}

impl Supervisor {
    /// Handles an event of the job of this number.
    pub fn job_event(&mut self, number: u64, event: JobEvent) {
        match event {
            JobEvent::Ended(outcome) => self.job_ended(number, outcome),
            JobEvent::Released(volume, to, given) => self.given(number, volume, to, *given),
            JobEvent::Moved(volume, added) => self.moved(number, volume, *added),
            JobEvent::Forgotten(uuid, outcome) => self.forgotten(number, uuid, outcome),
            JobEvent::Visible(is_shown) => self.shown(number, is_shown),
            JobEvent::Shrunk(outcome) => self.shrunk(number, outcome),
            JobEvent::StopWaiting => self.stop_waiting(number),
        }
    }

    /// Begins the requested job, or joins a running one, and answers the request.
    pub fn begin_job(&mut self, asked: JobRequest) {
        let JobRequest { volume, begin, uid, device_check, answer } = asked;
        let uid = user(uid);
        let text = format!("{} {}", begin.verb, begin.volume);
        let is_looking = matches!(device_check, DeviceCheck::NotYet);
        if begin.verb == JobKind::Add && self.is_flash(&begin) && !is_looking {
            tracing::info!(event = "job-asked", uid, "{text}");
            return self.add_flash(&begin, &uid, answer);
        }
        let begun = match volume {
            None if begin.verb == JobKind::Forget => self.forget(&begin),
            None if begin.verb == JobKind::Release => self.release(&begin),
            None if begin.verb == JobKind::Import => self.import(&begin, device_check),
            None if begin.verb == JobKind::Remove => self.is_removed(&begin),
            None => self.add(&begin, &device_check),
            Some(volume) => self.plan_job(volume, &begin).and_then(|planned| {
                if begin.dry_run { Ok(planned.shown()) } else { self.carry_out(volume, begin.verb, planned) }
            }),
        };
        match &begun {
            Err(failure) => tracing::info!(event = "job-refused", uid, "{text}: {failure}"),
            // The caller asks again after its look at the device.
            Ok(job) if is_looking && job.state == JobState::Planned => {}
            Ok(job) => match job.id {
                Some(number) => tracing::info!(event = "job-begun", uid, "{text} (job {number})"),
                None if job.state == JobState::Done && !job.already => {
                    tracing::info!(event = "job-done", uid, "{text}: {}", job.text().trim_end());
                }
                None => tracing::info!(event = "job-nothing", uid, "{text}: {}", job.text().trim_end()),
            },
        }
        let _gone = answer.send(begun);
    }

    /// Begins a planned job. The result carries its number, if there is anything to do.
    pub fn carry_out(&self, volume: usize, verb: JobKind, planned: JobPlan) -> Result<JobReport, Failure> {
        if let Some(number) = planned.joins {
            if let Some(job) = self.shared().jobs.all.get_mut(&number) {
                job.again = verb == JobKind::Flush;
            }
            return Ok(planned.shown());
        }
        if let Some(file) = &planned.file {
            file.write()?;
        }
        let shown = planned.shown();
        if matches!(verb, JobKind::Remove | JobKind::Stop)
            && planned.engine.is_none()
            && planned.work.is_some()
        {
            // No engine has it.
            self.gone(volume, Some(verb));
            return Ok(JobReport { state: JobState::Done, ..shown });
        }
        let mut shared = self.shared();
        let entry = &mut shared.table.volumes[volume];
        if let Some(wanted) = &planned.wanted {
            entry.wanted_cache = Some(wanted.clone());
        }
        if let Some(limit) = planned.limit {
            entry.limit = limit;
        }
        let Some(work) = planned.work else { return Ok(shown) };
        let (VolumeState::Served(served), Some(engine)) = (&entry.state, planned.engine) else {
            return Ok(shown);
        };
        let (served, id) = (served.clone(), served.id);
        let mut job = Job::new(&shown, JobTarget::Volume(volume, served), Some(engine.clone()));
        job.before = planned.before;
        job.dirty_beside = planned.dirty_beside;
        let number = shared.jobs.add(job);
        drop(shared);
        if let Some(size) = planned.size {
            self.is_to_have(volume, verb, size);
        }
        match work {
            JobWork::InEngine(work) => self.begin_here(number, work, &engine, id),
            JobWork::MoveTo(cache) => self.begin_move(number, VolumeMove { volume, cache }, &engine, id),
            JobWork::LossyShrink(sectors) => {
                let Some(loss) = planned.loss else { return Ok(shown) };
                self.begin_losing(number, (sectors, loss), engine, id)?;
            }
            JobWork::Release => self.begin_removal(number, volume, verb, &engine, id),
        }
        Ok(JobReport { id: Some(number), state: JobState::Running, ..shown })
    }

    /// Returns the kind of engine work for a verb.
    pub const fn job_of(verb: JobKind) -> VolumeJob {
        match verb {
            JobKind::Attach => VolumeJob::Attach,
            JobKind::Detach | JobKind::Replace => VolumeJob::Detach,
            // The other verbs are no work of an engine.
            _ => VolumeJob::Flush,
        }
    }

    pub fn begin_here(&self, number: u64, work: VolumeJob, engine: &Engine, id: VolumeId) {
        let sender = self.sender.clone();
        let ended = move |outcome| drop(sender.send(Event::Job(number, JobEvent::Ended(outcome))));
        engine.begin(number, work, id, Box::new(ended));
    }

    /// Handles the end of an engine's work.
    pub fn job_ended(&self, number: u64, outcome: Result<(), Error>) {
        let is_stopping = outcome == Err(Error::Stopping);
        let Some(job) = self.shared().jobs.under_way(number).cloned() else { return };
        if job.again && outcome.is_ok() {
            if let Some(job) = self.shared().jobs.all.get_mut(&number) {
                job.again = false;
            }
            let (JobTarget::Volume(_, served), Some(engine)) = (&job.target, &job.engine) else { return };
            return self.begin_here(number, Self::job_of(job.verb), engine, served.id);
        }
        let outcome = match outcome {
            // Requested twice at once, or the volume has left for another reason meanwhile: it is
            // where it was to be.
            Err(Error::NotAttached | Error::Attached) => Ok(()),
            other => other.map_err(|error| job.failure(&error)),
        };
        if outcome.is_ok() && matches!(job.verb, JobKind::Attach | JobKind::Detach | JobKind::Replace) {
            let mut shared = self.shared();
            if let Some(VolumeState::Served(info)) =
                job.volume().and_then(|volume| Some(&mut shared.table.volumes.get_mut(volume)?.state))
            {
                info.attached = job.verb == JobKind::Attach;
            }
        }
        if is_stopping {
            // The next start resumes the job. A resize of a flash-only volume must be requested
            // again.
            return;
        }
        self.end_job(number, outcome);
    }

    /// Ends a job. If it failed, what was kept for it is taken back.
    pub fn end_job(&self, number: u64, outcome: Result<(), Failure>) {
        let Some(job) = self.shared().jobs.under_way(number).cloned() else { return };
        if outcome.is_err() {
            // Before a client learns of the end, so that it finds the former state.
            self.take_back(&job);
        }
        if let (JobKind::Grow | JobKind::Shrink, Some(volume)) = (job.verb, job.volume()) {
            self.resized(volume);
        }
        if outcome.is_ok() && self.begins_to_show(number, &job) {
            return;
        }
        self.finish_job(number, &job, outcome);
    }

    /// Publishes the end of a job.
    pub fn finish_job(&self, number: u64, job: &Job, outcome: Result<(), Failure>) {
        self.shared().jobs.end(number, outcome.clone());
        match outcome {
            Ok(()) => {
                tracing::info!(event = "job-done", "{}: {} (job {number}) is done", job.name, job.verb);
            }
            Err(failure) => {
                tracing::error!(event = "job-failed", "{}: {} (job {number}): {failure}", job.name, job.verb);
                if let (JobKind::Replace, Some(volume)) = (job.verb, job.volume()) {
                    self.volume_stays(volume, &failure);
                }
            }
        }
        if let (JobKind::Grow | JobKind::Shrink, Some(volume)) = (job.verb, job.volume()) {
            self.leave_unwanted_cache(volume);
        }
    }

    /// Ends the jobs of an engine that is gone.
    pub fn end_jobs_of(&self, cache: usize, failure: &Failure) {
        let is_its_own = |volume: usize| self.shared().table.volumes[volume].cache == Some(cache);
        let running: Vec<_> = {
            let shared = self.shared();
            let running = shared.jobs.all.iter().filter(|(_, job)| job.ended.is_none());
            running.filter_map(|(number, job)| Some((*number, job.volume()?))).collect()
        };
        for (number, _) in running.into_iter().filter(|(_, volume)| is_its_own(*volume)) {
            // What was requested stays in the configuration: the next start resumes it.
            self.shared().jobs.end(number, Err(failure.clone()));
        }
        let replacing = self.shared().jobs.replacing(cache);
        if let Some(number) = replacing {
            self.shared().jobs.end(number, Err(failure.clone()));
        }
    }
}
