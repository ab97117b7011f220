//! Volumes that are attached to a cache, detached from it, or flushed. A request is judged as a
//! whole before anything is kept or done.

use crate::engine_error;
use crate::engine_thread::{AddRequest, AddedVolume, Engine, ReleasedVolume, ServeMode, VolumeJob};
use crate::supervisor::jobs::record_losses::AcceptedLoss;
use crate::supervisor::jobs::{Job, JobEvent, RollbackState};
use crate::supervisor::options::Completion;
use crate::supervisor::report::reasons::not_served;
use crate::supervisor::table::{VolumeEntry, VolumeState};
use crate::supervisor::{Event, Supervisor};
use bcached_config::options::quiet_hours;
use bcached_config::{Config, NO_CACHE, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_control::sizes::exact;
use bcached_engine::{Error, VolumeId, VolumeInfo};
use std::time::{Duration, Instant};

/// Longest time that the clients of a volume may wait for its move.
pub const MOVE_LIMIT: Duration = Duration::from_secs(10);

/// A volume, and the cache that it moves to.
pub struct VolumeMove {
    pub volume: usize,
    pub cache: usize,
}

/// A volume on its way from one engine to another.
pub struct MoveInFlight {
    number: u64,
    since: Instant,
}

/// A request that was judged.
pub struct JobPlan {
    verb: JobKind,
    name: String,
    /// The engine that has the volume. `None`: nothing is begun.
    pub engine: Option<Engine>,
    /// Dirty data now, in bytes.
    pub dirty: u64,
    /// It may be more: not all of it is counted, or the amount is unknown.
    pub dirty_unknown: bool,
    /// Dirty data that the job does not concern, in bytes.
    pub dirty_beside: u64,
    /// The number of a running job that does the same.
    pub joins: Option<u64>,
    /// `None`: there is nothing to do.
    pub work: Option<JobWork>,
    /// The cache that the volume is to have from now on.
    pub wanted: Option<String>,
    /// The file that keeps that, if it has to change.
    pub file: Option<SetFile>,
    pub before: RollbackState,
    /// The intended size of the volume, in bytes.
    pub size: Option<u64>,
    /// The new limit of the served size, in bytes.
    pub limit: Option<Option<u64>>,
    /// The loss that was accepted.
    pub loss: Option<AcceptedLoss>,
    /// The data that is lost, as far as is known, in bytes.
    pub lost: u64,
    notes: Vec<String>,
}

/// The work of a job.
#[derive(Clone, Copy)]
pub enum JobWork {
    /// The engine that has the volume does it.
    InEngine(VolumeJob),
    /// The volume moves to the engine of this cache.
    MoveTo(usize),
    /// The volume shrinks to so many sectors, and its data behind that is lost: [`JobPlan::loss`].
    LossyShrink(u64),
    /// Its engine gives the volume up.
    Release,
}

impl JobPlan {
    /// Returns a plan with nothing to do.
    pub fn nothing(verb: JobKind, name: &str, engine: Option<Engine>) -> Self {
        Self {
            verb,
            name: name.to_owned(),
            engine,
            dirty: 0,
            dirty_unknown: false,
            dirty_beside: 0,
            joins: None,
            work: None,
            wanted: None,
            file: None,
            before: RollbackState::default(),
            size: None,
            limit: None,
            loss: None,
            lost: 0,
            notes: Vec::new(),
        }
    }

    /// Adds a note for the caller.
    pub fn note(&mut self, note: &str) {
        self.notes.push(note.to_owned());
    }

    /// Returns the job as it is shown before it begins.
    pub fn shown(&self) -> JobReport {
        let is_nothing = self.work.is_none() && self.joins.is_none();
        let state = match self.joins {
            Some(_) => JobState::Running,
            None if is_nothing => JobState::Done,
            None => JobState::Planned,
        };
        let mut shown = JobReport::new(self.verb, self.name.clone(), state);
        shown.id = self.joins;
        shown.already = is_nothing;
        shown.dirty_bytes_at_start = self.dirty;
        shown.dirty_unknown = self.dirty_unknown;
        shown.size_bytes = self.size;
        shown.notes.clone_from(&self.notes);
        if let Some(loss) = self.loss.as_ref().filter(|_| self.lost > 0) {
            shown.lost_bytes = Some(self.lost);
            shown.lost_ranges = Some(loss.list.display().to_string());
        }
        shown
    }
}

impl Supervisor {
    /// Judges a request for a volume. Changes nothing.
    pub fn plan_job(&self, volume: usize, begin: &JobSpec) -> Result<JobPlan, Failure> {
        let (entry, running) = {
            let shared = self.shared();
            let running = shared.jobs.running(volume);
            let running = running.map(|(number, job)| (number, (job.verb, job.size), job.dirty_at_start));
            (shared.table.volumes.get(volume).cloned(), running)
        };
        let entry = entry.ok_or_else(|| {
            Failure::new(Kind::UnknownName, format!("there is no volume `{}` any more", begin.volume))
                .next("`bcached list` shows all volumes")
        })?;
        let name = entry.display_name();
        if matches!(entry.state, VolumeState::Releasing) {
            return Err(self.release_goes_on(&format!("cannot {} {name} now", begin.verb)));
        }
        if let Some((number, (verb, size), dirty)) = running {
            check_joins(name, begin, (number, verb, size))?;
            return Ok(JobPlan { joins: Some(number), dirty, ..JobPlan::nothing(verb, name, None) });
        }
        if let Some(planned) = self.plan_unserved(&entry, begin.verb)? {
            return Ok(planned);
        }
        let (engine, now) = self.engine_and_info(&entry, begin.verb)?;
        let dirty = now.dirty_sectors * 512;
        let dirty_unknown = !now.is_dirty_known();
        let mut planned =
            JobPlan { dirty, dirty_unknown, ..JobPlan::nothing(begin.verb, name, Some(engine)) };
        let here = Some(JobWork::InEngine(Self::job_of(begin.verb)));
        match begin.verb {
            JobKind::Flush => planned.work = here.filter(|_| now.attached && now.may_be_dirty()),
            JobKind::Detach => {
                planned.work = here.filter(|_| now.attached);
                self.plan_cache(&entry, NO_CACHE, &mut planned)?;
            }
            JobKind::Remove => self.plan_removal(&entry, &mut planned)?,
            JobKind::Stop => {
                self.check_unused(name, JobKind::Stop)?;
                planned.work = Some(JobWork::Release);
            }
            JobKind::Grow if now.flash_only => {
                self.plan_flash_growth(name, &now, begin.size_bytes, &mut planned)?;
            }
            JobKind::Shrink if now.flash_only => {
                self.plan_flash_shrinking(name, &now, begin, &mut planned)?;
            }
            JobKind::Grow => self.plan_growth(&entry, &now, begin.size_bytes, &mut planned)?,
            JobKind::Shrink => self.plan_shrinking(&entry, &now, begin, &mut planned)?,
            JobKind::Add | JobKind::Forget | JobKind::Replace | JobKind::Release | JobKind::Import => {
                unreachable!("{} is planned elsewhere", begin.verb)
            }
            JobKind::Attach => {
                let target = self.cache_called(begin.cache.as_deref())?;
                planned.work = self.plan_attach(&entry, &now, target)?;
                let name = self.cache_name(target);
                self.plan_cache(&entry, &name, &mut planned)?;
            }
        }
        Ok(planned)
    }

    /// Plans what can be done to a volume that no engine has.
    fn plan_unserved(&self, entry: &VolumeEntry, verb: JobKind) -> Result<Option<JobPlan>, Failure> {
        let is_stopped = match entry.state {
            VolumeState::Waiting(_) | VolumeState::Failed(_) => false,
            VolumeState::Stopped => true,
            // Another request was faster.
            VolumeState::Removed if verb == JobKind::Remove => {
                return Ok(Some(JobPlan::nothing(verb, entry.display_name(), None)));
            }
            _ => return Ok(None),
        };
        let mut planned = JobPlan::nothing(verb, entry.display_name(), None);
        self.note_stranded(entry, &mut planned);
        match verb {
            JobKind::Remove => self.plan_removal(entry, &mut planned)?,
            JobKind::Stop => planned.work = (!is_stopped).then_some(JobWork::Release),
            _ => return Ok(None),
        }
        Ok(Some(planned))
    }

    /// Marks the dirty data of a volume that no engine has as unknown, unless its device says that
    /// there is none.
    fn note_stranded(&self, entry: &VolumeEntry, planned: &mut JobPlan) {
        planned.dirty_unknown = entry.backing.is_some() && entry.stranded != Some(None);
        let Some(Some(stranded)) = &entry.stranded else { return };
        let is_open = |set| self.shared().table.caches.iter().any(|cache| cache.set() == Some(set));
        if !is_open(stranded.set()) {
            planned.note(&stranded.loss());
        }
    }

    /// Returns the engine that serves the volume, and the volume's present state there.
    pub fn engine_and_info(
        &self,
        entry: &VolumeEntry,
        verb: JobKind,
    ) -> Result<(Engine, VolumeInfo), Failure> {
        let name = entry.display_name();
        let VolumeState::Served(served) = &entry.state else {
            return Err(not_served(entry));
        };
        if served.flash_only
            && !matches!(verb, JobKind::Remove | JobKind::Stop | JobKind::Grow | JobKind::Shrink)
        {
            return Err(Failure::new(Kind::Usage, format!("{name} is a flash-only volume"))
                .why("it has no backing device that its data could go to")
                .next(format!(
                    "copy its data elsewhere; `bcached remove {name}` and `bcached forget {name}` delete it"
                )));
        }
        let engine = entry.cache.and_then(|index| self.shared().table.caches.get(index)?.engine());
        let silent = || engine_error::silent(name);
        let engine = engine.ok_or_else(silent)?;
        let status = engine.status().ok_or_else(silent)?;
        let now = status.volumes.into_iter().find(|now| now.id == served.id).ok_or_else(silent)?;
        Ok((engine, now))
    }

    /// Plans how a volume joins the cache `target`. `None`: it has that cache already.
    fn plan_attach(
        &self,
        entry: &VolumeEntry,
        now: &VolumeInfo,
        target: usize,
    ) -> Result<Option<JobWork>, Failure> {
        let name = entry.display_name();
        let is_here = entry.cache == Some(target);
        match (now.attached, is_here) {
            (true, true) => Ok(None),
            (true, false) => {
                let has = entry.cache.map(|index| self.cache_name(index)).unwrap_or_default();
                Err(Failure::new(
                    Kind::WrongSet,
                    format!("cannot attach {name} to {}", self.cache_name(target)),
                )
                .why(format!("it is attached to {has}"))
                .next(format!("`bcached detach {name}` first")))
            }
            (false, true) => Ok(Some(JobWork::InEngine(VolumeJob::Attach))),
            (false, false) => {
                self.check_blocks(name, now, target)?;
                Ok(Some(JobWork::MoveTo(target)))
            }
        }
    }

    /// Checks that a volume has no clients, because they lose it when its engine gives it up.
    pub fn check_unused(&self, name: &str, verb: JobKind) -> Result<(), Failure> {
        let cannot = || Failure::new(Kind::InUse, format!("cannot {verb} {name} now"));
        let users = self.fronts.users_of(name);
        if users.is_empty() {
            return self.fronts.write_out(name).map_err(|why| cannot().why(why).next("try again"));
        }
        let mut failure =
            cannot().why(format!("it is in use by {}", users.join(", "))).next("disconnect them first");
        failure.holders = users;
        Err(failure)
    }

    /// Checks that the blocks of the cache are no larger than those of the volume's device.
    pub fn check_blocks(&self, name: &str, now: &VolumeInfo, target: usize) -> Result<(), Failure> {
        let engine = self.shared().table.caches[target].engine();
        let cache = engine.and_then(|engine| engine.status()).map(|status| status.block_sectors);
        match now.backing_block_sectors.zip(cache) {
            Some((backing, set)) if backing < set => {
                Err(engine_error::of_attach(name, &Error::BlockSize { backing, set }))
            }
            _ => Ok(()),
        }
    }

    fn cache_name(&self, index: usize) -> String {
        let shared = self.shared();
        shared.table.caches.get(index).map_or_else(String::new, |cache| cache.display_name().to_owned())
    }

    /// Plans how it is kept that the volume has the cache called `wanted`, or none.
    fn plan_cache(&self, entry: &VolumeEntry, wanted: &str, planned: &mut JobPlan) -> Result<(), Failure> {
        planned.before.wanted.clone_from(&entry.wanted_cache);
        planned.wanted = Some(wanted.to_owned());
        let Ok((path, name)) = self.keeps(entry) else {
            planned.note(if wanted == NO_CACHE {
                "this is not kept: the next `bcached serve` with the same devices attaches it again"
            } else {
                "this is not kept over a restart"
            });
            return Ok(());
        };
        let mut file = SetFile::read(path)?;
        planned.before.kept = file.cache_of(name).take();
        let said = |file: &SetFile| -> Result<Option<String>, Failure> {
            let config = Config::load_with(&self.line, Some(&file.text()))?;
            let volume = config.volumes.into_iter().find(|volume| volume.name.as_deref() == Some(name));
            let only = || match config.caches.as_slice() {
                [only] => only.name.clone(),
                _ => None,
            };
            Ok(volume.and_then(|volume| volume.cache).or_else(only))
        };
        let without = said(&file)?;
        if without.as_deref() != Some(wanted) {
            *file.cache_of(name) = Some(wanted.to_owned());
            said(&file)?;
        }
        if planned.before.kept.as_deref() == Some(wanted) {
            // This completes an earlier request. If it is taken back, the other files decide.
            planned.before =
                RollbackState { wanted: without, is_kept_anew: true, ..RollbackState::default() };
        }
        if file.is_changed() {
            file.check_writable()?;
            planned.before.is_kept_anew = true;
            planned.file = Some(file);
        }
        Ok(())
    }

    /// Restores the cache that the volume was to have, because the job has failed.
    pub fn take_back(&self, job: &Job) {
        let wanted = match job.verb {
            JobKind::Flush
            | JobKind::Add
            | JobKind::Forget
            | JobKind::Replace
            | JobKind::Release
            | JobKind::Import => return,
            JobKind::Grow | JobKind::Shrink => return self.take_size_back(job),
            JobKind::Remove | JobKind::Stop => None,
            // The volume is served without its cache, and is still to have it.
            JobKind::Attach if job.volume().is_some_and(|volume| self.stays_without(volume)) => None,
            // A volume that could not be attached goes on as it is, whatever its section says.
            JobKind::Attach => Some(Some(NO_CACHE.to_owned())),
            JobKind::Detach => Some(job.before.wanted.clone()),
        };
        let entry = {
            let mut shared = self.shared();
            let entry = job.volume().and_then(|volume| shared.table.volumes.get_mut(volume));
            let Some(entry) = entry else { return };
            if let Some(wanted) = wanted {
                entry.wanted_cache = wanted;
            }
            entry.clone()
        };
        let RollbackState { kept, is_kept_anew, section, .. } = &job.before;
        let kept_in = match (&entry.backing, &self.config.set_file, &entry.name) {
            (None, Some(path), Some(name)) => Some((path.as_path(), name.as_str())),
            _ => self.keeps(&entry).ok(),
        };
        let (true, Some((path, name))) = (*is_kept_anew || section.is_some(), kept_in) else { return };
        let taken_back = SetFile::read(path).and_then(|mut file| {
            match section {
                Some(section) => file.kept_of(name).clone_from(section),
                None => file.cache_of(name).clone_from(kept),
            }
            file.write()
        });
        if let Err(failure) = taken_back {
            tracing::error!(event = "set-not-taken-back", "{failure}");
        }
    }

    /// Has the volume's engine hand it over when all requests in flight are answered. Requests that
    /// arrive from now on wait for the other engine.
    pub fn begin_move(&self, number: u64, to: VolumeMove, engine: &Engine, id: VolumeId) {
        let VolumeMove { volume, cache: to } = to;
        let name = {
            let mut shared = self.shared();
            let Some(entry) = shared.table.volumes.get_mut(volume) else { return };
            entry.state = VolumeState::Attaching;
            let name = entry.display_name().to_owned();
            shared.moves.insert(volume, MoveInFlight { number, since: Instant::now() });
            name
        };
        let (sender, engine) = (self.sender.clone(), engine.clone());
        let given = move |given| {
            drop(sender.send(Event::Job(number, JobEvent::Released(volume, Some(to), Box::new(given)))));
        };
        let give_up = move || engine.hand_over(id, Box::new(given));
        match self.exports.route(&name) {
            Some(route) => route.hold(give_up),
            None => give_up(),
        }
    }

    /// Ends moves that take longer than [`MOVE_LIMIT`], so that clients do not wait longer: if
    /// requests in flight do not complete, the volume stays where it is.
    pub fn look_after_moves(&self) {
        let late: Vec<_> = {
            let shared = self.shared();
            let late = shared.moves.iter().filter(|(_, moving)| moving.since.elapsed() >= MOVE_LIMIT);
            late.map(|(volume, moving)| (*volume, moving.number)).collect()
        };
        for (volume, number) in late {
            let entry = self.shared().table.volumes[volume].clone();
            let Some(route) = self.exports.route(entry.display_name()) else { continue };
            if route.release_unless_idle() {
                let limit = MOVE_LIMIT.as_secs();
                let failure = Failure::new(
                    Kind::Io,
                    format!("cannot move {} to another cache now", entry.display_name()),
                )
                .why(format!("its requests in flight have not completed for {limit} s"))
                .next("`bcached status` shows which device does not answer; then try again");
                self.stays(number, volume, failure);
            } else if !matches!(entry.state, VolumeState::Attaching) {
                self.shared().moves.remove(&volume);
                self.let_clients_go(&entry);
                self.name_export(&entry);
            }
        }
    }

    /// Tells new clients that the volume is not served. Returns false if a client has it open: the
    /// job has then failed.
    pub fn unpublish(&self, number: u64, volume: usize, verb: JobKind) -> bool {
        let entry = {
            let mut shared = self.shared();
            let Some(entry) = shared.table.volumes.get_mut(volume) else { return false };
            entry.state = VolumeState::Attaching;
            entry.clone()
        };
        self.name_export(&entry);
        match self.check_unused(entry.display_name(), verb) {
            Ok(()) => true,
            Err(failure) => {
                self.stays(number, volume, failure);
                false
            }
        }
    }

    /// Handles a volume that an engine has given up for the job `number`. The engine of cache `to`
    /// takes it over; with `None`, no engine does.
    pub fn given(&self, number: u64, volume: usize, to: Option<usize>, given: Result<ReleasedVolume, Error>) {
        self.shared().moves.entry(volume).and_modify(|moving| moving.since = Instant::now());
        let name = self.shared().table.volumes[volume].display_name().to_owned();
        let ReleasedVolume { device, lost } = match given {
            Ok(given) => given,
            Err(error) => return self.stays(number, volume, engine_error::of_attach(&name, &error)),
        };
        let owes = {
            let entry = &mut self.shared().table.volumes[volume];
            entry.owes |= lost.is_some();
            entry.owes
        };
        if let Some(error) = lost {
            tracing::error!(
                event = "flush-failed",
                "{name}: writes that its clients have not flushed may be lost: {error}"
            );
        }
        let Some(to) = to else {
            drop(device);
            let verb = self.shared().jobs.verb(number);
            self.gone(volume, verb);
            return self.end_job(number, Ok(()));
        };
        let engine = self.shared().table.caches[to].engine();
        let (Some(device), Some(engine)) = (device, engine) else {
            return self.not_moved(number, volume, &Error::NoVolume);
        };
        let mut shared = self.shared();
        let is_none = shared.table.caches[to].is_none_of.is_some();
        let entry = &mut shared.table.volumes[volume];
        entry.cache = Some(to);
        entry.told = entry.options.volume_options(quiet_hours::local_minute);
        let mode = entry.options.configured_mode();
        let serve_mode = if is_none { ServeMode::Uncached } else { ServeMode::Adopted };
        let adding = AddRequest { device, mode, options: entry.told, serve_mode, owes };
        drop(shared);
        let sender = self.sender.clone();
        let added =
            move |added| drop(sender.send(Event::Job(number, JobEvent::Moved(volume, Box::new(added)))));
        engine.add_backing(adding, Box::new(added));
    }

    /// Handles the answer of the engine that takes the volume over.
    pub fn moved(&self, number: u64, volume: usize, added: Result<AddedVolume, Error>) {
        match added {
            Err(error) => self.not_moved(number, volume, &error),
            Ok(added) => {
                self.shared().moves.remove(&volume);
                self.volume_added(volume, Ok(added));
                self.end_job(number, Ok(()));
            }
        }
    }

    /// Leaves the volume with its engine as before, and fails the job.
    fn stays(&self, number: u64, volume: usize, failure: Failure) {
        let entry = {
            let mut shared = self.shared();
            let served = shared.jobs.served(number);
            shared.moves.remove(&volume);
            let entry = &mut shared.table.volumes[volume];
            if let Some(served) = served {
                entry.state = VolumeState::Served(served);
            }
            entry.clone()
        };
        self.export(&entry);
        self.end_job(number, Err(failure));
    }

    /// Fails the job. The volume is looked for again, and served as it was before.
    fn not_moved(&self, number: u64, volume: usize, error: &Error) {
        let name = self.shared().table.volumes[volume].display_name().to_owned();
        let failure = engine_error::of_attach(&name, error);
        self.end_job(number, Err(failure.clone()));
        self.shared().table.set_volume(volume, VolumeState::Waiting(failure));
    }

    /// Detaches a volume that is to have no cache and has one. An earlier daemon may have been
    /// stopped before it did that.
    pub fn leave_unwanted_cache(&self, volume: usize) {
        let (wants_none, name) = {
            let shared = self.shared();
            if shared.jobs.running(volume).is_some() {
                // This check is repeated when that job has ended.
                return;
            }
            let entry = &shared.table.volumes[volume];
            let is_attached = matches!(&entry.state, VolumeState::Served(info) if info.attached);
            (entry.wanted_cache.as_deref() == Some(NO_CACHE) && is_attached, entry.display_name().to_owned())
        };
        if !wants_none {
            return;
        }
        let begin = JobSpec::new(JobKind::Detach, name.clone());
        let begun =
            self.plan_job(volume, &begin).and_then(|plan| self.carry_out(volume, JobKind::Detach, plan));
        match begun {
            Ok(_) => tracing::info!(event = "job-begun", "{name}: detaching it, as it is to have no cache"),
            Err(failure) => tracing::error!(event = "job-failed", "{name}: detach: {failure}"),
        }
    }

    /// Settles a volume that was just added. No caller waits for its cache mode.
    pub fn settle_volume(&self, volume: usize) {
        self.apply_cache_mode(volume, Completion::nobody());
        self.give_up_the_rest(volume);
        self.leave_unwanted_cache(volume);
    }
}

/// Checks that a request can join the running job: it asks for the same work and size. Other work,
/// or another size, is refused.
fn check_joins(
    name: &str,
    begin: &JobSpec,
    (number, verb, size): (u64, JobKind, Option<u64>),
) -> Result<(), Failure> {
    let is_of_another_size = begin.size_bytes.is_some() && begin.size_bytes != size;
    if verb == begin.verb && !is_of_another_size {
        return Ok(());
    }
    let next = match verb.can_be_cancelled() {
        true => format!("wait for it, or `bcached cancel {number}`"),
        false => "wait until it has ended: `bcached status` shows it".to_owned(),
    };
    Err(Failure::new(Kind::InUse, format!("cannot {} {name} now", begin.verb))
        .why(match size.filter(|_| is_of_another_size) {
            Some(size) => format!("its {verb} to {} is still running (job {number})", exact(size)),
            None => format!("its {verb} is still running (job {number})"),
        })
        .next(next))
}
