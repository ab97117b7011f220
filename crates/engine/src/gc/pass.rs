//! Runs the GC pass over all nodes. It rewrites nodes with many dead keys, merges neighbours with
//! few live keys, and learns how old the oldest pointer to each bucket is.
//!
//! A pass may be repeated or skipped at will, with one exception: a generation must not get more
//! than 96 ahead of a pointer that a reader can meet. Buckets then wait for a pass before they are
//! reused. A pass is due long before that, and when much has died ([`Buckets::count_dead`]).
//!
//! A coalesced node is visited in place of the two old nodes, so that the pass has seen every
//! pointer. A node that cannot be read is skipped, so that the rest is kept tidy. But what it names
//! is unknown, so such a pass renews no age.
//!
//! A reader meets pointers in leaves, in interior nodes (including pointers to children that died
//! long ago: only the generation shows that), and in journal entries that a crash would replay. A
//! pointer 128 generations old would pass for a new one.

use crate::btree::coalesce::coalesce;
use crate::btree::split::{self, InteriorNode};
use crate::cpu_cost::VISIT_MAX;
use crate::error::Error;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::Buckets;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::{Key, Pointer, Position};
use core::time::Duration;

/// How often to check whether a pass is due, and how soon to retry after a failure while a task
/// waits for a pass.
const PAUSE: Duration = Duration::from_secs(1);
/// How long to leave the tree alone after a pass that found no buckets for what it had to rewrite.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(30);
/// The same after a node that could not be read: the next pass, which is as due as before, reads
/// all other nodes again.
const PAUSE_AFTER_UNREADABLE: Duration = Duration::from_secs(300);
/// A node with a key staler than this is rewritten (the kernel's number).
const STALE_REWRITE: u8 = 10;
/// Nodes between two yields to requests.
const NODES_A_TURN: u32 = 8;

/// Runs the task.
pub async fn run(set: CacheSet) {
    set.walk_ends().await;
    while !set.is_ending() {
        let mut pause = None;
        if set.with(is_due) {
            set.with(|s| s.starvation.pass_begins());
            let failure = pass(&set).await.err();
            pause = failure.as_ref().map(|error| match error {
                Error::NoSpace => PAUSE_AFTER_FAILURE,
                _ => PAUSE_AFTER_UNREADABLE,
            });
            set.with(|s| {
                s.starvation.pass_ends(failure);
                if pause.is_some() {
                    // It is as due as before.
                    s.buckets.want_gc();
                }
            });
        }
        rest(&set, pause).await;
    }
}

fn is_due(s: &mut State) -> bool {
    !s.journal.is_replaying() && (s.buckets.take_gc_wanted() || s.starvation.wants_pass())
}

/// Waits until it is time to check again. After a failure that takes long, unless tasks wait for
/// buckets.
async fn rest(set: &CacheSet, after_failure: Option<Duration>) {
    let began = set.env().now();
    loop {
        let is_pressing = set.with(|s| s.starvation.wants_pass());
        let until = began + after_failure.filter(|_| !is_pressing).unwrap_or(PAUSE);
        if set.env().now() >= until || set.is_ending() {
            return;
        }
        set.env().wait_until(&set.signals().gc_work, until).await;
        if after_failure.is_none() {
            return;
        }
    }
}

/// The live content of the tree, as found at the start or by the last complete pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeStats {
    /// Nodes of the tree.
    pub nodes: u64,
    /// Leaves among them.
    pub leaves: u64,
    /// Size of the keys in the leaves, in bytes.
    pub key_bytes: u64,
    /// Extents.
    pub keys: u64,
    /// Total length of the extents, in sectors.
    pub key_sectors: u64,
}

/// The state of one pass.
struct GcPass {
    found: TreeStats,
    oldest: OldestGenerations,
    /// A node could not be rewritten because there are no buckets, and none will come before the
    /// pass has finished. The rest of the pass only looks.
    lacks_buckets: bool,
    /// Why a node was skipped, if one was.
    passed_by: Option<Error>,
    /// The previous leaf, if it may be merged with the next one.
    sparse: Option<LeafScan>,
}

impl GcPass {
    /// Skips a node for `at` that cannot be read, or cannot be processed now; returns where the
    /// next one begins. An error means that the set has failed.
    fn passes_by(
        &mut self,
        set: &CacheSet,
        (at, level): (Position, u8),
        error: Error,
    ) -> Result<Position, Error> {
        set.check_alive()?;
        self.passed_by.get_or_insert(error);
        Ok(set.with(|s| s.end_of_missing_node(at, level)))
    }
}

/// Runs one pass. Also returns an error if it has seen everything but could not rewrite all that it
/// should have.
pub async fn pass(set: &CacheSet) -> Result<(), Error> {
    // For a bucket that no pointer names, the oldest generation is that at the start of the pass.
    let began = set.env().now();
    let mut pass = GcPass {
        found: TreeStats::default(),
        oldest: OldestGenerations::begin(set).await,
        lacks_buckets: false,
        passed_by: None,
        sparse: None,
    };
    let journalled = set.with(|s| s.journal.open_sequence());
    if !visit_leaves(set, &mut pass).await? || !visit_interior(set, &mut pass).await? {
        return Ok(());
    }
    if let Some(error) = pass.passed_by {
        return Err(error);
    }
    // Journal entries from before the pass may hold pointers that no node has any more.
    writer::let_go_through(set, journalled).await?;
    pass.oldest.end(set).await;
    set.with(|s| {
        s.stats.gc_passes += 1;
        s.stats.gc.add(began, s.now);
        s.stats.found = pass.found;
    });
    set.signals().allocator_work.notify_all();
    if pass.lacks_buckets { Err(Error::NoSpace) } else { Ok(()) }
}

/// Visits all leaves. Returns false if the set stops meanwhile.
async fn visit_leaves(set: &CacheSet, pass: &mut GcPass) -> Result<bool, Error> {
    let mut at = Position::ZERO;
    for number in 1.. {
        if set.with(|s| s.stopping) {
            return Ok(false);
        }
        at = match see_leaf(set, pass, at).await {
            Ok(next) => next,
            Err(error) => pass.passes_by(set, (at, 0), error)?,
        };
        if at == Position::MAX {
            break;
        }
        if number % NODES_A_TURN == 0 {
            set.env().yield_now().await;
        }
    }
    Ok(true)
}

/// Processes the leaf for `at`, or replaces it by another; returns where to go on.
async fn see_leaf(set: &CacheSet, pass: &mut GcPass, at: Position) -> Result<Position, Error> {
    let mut seen: Vec<Pointer> = Vec::new();
    let mut leaf = visit(set, at, &mut seen).await?;
    let before = pass.sparse.take();
    if leaf.is_sparse && !pass.lacks_buckets {
        // The live keys of both have been counted. Neighbours that clearly stay two nodes are not
        // counted again.
        let with_last = before.filter(|last| set.with(|s| s.is_one_node(last.live_words + leaf.live_words)));
        if let Some(last) = with_last
            && coalesce(set, (last.begin, 0)).await?
        {
            pass.found.forget(&last.found);
            return Ok(last.begin);
        }
        // Try this before the leaf is rewritten alone.
        if leaf.wants_rewrite && coalesce(set, (at, 0)).await? {
            return Ok(at);
        }
    }
    if leaf.wants_rewrite && !pass.lacks_buckets {
        pass.lacks_buckets = !split::compact(set, at).await?;
        seen.clear();
        leaf = visit(set, at, &mut seen).await?;
    }
    pass.oldest.see(set, &seen).await;
    pass.found.add(&leaf.found);
    let end = leaf.end;
    pass.sparse = Some(leaf).filter(|leaf| leaf.is_sparse);
    Ok(end)
}

/// What a pass has seen of a leaf.
struct LeafScan {
    /// Where the leaf begins.
    begin: Position,
    /// Where the next leaf begins.
    end: Position,
    /// It holds many dead keys.
    wants_rewrite: bool,
    /// It has so few live keys that it may be merged with its neighbour.
    is_sparse: bool,
    /// Words of its live keys.
    live_words: usize,
    /// Its extents.
    found: TreeStats,
}

impl TreeStats {
    /// The content of a tree that is one empty leaf.
    pub const NOTHING: Self = Self { nodes: 1, leaves: 1, key_bytes: 0, keys: 0, key_sectors: 0 };

    /// Counts a live key.
    pub fn count(&mut self, key: &Key) {
        self.key_bytes += key.words() as u64 * 8;
        self.keys += 1;
        self.key_sectors += key.sectors();
    }

    /// Subtracts a leaf that was added and no longer exists.
    fn forget(&mut self, leaf: &Self) {
        self.nodes -= 1;
        self.leaves -= 1;
        self.key_bytes -= leaf.key_bytes;
        self.keys -= leaf.keys;
        self.key_sectors -= leaf.key_sectors;
    }

    fn add(&mut self, leaf: &Self) {
        self.nodes += 1;
        self.leaves += 1;
        self.add_keys(leaf);
    }

    fn add_keys(&mut self, others: &Self) {
        self.key_bytes += others.key_bytes;
        self.keys += others.keys;
        self.key_sectors += others.key_sectors;
    }

    fn words(&self) -> usize {
        usize::try_from(self.key_bytes / 8).expect("words of one leaf")
    }
}

/// Counts the live keys of a run, and reports each stale pointer with its age. The sums stay in
/// registers: a pass looks at four keys or more for each block that is overwritten.
#[inline]
fn see_run(buckets: &Buckets, run: &[Key], mut is_stale: impl FnMut(Pointer, u8)) -> TreeStats {
    let mut alive = TreeStats::default();
    let mut is_alive = |pointer: Pointer| match buckets.age_of(pointer) {
        Some(0) => true,
        // Only stale pointers are reported: a current one is no older than what the pass began
        // with.
        Some(age) => {
            is_stale(pointer, age);
            false
        }
        None => false,
    };
    for key in run {
        let is_alive = match key.pointers.as_slice() {
            // Nearly all keys have one pointer.
            [pointer] => is_alive(*pointer),
            // A key without pointers is dead, too. All pointers are visited, so that each stale one
            // is reported.
            all => all.iter().filter(|pointer| is_alive(**pointer)).count() > 0,
        };
        if is_alive {
            alive.count(key);
        }
    }
    alive
}

/// Visits the leaf for `at`, and adds the stale pointers to `seen`. Other tasks run between the
/// pieces. If they change the leaf, code that acts on what was seen checks again.
async fn visit(set: &CacheSet, at: Position, seen: &mut Vec<Pointer>) -> Result<LeafScan, Error> {
    let (mut found, mut stale_max) = (TreeStats::default(), 0);
    let mut next = at;
    loop {
        if !set.with(|s| s.starvation.wants_pass()) {
            set.make_way().await;
        }
        let visited = set
            .attempt(|s| {
                s.visit_leaf(next, |buckets, run| {
                    let alive = see_run(buckets, run, |pointer, age| {
                        stale_max = stale_max.max(age);
                        seen.push(pointer);
                    });
                    found.add_keys(&alive);
                })
            })
            .await?;
        next = visited.next;
        if visited.is_end {
            let live_words = found.words();
            let half_dead = visited.words_on_disk > 64 && live_words * 2 < visited.words_on_disk;
            // A leaf with old pointers is made anew without them: invariant D12.
            let wants_rewrite = stale_max > STALE_REWRITE || half_dead;
            let is_sparse = set.with(|s| s.is_one_node(live_words));
            return Ok(LeafScan { begin: at, end: next, wants_rewrite, is_sparse, live_words, found });
        }
    }
}

/// Visits all interior nodes. Returns false if the set stops meanwhile.
async fn visit_interior(set: &CacheSet, pass: &mut GcPass) -> Result<bool, Error> {
    for level in 1..=u8::MAX {
        let mut at = Position::ZERO;
        while at < Position::MAX {
            if set.with(|s| s.stopping) {
                return Ok(false);
            }
            at = match see_interior(set, pass, (at, level)).await {
                Ok(Some(next)) => next,
                Ok(None) => return Ok(true),
                Err(error) => pass.passes_by(set, (at, level), error)?,
            };
            set.env().yield_now().await;
        }
    }
    Ok(true)
}

/// Processes the interior node at `level` for `at`, or replaces it by another. Returns where to go
/// on, or `None` if the tree has no such level.
async fn see_interior(
    set: &CacheSet,
    pass: &mut GcPass,
    (at, level): (Position, u8),
) -> Result<Option<Position>, Error> {
    if !pass.lacks_buckets && coalesce(set, (at, level)).await? {
        return Ok(Some(at));
    }
    // An interior node with old pointers is made anew without them: invariant D12.
    let is_due = |buckets: &Buckets, pointer: Pointer| {
        let age = |id| buckets.get(id).generation.after(pointer.generation());
        !pass.lacks_buckets && buckets.of(pointer).is_some_and(|id| age(id) > STALE_REWRITE)
    };
    let Some(InteriorNode { end, named, lacks_buckets }) = split::tidy(set, (at, level), is_due).await?
    else {
        return Ok(None);
    };
    pass.lacks_buckets |= lacks_buckets;
    pass.found.nodes += 1;
    pass.oldest.see(set, &named).await;
    Ok(Some(end))
}

/// The oldest generation seen of each bucket. It is kept in the table of buckets: a pass that
/// needed memory for it could fail for lack of memory.
struct OldestGenerations;

impl OldestGenerations {
    /// Starts with the current generations.
    async fn begin(set: &CacheSet) -> Self {
        each_part(set, Buckets::begin_seeing).await;
        Self
    }

    async fn see(&mut self, set: &CacheSet, pointers: &[Pointer]) {
        for pointers in pointers.chunks(VISIT_MAX) {
            set.env().breathe().await;
            set.with(|s| {
                s.work.visit(pointers.len());
                pointers.iter().for_each(|pointer| s.buckets.see(*pointer));
            });
        }
    }

    /// Stores the result in the table of buckets.
    async fn end(self, set: &CacheSet) {
        each_part(set, Buckets::end_seeing).await;
    }
}

/// Applies `change` to all buckets, in pieces; other tasks run between them. `change` returns how
/// many buckets it has handled from an index on.
async fn each_part(set: &CacheSet, change: impl Fn(&mut Buckets, usize) -> usize) {
    let mut at = 0;
    loop {
        set.env().breathe().await;
        let passed = set.with(|s| {
            let passed = change(&mut s.buckets, at);
            s.work.buckets(passed);
            passed
        });
        if passed == 0 {
            return;
        }
        at += passed;
    }
}
