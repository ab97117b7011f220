//! Growing and shrinking of flash-only volumes.
//!
//! The cache keeps the size, so the configuration keeps nothing. Data behind a new end exists
//! nowhere else. It is given up only if the request accepts so many bytes, and is written down
//! first, on a thread of its own, as [`crate::supervisor::jobs::forget`] does.

use crate::engine_error;
use crate::engine_thread::{Engine, VolumeJob};
use crate::supervisor::jobs::JobEvent;
use crate::supervisor::jobs::attach_detach::{JobPlan, JobWork};
use crate::supervisor::jobs::record_losses::{self, AcceptedLoss, PointOfNoReturn};
use crate::supervisor::{Event, Supervisor};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobSpec};
use bcached_control::sizes::{exact, human, typed};
use bcached_engine::{Error, VolumeId, VolumeInfo};
use bcached_offline::lost_writes::{self, VolumeIdentity};
use std::path::PathBuf;
use std::thread;

impl Supervisor {
    /// Plans to grow a volume to so many bytes, if the cache can promise them. `now` is the open
    /// volume.
    pub fn plan_flash_growth(
        &self,
        name: &str,
        now: &VolumeInfo,
        size: Option<u64>,
        planned: &mut JobPlan,
    ) -> Result<(), Failure> {
        let refused =
            |kind, why: String| Failure::new(kind, format!("cannot grow {name}")).why(why).option("--size");
        let most = planned.engine.as_ref().and_then(|engine| engine.flash_sectors_max(now.id));
        let most = most.ok_or_else(|| engine_error::silent(name))?;
        let most = most.map_err(|error| engine_error::of_job(JobKind::Grow, name, &error))? * 512;
        let has = now.sectors * 512;
        let largest = format!("the largest that fits is `--size {}`", typed(most));
        let size = size.ok_or_else(|| {
            refused(Kind::Usage, "it is a flash-only volume, and its new size is not given".to_owned())
                .next(largest.clone())
        })?;
        check_blocks(size, now).map_err(|why| refused(Kind::Geometry, why))?;
        if size < has {
            return Err(refused(Kind::Usage, format!("its size is already {}", exact(has)))
                .next(format!("`bcached shrink {name} --size {}` makes it smaller", typed(size))));
        }
        if size > most {
            let why = format!(
                "its cache has room for {} beside its dirty data and the space promised to other volumes",
                exact(most)
            );
            return Err(refused(Kind::NoRoom, why).next(format!("{largest}; nothing overrides this")));
        }
        planned.size = Some(size);
        (planned.dirty_beside, planned.dirty) = (planned.dirty, 0);
        planned.work = (size > has).then_some(JobWork::InEngine(VolumeJob::Grow(size / 512)));
        self.note_kept_size(name, planned);
        Ok(())
    }

    /// Plans to shrink a volume to so many bytes, if no more data behind them is lost than was
    /// accepted. `now` is the open volume.
    pub fn plan_flash_shrinking(
        &self,
        name: &str,
        now: &VolumeInfo,
        begin: &JobSpec,
        planned: &mut JobPlan,
    ) -> Result<(), Failure> {
        let refused = |kind, why: String| Failure::new(kind, format!("cannot shrink {name}")).why(why);
        let size = begin
            .size_bytes
            .ok_or_else(|| refused(Kind::Usage, "its new size is not given".to_owned()).option("--size"))?;
        check_blocks(size, now).map_err(|why| refused(Kind::Geometry, why).option("--size"))?;
        if size > now.sectors * 512 {
            return Err(refused(Kind::Usage, format!("its size is only {}", exact(now.sectors * 512)))
                .next(format!("`bcached grow {name} --size {}` makes it larger", typed(size)))
                .option("--size"));
        }
        self.check_unused(name, JobKind::Shrink)?;
        let engine = planned.engine.as_ref().ok_or_else(|| engine_error::silent(name))?;
        let behind = engine.dirty_from(now.id, size / 512).zip(engine.status());
        let (behind, status) = behind.ok_or_else(|| engine_error::silent(name))?;
        let lost = behind * 512;
        let accepted = begin.accept_loss_bytes.unwrap_or(0);
        if lost > accepted {
            return Err(too_much(name, size, lost, begin.accept_loss_bytes));
        }
        let list =
            begin.lost_ranges.as_ref().map_or_else(|| lost_writes::default_path(now.uuid), PathBuf::from);
        if lost > 0 || begin.lost_ranges.is_some() {
            lost_writes::check(&list)?;
        }
        let (label, set_uuid) = (now.label.to_string(), status.set_uuid);
        let owner = VolumeIdentity { uuid: now.uuid, label, set_uuid, flash_only: true };
        planned.loss = Some(AcceptedLoss { accepted, list, owner });
        planned.lost = lost;
        planned.size = Some(size);
        (planned.dirty_beside, planned.dirty) = (planned.dirty, 0);
        // Even if the volume has that size already, an earlier attempt, or a kernel, may have left
        // data behind its end.
        planned.work = Some(JobWork::LossyShrink(size / 512));
        Ok(())
    }

    /// Begins to shrink a volume to so many sectors.
    pub fn begin_losing(
        &self,
        number: u64,
        (sectors, loss): (u64, AcceptedLoss),
        engine: Engine,
        id: VolumeId,
    ) -> Result<(), Failure> {
        let job = self.shared().jobs.name_and_turn(number);
        let Some((name, turn)) = job else { return Ok(()) };
        let sender = self.sender.clone();
        let work = move || {
            let losing = LossyShrink { number, id, name, sectors, loss };
            drop(sender.send(Event::Job(number, JobEvent::Shrunk(losing.carry_out(&engine, &turn)))));
        };
        let begun = thread::Builder::new().name("shrink".to_owned()).spawn(work);
        begun.map(drop).map_err(|error| {
            let failure = Failure::new(Kind::Io, "cannot start a thread for the job").why(error.to_string());
            self.end_job(number, Err(failure.clone()));
            failure
        })
    }

    /// Handles the end of the thread.
    pub fn shrunk(&self, number: u64, outcome: Result<u64, Failure>) {
        if let Ok(lost) = &outcome {
            self.shared().jobs.loses(number, *lost);
        }
        self.end_job(number, outcome.map(drop));
    }
}

/// A volume that the job `number` shrinks to so many sectors.
struct LossyShrink {
    number: u64,
    id: VolumeId,
    name: String,
    sectors: u64,
    loss: AcceptedLoss,
}

impl LossyShrink {
    /// Writes down what is lost, then has it given up. Returns the number of bytes lost.
    fn carry_out(self, engine: &Engine, turn: &PointOfNoReturn) -> Result<u64, Failure> {
        let Self { number, id, name, sectors, loss } = self;
        let failed = |error: Error| engine_error::of_job(JobKind::Shrink, &name, &error);
        let shrinking = engine.begin_shrinking(number, id, sectors).map_err(failed)?;
        let lost = shrinking.dirty_sectors * 512;
        let begun = loss.write_down(
            lost,
            turn,
            || too_much(&name, sectors * 512, lost, Some(loss.accepted)),
            || record_losses::cancelled(format!("{name} keeps its size")),
            |at| engine.lost_behind(&shrinking, at).map_err(failed),
        );
        if let Err(failure) = begun {
            engine.keep_size(shrinking);
            return Err(failure);
        }
        if lost > 0 {
            let (lost, list) = (human(lost), loss.list_in_words(lost));
            tracing::info!(
                event = "volume-shrunk",
                "{name}: {lost} of dirty data beyond its new end is given up ({list})"
            );
        }
        engine.shrink_flash_only(shrinking).map(|()| lost).map_err(failed)
    }
}

fn too_much(name: &str, size: u64, lost: u64, accepted: Option<u64>) -> Failure {
    let accepted = record_losses::more_than(accepted);
    Failure::new(Kind::DataLoss, format!("cannot shrink {name}"))
        .why(format!("{} of data beyond {}, which exists nowhere else, {accepted}", exact(lost), exact(size)))
        .next(format!("discard what is not needed there, or give it up with `--accept-loss {}`", typed(lost)))
        .option("--accept-loss")
}

fn check_blocks(size: u64, now: &VolumeInfo) -> Result<(), String> {
    let block = now.block_sectors * 512;
    if size == 0 || !size.is_multiple_of(block) {
        return Err(format!("its size must be a whole number of blocks of {}, at least one", human(block)));
    }
    Ok(())
}
