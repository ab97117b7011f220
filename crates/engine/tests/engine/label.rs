//! Labels that are changed while the volume is served.

use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, backing_superblock, open, run, write};
use bcached_engine::{Error, Options, VolumeId};
use bcached_env::{Executor, Op};
use bcached_format::Label;
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use std::rc::Rc;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 4096 };

fn label(text: &str) -> Label {
    Label::from_text(text).expect("short")
}

/// The process dies right after the acknowledgement. The new label is found on the device, and in
/// the set's table without the device.
#[test]
fn a_label_is_durable_when_it_is_acknowledged() {
    let mut rig = Rig::new(SIZES, 1);
    let mut first: Executor = rig.executor();
    let env = first.env();
    let done = first.block_on(async move {
        let (set, volume) = open(env, Options::default()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        assert_eq!(set.set_label(volume, label("media")).await, Ok(()));
        assert_eq!(set.volumes()[0].label, label("media"));
        let alone = set.create_flash_only(64, label("scratch")).await.expect("there is room");
        assert_eq!(set.set_label(alone, label("swap")).await, Ok(()));
        assert_eq!(set.set_label(VolumeId(99), label("x")).await, Err(Error::NoVolume));
    });
    assert_eq!(done, Some(()));
    drop(first);
    assert_eq!(backing_superblock(&rig).label(), label("media"));
    run(&mut rig, |env| async move {
        let set =
            bcached_engine::CacheSet::open(env, CACHE, Box::new(crate::memory::NoNote), Options::default());
        let set = set.await.expect("sound");
        assert_eq!(set.volumes().iter().map(|info| info.label).collect::<Vec<_>>(), [label("swap")]);
        assert_eq!(set.status().unserved.iter().map(|left| left.label).collect::<Vec<_>>(), [label("media")]);
        set.stop().await.expect("it stops");
    });
}

/// The superblock is authoritative. If the process dies before the table is updated, the next start
/// corrects the table.
#[test]
fn a_table_with_an_old_label_is_put_right() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, Options::default()).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
        }));
        assert!(set.set_label(volume, label("media")).await.is_err());
        world.borrow_mut().fate = None;
    });
    assert_eq!(backing_superblock(&rig).label(), label("media"));
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, Options::default()).await.expect("sound");
        assert_eq!(set.volumes()[0].label, label("media"));
        ask(&set, volume, write(0, 8, 1)).await;
        set.remove_volume(volume).await.expect("it is there");
        assert_eq!(set.status().unserved.iter().map(|left| left.label).collect::<Vec<_>>(), [label("media")]);
        set.stop().await.expect("it stops");
    });
}

/// If the superblock cannot be written, the old label stays.
#[test]
fn a_label_that_cannot_be_written_is_refused() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, Options::default()).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_superblock = matches!(op, Op::Write { sector: SUPERBLOCK_SECTOR, .. });
            (disk == BACKING && is_superblock).then_some(OpFault::Fails)
        }));
        assert!(matches!(set.set_label(volume, label("media")).await, Err(Error::Io { .. })));
        assert_eq!(set.volumes()[0].label, Label::default());
        world.borrow_mut().fate = None;
        assert_eq!(set.set_label(volume, label("media")).await, Ok(()));
        set.stop().await.expect("it stops");
    });
}
