//! Clients of a volume: a fixed number of requests in flight, drawn from a seed. The latency of
//! each is measured from submission to completion, in virtual nanoseconds.

use super::latencies::Latencies;
use super::zipf::Zipf;
use bcached_engine::{CacheSet, Request, VolumeId};
use bcached_env::rng::Rng;
use bcached_env::{Buffer, Env, Payload};
use std::cell::RefCell;
use std::rc::Rc;

/// CPU time of a request besides the engine's own work, in nanoseconds: receiving it from a port
/// and answering it there. Measured with a prototype of the port, for a request at depth 8 and
/// more.
const PORT_NS: u64 = 200;

/// Where requests go in the region.
#[derive(Clone, Debug)]
pub enum AccessPattern {
    /// Uniformly random.
    Random,
    /// Sequential from the beginning of the region, and again from there.
    Sequential,
    /// Sequential with gaps: each this many request lengths after the last, so that the blocks
    /// between are skipped.
    Strided(u64),
    /// Zipf-distributed: some blocks are much more frequent than others. The share of the n-th is
    /// 1/n to the power of `theta`; its place does not depend on n.
    Zipf(Rc<Zipf>),
}

/// When a load ends.
#[derive(Clone, Copy, Debug)]
pub enum StopAfter {
    /// After this many requests.
    Requests(u64),
    /// After this many virtual nanoseconds.
    Nanoseconds(u64),
}

/// The parameters of a load.
#[derive(Clone, Debug)]
pub struct Load {
    /// Number of requests in flight.
    pub depth: u64,
    /// Length of a request, in sectors.
    pub sectors: u64,
    /// Size of the region, from the beginning of the volume, in sectors.
    pub region: u64,
    /// Where in the region requests go.
    pub places: AccessPattern,
    /// Percentage of reads.
    pub read_percent: u64,
    /// Whether writes carry FUA.
    pub fua: bool,
    /// Each client flushes after this many of its writes; 0: never.
    pub flush_each: u64,
    /// When it ends.
    pub until: StopAfter,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Load {
    /// Random writes of 4 KiB over `region` sectors.
    #[must_use]
    pub const fn random_writes(region: u64, depth: u64, until: StopAfter) -> Self {
        Self {
            depth,
            sectors: 8,
            region,
            places: AccessPattern::Random,
            read_percent: 0,
            fua: false,
            flush_each: 0,
            until,
            seed: 1,
        }
    }
}

/// The result of a load.
#[derive(Clone, Debug, Default)]
pub struct LoadResult {
    /// Virtual nanoseconds from the first request to the last completion.
    pub nanoseconds: u64,
    /// Number of completed reads and writes.
    pub requests: u64,
    /// Latencies of reads.
    pub reads: Latencies,
    /// Latencies of writes, without the flushes that follow them.
    pub writes: Latencies,
    /// Reads and writes completed in each second of the load.
    pub by_second: Vec<u64>,
}

impl LoadResult {
    /// Returns reads and writes per second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    pub fn iops(&self) -> f64 {
        self.requests as f64 * 1e9 / self.nanoseconds.max(1) as f64
    }
}

struct LoadState {
    load: Load,
    env: Env,
    set: CacheSet,
    volume: VolumeId,
    began: u64,
    payload: Payload,
    drawn: RefCell<(Rng, u64)>,
    /// The result so far, and the number of clients that are still running.
    done: RefCell<(LoadResult, u64)>,
}

const SECTOR: usize = 512;

impl LoadState {
    /// Draws the next request: whether it is a read, and its sector. Returns `None` if the load has
    /// ended.
    fn draw(&self) -> Option<(bool, u64)> {
        let Load { region, sectors, read_percent, until, places, .. } = &self.load;
        let mut drawn = self.drawn.borrow_mut();
        let (rng, count) = &mut *drawn;
        let is_over = match until {
            StopAfter::Requests(limit) => *count >= *limit,
            StopAfter::Nanoseconds(limit) => self.env.now().0 >= self.began + limit,
        };
        if is_over {
            return None;
        }
        let blocks = region / sectors;
        let block = match places {
            AccessPattern::Random => rng.below(blocks),
            AccessPattern::Sequential => *count % blocks,
            AccessPattern::Strided(stride) => *count * stride % blocks,
            AccessPattern::Zipf(zipf) => zipf.draw(rng) % blocks,
        };
        *count += 1;
        Some((rng.below(100) < *read_percent, block * sectors))
    }

    async fn work(&self) {
        let mut writes = 0;
        while let Some((reads, sector)) = self.draw() {
            self.env.charge(PORT_NS);
            let since = self.env.now().0;
            let request = if reads {
                Request::Read { sector, buffer: Buffer::zeroed(self.payload.len()) }
            } else {
                Request::Write { sector, payload: self.payload.clone(), fua: self.load.fua }
            };
            self.set.serve(self.volume, request).await.result.expect("no device fails");
            // The engine's last work for this request is charged when the task yields.
            self.env.yield_now().await;
            self.count(reads, since);
            writes += u64::from(!reads);
            if self.load.flush_each > 0 && !reads && writes.is_multiple_of(self.load.flush_each) {
                self.set.serve(self.volume, Request::Flush).await.result.expect("no device fails");
            }
        }
        let mut done = self.done.borrow_mut();
        done.0.nanoseconds = self.env.now().0 - self.began;
        done.1 -= 1;
    }

    fn count(&self, reads: bool, since: u64) {
        let now = self.env.now().0;
        let (done, _) = &mut *self.done.borrow_mut();
        done.requests += 1;
        (if reads { &mut done.reads } else { &mut done.writes }).add(now - since);
        let second = usize::try_from((now - self.began) / 1_000_000_000).expect("a load lasts days at most");
        if done.by_second.len() <= second {
            done.by_second.resize(second + 1, 0);
        }
        done.by_second[second] += 1;
    }
}

/// A running load.
pub(super) struct RunningLoad(Rc<LoadState>);

impl RunningLoad {
    pub(super) fn begin(load: &Load, env: Env, set: &CacheSet, volume: VolumeId) -> Self {
        let bytes = usize::try_from(load.sectors).expect("a request fits in memory") * SECTOR;
        let clients = Rc::new(LoadState {
            load: load.clone(),
            began: env.now().0,
            env: env.clone(),
            set: set.clone(),
            volume,
            payload: Buffer::zeroed(bytes).freeze(),
            drawn: RefCell::new((Rng::new(load.seed), 0)),
            done: RefCell::new((LoadResult::default(), load.depth)),
        });
        for _ in 0..load.depth {
            let clients = Rc::clone(&clients);
            env.spawn(async move { clients.work().await });
        }
        Self(clients)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.0.done.borrow().1 == 0
    }

    pub(super) fn done(self) -> LoadResult {
        std::mem::take(&mut self.0.done.borrow_mut().0)
    }
}
