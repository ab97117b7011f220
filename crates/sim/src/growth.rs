//! Grown sets as starting points: trees of several levels with a node that is about to split.
//!
//! To reach such a state takes tens of thousands of writes, and most crashes on the way would be
//! far from the intended event. So a set is grown once, without crashes, and many runs start from
//! its image.

use crate::disk::Survivors;
use crate::driver::Crash;
use crate::failure::FailureKind;
use crate::rig::{Rig, Snapshot};
use crate::system::tuning::{DeviceTuning, Tuning};
use crate::system::{Geometry, System};
use crate::workload::Step;
use bcached_engine::Phase;
use bcached_env::rng::Rng;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// How far a set has grown: to just before this event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum GrowthStage {
    /// A root above the leaves splits, and the tree gets its third level.
    ThirdLevel,
    /// An interior node other than the root splits.
    InteriorSplit,
    /// There are some twenty leaves, of two volumes: enough for a walk, and few enough to crash it
    /// often.
    Copse,
}

/// Buckets of such a set, other than a copse.
pub const BUCKETS: u64 = 5000;
/// Number of requests in flight while the set grows.
const DEPTH: usize = 16;
/// Writes between two images. A split of an interior node comes some leaf splits later, and each of
/// these some writes later.
const BATCH: usize = 24;
/// Time for its leaves to be written, in milliseconds.
const REST_MS: u64 = 40;
/// Sectors of the volume that a set grows over: every other one is written.
pub const SPAN: u64 = 56 * 1024;
/// Buckets of a copse: its priorities are a short chain, and not all of its cached data can stay.
pub const COPSE_BUCKETS: u64 = 1100;
/// Sectors of each of its volumes.
pub const COPSE_SPAN: u64 = 4096;
/// Minimum number of leaves of a copse.
const COPSE_LEAVES: u64 = 20;

/// Returns the geometry of a set that grows, with the smallest possible nodes. The part of `tuning`
/// that is visible on the devices is ignored: it is that with which the set grew, in write-back
/// mode.
#[must_use]
pub fn geometry(growth: GrowthStage, tuning: Tuning) -> Geometry {
    const DEVICES: DeviceTuning = DeviceTuning {
        cache_fua_flushes: false,
        backing_fua_flushes: false,
        cache_latency_us: 20,
        backing_latency_us: 500,
        discard: false,
        backing_discard: false,
        backing_zeroing: 0,
        // Write-back.
        first_mode: 2,
        node_read_us: 0,
        replacement: 0,
    };
    let devices = DeviceTuning { node_read_us: tuning.devices.node_read_us, ..DEVICES };
    let (buckets, volumes) = match growth {
        GrowthStage::ThirdLevel | GrowthStage::InteriorSplit => (BUCKETS, vec![SPAN]),
        GrowthStage::Copse => (COPSE_BUCKETS, vec![COPSE_SPAN; 2]),
    };
    Geometry {
        block_sectors: 1,
        set_block_sectors: 1,
        bucket_sectors: 8,
        buckets,
        volumes,
        lodgers: Vec::new(),
        torn_sectors: 1,
        backing_volatile: true,
        cache_volatile: true,
        note_records: 1024,
        tuning: Tuning { devices, ..tuning },
    }
}

thread_local! {
    static GROWN: RefCell<BTreeMap<(String, GrowthStage), Snapshot>> = const { RefCell::new(BTreeMap::new()) };
}

/// Returns a set that has grown to `growth`, with its process killed.
///
/// # Errors
/// Returns a fault on the way.
pub fn grown(system: &Rc<dyn System>, growth: GrowthStage) -> Result<Snapshot, FailureKind> {
    let name = (system.name().to_owned(), growth);
    if let Some(snapshot) = GROWN.with_borrow(|grown| grown.get(&name).cloned()) {
        return Ok(snapshot);
    }
    let mut snapshot = grow(system, growth)?;
    snapshot.crash(Crash::ProcessDeath, Survivors::Everything);
    snapshot.oracle.thin_out();
    GROWN.with_borrow_mut(|grown| grown.insert(name, snapshot.clone()));
    Ok(snapshot)
}

fn grow(system: &Rc<dyn System>, growth: GrowthStage) -> Result<Snapshot, FailureKind> {
    let mut tuning = Tuning::draw(2 << 40);
    tuning.set.leaf_delay_ms = REST_MS / 8;
    tuning.devices.node_read_us = 0;
    let mut rig = Rig::new(Rc::clone(system), geometry(growth, tuning), DEPTH, 1);
    let (note, oracle, phases) = (Rc::clone(&rig.note), Rc::clone(&rig.oracle), Arc::clone(&rig.phases));
    let places = places(growth);
    let lived = rig.live(move |client| async move {
        // The last two images: the first of them is from before the event.
        let mut images: VecDeque<Snapshot> = VecDeque::new();
        for batch in places.chunks(BATCH) {
            let write = |&(volume, at): &(u32, u64)| Step::Write { volume, sectors: at..at + 1, fua: false };
            client.go_through(batch.iter().map(write).collect()).await;
            // The leaves are written, and a journal entry says so and names the current root: a
            // start from this image has little to replay.
            client.go(Step::Pause(REST_MS)).await;
            client.ask(Step::Write { volume: 0, sectors: 0..1, fua: true }).await;
            client.ask(Step::Flush { volume: 0 }).await;
            images.push_back(Snapshot {
                devices: client.world().borrow().devices.clone(),
                note: note.borrow().clone(),
                oracle: oracle.borrow().clone(),
            });
            if images.len() > 2 {
                images.pop_front();
            }
            let is_over = match growth {
                // The first root split makes the root an interior node.
                GrowthStage::ThirdLevel => phases.begun(Phase::RootSplit) > 1,
                GrowthStage::InteriorSplit => phases.begun(Phase::InteriorSplit) > 0,
                GrowthStage::Copse => phases.begun(Phase::LeafSplit) > COPSE_LEAVES,
            };
            if is_over {
                break;
            }
        }
        Ok(images.pop_front().expect("there are places"))
    })?;
    Ok(lived.expect("nothing ends this world"))
}

/// Returns every other sector of each volume, in random order.
fn places(growth: GrowthStage) -> Vec<(u32, u64)> {
    let (volumes, span) = if growth == GrowthStage::Copse { (2, COPSE_SPAN) } else { (1, SPAN) };
    let of_volume = |volume| (0..span / 2).map(move |place| (volume, 2 * place));
    let mut places: Vec<(u32, u64)> = (0..volumes).flat_map(of_volume).collect();
    let mut rng = Rng::new(1);
    for last in (1..places.len()).rev() {
        let pick = rng.below(last as u64 + 1);
        places.swap(last, usize::try_from(pick).expect("an index"));
    }
    places
}
