//! Requests with lent memory: what the engine may do with it.

use crate::rig::{BACKING, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run};
use bcached_engine::{Options, Request};
use bcached_env::{Buffer, BufferSlot, Lender, LentBuffer};
use bcached_format::CacheMode;
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 520, backing: 20_000 };

/// Memory that changes while it is read: each access finds something else.
#[derive(Debug)]
struct ChangingMemory(AtomicU8);

impl Lender for ChangingMemory {
    fn slot(&self) -> BufferSlot {
        BufferSlot { ring: 0, number: 0 }
    }

    fn read(&self, _: usize, into: &mut [u8]) -> bool {
        into.fill(self.0.fetch_add(1, Ordering::Relaxed));
        true
    }

    fn write(&self, _: usize, _: &[u8]) -> bool {
        false
    }
}

/// Memory that can be written to but not read.
#[derive(Debug)]
struct WriteOnlyMemory(Mutex<Vec<u8>>);

impl Lender for WriteOnlyMemory {
    fn slot(&self) -> BufferSlot {
        BufferSlot { ring: 0, number: 0 }
    }

    fn read(&self, _: usize, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, start: usize, from: &[u8]) -> bool {
        self.0.lock().expect("nobody panics")[start..start + from.len()].copy_from_slice(from);
        true
    }
}

fn lent(lender: &Arc<impl Lender + 'static>, sectors: usize) -> Buffer {
    let lender = Arc::clone(lender);
    LentBuffer::new(lender, sectors * 512).into()
}

/// Data written through from changing memory is the same in both places. Otherwise the cache and
/// the backing device would differ, and a clean extent would not equal what is below it.
#[test]
fn what_is_written_through_is_the_same_in_both_places() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, Options::default()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        let memory = Arc::new(ChangingMemory(AtomicU8::new(1)));
        let payload = lent(&memory, 8).freeze();
        ask(&set, volume, Request::Write { sector: 800, payload, fua: false }).await;
        ask(&set, volume, Request::Flush).await;
        let hits = set.status().stats.hit_bytes;
        let in_cache = bytes(&set, volume, 800, 8).await;
        assert_eq!(set.status().stats.hit_bytes, hits + 4096, "it is read from the cache");
        let mut below = [0; 4096];
        world.borrow().look(BACKING.0 as usize, DATA_OFFSET + 800, &mut below);
        assert_eq!(in_cache, [below[0]; 8]);
        assert!(below.iter().all(|byte| *byte == below[0]));
        assert_eq!(Arc::strong_count(&memory), 1, "nobody keeps any of it");
    });
}

/// A miss is added to the cache from the engine's own memory, and a part of a block is cut out of
/// that.
#[test]
fn memory_that_cannot_be_looked_at_is_read_into() {
    let mut rig = Rig::new(SIZES, 1);
    let below: Vec<u8> = (0..16_u8).flat_map(|sector| [sector + 1; 512]).collect();
    rig.world.borrow_mut().place(BACKING.0 as usize, DATA_OFFSET + 800, &below);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("sound");
        for (round, (sector, sectors)) in [(800, 16), (803, 7), (800, 8), (801, 1)].into_iter().enumerate() {
            let memory = Arc::new(WriteOnlyMemory(Mutex::new(vec![0; sectors * 512])));
            let buffer = lent(&memory, sectors);
            ask(&set, volume, Request::Read { sector, buffer }).await;
            let start = usize::try_from(sector - 800).expect("small") * 512;
            assert!(*memory.0.lock().unwrap() == below[start..start + sectors * 512], "round {round}");
            assert_eq!(Arc::strong_count(&memory), 1, "round {round}: nobody keeps any of it");
            env.sleep(std::time::Duration::from_secs(1)).await;
            assert_eq!(
                set.status().stats.hit_bytes > 0,
                round > 0,
                "round {round}: the first has filled the cache"
            );
        }
    });
}
