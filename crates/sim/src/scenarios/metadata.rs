//! Damaged priorities, torn superblocks, and a damaged table of volumes.

use super::bench::{eager, quiet};
use super::image::records;
use super::stage::{
    AROUND, ATTACH, BACK, DETACH, FLUSH, assert_refused, bench, keep, pause, read, small, stage_of,
    unstarted, write, write_to,
};
use crate::disk::{OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::failure::FailureKind;
use crate::scenario::ScenarioRig;
use crate::system::engine::DeviceImage;
use crate::system::{Geometry, Mode};
use crate::workload::Step;
use bcached_check::{DamageKind, ReadAt, Record};
use bcached_engine::{Phase, Settings};
use bcached_env::DiskId;
use bcached_format::{ReplacementPolicy, SUPERBLOCK_SECTOR};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

super::scenarios! {
    include_str!("metadata.rs"),
    a_set_that_lost_its_priorities_is_refused,
    no_power_cut_tears_a_superblock,
    checker_and_engine_judge_a_damaged_table_of_volumes_alike,
}

/// The buckets with the generations have become unreadable. Without them it is unknown which
/// pointers are stale; a guess would show one file's blocks in another. (A kernel went on with
/// zeroes and logged it.)
fn a_set_that_lost_its_priorities_is_refused() {
    let (mut stage, _) = bench(small(vec![4096], BACK), quiet());
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    let chain = records(&mut stage).into_iter().find_map(|record| match record {
        Record::PriorityChain { buckets } => Some(buckets),
        _ => None,
    });
    let bucket = *chain.expect("there is a chain").last().expect("the chain has a bucket");
    let whole = stage.device(0).clone();
    stage.device(0).rot(bucket * 16 + 3, 77);
    assert_refused(&mut stage, "priorities");
    stage.device(0).return_as(&whole);
    stage.device(0).make_unreadable(bucket * 16..bucket * 16 + 1);
    assert_refused(&mut stage, "priorities");
    *stage.device(0) = whole;
    stage.start().unwrap();
    stage.verify().unwrap();
}

/// The reason for which a superblock is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SuperblockWrite {
    CacheFirstStart,
    CacheStart,
    CacheRecord,
    Attached,
    Dirty,
    Clean,
    Mode,
    Stale,
    Detached,
    AttachedAgain,
}

impl SuperblockWrite {
    const ALL: [Self; 10] = [
        Self::CacheFirstStart,
        Self::CacheStart,
        Self::CacheRecord,
        Self::Attached,
        Self::Dirty,
        Self::Clean,
        Self::Mode,
        Self::Stale,
        Self::Detached,
        Self::AttachedAgain,
    ];

    /// Returns the device whose superblock is written.
    const fn device(self) -> DiskId {
        match self {
            Self::CacheFirstStart | Self::CacheStart | Self::CacheRecord => DiskId(0),
            _ => DiskId(1),
        }
    }

    /// Returns whether a start makes the change, without a request.
    const fn is_of_a_start(self) -> bool {
        matches!(self, Self::CacheFirstStart | Self::CacheStart | Self::CacheRecord | Self::Attached)
    }

    /// Returns the phase in which the set makes the change.
    const fn phase(self) -> Phase {
        match self {
            Self::CacheFirstStart => Phase::CacheFirstStart,
            Self::CacheStart => Phase::CacheStart,
            Self::CacheRecord => Phase::CacheRecord,
            Self::Attached | Self::AttachedAgain => Phase::BackingAttached,
            Self::Dirty => Phase::BackingDirty,
            Self::Clean => Phase::BackingClean,
            Self::Mode => Phase::BackingRecord,
            Self::Stale => Phase::BackingStale,
            Self::Detached => Phase::BackingDetached,
        }
    }
}

impl fmt::Display for SuperblockWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CacheFirstStart => "first start of the cache",
            Self::CacheStart => "later start of the cache",
            Self::CacheRecord => "other settings of the cache",
            Self::Attached => "attach",
            Self::Dirty => "first dirty data",
            Self::Clean => "no dirty data any more",
            Self::Mode => "another mode",
            Self::Stale => "the cache has died",
            Self::Detached => "detach",
            Self::AttachedAgain => "attach after a detach",
        })
    }
}

/// There is one copy of each superblock, and the power fails while it is written: that of a cache
/// at its first start and at later ones, that of a disk at each change of its state. A torn
/// superblock would make the device unrecognisable.
fn no_power_cut_tears_a_superblock() {
    let subsets =
        [Survivors::Nothing, Survivors::Everything].into_iter().chain((0..40).map(Survivors::Seeded));
    let cuts: Vec<(bool, Survivors)> = subsets.flat_map(|subset| [(false, subset), (true, subset)]).collect();
    for change in SuperblockWrite::ALL {
        for (completed, survivors) in cuts.iter().copied() {
            let met = format!("{change}, {} {survivors}", if completed { "completed" } else { "submitted" });
            let cut = cut_in_a_superblock(change, completed, survivors);
            let mut stage = cut.unwrap_or_else(|fault| panic!("{met}: {fault}"));
            stage.device(0).gone = false;
            stage.start().unwrap_or_else(|fault| panic!("{met}: {fault}"));
            stage.verify().unwrap_or_else(|fault| panic!("{met}: {fault}"));
            stage.stop().unwrap_or_else(|fault| panic!("{met}: {fault}"));
        }
    }
}

/// Plays up to the change, and cuts the power when the superblock is written.
fn cut_in_a_superblock(
    change: SuperblockWrite,
    completed: bool,
    survivors: Survivors,
) -> Result<ScenarioRig, FailureKind> {
    let options = if change == SuperblockWrite::Clean { eager(Duration::from_millis(1)) } else { quiet() };
    let mode = if change == SuperblockWrite::Stale { AROUND } else { BACK };
    // A new cache has so many journal buckets that their list does not end in the sector that it
    // begins in.
    let buckets = if change == SuperblockWrite::CacheFirstStart { 5200 } else { 600 };
    let geometry = Geometry { block_sectors: 1, torn_sectors: 1, buckets, ..small(vec![4096], mode) };
    let (mut stage, bench) = unstarted(geometry, options, 1);
    let phases = Arc::clone(&stage.rig().phases);
    let written = move |op: &OpView| {
        let here = op.disk == change.device() && op.kind == OpKind::Write && op.completed == completed;
        // The write of the new cache's list of journal buckets comes earlier, and starts at a later
        // sector.
        here && op.sectors.start == SUPERBLOCK_SECTOR && phases.is_inside(change.phase())
    };
    if matches!(change, SuperblockWrite::CacheStart | SuperblockWrite::CacheRecord) {
        stage.start()?;
        stage.stop()?;
    }
    if change == SuperblockWrite::CacheRecord {
        bench.change(Settings { discard: Some(true), replacement: Some(ReplacementPolicy::Random) });
    }
    if change.is_of_a_start() {
        stage.crash_in_start(written, Crash::PowerCut, survivors)?;
        return Ok(stage);
    }
    stage.start()?;
    let steps = steps_to(&mut stage, change)?;
    stage.crash_at(steps, written, Crash::PowerCut, survivors)?;
    Ok(stage)
}

/// Does what must precede the change, and returns the steps that make a running set write the
/// superblock of the disk.
fn steps_to(stage: &mut ScenarioRig, change: SuperblockWrite) -> Result<Vec<Step>, FailureKind> {
    Ok(match change {
        SuperblockWrite::CacheFirstStart
        | SuperblockWrite::CacheStart
        | SuperblockWrite::CacheRecord
        | SuperblockWrite::Attached => {
            unreachable!("a start does")
        }
        SuperblockWrite::Dirty => vec![write(0..64)],
        SuperblockWrite::Clean => {
            keep(stage, 0..64);
            vec![Step::Pause(3_000)]
        }
        SuperblockWrite::Mode => vec![Step::Mode { volume: 0, mode: Mode::Writethrough }],
        SuperblockWrite::Stale => {
            keep(stage, 0..64);
            stage.ask(read(0..64))?;
            stage.ask(FLUSH)?;
            pause(stage, 20)?;
            stage.device(0).gone = true;
            vec![write(0..64), FLUSH]
        }
        SuperblockWrite::Detached => {
            keep(stage, 0..64);
            vec![DETACH]
        }
        SuperblockWrite::AttachedAgain => {
            keep(stage, 0..64);
            stage.ask(DETACH)?;
            keep(stage, 0..32);
            vec![ATTACH]
        }
    })
}

/// A write of the table of volumes was lost, or went to another place. The engine serves each
/// volume under the number that its device records. The checker, given the devices, finds the
/// damage and sees the same volumes.
fn checker_and_engine_judge_a_damaged_table_of_volumes_alike() {
    for seed in 0..28 {
        let mut stage = stage_of(vec![2048, 2048], BACK);
        for volume in [0, 1] {
            stage.ask(write_to(volume, 0..64)).unwrap();
            stage.ask(Step::Flush { volume }).unwrap();
        }
        stage.stop().unwrap();
        stage.rig().damage_table(seed).unwrap();
        let devices = &stage.rig().world.borrow().devices.clone();
        let images: Vec<_> = devices.iter().map(DeviceImage).collect();
        let disks: Vec<_> = images[1..].iter().map(|image| image as &dyn ReadAt).collect();
        let options = bcached_check::Options { compare_clean: true, ..Default::default() };
        let report = bcached_check::check(&images[0], &disks, options).report;
        let is_of_table = |kind: &DamageKind| {
            use DamageKind::{DoubtedSlot, DuplicateUuid, UuidTableSum};
            matches!(kind, UuidTableSum { .. } | DoubtedSlot { .. } | DuplicateUuid { .. })
        };
        let others: Vec<_> = report.findings.iter().filter(|found| !is_of_table(&found.kind)).collect();
        assert!(others.is_empty() && !report.findings.is_empty(), "seed {seed}: {others:?}");
        let served = report.volumes.iter().filter(|volume| volume.state.is_some());
        assert_eq!(served.map(|volume| volume.inode).collect::<Vec<_>>(), [0, 1], "seed {seed}");
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}
