//! Reads over unusually many keys of the tree, and slow reads.

use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use bcached_format::CacheMode;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// The longest time that a test waits for something, in virtual time; a few milliseconds are
/// needed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Thousands of small pieces are cached and then evicted: a leaf has more consecutive stale keys
/// than one attempt looks at. A read over all of them must end. It used to repeat the same attempt
/// forever, because the first one had found nothing to return.
#[test]
fn a_read_over_very_many_stale_keys_ends() {
    const PIECES: u64 = 2200;
    let mut rig = Rig::new(Sizes { block: 1, bucket: 512, buckets: 600, backing: 2_000_000 }, 1);
    let mut executor = rig.executor();
    let env = executor.env();
    let content = executor.block_on(async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a sound set");
        let payload = Buffer::copied_from(&[9; 512]).freeze();
        ask(&set, volume, Request::Write { sector: 1, payload, fua: false }).await;
        ask(&set, volume, Request::Flush).await;
        for piece in 0..PIECES {
            ask(&set, volume, Request::Read { sector: 2 * piece, buffer: Buffer::zeroed(512) }).await;
        }
        env.sleep(Duration::from_secs(1)).await;
        for other in 0..2000 {
            let sector = 10_000 + 512 * other;
            ask(&set, volume, Request::Read { sector, buffer: Buffer::zeroed(512 * 512) }).await;
        }
        let ended = Rc::new(Cell::new(None));
        let (reader, content) = (set.clone(), Rc::clone(&ended));
        env.spawn(async move {
            let buffer = Buffer::zeroed(512 * 2 * usize::try_from(PIECES).expect("small"));
            let reply = ask(&reader, volume, Request::Read { sector: 0, buffer }).await;
            content.set(reply.buffer.map(|buffer| buffer.as_slice()[512]));
        });
        env.sleep(PATIENCE).await;
        ended.get()
    });
    assert_eq!(content, Some(Some(9)), "the read is still under way, or found something else");
}

/// The content before the two writes below.
const FIRST: u8 = 1;
/// Is written into the cache.
const OLD: u8 = 2;
/// Is written past the cache.
const NEW: u8 = 3;

/// Reads eight sectors while `holds_read` stalls the read. Meanwhile they are written into the
/// cache, and then written past it; `holds_flush` stalls the latter once the backing device has it.
/// The next read must see the former write, and a read after both writes the latter. Returns what
/// the slow read returned.
async fn slow_read(
    env: &Env,
    set: &CacheSet,
    volume: VolumeId,
    holds_read: &Cell<bool>,
    holds_flush: &Cell<bool>,
) -> Option<u8> {
    let (slow, written) = (Rc::new(Cell::new(None)), Rc::new(Cell::new(None)));
    let (reader, content) = (set.clone(), Rc::clone(&slow));
    env.spawn(async move {
        let reply = ask(&reader, volume, Request::Read { sector: 0, buffer: Buffer::zeroed(4096) }).await;
        content.set(reply.buffer.map(|buffer| buffer.as_slice()[0]));
    });
    env.sleep(Duration::from_millis(1)).await;
    ask(set, volume, write(0, 8, OLD)).await;
    holds_flush.set(true);
    let (writer, done) = (set.clone(), Rc::clone(&written));
    env.spawn(async move { done.set(Some(writer.serve(volume, write(0, 8, NEW)).await.result)) });
    env.sleep(Duration::from_millis(5)).await;
    holds_read.set(false);
    env.sleep(Duration::from_millis(5)).await;
    let read = slow.take();
    assert_eq!(bytes(set, volume, 0, 8).await, [OLD; 8]);
    holds_flush.set(false);
    env.sleep(Duration::from_millis(5)).await;
    assert_eq!(written.take(), Some(Ok(())));
    assert_eq!(bytes(set, volume, 0, 8).await, [NEW; 8]);
    read
}

/// A read of the backing device is slow. Meanwhile its range is written into the cache, and then
/// written again, which the cache refuses. The second write goes to the backing device while the
/// cache still has the older data. The slow read used to return the newer data, and the next read
/// the older data again.
#[test]
fn a_slow_read_does_not_return_what_the_next_one_does_not() {
    // Proves invariant D35.
    let mut rig = Rig::new(Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        // If the older data were written back, the slow read would rightly find it.
        let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
        let options = Options { volume, ..Options::default() };
        let (set, volume) = open(env.clone(), options).await.expect("a sound set");
        let (holds_read, holds_flush) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(false)));
        let (is_slow, is_flush_slow) = (Rc::clone(&holds_read), Rc::clone(&holds_flush));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Read { sector: DATA_OFFSET, .. } if disk == BACKING => {
                is_slow.get().then_some(OpFault::Waits)
            }
            Op::Flush if disk == BACKING => is_flush_slow.get().then_some(OpFault::Waits),
            Op::Write { payload, .. } if disk == CACHE && payload.as_slice() == [NEW; 4096] => {
                Some(OpFault::Fails)
            }
            _ => None,
        }));
        let slow = slow_read(&env, &set, volume, &holds_read, &holds_flush).await;
        assert_eq!(slow, Some(0), "it had come before the others");
    });
}

/// The same for a read whose clean copy in the cache is unreadable, so that it falls back to the
/// backing device.
#[test]
fn a_read_that_turns_to_the_backing_device_does_not_return_what_the_next_one_does_not() {
    // Proves invariant D35.
    let mut rig = Rig::new(Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        // Write-back would read the cache as well, and its read could be the one that fails.
        let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
        let options = Options { parked_delay: Duration::from_millis(1), volume, ..Options::default() };
        let (set, volume) = open(env.clone(), options).await.expect("a sound set");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        ask(&set, volume, write(0, 8, FIRST)).await;
        ask(&set, volume, Request::Flush).await;
        env.sleep(Duration::from_millis(20)).await;
        set.set_cache_mode(volume, CacheMode::Writeback).await.expect("set");
        let (holds_read, holds_flush) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(false)));
        let (is_slow, is_flush_slow) = (Rc::clone(&holds_read), Rc::clone(&holds_flush));
        let fails = Cell::new(true);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            // The clean copy, the first data that is read.
            Op::Read { buffer, .. } if disk == CACHE && buffer.len() == 4096 && fails.get() => {
                if is_slow.get() {
                    return Some(OpFault::Waits);
                }
                fails.set(false);
                Some(OpFault::Fails)
            }
            Op::Flush if disk == BACKING => is_flush_slow.get().then_some(OpFault::Waits),
            Op::Write { payload, .. } if disk == CACHE && payload.as_slice() == [NEW; 4096] => {
                Some(OpFault::Fails)
            }
            _ => None,
        }));
        let slow = slow_read(&env, &set, volume, &holds_read, &holds_flush).await;
        assert_eq!(slow, Some(OLD));
    });
}
