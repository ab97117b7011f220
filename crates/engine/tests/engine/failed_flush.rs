//! The effects of a failed flush of the cache device, or of a failed durable write.

use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Options, Request, VolumeOptions};
use bcached_env::{Buffer, Note, NoteRecord, Op};
use bcached_format::CacheMode;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 16, buckets: 600, backing: 200_000 };

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// Dirty data was moved to another bucket, and the flush that should make the copy durable failed
/// and dropped it. The key points to the copy. A read must not return what is there instead.
/// Proves invariant D31.
#[test]
fn moved_data_is_not_read_when_the_flush_after_it_has_failed() {
    /// The content of the moved data, and what is in its new place after the flush.
    const MOVED: u8 = 7;
    const FOREIGN: u8 = 0xEE;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    let failed = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        for n in 0..540 {
            ask(&set, volume, write(16 * n, 16, MOVED)).await;
        }
        ask(&set, volume, Request::Flush).await;
        let (moved, failed) = (Rc::new(RefCell::new(BTreeSet::new())), Rc::new(Cell::new(false)));
        let (places, has_failed) = (Rc::clone(&moved), Rc::clone(&failed));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            match op {
                Op::Write { sector, payload, .. }
                    if disk == CACHE && payload.as_slice().iter().all(|byte| *byte == MOVED) =>
                {
                    places.borrow_mut().extend(*sector..*sector + payload.len() as u64 / 512);
                }
                Op::Flush if disk == CACHE && !has_failed.get() && !places.borrow().is_empty() => {
                    has_failed.set(true);
                    return Some(OpFault::Fails);
                }
                _ => {}
            }
            None
        }));
        // Make buckets sparse while few are free, so that the rest of their data is moved.
        for n in (0..540).take_while(|_| !failed.get()) {
            let _ = set.serve(volume, Request::Discard { sector: 16 * n, sectors: 12 }).await;
        }
        for _ in (0..100).take_while(|_| !failed.get()) {
            env.sleep(Duration::from_millis(100)).await;
        }
        world.borrow_mut().fate = None;
        for sector in moved.borrow().iter() {
            world.borrow_mut().place(0, *sector, &[FOREIGN; 512]);
        }
        for n in 0..540 {
            let read = Request::Read { sector: 16 * n + 12, buffer: Buffer::zeroed(4 * 512) };
            let reply = set.serve(volume, read).await;
            let first = reply.buffer.expect("a read gives its memory back").as_slice()[0];
            assert!(reply.result.is_err() || first == MOVED, "piece {n}: read as {first:#x}");
        }
        failed.get()
    });
    assert!(failed, "nothing was moved, or no flush came after it");
}

/// A flush was about to fail and had already dropped data when that data was read. The read used to
/// complete before the failure, with whatever was there instead. A read of data that a running
/// flush covers waits for the flush. Proves invariant D31.
#[test]
fn what_a_running_flush_may_have_dropped_is_not_read_before_its_end() {
    const WRITTEN: u8 = 7;
    const FOREIGN: u8 = 0xEE;
    for fails in [false, true] {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        let first = run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("sound");
            let (place, holds) = (Rc::new(Cell::new(None)), Rc::new(Cell::new(true)));
            let (placed, held) = (Rc::clone(&place), Rc::clone(&holds));
            world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
                Op::Write { sector, payload, .. } if disk == CACHE && payload.as_slice()[0] == WRITTEN => {
                    placed.set(Some(*sector));
                    None
                }
                Op::Flush if disk == CACHE && held.get() => Some(OpFault::Waits),
                Op::Flush if disk == CACHE && fails => Some(OpFault::Fails),
                _ => None,
            }));
            ask(&set, volume, write(0, 8, WRITTEN)).await;
            let (flushing, reading) = (set.clone(), set.clone());
            env.spawn(async move { drop(flushing.serve(volume, Request::Flush).await) });
            env.sleep(Duration::from_millis(1)).await;
            if fails {
                let sector = place.get().expect("the cache has it");
                world.borrow_mut().place(0, sector, &[FOREIGN; 8 * 512]);
            }
            let answer = Rc::new(RefCell::new(None));
            let told = Rc::clone(&answer);
            env.spawn(async move {
                let read = Request::Read { sector: 0, buffer: Buffer::zeroed(8 * 512) };
                let reply = reading.serve(volume, read).await;
                let buffer = reply.buffer.expect("a read gives its memory back");
                *told.borrow_mut() = Some(reply.result.map(|()| buffer.as_slice()[0]));
            });
            env.sleep(Duration::from_millis(1)).await;
            assert!(answer.borrow().is_none(), "nobody knows yet");
            holds.set(false);
            env.sleep(Duration::from_millis(10)).await;
            answer.take().expect("the flush has ended")
        });
        if fails {
            assert!(first.is_err(), "{first:?}");
        } else {
            assert_eq!(first, Ok(WRITTEN));
        }
    }
}

/// A note that records whether it has been voided, and what was added to it since.
#[derive(Default)]
struct NoteLog {
    is_void: Cell<bool>,
    late: Cell<u32>,
}

struct WatchedNote(Rc<NoteLog>);

impl Note for WatchedNote {
    fn room(&self) -> usize {
        1 << 20
    }

    fn append(&mut self, _record: NoteRecord) {
        self.0.late.set(self.0.late.get() + u32::from(self.0.is_void.get()));
    }

    fn forget_through(&mut self, _sequence: u64) {}

    fn give_up(&mut self) -> Vec<NoteRecord> {
        self.0.is_void.set(true);
        Vec::new()
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn recovered(&mut self, _session: u64) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn begin(&mut self, _session: u64) {}

    fn reopen(&mut self) {}
}

/// A large write enters the tree piece by piece and yields in between. Meanwhile a flush of the
/// cache device fails, and the note is voided, since it may refer to lost data. The write used to
/// continue, enter its keys into the void note, and be acknowledged. The next process then restored
/// keys of data that the flush had dropped.
#[test]
fn nothing_enters_the_note_after_the_set_has_failed() {
    // Proves invariant D36.
    let mut failures = 0;
    for seed in 1..80 {
        let mut rig = Rig::new(SIZES, seed);
        let world = Rc::clone(&rig.world);
        let note: Rc<NoteLog> = Rc::default();
        let watched = Box::new(WatchedNote(Rc::clone(&note)));
        run(&mut rig, move |env| async move {
            let set = CacheSet::open(env.clone(), CACHE, watched, options()).await.expect("sound");
            let volume = set.add_backing(BACKING, None).await.expect("sound");
            ask(&set, volume, write(0, 1, 1)).await;
            let passing = Cell::new(seed % 7);
            world.borrow_mut().fate = Some(Box::new(move |disk, op| {
                let fails = disk == CACHE && matches!(op, Op::Flush) && passing.get() == 0;
                passing.set(passing.get().saturating_sub(u64::from(matches!(op, Op::Flush))));
                fails.then_some(OpFault::Fails)
            }));
            let (flusher, clock) = (set.clone(), env.clone());
            env.spawn(async move {
                while flusher.status().failed.is_none() {
                    let _ = flusher.serve(volume, write(100_000, 1, 2)).await;
                    let _ = flusher.serve(volume, Request::Flush).await;
                    clock.sleep(Duration::from_micros(5)).await;
                }
            });
            let _ = set.serve(volume, write(1000, 16 * 38, 3)).await;
        });
        failures += u32::from(note.is_void.get());
        assert_eq!(note.late.get(), 0, "seed {seed}: keys in a note that was void");
    }
    assert!(failures > 0, "no flush failed");
}

/// A write of a part of a block is on its way to the backing device with the rest of its block. The
/// cache fails and the volume leaves it. Another part of the same block is written past the cache,
/// acknowledged and flushed. The first write must not land after that: it carries the old content
/// of that part.
#[test]
fn a_write_past_the_cache_waits_for_one_that_began_before_the_volume_left_it() {
    let mut rig = Rig::new(Sizes { block: 8, bucket: 128, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    let found = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        ask(&set, volume, Request::Flush).await;
        bytes(&set, volume, 800, 8).await;
        env.sleep(Duration::from_millis(10)).await;
        let holds = Rc::new(Cell::new(true));
        let (held, waits) = (Rc::clone(&holds), Rc::new(Cell::new(false)));
        let is_waiting = Rc::clone(&waits);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Write { sector: 16, payload, .. }
                if disk == BACKING && payload.len() == 4096 && held.get() =>
            {
                is_waiting.set(true);
                Some(OpFault::Waits)
            }
            // The journal: data consists of one byte value throughout.
            Op::Write { payload, .. } if disk == CACHE && ![0, 5].contains(&payload.as_slice()[0]) => {
                Some(OpFault::Fails)
            }
            _ => None,
        }));
        let (first, clock) = (set.clone(), env.clone());
        env.spawn(async move {
            ask(&first, volume, write(0, 1, 5)).await;
        });
        while !waits.get() {
            clock.sleep(Duration::from_micros(10)).await;
        }
        ask(&set, volume, write(800, 8, 6)).await;
        assert!(!set.volumes()[0].attached, "the journal is dead, and the volume clean");
        let (second, ended) = (set.clone(), Rc::new(Cell::new(false)));
        let has_ended = Rc::clone(&ended);
        env.spawn(async move {
            ask(&second, volume, write(1, 1, 9)).await;
            has_ended.set(true);
        });
        env.sleep(Duration::from_millis(1)).await;
        holds.set(false);
        while !ended.get() {
            env.sleep(Duration::from_micros(10)).await;
        }
        env.sleep(Duration::from_millis(1)).await;
        bytes(&set, volume, 0, 2).await
    });
    assert_eq!(found, [5, 9]);
}
