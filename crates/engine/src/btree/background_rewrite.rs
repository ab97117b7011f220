//! Rewrites of leaves beside those who write into them.
//!
//! A rewrite takes as long as a flush and several writes. It is a task of its own, so that who found the leaf full, or nearly so, goes on
//! as soon as keys may enter it again: when it has been closed and keeps them for its successors (`late`), not when these are there.
//! The task waits neither for buckets nor for requests.

use crate::btree::Need;
use crate::btree::budget::REWRITE_NODES;
use crate::btree::split::{self, Step};
use crate::error::Error;
use crate::set::{CacheSet, Duty};
use crate::space::allocator;
use crate::state::State;
use alloc::rc::Rc;
use bcached_format::Position;
use core::cell::Cell;

/// Has the leaf for the extent start `at` rewritten, which is nearly full. If it cannot be now, or would take of what is kept for those who need it,
/// that is left to who finds it full.
pub fn begin(set: &CacheSet, at: Position) {
    // A replay has the tree for itself: it writes all of it when the journal is nearly full, also what would be on its way.
    if set.with(|s| s.journal.is_replaying()) {
        return;
    }
    set.spawn(Duty::Rewriting, move |set| async move {
        // A full parent comes first.
        while let Ok(Step::Parent) = split::step(&set, at, split::leaf_nearly_full).await {}
        set.signals().node_progress.notify_all();
    });
}

/// Sees to it that the leaf for the extent start `at` takes `words` more.
pub async fn make_room(set: &CacheSet, at: Position, words: usize) -> Result<(), Error> {
    // A replay has the tree for itself, and takes no more of the journal than it must.
    if set.with(|s| s.journal.is_replaying()) {
        return split::split(set, at, words).await;
    }
    loop {
        match step(set, at, words).await? {
            Some(Step::Done) | None => return Ok(()),
            Some(Step::Parent) => {}
            Some(Step::NoBuckets) => allocator::metadata_comes(set, REWRITE_NODES).await?,
        }
    }
}

/// What a step towards room for `words` more at `at` came to; `None` as soon as there is room.
pub async fn step(set: &CacheSet, at: Position, words: usize) -> Result<Option<Step>, Error> {
    let outcome = Rc::new(Cell::new(None));
    let told = Rc::clone(&outcome);
    set.spawn(Duty::Rewriting, move |set| async move {
        told.set(Some(split::step(&set, at, |s, path| split::leaf_full(s, path, words)).await));
        set.signals().node_progress.notify_all();
    });
    loop {
        if let Some(outcome) = outcome.take() {
            return outcome.map(Some);
        }
        if set.with(|s| s.is_rewritten(at, words)) {
            return Ok(None);
        }
        set.signals().node_progress.wait().await;
    }
}

impl State {
    /// The leaf for `at` has room for `words` more, or its rewrite has begun. One that is not in memory may be full as ever.
    fn is_rewritten(&mut self, at: Position, words: usize) -> bool {
        matches!(self.leaf_to_change(at, words), Ok(_) | Err(Need::Gate))
    }
}
