//! Short helpers that every scenario uses: a set of a given size, a write to a place, a device that
//! fails now.

use super::bench::ScenarioSystem;
use crate::disk::{DiskFault, FaultRule, OpKind, Survivors, WrittenPart};
use crate::driver::Crash;
use crate::failure::FailureKind;
use crate::scenario::ScenarioRig;
use crate::system::tuning::WITHOUT_STREAMS;
use crate::system::{Geometry, Tuning, engine::Engine};
use crate::workload::Step;
use bcached_engine::{Error, Options};
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;

/// Mode of the first volume, for [`geometry`]: an index into a cycle of write-through, write-around
/// and four times write-back. Each further volume has the next index. This one is write-through; a
/// second volume is write-around.
pub const THROUGH: u64 = 0;
/// Write-around; a second volume is write-back.
pub const AROUND: u64 = 1;
/// Write-back; a second volume too.
pub const BACK: u64 = 2;
/// Write-back at the end of the cycle; a second volume is write-through.
pub const BACK_LAST: u64 = 5;

/// Sector of a backing device at which its volume begins.
pub const DATA_START: u64 = 16;

/// All sectors of a device.
pub const ANYWHERE: Range<u64> = 0..u64::MAX;

/// Nanoseconds in a millisecond, for operations that are late.
pub const MILLISECOND: u64 = 1_000_000;

/// A running set of one volume of 8 MiB in write-back mode.
pub fn stage() -> ScenarioRig {
    stage_of(vec![16384], BACK)
}

/// A running set of volumes of these sizes in sectors.
pub fn stage_of(volumes: Vec<u64>, first_mode: u64) -> ScenarioRig {
    let mut stage = ScenarioRig::new(Rc::new(Engine), geometry(volumes, first_mode), 1);
    stage.start().expect("the system opens");
    stage
}

/// 600 buckets of 64 KiB, blocks of 4 KiB, volumes of these sizes in sectors.
pub fn geometry(volumes: Vec<u64>, first_mode: u64) -> Geometry {
    Geometry {
        block_sectors: 8,
        set_block_sectors: 8,
        bucket_sectors: 128,
        buckets: 600,
        volumes,
        lodgers: Vec::new(),
        torn_sectors: 8,
        backing_volatile: true,
        cache_volatile: true,
        note_records: 100,
        tuning: without_streams(Tuning::draw(first_mode << 40)),
    }
}

/// Disables the detection of streams, so that the scenario alone decides what is cached.
const fn without_streams(mut tuning: Tuning) -> Tuning {
    tuning.set.writeback_batch_sectors = WITHOUT_STREAMS;
    tuning
}

/// Buckets of 8 KiB: two blocks each.
pub fn small(volumes: Vec<u64>, first_mode: u64) -> Geometry {
    Geometry { bucket_sectors: 16, ..geometry(volumes, first_mode) }
}

/// The same with blocks of one sector: a tree soon has many small keys, and several levels.
pub fn packed(volumes: Vec<u64>, first_mode: u64) -> Geometry {
    Geometry { block_sectors: 1, set_block_sectors: 1, torn_sectors: 1, ..small(volumes, first_mode) }
}

/// A running set with this geometry and these options.
pub fn bench(geometry: Geometry, options: Options) -> (ScenarioRig, Rc<ScenarioSystem>) {
    let (mut stage, bench) = unstarted(geometry, options, 1);
    stage.start().expect("the system opens");
    (stage, bench)
}

/// The same, made but not started; `seed` is the seed of its world.
pub fn unstarted(geometry: Geometry, options: Options, seed: u64) -> (ScenarioRig, Rc<ScenarioSystem>) {
    let bench = ScenarioSystem::new(options, geometry.volumes.len());
    (ScenarioRig::new(Rc::<ScenarioSystem>::clone(&bench), geometry, seed), bench)
}

/// A write to the first volume. Sectors have 512 bytes, as everywhere here.
pub const fn write(sectors: Range<u64>) -> Step {
    write_to(0, sectors)
}

/// A write to any volume.
pub const fn write_to(volume: u32, sectors: Range<u64>) -> Step {
    Step::Write { volume, sectors, fua: false }
}

/// A write that is durable when it is answered.
pub const fn write_fua(sectors: Range<u64>) -> Step {
    Step::Write { volume: 0, sectors, fua: true }
}

/// A read of the first volume.
pub const fn read(sectors: Range<u64>) -> Step {
    Step::Read { volume: 0, sectors }
}

/// Makes acknowledged writes to the first volume durable.
pub const FLUSH: Step = Step::Flush { volume: 0 };

/// Detaches the first volume from the cache, and attaches it again.
pub const DETACH: Step = Step::Detach { volume: 0 };
pub const ATTACH: Step = Step::Attach { volume: 0 };

/// Lets this many milliseconds pass without requests.
pub fn pause(stage: &mut ScenarioRig, milliseconds: u64) -> Result<(), FailureKind> {
    stage.play(move |client| async move {
        client.go(Step::Pause(milliseconds)).await;
        Ok(())
    })
}

/// Lets this many minutes pass without requests. A minute is longer than anything in the engine
/// waits for by itself: its longest delay is half a minute.
pub fn minutes(stage: &mut ScenarioRig, count: u32) {
    for _ in 0..6 * count {
        pause(stage, 10_000).unwrap();
    }
}

/// Makes all of these requests, without waiting for the answers.
pub fn begin(stage: &mut ScenarioRig, steps: Vec<Step>) {
    let begun = stage.play(move |client| async move {
        for step in steps {
            client.go(step).await;
        }
        Ok(())
    });
    begun.unwrap();
}

/// Makes the next `count` operations of this kind suffer `fault` on a device, if they touch these
/// sectors (a flush touches all).
pub fn trouble(
    stage: &mut ScenarioRig,
    device: usize,
    on: OpKind,
    sectors: Range<u64>,
    count: u32,
    fault: DiskFault,
) {
    stage.device(device).faults.add(FaultRule { on, sectors, skip: 0, count, fault });
}

/// Makes the next `count` operations of this kind fail, with nothing landed.
pub fn failure(stage: &mut ScenarioRig, device: usize, on: OpKind, count: u32) {
    trouble(stage, device, on, ANYWHERE, count, DiskFault::Fail(WrittenPart::Nothing));
}

/// Cuts the power: everything that no flush has made durable is lost.
pub fn power_cut(stage: &mut ScenarioRig) {
    stage.crash(Crash::PowerCut, Survivors::Nothing);
}

/// Writes, and makes it durable.
pub fn keep(stage: &mut ScenarioRig, sectors: Range<u64>) {
    stage.ask(write(sectors)).unwrap();
    stage.ask(FLUSH).unwrap();
}

/// Reads a range so that the cache durably holds a clean copy of it in its tree.
pub fn warm(stage: &mut ScenarioRig, sectors: Range<u64>) {
    stage.ask(read(sectors)).unwrap();
    pause(stage, 20).unwrap();
    stage.ask(FLUSH).unwrap();
    pause(stage, 20).unwrap();
    stage.stop().unwrap();
    stage.start().unwrap();
}

/// Asserts that the set does not open and that the refusal contains `words`. No process runs
/// afterwards.
pub fn assert_not_opened(stage: &mut ScenarioRig, words: &str) {
    match stage.start() {
        Err(FailureKind::Open(refusal)) => {
            let refusal = refusal.to_string();
            assert!(refusal.contains(words), "refused with other words: {refusal}");
        }
        other => panic!("not refused: {other:?}"),
    }
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
}

/// The same, and asserts that nothing was written.
pub fn assert_refused(stage: &mut ScenarioRig, words: &str) {
    let before = digests(stage);
    assert_not_opened(stage, words);
    assert_eq!(before, digests(stage), "a refusal changes nothing");
}

fn digests(stage: &ScenarioRig) -> Vec<u64> {
    stage.rig().world.borrow().devices.iter().map(|device| device.view().digest()).collect()
}

/// The possible fates of writes that no flush has covered.
pub const FATES: [Survivors; 3] = [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(1)];

/// Runs `act` and cuts the power as the cache completes operation number `nth`. Returns false if
/// `act` ends before that.
pub fn cut_at<F>(stage: &mut ScenarioRig, nth: u64, survivors: Survivors, act: F) -> bool
where
    F: Future<Output = Result<(), Error>> + 'static,
{
    let mut seen = 0;
    let trap = move |op: &crate::driver::OpView| {
        seen += u64::from(op.disk.0 == 0 && op.completed);
        seen > nth
    };
    let cut = stage.crash_within(
        |stage| {
            stage.play(|_| async move {
                act.await.unwrap();
                Ok(())
            })
        },
        trap,
        Crash::PowerCut,
        survivors,
    );
    match cut {
        Ok(()) => true,
        Err(FailureKind::Story(_)) => false,
        Err(fault) => panic!("at operation {nth}, {survivors}: {fault}"),
    }
}
