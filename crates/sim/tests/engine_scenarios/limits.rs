//! Sizes at the edge, and what does not fit.

use crate::stage::{BACK, geometry, stage};
use bcached_format::{DeviceFacts, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock};
use bcached_sim::disk::Survivors;
use bcached_sim::driver::Crash;
use bcached_sim::failure::Fault;
use bcached_sim::scenario::Stage;
use bcached_sim::system::{Geometry, engine::Engine};
use std::rc::Rc;

/// Sizes that a superblock may have and that leave no room to append: a bucket of one block (each set of a node needs
/// its own), and a journal without room for the entries that free it. They are refused, not waited for.
#[test]
fn sizes_without_room_to_append_are_refused() {
    let refused = |stage: &mut Stage| match stage.start() {
        Err(Fault::Open(refusal)) => refusal.to_string().contains("a bucket must hold two blocks"),
        other => panic!("not refused: {other:?}"),
    };
    let one_block = Geometry { bucket_sectors: 8, ..geometry(vec![4096], BACK) };
    assert!(refused(&mut Stage::new(Rc::new(Engine), one_block, 1)));

    let mut stage = stage();
    stage.stop().unwrap();
    for buckets in 0..4 {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        stage.device(0).read(SUPERBLOCK_SECTOR, &mut bytes).unwrap();
        let facts = DeviceFacts { sectors: u64::MAX, logical_block_sectors: 8 };
        let raw = RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts));
        let Ok(Superblock::Cache(mut superblock)) = raw else { panic!("a cache: {raw:?}") };
        superblock.set_journal_buckets(buckets);
        stage.device(0).place(SUPERBLOCK_SECTOR, &superblock.seal()[..]);
        assert!(refused(&mut stage), "{buckets} journal buckets");
        stage.crash(Crash::ProcessDeath, Survivors::Nothing);
    }
}
