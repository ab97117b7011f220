//! The task that moves keys from the overlay (`journal::overlay`) into their leaves, in key order,
//! reading several leaves at once. It runs alongside the tree walk, which reads the same leaves.
//!
//! When the journal runs low, the keys of its oldest entries go first. Their leaves are then
//! written as usual, so space is freed in steps. The task needs no journal entries except to obtain
//! buckets.
//!
//! A leaf that cannot be read or is damaged is skipped and retried. Its keys stay in the overlay,
//! and their journal entries stay pinned. If the walk has skipped a damaged leaf for good
//! (`btree::frozen_ranges`), its keys are re-journalled from entry to entry. Otherwise a request
//! that reaches the leaf gets the error, and so does a caller that waits for the dirty counts. A
//! caller that needs journal space fails once none can become free, and the set fails with it.
//!
//! A stop waits for the task to finish, but not for keys that cannot be applied: then the journal
//! is left as it is for the next start.

use crate::btree::budget::REWRITE_NODES;
use crate::btree::split::RewriteOutcome;
use crate::btree::{Attempt, Need, NodeRef, background_rewrite, background_walk, load};
use crate::cpu_cost::VISIT_MAX;
use crate::error::Error;
use crate::journal::overlay::NextKey;
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::allocator;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::{Key, Position};
use core::time::Duration;

/// Pause after a sweep that could not apply all keys.
const PAUSE: Duration = Duration::from_secs(1);

/// The result of a sweep over the tree.
#[derive(Default)]
struct DrainResult {
    /// Number of keys applied.
    put: usize,
    /// The first error that kept other keys from being applied.
    met: Option<Error>,
}

/// The task. Ends when all keys are applied, or when the set ends before they can be.
pub async fn run(set: CacheSet) {
    let drain = set.begin(Phase::ReplayBeside);
    let mut from = set.with(|s| s.frontier.next());
    // When the journal runs low, prefer the keys of the oldest entries, if there are any.
    let mut is_choosy = true;
    loop {
        if set.with(|s| s.overlay.is_empty()) {
            if !set.with(|s| s.overlay.grows) {
                break;
            }
            set.signals().walked.wait().await;
            if set.check_alive().is_err() {
                return;
            }
            continue;
        }
        if set.with(|s| s.wants_carrying()) && carry(&set).await.is_err() {
            return;
        }
        let swept = sweep(&set, from, is_choosy).await;
        from = Position::ZERO;
        let Ok(DrainResult { put, met }) = swept else { return };
        is_choosy = put > 0;
        // Leaves have changed, and writing some of them may free journal space.
        set.with(writer::relieve);
        let is_stuck = put == 0 && met.is_some();
        let is_news = is_stuck && !set.with(|s| s.overlay.are_frozen) && are_frozen(&set).await;
        set.with(|s| {
            s.overlay.are_frozen |= is_news;
            s.overlay.tried(met);
        });
        set.wake_all();
        if is_news {
            background_walk::all_is_known(&set).await;
        }
        if is_stuck && !rests(&set).await {
            return;
        }
    }
    drop(drain);
    set.with(|s| s.overlay.tried(None));
    set.wake_all();
    background_walk::all_is_known(&set).await;
}

/// Returns true if all remaining keys belong to damaged leaves that are no longer read.
async fn are_frozen(set: &CacheSet) -> bool {
    // A start that is still adding keys may add some for other leaves.
    if set.with(|s| s.frozen.is_empty() || s.overlay.grows) {
        return false;
    }
    let mut at = Position::ZERO;
    loop {
        set.env().breathe().await;
        let known = set.with(|s| {
            s.work.visit(VISIT_MAX);
            for _ in 0..VISIT_MAX {
                match s.overlay.next_from(at, u64::MAX, 1) {
                    NextKey::Key(key) if s.frozen.holds(&key) => at = key.position(),
                    NextKey::Key(_) => return Some(false),
                    NextKey::Behind(_) | NextKey::None => return Some(true),
                }
            }
            None
        });
        if let Some(are_frozen) = known {
            return are_frozen;
        }
    }
}

/// Waits until it is time to retry. Returns false if the set is ending, so that no retry is needed.
async fn rests(set: &CacheSet) -> bool {
    let until = set.env().now() + PAUSE;
    while set.env().now() < until && !set.is_ending() && !set.with(|s| s.wants_carrying()) {
        set.env().wait_until(&set.signals().walked, until).await;
    }
    !set.is_ending()
}

/// Re-journals the keys that remain in the overlay, so that the entries they came from are no
/// longer needed.
async fn carry(set: &CacheSet) -> Result<(), Error> {
    let through = set.with(|s| s.journal.open_sequence()).saturating_sub(1);
    let mut at = Position::ZERO;
    loop {
        set.env().breathe().await;
        let next = set.with(|s| {
            s.work.visit(VISIT_MAX);
            s.overlay.next_from(at, through, VISIT_MAX)
        });
        at = match next {
            NextKey::Key(key) => {
                set.attempt(|s| s.carry_pending(&key)).await?;
                key.position()
            }
            NextKey::Behind(at) => at,
            NextKey::None => break,
        };
    }
    writer::commit(set).await
}

/// Leaves the device to requests for a while, unless requests wait for journal space.
async fn makes_way(set: &CacheSet) {
    let began = set.env().now();
    loop {
        let rest = set.with(|s| if s.journal.is_low() { Duration::ZERO } else { s.options.replay_rest });
        if set.env().now() >= began + rest || set.is_ending() {
            return;
        }
        set.env().wait_until(&set.signals().walked, began + rest).await;
    }
}

/// Applies the keys it finds from `from` to the end of the tree.
///
/// # Errors
/// The set has failed.
async fn sweep(set: &CacheSet, from: Position, is_choosy: bool) -> Result<DrainResult, Error> {
    let (mut at, mut sweep) = (from, DrainResult::default());
    // The leaves of keys that begin before this position have been read.
    let mut upto = from;
    // Apply all keys of a leaf that is in memory: reading it again for the rest would cost more
    // than it saves.
    let mut leaf_end = Position::ZERO;
    loop {
        set.env().breathe().await;
        set.check_alive()?;
        let through =
            |s: &State| if is_choosy && s.journal.is_low() { s.journal.reclaim_target() } else { u64::MAX };
        let next = set.with(|s| {
            s.work.visit(VISIT_MAX);
            let through = if at < leaf_end { u64::MAX } else { through(s) };
            s.overlay.next_from(at, through, VISIT_MAX)
        });
        let key = match next {
            NextKey::Key(key) => key,
            NextKey::Behind(next) => {
                at = next;
                continue;
            }
            NextKey::None => return Ok(sweep),
        };
        let start = key.start_position();
        if start >= upto {
            makes_way(set).await;
            upto = load::together(set, |s, most| s.leaves_of_pending(start, through(s), most)).await;
        }
        at = match put(set, &key).await {
            Ok(Some(end)) => {
                sweep.put += 1;
                leaf_end = end;
                // The rest of the key begins in the next leaf.
                start
            }
            Ok(None) => {
                sweep.met.get_or_insert(Error::NoSpace);
                key.position()
            }
            Err(error) if is_passing(&error) => {
                sweep.met.get_or_insert(error);
                // A key that begins in that leaf may end in another.
                set.with(|s| s.end_of_missing_node(start, 0)).max(key.position())
            }
            Err(error @ Error::Failed(_)) => return Err(error),
            Err(error) => return Err(set.fail(error)),
        };
    }
}

/// Returns true for errors that are retried: a node that cannot be read or is damaged. The walk
/// meets the same node and handles the consequences (`btree::frozen_ranges`).
fn is_passing(error: &Error) -> bool {
    matches!(error, Error::Node { .. }) || matches!(error, Error::Io { .. }) && error.may_pass()
}

/// Applies as much of a key as belongs to its first leaf, and returns where that leaf ends. `None`:
/// no buckets are available for a split.
async fn put(set: &CacheSet, key: &Key) -> Result<Option<Position>, Error> {
    enum PutOutcome {
        Done(Position),
        Full { at: Position, words: usize },
    }
    loop {
        let put = set
            .attempt(|s| match s.put_pending(key.position()) {
                Attempt::Done(()) => {
                    Attempt::Done(PutOutcome::Done(s.end_of_missing_node(key.start_position(), 0)))
                }
                Attempt::Needs(Need::Split { at, words }) => Attempt::Done(PutOutcome::Full { at, words }),
                Attempt::Needs(need) => Attempt::Needs(need),
            })
            .await?;
        match put {
            PutOutcome::Done(end) => return Ok(Some(end)),
            PutOutcome::Full { at, words } if make_room(set, at, words).await? => {}
            PutOutcome::Full { .. } => return Ok(None),
        }
    }
}

/// Makes room for `words` more words in the leaf for `at`. Returns false if no buckets are
/// available. Other tasks may use up the room in the meantime.
async fn make_room(set: &CacheSet, at: Position, words: usize) -> Result<bool, Error> {
    loop {
        match background_rewrite::step(set, at, words).await? {
            Some(RewriteOutcome::Done) | None => return Ok(true),
            Some(RewriteOutcome::Parent) => {}
            Some(RewriteOutcome::NoBuckets) => {
                set.with(|s| s.overlay.waits_for_buckets = true);
                // Tasks that wait for journal space learn that the overlay may need it.
                set.signals().journal_progress.notify_all();
                set.signals().space.notify_all();
                let came = allocator::metadata_comes_to_replay(set, REWRITE_NODES).await;
                set.with(|s| s.overlay.waits_for_buckets = false);
                if !came? {
                    return Ok(false);
                }
            }
        }
    }
}

impl State {
    /// Returns the leaves that are not in memory, at most `most`, for the pending key that begins
    /// at `start` and the pending keys behind it of entries up to `through`; and the end of the
    /// last leaf that was looked up. Leaves whose parent nodes are not in memory are left out.
    fn leaves_of_pending(&mut self, start: Position, through: u64, most: usize) -> (Vec<NodeRef>, Position) {
        self.leaves_of(start, most, |s, upto| {
            s.work.visit(VISIT_MAX / 8);
            match s.overlay.next_from(upto, through, VISIT_MAX / 8) {
                // A key that begins before `upto` has been looked up already.
                NextKey::Key(key) => Some(key.start_position().max(upto)),
                NextKey::Behind(_) | NextKey::None => None,
            }
        })
    }
}
