//! A failed set is released and opened again in the same process. Nothing that was acknowledged is
//! lost, and nothing of the former set remains that could write.

use crate::background_tasks::BackgroundTask;
use crate::memory::{NoNote, OpFault, World};
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Error, ErrorContext, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, IoError, IoErrorKind, Note, NoteRecord, Op};
use bcached_format::{BackingState, CacheMode};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 8192 };

/// The id of the volume, which it keeps.
const VOLUME: VolumeId = VolumeId(5);

fn options() -> Options {
    Options {
        journal_delay: Duration::from_secs(3600),
        leaf_delay: Duration::from_secs(3600),
        congested_read_threshold: Duration::ZERO,
        congested_write_threshold: Duration::ZERO,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// A note that outlives the set that holds it; only one set holds it at a time.
#[derive(Clone, Default)]
pub struct PersistentNote(Rc<RefCell<NoteContents>>);

#[derive(Clone, Default)]
struct NoteContents {
    session: u64,
    records: Vec<NoteRecord>,
    given_up: Vec<NoteRecord>,
}

impl Note for PersistentNote {
    fn room(&self) -> usize {
        usize::MAX
    }

    fn append(&mut self, record: NoteRecord) {
        self.0.borrow_mut().records.push(record);
    }

    fn forget_through(&mut self, sequence: u64) {
        self.0.borrow_mut().records.retain(|record| record.sequence > sequence);
    }

    fn give_up(&mut self) -> Vec<NoteRecord> {
        let records = std::mem::take(&mut self.0.borrow_mut().records);
        self.0.borrow_mut().given_up.extend(&records);
        records
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        self.0.borrow().given_up.clone()
    }

    fn recovered(&mut self, session: u64) -> Vec<NoteRecord> {
        let kept = self.0.borrow();
        if kept.session == session { kept.records.clone() } else { Vec::new() }
    }

    fn begin(&mut self, session: u64) {
        *self.0.borrow_mut() = NoteContents { session, ..NoteContents::default() };
    }

    fn reopen(&mut self) {}
}

async fn open_with(env: &Env, note: &PersistentNote) -> Result<CacheSet, Error> {
    CacheSet::open(env.clone(), CACHE, Box::new(note.clone()), options()).await
}

/// One block of `byte` at `sector`, durable when it is acknowledged.
fn fua(sector: u64, byte: u8) -> Request {
    let payload = Buffer::copied_from(&[byte; 8 * 512]).freeze();
    Request::Write { sector, payload, fua: true }
}

/// Releases the failed set, makes its devices work again, and opens it.
async fn opened_again(
    env: &Env,
    note: &PersistentNote,
    world: &RefCell<World>,
    failed: CacheSet,
) -> CacheSet {
    let_go(env, world, failed).await;
    open_with(env, note).await.expect("it is sound all the time")
}

/// Stops and releases the failed set, and makes its devices work again.
async fn let_go(env: &Env, world: &RefCell<World>, failed: CacheSet) {
    assert!(failed.stop().await.is_err());
    last_handle(env, &failed).await;
    drop(failed);
    world.borrow_mut().fate = None;
}

/// Waits until no other handle on `set` is left, which must be soon.
async fn last_handle(env: &Env, set: &CacheSet) {
    for _ in 0..100 {
        if set.is_last_handle() {
            return;
        }
        env.sleep(Duration::from_millis(1)).await;
    }
    unreachable!("somebody holds on to it");
}

/// The journal cannot be written, so only the note has what was acknowledged before. The reopened
/// set has it.
#[test]
fn a_set_that_is_opened_again_has_all_that_was_acknowledged() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let note = PersistentNote::default();
        let set = open_with(&env, &note).await.expect("sound");
        set.number_from(VOLUME);
        assert_eq!(set.add_backing(BACKING, None).await, Ok(VOLUME));
        ask(&set, VOLUME, fua(0, 1)).await;
        ask(&set, VOLUME, write(8, 8, 2)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_entry = disk == CACHE && matches!(op, Op::Write { fua: true, .. });
            is_entry.then_some(OpFault::Fails)
        }));
        let refused = set.serve(VOLUME, fua(0, 3)).await.result;
        assert!(matches!(&refused, Err(error) if error.may_pass()), "{refused:?}");
        assert!(set.failure().is_some_and(|error| error.may_pass()));
        assert!(
            set.serve(VOLUME, write(16, 8, 4)).await.result.is_err(),
            "nothing is acknowledged after that"
        );
        assert_eq!(set.leave_failed(VOLUME).await, Ok(()), "it stays, because it is dirty");
        assert_eq!(set.volumes()[0].state, Some(BackingState::Dirty));
        let set = opened_again(&env, &note, &world, set).await;
        assert_eq!(set.add_backing_as(VOLUME, BACKING).await, Ok(()));
        let first = bytes(&set, VOLUME, 0, 8).await;
        assert!(first == [1; 8] || first == [3; 8], "{first:?}");
        assert_eq!(bytes(&set, VOLUME, 8, 8).await, [2; 8], "it stood in the note alone");
        ask(&set, VOLUME, write(16, 8, 5)).await;
        set.stop().await.expect("it stops");
    });
}

/// The cache device is pulled and loses power. Data whose keys only the note has may be lost, and
/// restoring those keys after a restart would show former contents of the buckets. The note must
/// not have them any more.
#[test]
fn a_note_names_nothing_that_a_pulled_device_may_have_lost() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let note = PersistentNote::default();
        let set = open_with(&env, &note).await.expect("sound");
        set.number_from(VOLUME);
        assert_eq!(set.add_backing(BACKING, None).await, Ok(VOLUME));
        let session = set.session();
        ask(&set, VOLUME, fua(0, 1)).await;
        ask(&set, VOLUME, write(8, 8, 2)).await;
        assert_eq!(note.0.borrow().records.len(), 1, "one of them is in the journal");
        // A journal write gets the error, after a flush that did not.
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_entry = disk == CACHE && matches!(op, Op::Write { fua: true, .. });
            is_entry.then_some(OpFault::Gone)
        }));
        let refused = set.serve(VOLUME, fua(16, 3)).await.result;
        assert!(refused.is_err() && set.failure().is_some_and(|error| error.is_absence()));
        assert_eq!(set.session(), session, "whoever has the device back knows it by that");
        assert!(note.0.borrow().records.is_empty(), "{:?}", note.0.borrow().records);
        let set = opened_again(&env, &note, &world, set).await;
        assert_ne!(set.session(), session);
        assert_eq!(set.add_backing_as(VOLUME, BACKING).await, Ok(()));
        assert_eq!(bytes(&set, VOLUME, 0, 8).await, [1; 8], "what was durable is there");
        assert_eq!(bytes(&set, VOLUME, 8, 8).await, [0; 8]);
        set.stop().await.expect("it stops");
    });
}

/// The cache device disappears while it is idle, and nothing is due to be written for an hour. The
/// set can be made to notice that.
#[test]
fn a_set_can_be_had_to_find_out_that_its_device_is_gone() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let set = open_with(&env, &PersistentNote::default()).await.expect("sound");
        let entries = || set.status().stats.journal_entries;
        let before = entries();
        set.prove_cache().await.expect("it is there");
        assert_eq!(entries(), before + 1);
        world.borrow_mut().fate = Some(Box::new(|disk, _| (disk == CACHE).then_some(OpFault::Gone)));
        env.sleep(Duration::from_secs(1000)).await;
        assert_eq!(set.failure(), None, "or it proves nothing");
        assert!(set.prove_cache().await.is_err());
        assert!(set.failure().is_some_and(|error| error.is_absence()));
        // A stopped set writes nothing.
        world.borrow_mut().fate = None;
        let set = opened_again(&env, &PersistentNote::default(), &world, set).await;
        set.stop().await.expect("it stops");
        let writes = Rc::new(Cell::new(0));
        let counted = Rc::clone(&writes);
        world.borrow_mut().fate = Some(Box::new(move |_, _| {
            counted.set(counted.get() + 1);
            None
        }));
        set.prove_cache().await.expect("there is nothing to prove");
        assert_eq!(writes.get(), 0);
    });
}

/// Before all devices are released, each of them can be asked for an answer, even if it is idle.
#[test]
fn a_set_can_be_had_to_find_out_that_a_device_is_silent() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, _) = open(env.clone(), Options::default()).await.expect("sound");
        set.prove_devices().await.expect("both answer");
        for silent in [BACKING, CACHE] {
            world.borrow_mut().fate =
                Some(Box::new(move |disk, _| (disk == silent).then_some(OpFault::Waits)));
            let asked = set.clone();
            let proving = BackgroundTask::start(&env, async move { asked.prove_devices().await });
            env.sleep(Duration::from_secs(100)).await;
            assert!(!proving.is_over(), "{silent:?} does not answer");
            world.borrow_mut().fate = None;
            env.sleep(Duration::from_secs(1)).await;
            assert!(proving.is_over(), "{silent:?} answers");
            proving.result(&env).await.expect("both answer at last");
        }
        set.stop().await.expect("it stops");
    });
}

/// Flash-only volumes were created while others were served, one of them is no longer served, and
/// the set fails. The reopened set used to give them the first ids, which belonged to other
/// volumes. Those could not come back, and requests meant for them reached the wrong volume. (Found
/// by a bug hunt.)
#[test]
fn volumes_in_the_cache_alone_keep_their_numbers() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let note = PersistentNote::default();
        let set = open_with(&env, &note).await.expect("sound");
        let backed = set.add_backing(BACKING, None).await.expect("sound");
        let mut made = Vec::new();
        for name in ["one", "two", "three"] {
            let label = bcached_format::Label::from_text(name).expect("short");
            made.push(set.create_flash_only(64, label).await.expect("there is room"));
        }
        set.remove_volume(made[0]).await.expect("it is served");
        let gone = set.create_flash_only(64, bcached_format::Label::default()).await.expect("there is room");
        set.remove_volume(gone).await.expect("it is served");
        set.change_volume_options(made[1], |options| options.sequential_cutoff = 77).expect("it is served");
        ask(&set, made[1], write(0, 8, 2)).await;
        ask(&set, made[2], write(0, 8, 3)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
        }));
        assert!(set.serve(made[2], fua(8, 4)).await.result.is_err());
        let (former, next) = (set.volumes(), set.next_number());
        let set = opened_again(&env, &note, &world, set).await;
        set.resume_flash_only(&former);
        set.number_from(next);
        assert_eq!(set.add_backing_as(backed, BACKING).await, Ok(()));
        assert_eq!(set.volumes().iter().map(|info| info.id).collect::<Vec<_>>(), [backed, made[1], made[2]]);
        assert_eq!(bytes(&set, made[1], 0, 8).await, [2; 8]);
        assert_eq!(bytes(&set, made[2], 0, 8).await, [3; 8]);
        assert_eq!(set.volume_options(made[1]).map(|options| options.sequential_cutoff), Some(77));
        assert_eq!(
            set.status().unserved.iter().map(|left| left.label.to_string()).collect::<Vec<_>>(),
            ["one", ""]
        );
        // A client may still know the id of the removed volume.
        let another =
            set.create_flash_only(64, bcached_format::Label::default()).await.expect("there is room");
        assert_eq!((another, another.0), (next, gone.0 + 1));
        set.stop().await.expect("it stops");
    });
}

/// A flush of the cache device failed. The data that it covered may be lost, and a reopened set
/// does not have it. A client may have read it already, so this failure is not one that passes by
/// itself.
#[test]
fn a_failed_flush_of_the_cache_does_not_pass() {
    // Proves invariant D39.
    let io = |doing| {
        let source = IoError { kind: IoErrorKind::Io, disk: CACHE, sector: 8 };
        Error::Failed(Box::new(Error::Io { doing, source }))
    };
    assert!(!io(ErrorContext::CacheFlush).may_pass());
    assert!(io(ErrorContext::Journal).may_pass() && io(ErrorContext::Data).may_pass());
    assert!(!Error::Inconsistent("anything").may_pass());
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        world.borrow_mut().fate =
            Some(Box::new(|disk, op| (disk == CACHE && matches!(op, Op::Flush)).then_some(OpFault::Fails)));
        assert!(set.serve(volume, Request::Flush).await.result.is_err());
        assert!(set.failure().is_some_and(|error| !error.may_pass()), "{:?}", set.failure());
    });
}

/// A failed opening leaves no task behind. It used to leave tasks that kept writing beside the set
/// that was opened next.
#[test]
fn an_opening_that_fails_leaves_nobody_behind() {
    for failing in 0..12 {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let note = PersistentNote::default();
            let set = open_with(&env, &note).await.expect("sound");
            let volume = set.add_backing(BACKING, None).await.expect("sound");
            ask(&set, volume, write(0, 64, 1)).await;
            // The set is not stopped: as after a crash there is something to replay.
            ask(&set, volume, Request::Flush).await;
            ask(&set, volume, write(64, 8, 2)).await;
            world.borrow_mut().fate = Some(Box::new(|disk, op| {
                (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
            }));
            assert!(set.serve(volume, Request::Flush).await.result.is_err());
            let_go(&env, &world, set).await;
            let mut writes = 0;
            world.borrow_mut().fate = Some(Box::new(move |disk, op| {
                writes += u64::from(disk == CACHE && matches!(op, Op::Write { .. }));
                (disk == CACHE && matches!(op, Op::Write { .. }) && writes > failing)
                    .then_some(OpFault::Fails)
            }));
            let opened = open_with(&env, &note).await;
            let holders = || Rc::strong_count(&note.0);
            assert_eq!(holders(), if opened.is_ok() { 2 } else { 1 }, "after {failing} writes");
            if let Ok(set) = opened {
                assert!(failing > 0);
                let _may_have_failed_meanwhile = set.stop().await;
                last_handle(&env, &set).await;
            }
            world.borrow_mut().fate = None;
            let set = open_with(&env, &note).await.expect("it is sound all the time");
            set.add_backing_as(volume, BACKING).await.expect("so is that");
            assert_eq!(bytes(&set, volume, 0, 64).await, [1; 64]);
            assert_eq!(bytes(&set, volume, 64, 8).await, [2; 8]);
        });
    }
}

/// After `leave_failed`, a volume without dirty data has left the failed set: it can be served
/// without a cache, and be added again under its id.
#[test]
fn a_clean_volume_leaves_a_set_that_failed_and_can_be_served_past_another() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let leaf_delay = Duration::from_millis(50);
        let (set, volume) = open(env.clone(), Options { leaf_delay, ..options() }).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        bytes(&set, volume, 0, 8).await;
        assert_eq!(set.leave_failed(volume).await, Ok(()));
        assert!(set.volumes()[0].attached, "the set works");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
        }));
        ask(&set, volume, write(8, 8, 2)).await;
        env.sleep(Duration::from_secs(1)).await;
        assert!(set.failure().is_some(), "the leaf could not be written");
        assert!(set.volumes()[0].attached, "nobody has asked for anything since");
        assert_eq!(set.leave_failed(volume).await, Ok(()));
        let info = set.volumes().remove(0);
        assert_eq!((info.attached, info.state), (false, Some(BackingState::Stale)));
        assert_eq!(set.flush_backing_of(volume).await, Ok(()));
        let_go(&env, &world, set).await;
        let set = CacheSet::open(env, CACHE, Box::new(NoNote), options()).await.expect("sound");
        set.add_uncached_as(VOLUME, BACKING).await.expect("it has left its cache");
        assert_eq!(set.disk_of(VOLUME), Some(BACKING));
        assert_eq!(set.volumes()[0].id, VOLUME);
        assert_eq!(bytes(&set, VOLUME, 0, 16).await[..], [[1; 8], [2; 8]].concat());
        set.remove_volume(VOLUME).await.expect("it is there");
        set.add_backing_as(VOLUME, BACKING).await.expect("it comes anew");
        assert_eq!(bytes(&set, VOLUME, 0, 16).await[..], [[1; 8], [2; 8]].concat());
    });
}

/// Data invalidated by a failed flush is reported by volume and amount. It used to vanish without a
/// trace. Proves invariant D32.
#[test]
fn what_a_failed_flush_made_void_is_told_by_volume() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let note = PersistentNote::default();
        let set = open_with(&env, &note).await.expect("sound");
        let volume = set.add_backing(BACKING, None).await.expect("sound");
        let flash = set.create_flash_only(64, bcached_format::Label::default()).await.expect("room");
        ask(&set, volume, write(64, 8, 1)).await;
        ask(&set, flash, write(0, 8, 1)).await;
        ask(&set, flash, write(40, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        // Buckets are prepared meanwhile, which also flushes.
        env.sleep(Duration::from_secs(1)).await;
        let fails = |disk, op: &Op| (disk == CACHE && matches!(op, Op::Flush)).then_some(OpFault::Fails);
        world.borrow_mut().fate = Some(Box::new(fails));
        for (volume, sector) in [(volume, 8), (volume, 0), (volume, 8), (volume, 800), (flash, 16)] {
            ask(&set, volume, write(sector, 8, 2)).await;
        }
        ask(&set, flash, Request::WriteZeroes { sector: 40, sectors: 8, fua: false, may_unmap: false }).await;
        assert!(set.status().given_up.is_empty(), "nothing has failed");
        set.serve(volume, Request::Flush).await.result.expect_err("it fails");
        let told = set.status().given_up;
        let uuids = [volume, flash].map(|id| {
            set.volumes().into_iter().find(|info| info.id == id).map(|info| info.uuid).expect("it is served")
        });
        let sums: Vec<_> = uuids
            .iter()
            .filter_map(|uuid| told.iter().find(|one| one.uuid == *uuid))
            .map(|one| (one.sectors, one.ranges, one.start, one.end))
            .collect();
        // For a volume with a backing device, sectors of the device count.
        assert_eq!((sums, told.len()), (vec![(24, 2, 16, 824), (16, 2, 16, 48)], 2));

        let_go(&env, &world, set).await;
        let set = open_with(&env, &note).await.expect("sound");
        assert_eq!(set.status().given_up_before, told);
        assert!(set.status().given_up.is_empty());
        let volume = set.add_backing(BACKING, None).await.expect("sound");
        assert_eq!(bytes(&set, volume, 64, 1).await, [1], "what was flushed is there");
        ask(&set, volume, Request::Flush).await;
        set.stop().await.expect("it works");
        drop((last_handle(&env, &set).await, set));
        let set = open_with(&env, &note).await.expect("sound");
        assert!(set.status().given_up_before.is_empty(), "it is told once");
    });
}
