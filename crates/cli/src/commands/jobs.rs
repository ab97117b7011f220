//! `bcached flush`, `detach`, `attach`, `add`, `remove`, `stop VOLUME`, `forget`, `grow`, `shrink`,
//! `replace`, `release`, `import` and `cancel`: long jobs of the daemon. The daemon decides and
//! does the work; this module starts the job, follows it and waits for it.

use super::name_lookup::{self, called};
use super::orphan;
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::jobs::Overrides;
use bcached_control::jobs::{JobKind, JobList, JobReport, JobSpec, JobState};
use bcached_control::sizes;
use bcached_control::status::{Status, VolumeStatus};
use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The interval between two polls of a running job.
const LOOK: Duration = Duration::from_millis(200);
/// How long a volume that was added may take to appear among the volumes.
const COMES: Duration = Duration::from_secs(10);
/// The interval between two progress lines, on a terminal and elsewhere.
const TOLD_TERMINAL: Duration = Duration::from_secs(1);
const TOLD: Duration = Duration::from_secs(30);

/// Writes back the dirty data of one volume, or of all.
pub fn flush(flags: &flags::FlushArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let verb = JobKind::Flush;
    let begin = |volume| JobSpec { dry_run: flags.watch.dry_run, ..JobSpec::new(verb, volume) };
    if let Some(name) = &flags.volume {
        let job = watch.begin(&begin(name.clone()))?;
        return watch.finish(vec![job]);
    }
    let FlushableVolumes { volumes, missing } = all_volumes(&watch)?;
    // All jobs are started before the first is waited for: each device works independently.
    let (mut jobs, mut refused) = (Vec::new(), missing);
    for name in volumes {
        match watch.begin(&begin(name)) {
            Ok(job) => jobs.push(job),
            Err(failure) => refused = refused.or(Some(failure)),
        }
    }
    let report = watch.finish(jobs)?;
    Ok(match refused {
        Some(failure) => report.failing(failure),
        None => report,
    })
}

/// Detaches a volume from its cache.
pub fn detach(flags: &flags::DetachArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let begin = JobSpec::new(JobKind::Detach, flags.volume.clone());
    let job = watch.begin(&JobSpec { dry_run: flags.watch.dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Attaches a volume to a cache.
pub fn attach(flags: &flags::AttachArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let begin = JobSpec::new(JobKind::Attach, flags.volume.clone());
    let cache = flags.cache.clone();
    let job = watch.begin(&JobSpec { cache, dry_run: flags.watch.dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Stops serving a volume permanently.
pub fn remove(flags: &flags::RemoveArgs) -> Result<Report, Failure> {
    if let Some(removed) = orphan::remove(flags) {
        return removed;
    }
    let watch = JobWatch::of(&flags.watch)?;
    let begin = JobSpec::new(JobKind::Remove, flags.volume.clone());
    let job = watch.begin(&JobSpec { dry_run: flags.watch.dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Stops serving a volume until the next start.
pub fn stop(volume: &str, flags: &flags::WatchArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(flags)?;
    let begin = JobSpec::new(JobKind::Stop, volume.to_owned());
    let job = watch.begin(&JobSpec { dry_run: flags.dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Adds a volume, and waits until it is served.
pub fn add(flags: &flags::AddArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let flags::AddArgs { name, backing, cache, .. } = flags;
    let backing = backing.as_deref().map(name_lookup::device);
    let (dry_run, cache) = (flags.watch.dry_run, cache.clone());
    let size_bytes = flags.size.as_deref().map(|typed| size(typed, "--size")).transpose()?;
    let begin = JobSpec::new(JobKind::Add, name.clone());
    let job = watch.begin(&JobSpec { backing, cache, size_bytes, dry_run, ..begin })?;
    if !flags.watch.no_wait && !dry_run {
        watch.until_served(name)?;
    }
    Report::of(&job)
}

/// Makes a cache drop everything it holds of a volume.
pub fn forget(flags: &flags::ForgetArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let accept_loss_bytes =
        flags.accept_loss.as_deref().map(|typed| size(typed, "--accept-loss")).transpose()?;
    let lost_ranges = flags.lost_ranges.as_deref().map(list_of_lost).transpose()?;
    let (cache, dry_run) = (flags.cache.clone(), flags.watch.dry_run);
    let begin = JobSpec::new(JobKind::Forget, flags.volume.clone());
    let job = watch.begin(&JobSpec { cache, accept_loss_bytes, lost_ranges, dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Returns the absolute path: the daemon may have another working directory.
fn list_of_lost(path: &Path) -> Result<String, Failure> {
    let refused = |why: String| Failure::new(Kind::Usage, why).option("--lost-ranges");
    let path = std::path::absolute(path).map_err(|error| refused(error.to_string()))?;
    path.to_str().map(str::to_owned).ok_or_else(|| refused(format!("{} is not valid UTF-8", path.display())))
}

/// Grows a volume to the size of its backing device, or one that has none to the size asked for.
pub fn grow(flags: &flags::GrowArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let size_bytes = flags.size.as_deref().map(|typed| size(typed, "--size")).transpose()?;
    let begin = JobSpec::new(JobKind::Grow, flags.volume.clone());
    let job = watch.begin(&JobSpec { size_bytes, dry_run: flags.watch.dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Shrinks a volume.
pub fn shrink(flags: &flags::ShrinkArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    let size_bytes = Some(size(&flags.size, "--size")?);
    let accept_loss_bytes =
        flags.accept_loss.as_deref().map(|typed| size(typed, "--accept-loss")).transpose()?;
    let lost_ranges = flags.lost_ranges.as_deref().map(list_of_lost).transpose()?;
    let (begin, dry_run) = (JobSpec::new(JobKind::Shrink, flags.volume.clone()), flags.watch.dry_run);
    let job = watch.begin(&JobSpec { size_bytes, accept_loss_bytes, lost_ranges, dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Moves the volumes of a cache to another device.
pub fn replace(flags: &flags::ReplaceArgs) -> Result<Report, Failure> {
    let watch = JobWatch::of(&flags.watch)?;
    // The daemon may have another working directory.
    let refused = |why: String| Failure::new(Kind::Usage, why).option("--with");
    let with = std::path::absolute(&flags.with).map_err(|error| refused(error.to_string()))?;
    let with =
        with.to_str().ok_or_else(|| refused(format!("{} is not valid UTF-8", with.display())))?.to_owned();
    let (wipe_signature, wipe_bcache) = (flags.wipe_signature.clone(), flags.wipe_bcache);
    let overwrites = Overrides { wipe_signature, wipe_bcache };
    let begin = JobSpec::new(JobKind::Replace, flags.cache.clone());
    let (with, dry_run) = (Some(with), flags.watch.dry_run);
    let job = watch.begin(&JobSpec { with, overwrites, dry_run, ..begin })?;
    watch.finish(vec![job])
}

/// Starts the import of a set, and returns the job as it was at its start. Configuration that the
/// daemon has stored by then is kept.
pub fn begin_import(set: &str, devices: &[String], flags: &flags::WatchArgs) -> Result<JobReport, Failure> {
    let begin = JobSpec::new(JobKind::Import, set.to_owned());
    let (devices, dry_run) = (devices.to_vec(), flags.dry_run);
    JobWatch::of(flags)?.begin(&JobSpec { devices, dry_run, ..begin })
}

/// Waits until the imported set is served. If that fails, the message gives `bcached release` with
/// `option` as the way back.
pub fn finish_import(job: &JobReport, flags: &flags::WatchArgs, option: &str) -> Result<Report, Failure> {
    if !flags.no_wait && !flags.dry_run {
        JobWatch::of(flags)?.until_all_served(job).map_err(|failure| match failure.kind.exit() {
            4 => {
                let next = failure.next.clone().map_or_else(String::new, |next| format!("{next}; "));
                failure.next(format!("{next}`bcached release {}{option}` undoes the import", job.volume))
            }
            _ => failure,
        })?;
    }
    Report::of(job)
}

/// Releases a cache. Returns the job as it ended.
pub fn release(cache: &str, flags: &flags::WatchArgs) -> Result<(JobReport, Report), Failure> {
    let watch = JobWatch::of(flags)?;
    let begin = JobSpec::new(JobKind::Release, cache.to_owned());
    let job = watch.begin(&JobSpec { dry_run: flags.dry_run, ..begin })?;
    let report = watch.finish(vec![job.clone()])?;
    Ok((job, report))
}

/// Parses an option's value as bytes.
fn size(typed: &str, option: &str) -> Result<u64, Failure> {
    sizes::parse(typed, sizes::DefaultUnit::Bytes)
        .map_err(|error| Failure::new(Kind::Usage, error.to_string()).option(option))
}

/// Cancels a job.
pub fn cancel(flags: &flags::CancelArgs) -> Result<Report, Failure> {
    let socket = flags.control.socket();
    let path = format!("/v1/jobs/{}", client::encoded(&flags.job));
    if flags.dry_run {
        return Report::of(&client::understood::<JobReport>(&client::delete(
            &socket,
            &format!("{path}?dry_run=true"),
        )?)?);
    }
    let mut job: JobReport = client::understood(&client::delete(&socket, &path)?)?;
    // The job ends after its current step.
    let until = Instant::now() + Duration::from_secs(10);
    while job.state == JobState::Running && Instant::now() < until {
        thread::sleep(LOOK);
        job = client::understood(&client::get(&socket, &path)?)?;
    }
    match job.state {
        JobState::Running => Err(Failure::new(Kind::TimeLimit, format!("job {} is still ending", flags.job))
            .why("it ends after its current step")
            .next("`bcached status` shows when it has ended")),
        // The job has ended, as requested.
        _ => Report::of(&job),
    }
}

/// The volumes that can be flushed, and why others cannot.
struct FlushableVolumes {
    volumes: Vec<String>,
    missing: Option<Failure>,
}

/// Returns the volumes that have a cache. Reports those with unknown dirty data, so that they do
/// not pass for clean.
fn all_volumes(watch: &JobWatch<'_>) -> Result<FlushableVolumes, Failure> {
    let status: Status = client::understood(&client::get(&watch.socket, "/v1/status")?)?;
    let is_cached = |volume: &&VolumeStatus| volume.backing.is_some() && volume.cache.is_some();
    let volumes = status.volumes.iter().filter(is_cached).filter(|volume| volume.facts.is_some());
    let not_open = status.caches.iter().filter(|cache| cache.state != "open");
    let not_open = not_open.map(|cache| format!("the cache {} is {}", cache.name, cache.state));
    let not_served = status.volumes.iter().filter(|volume| volume.facts.is_none());
    let not_served = not_served.map(|volume| format!("{} is {}", volume.name, volume.state));
    let unserved = status.caches.iter().flat_map(|cache| &cache.unserved);
    // A volume without a backing device has nowhere to write its data back to.
    let unserved = unserved.filter(|left| left.flash_size_bytes.is_none());
    let unserved = unserved.map(|left| format!("{} is not served ({})", left.name(), left.dirty));
    let missing: Vec<_> = not_open.chain(not_served).chain(unserved).collect();
    let missing = (!missing.is_empty())
        .then(|| Failure::new(Kind::NotFound, "cannot flush all dirty data").why(missing.join("; ")));
    Ok(FlushableVolumes { volumes: volumes.map(|volume| volume.name.clone()).collect(), missing })
}

/// A client waiting for a job.
struct JobWatch<'a> {
    socket: PathBuf,
    flags: &'a flags::WatchArgs,
    until: Option<Instant>,
}

impl<'a> JobWatch<'a> {
    fn of(flags: &'a flags::WatchArgs) -> Result<Self, Failure> {
        let limit = flags.timeout.as_deref().map(bcached_config::time).transpose();
        let limit = limit.map_err(|why| Failure::new(Kind::Usage, why).option("--timeout"))?;
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        Ok(Self { socket: flags.control.socket(), flags, until })
    }

    /// Starts the job. Volume and cache may be given in any form that `called` resolves.
    fn begin(&self, begin: &JobSpec) -> Result<JobReport, Failure> {
        let to_cache = |begin: &JobSpec| match &begin.cache {
            None => self.ask(begin),
            Some(cache) => {
                called(cache, |cache| self.ask(&JobSpec { cache: Some(cache.to_owned()), ..begin.clone() }))
            }
        };
        if begin.verb == JobKind::Add {
            // It is the new volume's name, not that of an existing one.
            return to_cache(begin);
        }
        called(&begin.volume, |volume| to_cache(&JobSpec { volume: volume.to_owned(), ..begin.clone() }))
    }

    fn ask(&self, begin: &JobSpec) -> Result<JobReport, Failure> {
        let body = client::body(begin)?;
        client::understood(&client::post(&self.socket, "/v1/jobs", &body)?)
    }

    /// Waits until the added volume is served.
    fn until_served(&self, name: &str) -> Result<(), Failure> {
        let (mut progress, began) = (ProgressLines::default(), Instant::now());
        let served = self.look_until_served(name, began, &mut progress);
        progress.end();
        served
    }

    fn look_until_served(
        &self,
        name: &str,
        began: Instant,
        progress: &mut ProgressLines,
    ) -> Result<(), Failure> {
        let mut is_seen = false;
        loop {
            let status: Status = client::understood(&client::get(&self.socket, "/v1/status")?)?;
            let volume = status.volumes.into_iter().find(|volume| volume.name == name);
            let reason = volume.as_ref().and_then(|volume| volume.reason.clone()).unwrap_or_default();
            let state = volume.as_ref().map_or("", |volume| &volume.state);
            match state {
                "served" | "degraded" => return Ok(()),
                // The volume appears only after the daemon has answered the client that added it.
                "" if !is_seen && began.elapsed() < COMES => thread::sleep(LOOK),
                "" | "removed" | "stopped" => {
                    let how = if state == "stopped" { "stopped" } else { "removed" };
                    return Err(Failure::new(
                        Kind::Cancelled,
                        format!("{name} was added, but is not served"),
                    )
                    .why(format!("another command has {how} it"))
                    .next(format!("`bcached add {name}` serves it again")));
                }
                "failed" => {
                    return Err(Failure::new(Kind::Io, format!("{name} was added, but cannot be served"))
                        .why(reason)
                        .next(format!("`bcached remove {name}` undoes this")));
                }
                _ if self.until.is_some_and(|until| Instant::now() >= until) => {
                    return Err(Failure::new(
                        Kind::TimeLimit,
                        format!("{name} was added, but is not served yet"),
                    )
                    .why(reason)
                    .next("it will be served as soon as possible"));
                }
                _ => {
                    is_seen = true;
                    progress.tell_wait(&format!("{name}: not served yet: {reason}"));
                    thread::sleep(LOOK);
                }
            }
        }
    }

    /// Waits until the imported set is served: the cache, then the devices that were imported with
    /// it.
    fn until_all_served(&self, job: &JobReport) -> Result<(), Failure> {
        let mut progress = ProgressLines::default();
        let status = self.look_until_open(&job.volume, &mut progress);
        progress.end();
        let is_its = |volume: &&VolumeStatus| {
            volume.backing.as_ref().is_some_and(|backing| job.devices.iter().any(|device| device == backing))
        };
        let volumes = status?.volumes;
        volumes.iter().filter(is_its).try_for_each(|volume| self.until_served(&volume.name))
    }

    fn look_until_open(&self, name: &str, progress: &mut ProgressLines) -> Result<Status, Failure> {
        loop {
            let status: Status = client::understood(&client::get(&self.socket, "/v1/status")?)?;
            let cache = status.caches.iter().find(|cache| cache.name == name);
            let reason = cache.and_then(|cache| cache.reason.clone());
            match cache.map_or("", |cache| &cache.state) {
                "open" => return Ok(status),
                "failed" => {
                    let what = format!("{name} was imported, but cannot be served");
                    return Err(Failure::new(Kind::Io, what)
                        .why(reason.unwrap_or_default())
                        .next(format!("correct that, then repeat `bcached import {name}`")));
                }
                state @ ("" | "stopped") => {
                    let how = if state == "stopped" { "stopped" } else { "released" };
                    return Err(Failure::new(
                        Kind::Cancelled,
                        format!("{name} was imported, but is not served"),
                    )
                    .why(format!("another command has {how} it"))
                    .next(format!("`bcached import {name}` imports it again")));
                }
                state if self.until.is_some_and(|until| Instant::now() >= until) => {
                    return Err(Failure::new(
                        Kind::TimeLimit,
                        format!("{name} was imported, but is not served yet"),
                    )
                    .why(reason.unwrap_or_else(|| format!("it is {state}")))
                    .next("it will be served as soon as possible"));
                }
                state => {
                    let waits = reason.unwrap_or_else(|| state.to_owned());
                    progress.tell_wait(&format!("{name}: not served yet: {waits}"));
                    thread::sleep(LOOK);
                }
            }
        }
    }

    /// Returns the current state of the job.
    fn look_again(&self, job: &JobReport, id: u64) -> Result<JobReport, Failure> {
        let now = client::get(&self.socket, &format!("/v1/jobs/{id}"));
        let now = now.map_err(|failure| match failure.kind {
            Kind::NotFound => nobody_knows(id),
            _ => failure,
        })?;
        let now: JobReport = client::understood(&now)?;
        let is_it = (now.verb, &now.volume) == (job.verb, &job.volume);
        if is_it { Ok(now) } else { Err(nobody_knows(id)) }
    }

    /// Waits for all jobs, and prints their progress meanwhile.
    fn finish(&self, mut jobs: Vec<JobReport>) -> Result<Report, Failure> {
        let is_running = |job: &JobReport| job.state == JobState::Running && job.id.is_some();
        let is_waited_for = !self.flags.no_wait && !self.flags.dry_run;
        let mut progress = ProgressLines::default();
        while is_waited_for && jobs.iter().any(is_running) {
            if self.until.is_some_and(|until| Instant::now() >= until) {
                progress.end();
                return Err(time_limit(&jobs));
            }
            thread::sleep(LOOK);
            for job in jobs.iter_mut().filter(|job| is_running(job)) {
                let Some(id) = job.id else { continue };
                *job = self.look_again(job, id)?;
            }
            if let Some(job) = jobs.iter().find(|job| is_running(job)) {
                progress.tell(job);
            }
        }
        progress.end();
        let failure = jobs.iter().find_map(JobReport::to_failure);
        let report = match jobs.as_slice() {
            [job] => Report::of(job)?,
            _ => Report::of(&JobList { jobs })?,
        };
        Ok(match failure {
            Some(failure) => report.failing(failure),
            None => report,
        })
    }
}

/// The failure for a job of a daemon that was restarted, and has another job of that number, or
/// none.
fn nobody_knows(id: u64) -> Failure {
    Failure::new(Kind::Io, format!("the outcome of job {id} is unknown"))
        .why("the daemon was restarted while this command waited")
        .next("repeat the command")
}

fn time_limit(jobs: &[JobReport]) -> Failure {
    let running: Vec<_> = jobs.iter().filter(|job| job.state == JobState::Running).collect();
    let lines: Vec<_> = running.iter().map(|job| job.progress_text()).collect();
    let can_be = running.iter().filter(|job| job.verb.can_be_cancelled());
    let cancels: Vec<_> = can_be.filter_map(|job| Some(format!("`bcached cancel {}`", job.id?))).collect();
    let next = match cancels.as_slice() {
        [] => "repeat the command to wait for it".to_owned(),
        cancels => format!("repeat the command to wait for it, or cancel it: {}", cancels.join(", ")),
    };
    Failure::new(Kind::TimeLimit, "the work is not done yet, and continues").why(lines.join("; ")).next(next)
}

/// The progress lines printed so far, on standard error: at intervals, and on a terminal on one
/// line.
#[derive(Default)]
struct ProgressLines {
    last: Option<Instant>,
    has_line: bool,
    has_hint: bool,
}

impl ProgressLines {
    fn tell(&mut self, job: &JobReport) {
        let id = job.id.unwrap_or_default();
        let cancel = match job.verb.can_be_cancelled() {
            true => format!(", `bcached cancel {id}` cancels it"),
            false => String::new(),
        };
        self.say(&job.progress_text(), &format!("job {id}; Ctrl-C leaves it running{cancel}"));
    }

    /// Prints progress of a volume that was added and is not served yet.
    fn tell_wait(&mut self, line: &str) {
        self.say(line, "Ctrl-C ends only this command: the daemon serves it as soon as possible");
    }

    fn say(&mut self, line: &str, hint: &str) {
        let is_terminal = io::stderr().is_terminal();
        let pause = if is_terminal { TOLD_TERMINAL } else { TOLD };
        let last = *self.last.get_or_insert_with(Instant::now);
        if last.elapsed() < pause {
            return;
        }
        self.last = Some(Instant::now());
        let mut out = io::stderr().lock();
        // Standard error may be closed, which is no reason to stop.
        let _unread = if is_terminal {
            if !std::mem::replace(&mut self.has_hint, true) {
                let _unread = writeln!(out, "{hint}");
            }
            self.has_line = true;
            write!(out, "\r\x1b[K{line}").and_then(|()| out.flush())
        } else {
            writeln!(out, "{line}")
        };
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.has_line) {
            let _unread = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Printable for JobReport {
    const SCHEMA: &'static str = "bcached.job";

    fn text(&self) -> String {
        Self::text(self)
    }
}

impl Printable for JobList {
    const SCHEMA: &'static str = "bcached.jobs";

    fn text(&self) -> String {
        if self.jobs.is_empty() {
            return "no volume has a cache\n".to_owned();
        }
        self.jobs.iter().map(JobReport::text).collect()
    }
}
