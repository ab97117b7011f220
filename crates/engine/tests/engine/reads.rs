//! Reads over what the tree holds in unusual amounts.

use crate::rig::{Rig, Sizes, ask, open};
use bcached_engine::{Options, Request};
use bcached_env::Buffer;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Longest that a test waits for something, in virtual time; a few milliseconds are needed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Thousands of small pieces are cached and then pushed out by others: a leaf has more stale keys in a row than an attempt
/// looks at. A read over all of them once began the same attempt again for ever, because the first one had found
/// nothing to tell.
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
