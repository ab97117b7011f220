//! Buckets, their generations, and who reuses them when.

use crate::stage::{BACK, small, write};
use bcached_sim::disk::{Fault as DiskFault, OpKind, Rule};
use bcached_sim::scenario::Stage;
use bcached_sim::system::engine::Engine;
use std::rc::Rc;

/// A set is stopped while the allocator stores generations, on a device that takes its time for them: the journal, which
/// the allocator needs for that, must go on until it has ended (found as a stop that never ended).
#[test]
fn a_stop_waits_for_the_allocator_before_it_ends_the_journal() {
    const LATE: u64 = 1_000_000_000;
    let mut met = 0;
    for count in 20..40 {
        let small = small(vec![4096], BACK);
        let mut stage = Stage::new(Rc::new(Engine), small, count);
        stage.start().expect("it opens");
        // Superblock, four journal buckets, then the two chains of priorities.
        let fault = DiskFault::Late(LATE);
        let chains = 6 * 16..8 * 16;
        stage.device(0).faults.add(Rule { on: OpKind::Write, sectors: chains, skip: 0, count: 1, fault });
        stage.together((0..count).map(|place| write(place * 16..(place + 1) * 16)).collect()).unwrap();
        let before = stage.rig().figures().virtual_ns;
        stage.stop().unwrap_or_else(|fault| panic!("after {count} writes: {fault}"));
        met += u32::from(stage.rig().figures().virtual_ns - before > LATE / 2);
    }
    assert!(met > 0, "no stop met the allocator at work");
}
