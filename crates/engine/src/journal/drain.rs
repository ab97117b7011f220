//! The task that puts the keys of the journal into their leaves that lie over the tree (`journal::overlay`), in the order of their places,
//! leaves read together. It goes along with the walk, which reads the same ones.
//!
//! When the journal has little room, those of its oldest entries come first: their leaves are written then, as always, and so room comes in
//! steps. It needs no entry but for buckets. A leaf that cannot be read, or is damaged, is passed by and tried again; its keys stay where they are, and their
//! entries are needed as long. Those of a damaged leaf that the walk has passed by are carried on from entry to entry (`btree::frozen`). Else who comes to that leaf is told, and who waits to know what is dirty. Who must have room in the journal
//! gives up when there will be none, and with him the set.
//!
//! A stop waits for the end of it, but not for what cannot be put: then the journal stays as it is for the next start.

use crate::btree::budget::REWRITE_NODES;
use crate::btree::split::Step;
use crate::btree::{Attempt, Child, Need, background_rewrite, background_walk, load};
use crate::cpu_cost::VISIT_MAX;
use crate::error::Error;
use crate::journal::overlay::Next;
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::allocator;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::{Key, Position};
use core::time::Duration;

/// How long to wait after a sweep that could not put all.
const PAUSE: Duration = Duration::from_secs(1);

/// What a sweep over the tree came to.
#[derive(Default)]
struct Sweep {
    /// Keys that were put.
    put: usize,
    /// What was met first of what kept others from it.
    met: Option<Error>,
}

/// The task. It ends when all are put, or cannot be before the set ends.
pub async fn run(set: CacheSet) {
    let drain = set.begin(Phase::ReplayBeside);
    let mut from = set.with(|s| s.frontier.next());
    // With little room those of the oldest entries come first, if there are such.
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
        let Ok(Sweep { put, met }) = swept else { return };
        is_choosy = put > 0;
        // Leaves have been changed, and some may be written for the room that it gives.
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

/// Whether all keys that are left are of damaged leaves that nobody reads any more.
async fn are_frozen(set: &CacheSet) -> bool {
    // What a start adds may be of others.
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
                    Next::Key(key) if s.frozen.holds(&key) => at = key.position(),
                    Next::Key(_) => return Some(false),
                    Next::Behind(_) | Next::None => return Some(true),
                }
            }
            None
        });
        if let Some(are_frozen) = known {
            return are_frozen;
        }
    }
}

/// Until it is time to try again; false if nobody waits for that.
async fn rests(set: &CacheSet) -> bool {
    let until = set.env().now() + PAUSE;
    while set.env().now() < until && !set.is_ending() && !set.with(|s| s.wants_carrying()) {
        set.env().wait_until(&set.signals().walked, until).await;
    }
    !set.is_ending()
}

/// Journals the keys that stay here anew, so that the entries from which they come are needed no more.
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
            Next::Key(key) => {
                set.attempt(|s| s.carry_pending(&key)).await?;
                key.position()
            }
            Next::Behind(at) => at,
            Next::None => break,
        };
    }
    writer::commit(set).await
}

/// Leaves the device to requests for a while, unless they wait for this.
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

/// Puts what it comes to from `from` to the end of the tree. An error: the set has failed.
async fn sweep(set: &CacheSet, from: Position, is_choosy: bool) -> Result<Sweep, Error> {
    let (mut at, mut sweep) = (from, Sweep::default());
    // The leaves of keys that begin before it have been read.
    let mut upto = from;
    // Of a leaf that is in memory all are put: to read it again for the others would cost more than it gives.
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
            Next::Key(key) => key,
            Next::Behind(next) => {
                at = next;
                continue;
            }
            Next::None => return Ok(sweep),
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
                // What is left of it begins in the next leaf.
                start
            }
            Ok(None) => {
                sweep.met.get_or_insert(Error::NoSpace);
                key.position()
            }
            Err(error) if is_passing(&error) => {
                sweep.met.get_or_insert(error);
                // One that begins in that leaf may end in another.
                set.with(|s| s.end_of_missing_node(start, 0)).max(key.position())
            }
            Err(error @ Error::Failed(_)) => return Err(error),
            Err(error) => return Err(set.fail(error)),
        };
    }
}

/// What is tried again: a node that cannot be read, or is damaged. The walk meets it, too, and says what follows from that (`btree::frozen`).
fn is_passing(error: &Error) -> bool {
    matches!(error, Error::Node { .. }) || matches!(error, Error::Io { .. }) && error.may_pass()
}

/// Puts a key, as much of it as its first leaf takes; where that ends. `None`: there are no buckets for it.
async fn put(set: &CacheSet, key: &Key) -> Result<Option<Position>, Error> {
    enum Put {
        Done(Position),
        Full { at: Position, words: usize },
    }
    loop {
        let put = set
            .attempt(|s| match s.put_pending(key.position()) {
                Attempt::Done(()) => Attempt::Done(Put::Done(s.end_of_missing_node(key.start_position(), 0))),
                Attempt::Needs(Need::Split { at, words }) => Attempt::Done(Put::Full { at, words }),
                Attempt::Needs(need) => Attempt::Needs(need),
            })
            .await?;
        match put {
            Put::Done(end) => return Ok(Some(end)),
            Put::Full { at, words } if make_room(set, at, words).await? => {}
            Put::Full { .. } => return Ok(None),
        }
    }
}

/// Sees to it that the leaf for `at` takes `words` more. False: there are no buckets for that. Others may put what they need meanwhile.
async fn make_room(set: &CacheSet, at: Position, words: usize) -> Result<bool, Error> {
    loop {
        match background_rewrite::step(set, at, words).await? {
            Some(Step::Done) | None => return Ok(true),
            Some(Step::Parent) => {}
            Some(Step::NoBuckets) => {
                set.with(|s| s.overlay.waits_for_buckets = true);
                // Who waits for room in the journal learns that it may be needed here.
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
    /// The leaves of a pending key that begins at `start` and of those behind it of entries up to `through`, at most so many, that are not in
    /// memory, as far as the nodes above them are; and where the last one that was looked for ends.
    fn leaves_of_pending(&mut self, start: Position, through: u64, most: usize) -> (Vec<Child>, Position) {
        self.leaves_of(start, most, |s, upto| {
            s.work.visit(VISIT_MAX / 8);
            match s.overlay.next_from(upto, through, VISIT_MAX / 8) {
                // One that begins before has been looked for.
                Next::Key(key) => Some(key.start_position().max(upto)),
                Next::Behind(_) | Next::None => None,
            }
        })
    }
}
