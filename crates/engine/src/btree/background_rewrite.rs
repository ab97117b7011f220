//! Rewrites leaves in background tasks, so that writers do not wait for a whole rewrite.
//!
//! A rewrite takes as long as a flush and several writes, so it runs in a task of its own. A writer
//! that finds the leaf full, or nearly full, continues as soon as keys may enter the leaf again.
//! That is when the leaf has been closed and keeps new keys for its successors (`pending_keys`),
//! not when the successors exist. The task waits neither for buckets nor for requests.

use crate::btree::Need;
use crate::btree::budget::REWRITE_NODES;
use crate::btree::split::{self, RewriteOutcome};
use crate::error::Error;
use crate::set::{CacheSet, TaskKind};
use crate::space::allocator;
use crate::state::State;
use alloc::rc::Rc;
use bcached_format::Position;
use core::cell::Cell;

/// Starts a rewrite of the nearly full leaf for the extent start `at`. If the rewrite is not
/// possible now, or would use free buckets that are kept for the tree (`BTREE_RESERVE`), it is left
/// to the writer that finds the leaf full.
pub fn begin(set: &CacheSet, at: Position) {
    // A replay has the tree to itself. When the journal is nearly full it writes the whole tree,
    // including anything that would be in flight.
    if set.with(|s| s.journal.is_replaying()) {
        return;
    }
    set.spawn(TaskKind::Rewriting, move |set| async move {
        // A full parent is rewritten first.
        while let Ok(RewriteOutcome::Parent) = split::step(&set, at, split::leaf_nearly_full).await {}
        set.signals().node_progress.notify_all();
    });
}

/// Makes room for `words` more words in the leaf for the extent start `at`.
pub async fn make_room(set: &CacheSet, at: Position, words: usize) -> Result<(), Error> {
    // A replay has the tree to itself, and uses no more of the journal than it must.
    if set.with(|s| s.journal.is_replaying()) {
        return split::split(set, at, words).await;
    }
    loop {
        match step(set, at, words).await? {
            Some(RewriteOutcome::Done) | None => return Ok(()),
            Some(RewriteOutcome::Parent) => {}
            Some(RewriteOutcome::NoBuckets) => allocator::metadata_comes(set, REWRITE_NODES).await?,
        }
    }
}

/// Takes one step towards room for `words` more words at `at` and returns its outcome; `None` as
/// soon as there is room.
pub async fn step(set: &CacheSet, at: Position, words: usize) -> Result<Option<RewriteOutcome>, Error> {
    let outcome = Rc::new(Cell::new(None));
    let told = Rc::clone(&outcome);
    set.spawn(TaskKind::Rewriting, move |set| async move {
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
    /// Returns whether the leaf for `at` has room for `words` more words, or its rewrite has begun.
    /// A leaf that is not in memory may still be full.
    fn is_rewritten(&mut self, at: Position, words: usize) -> bool {
        matches!(self.leaf_to_change(at, words), Ok(_) | Err(Need::BeingSplit))
    }
}
