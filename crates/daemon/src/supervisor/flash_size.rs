//! Other sizes of volumes that live in a cache alone.
//!
//! The cache keeps the size, so nothing is kept here. What lies behind a new end is nowhere else: it is given up only if that was asked
//! for in so many bytes.

use super::Supervisor;
use super::cycle::{Planned, Work};
use crate::control::jobs::{Begin, Verb};
use crate::engine_failure;
use crate::engine_thread::{Engine, Long};
use crate::failure::{Failure, Kind};
use crate::sizes::{human, typed};
use bcached_engine::VolumeInfo;

impl Supervisor {
    /// So many bytes, if the cache can promise them; of an open volume that is `now`.
    pub(super) fn plan_flash_growth(
        &self,
        name: &str,
        now: &VolumeInfo,
        size: Option<u64>,
        planned: &mut Planned,
    ) -> Result<(), Failure> {
        let refused =
            |kind, why: String| Failure::new(kind, format!("cannot grow {name}")).why(why).option("--size");
        let status = planned.engine.as_ref().and_then(Engine::status);
        let status = status.ok_or_else(|| engine_failure::silent(name))?;
        let has = now.sectors * 512;
        // What it holds of a former, longer life is its own already.
        let most = now.sectors.max(now.dirty_sectors).saturating_add(status.flash_room_sectors) * 512;
        let largest = format!("the largest that fits is `--size {}`", typed(most));
        let size = size.ok_or_else(|| {
            refused(Kind::Usage, "it lives on its cache alone, and its new size is not said".to_owned())
                .next(largest.clone())
        })?;
        if size < has {
            return Err(refused(Kind::Usage, format!("it is {} large", human(has)))
                .next(format!("`bcached shrink {name} --size {}` makes it smaller", typed(size))));
        }
        check_blocks(size, now).map_err(|why| refused(Kind::Geometry, why))?;
        if size > most {
            let why = format!(
                "its cache can promise {} beside what is dirty and what others in it were promised",
                human(most)
            );
            return Err(refused(Kind::NoRoom, why).next(format!("{largest}; nothing overrides this")));
        }
        planned.size = Some(size);
        (planned.dirty_beside, planned.dirty) = (planned.dirty, 0);
        planned.work = (size > has).then_some(Work::Here(Long::Grow(size / 512)));
        if planned.work.is_some() && !self.users_of(name).is_empty() {
            planned.note("who is connected sees the new size when connecting again");
        }
        Ok(())
    }

    /// So many bytes, if no more is lost behind them than was agreed to; of an open volume that is `now`.
    pub(super) fn plan_flash_shrinking(
        &self,
        name: &str,
        now: &VolumeInfo,
        begin: &Begin,
        planned: &mut Planned,
    ) -> Result<(), Failure> {
        let refused = |kind, why: String| Failure::new(kind, format!("cannot shrink {name}")).why(why);
        let size = begin
            .size_bytes
            .ok_or_else(|| refused(Kind::Usage, "its new size is not said".to_owned()).option("--size"))?;
        if size > now.sectors * 512 {
            return Err(refused(Kind::Usage, format!("it is {} large", human(now.sectors * 512)))
                .next(format!("`bcached grow {name} --size {}` makes it larger", typed(size)))
                .option("--size"));
        }
        check_blocks(size, now).map_err(|why| refused(Kind::Geometry, why).option("--size"))?;
        self.check_unused(name, Verb::Shrink)?;
        let behind = planned.engine.as_ref().and_then(|engine| engine.dirty_from(now.id, size / 512));
        let lost = behind.ok_or_else(|| engine_failure::silent(name))? * 512;
        if lost > begin.accept_loss_bytes.unwrap_or(0) {
            return Err(refused(
                Kind::DataLoss,
                format!("{} of it behind {} would be lost, which are nowhere else", human(lost), human(size)),
            )
            .next(format!(
                "discard what is not needed there, or give it up with `--accept-loss {}`",
                typed(lost)
            ))
            .option("--accept-loss"));
        }
        planned.size = Some(size);
        (planned.dirty_beside, planned.dirty) = (planned.dirty, 0);
        // Behind the end of one that has that size already there may be what an earlier attempt, or a kernel, has left.
        planned.work = Some(Work::Here(Long::Shrink(size / 512)));
        Ok(())
    }
}

fn check_blocks(size: u64, now: &VolumeInfo) -> Result<(), String> {
    let block = now.block_sectors * 512;
    if size == 0 || !size.is_multiple_of(block) {
        return Err(format!("its size must be one block of {} or several", human(block)));
    }
    Ok(())
}
