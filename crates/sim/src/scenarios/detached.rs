//! Volumes that are detached from the cache and attached again while they are served.

use super::bench::quiet;
use super::image::{backing, records};
use super::stage::{
    ANYWHERE, ATTACH, BACK, DETACH, FLUSH, MILLISECOND, bench, geometry, keep, pause, power_cut, read,
    trouble, warm, write,
};
use crate::disk::{DiskFault, OpKind};
use crate::workload::Step;
use bcached_check::Record;
use bcached_engine::Options;
use bcached_format::BackingState;
use std::rc::Rc;

super::scenarios! {
    include_str!("detached.rs"),
    a_volume_that_the_table_still_knows_after_a_detach_is_not_believed,
    old_copies_do_not_come_back_when_a_volume_is_put_back,
}

/// A volume is detached, and a program keeps writing without a pause. The disk's superblock says
/// that it has no cache, so the write goes to the disk alone. The SSD is slow at that moment, and
/// the power fails before its table has forgotten the volume. The cache holds copies under the
/// number that is still in the table, and they are older than what the disk holds.
/// Proves invariant D16.
fn a_volume_that_the_table_still_knows_after_a_detach_is_not_believed() {
    let (mut stage, bench) = bench(geometry(vec![16384], BACK), quiet());
    keep(&mut stage, 0..64);
    trouble(&mut stage, 0, OpKind::Write, ANYWHERE, u32::MAX, DiskFault::Late(1000 * MILLISECOND));
    let status = Rc::clone(&bench);
    let done = stage.play(move |client| async move {
        client.go(DETACH).await;
        while status.status().volumes[0].attached {
            client.go(Step::Pause(1)).await;
        }
        client.ask(write(0..64)).await;
        client.ask(FLUSH).await;
        Ok(())
    });
    done.unwrap();
    power_cut(&mut stage);
    assert_eq!(backing(&mut stage, 1).state(), BackingState::None);
    let known = |record: &Record| matches!(record, Record::UuidSlot { inode: 0, invalidated: 0, .. });
    assert!(records(&mut stage).iter().any(known), "the volume is missing from the table");
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// An administrator detaches a volume for an hour, works on, and attaches it to the same cache,
/// which still holds clean copies of everything from before. Reads return the new data, also after
/// a power cut.
fn old_copies_do_not_come_back_when_a_volume_is_put_back() {
    let (mut stage, _) = bench(geometry(vec![16384], BACK), Options { cutoff_writeback: 0, ..quiet() });
    warm(&mut stage, 0..64);
    stage.ask(DETACH).unwrap();
    stage.ask(write(0..32)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.ask(ATTACH).unwrap();
    stage.ask(read(0..64)).unwrap();
    pause(&mut stage, 20).unwrap();
    power_cut(&mut stage);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}
