//! Opening a set reads the whole tree and reports its progress.

use crate::rig::{Rig, Sizes, ask, open, run};
use bcached_engine::{OpenProgress, Options, Request, VolumeOptions};
use bcached_env::Buffer;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Small buckets, so that a tree soon has several leaves.
const SIZES: Sizes = Sizes { block: 1, bucket: 16, buckets: 600, backing: 200_000 };

/// Number of reads, of every other sector, that make a tree of more leaves than are read at once.
const READS: u64 = 12_000;

fn options() -> Options {
    Options {
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// Opening reports the nodes that it has read. The walk of a large tree used to report nothing.
#[test]
fn an_opening_counts_the_nodes_that_it_has_read() {
    let mut rig = Rig::new(SIZES, 1);
    let nodes = run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let others = set.status().buckets_metadata - 1;
        for n in 0..READS {
            ask(&set, volume, Request::Read { sector: 2 * n, buffer: Buffer::zeroed(512) }).await;
        }
        set.stop().await.expect("it stops");
        assert!(set.status().tree_depth > 0, "there are several leaves");
        set.status().buckets_metadata - others
    });
    assert!(nodes > 40, "more than two batches of leaves, not {nodes}");

    let opening: Arc<OpenProgress> = Arc::default();
    let look = |opening: &OpenProgress| (opening.nodes_read(), opening.tree_percent());
    assert_eq!(look(&opening), (0, 0));
    let seen: Rc<RefCell<Vec<(u64, u64)>>> = Rc::default();
    let (watched, told) = (Arc::clone(&opening), Rc::clone(&seen));
    rig.world.borrow_mut().fate = Some(Box::new(move |_, _| {
        told.borrow_mut().push(look(&watched));
        None
    }));
    let options = Options { opening: Arc::clone(&opening), ..options() };
    run(&mut rig, |env| async move {
        open(env, options).await.expect("sound");
    });
    assert_eq!(look(&opening), (nodes, 100));
    let seen = seen.borrow();
    let never_falls = |pair: &[(u64, u64)]| pair[0].0 <= pair[1].0 && pair[0].1 <= pair[1].1;
    assert!(seen.windows(2).all(never_falls), "{seen:?}");
    let between =
        seen.iter().filter(|(read, percent)| (2..nodes).contains(read) && (1..100).contains(percent));
    assert!(between.count() > 10, "{seen:?}");
}
