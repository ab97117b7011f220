//! Keys with two pointers. The kernel writes none, but the format allows them.

use crate::forged_set::{DATA_OFFSET, StoppedSet, options, stopped};
use crate::memory::NoNote;
use crate::rig::{ask, open};
use bcached_engine::{CancelToken, Request};
use bcached_env::Buffer;
use bcached_format::{DeviceIndex, Gen, Key, Pointer, Pointers};

/// The key of the first bucket's data, with another copy in front of the existing one.
fn with_copy(stopped: &StoppedSet, copy: Pointer) -> Key {
    let pointers = Pointers::from_slice(&[copy, stopped.data.pointers.as_slice()[0]]).expect("two");
    Key { pointers, ..stopped.data }
}

/// The first sector of an unused bucket.
const ELSEWHERE: u64 = 128 * 500;

/// A set in which the first copy's bucket has been reused: the data is in the second copy, and the
/// first one's place now holds other data.
fn with_a_copy_gone() -> StoppedSet {
    let mut stopped = stopped();
    let key = with_copy(&stopped, Pointer::new(DeviceIndex(0), ELSEWHERE, Gen(255)));
    stopped.append(&[key]);
    stopped.rig.world.borrow_mut().place(0, ELSEWHERE, &[0xEE; 128 * 512]);
    stopped
}

/// A read uses the copy that is still valid. It used to return the other data.
#[test]
fn the_copy_that_is_still_there_is_read() {
    let mut stopped = with_a_copy_gone();
    let mut executor = stopped.rig.executor();
    let env = executor.env();
    let read = executor.block_on(async move {
        let (set, volume) = open(env, options()).await.expect("a sound set");
        let read = Request::Read { sector: 100, buffer: Buffer::zeroed(512) };
        let reply = ask(&set, volume, read).await;
        reply.buffer.map(|buffer| buffer.as_slice()[0])
    });
    assert_eq!(read.expect("somebody waits for ever"), Some(0x77));
}

/// Write-back uses the copy that is still valid.
#[test]
fn the_copy_that_is_still_there_is_written_back() {
    let mut stopped = with_a_copy_gone();
    let mut executor = stopped.rig.executor();
    let env = executor.env();
    let written = executor.block_on(async move {
        let (set, volume) = open(env, options()).await.expect("a sound set");
        set.write_back(volume, &CancelToken::default()).await
    });
    assert_eq!(written.expect("somebody waits for ever"), Ok(()));
    let mut found = [0; 512];
    stopped.rig.world.borrow().look(1, DATA_OFFSET + 100, &mut found);
    assert_eq!(found[0], 0x77);
}

/// Dirty sectors are counted once, however many copies there are. When each copy counted, the
/// volume never became clean.
#[test]
fn dirty_sectors_are_counted_once_for_all_copies() {
    let mut stopped = stopped();
    let key = with_copy(&stopped, Pointer::new(DeviceIndex(0), ELSEWHERE, Gen(0)));
    assert_eq!(key.start(), DATA_OFFSET);
    stopped.append(&[key]);
    for start in 0..2 {
        assert_eq!(stopped.reopened(Box::new(NoNote)), Ok(256), "start {start}");
    }
}
