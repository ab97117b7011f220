//! Clients: so many requests in flight, drawn from a seed, each one's time taken from asking to answer in virtual nanoseconds.

use super::latencies::Latencies;
use super::zipf::Zipf;
use bcached_engine::{CacheSet, Request, VolumeId};
use bcached_env::rng::Rng;
use bcached_env::{Buffer, Env, Payload};
use std::cell::RefCell;
use std::rc::Rc;

/// CPU time that a request takes beside the engine's own work, in nanoseconds: taking it from a port and answering it there. What
/// a prototype of the port took for a request at depth 8 and more.
const PORT_NS: u64 = 200;

/// Where requests go.
#[derive(Clone, Debug)]
pub enum Places {
    /// Anywhere in the region, alike.
    Random,
    /// One after the other from the beginning of the region, and again.
    Sequential,
    /// One after the other, each so many requests' lengths behind the last: what lies between them is not asked for.
    Strided(u64),
    /// Anywhere, some blocks much more often than others: the share of the n-th is 1/n to the power of `theta`; where it lies
    /// has nothing to do with n.
    Zipf(Rc<Zipf>),
}

/// When a load ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// So many requests have been asked.
    Requests(u64),
    /// It has lasted so long, in virtual nanoseconds.
    Nanoseconds(u64),
}

/// What clients do.
#[derive(Clone, Debug)]
pub struct Load {
    /// Requests in flight.
    pub depth: u64,
    /// Length of a request, in sectors.
    pub sectors: u64,
    /// The region, from the beginning of the volume, in sectors.
    pub region: u64,
    /// Where in it.
    pub places: Places,
    /// Reads, in percent.
    pub read_percent: u64,
    /// Writes carry FUA.
    pub fua: bool,
    /// Each client flushes after so many of its writes; 0: never.
    pub flush_each: u64,
    /// When it ends.
    pub until: Until,
    /// What it draws from.
    pub seed: u64,
}

impl Load {
    /// Random writes of 4 KiB over `region` sectors.
    #[must_use]
    pub const fn random_writes(region: u64, depth: u64, until: Until) -> Self {
        Self {
            depth,
            sectors: 8,
            region,
            places: Places::Random,
            read_percent: 0,
            fua: false,
            flush_each: 0,
            until,
            seed: 1,
        }
    }
}

/// What came of a load.
#[derive(Clone, Debug, Default)]
pub struct Done {
    /// Virtual nanoseconds from the first request to the last answer.
    pub nanoseconds: u64,
    /// Reads and writes answered.
    pub requests: u64,
    /// How long reads took.
    pub reads: Latencies,
    /// How long writes took, without the flushes behind them.
    pub writes: Latencies,
    /// Reads and writes answered in each whole second of the load.
    pub by_second: Vec<u64>,
}

impl Done {
    /// Reads and writes a second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    pub fn iops(&self) -> f64 {
        self.requests as f64 * 1e9 / self.nanoseconds.max(1) as f64
    }
}

struct Clients {
    load: Load,
    env: Env,
    set: CacheSet,
    volume: VolumeId,
    began: u64,
    payload: Payload,
    drawn: RefCell<(Rng, u64)>,
    /// What came of it, and how many clients are still at it.
    done: RefCell<(Done, u64)>,
}

const SECTOR: usize = 512;

impl Clients {
    /// The next request: whether it reads, and where; `None` if the load has come to its end.
    fn draw(&self) -> Option<(bool, u64)> {
        let Load { region, sectors, read_percent, until, places, .. } = &self.load;
        let mut drawn = self.drawn.borrow_mut();
        let (rng, count) = &mut *drawn;
        let is_over = match until {
            Until::Requests(limit) => *count >= *limit,
            Until::Nanoseconds(limit) => self.env.now().0 >= self.began + limit,
        };
        if is_over {
            return None;
        }
        let blocks = region / sectors;
        let block = match places {
            Places::Random => rng.below(blocks),
            Places::Sequential => *count % blocks,
            Places::Strided(stride) => *count * stride % blocks,
            Places::Zipf(zipf) => zipf.draw(rng) % blocks,
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
            // What the engine has done last for this request is charged when the task lets others run.
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

/// A load under way.
pub(super) struct Run(Rc<Clients>);

impl Run {
    pub(super) fn begin(load: &Load, env: Env, set: &CacheSet, volume: VolumeId) -> Self {
        let bytes = usize::try_from(load.sectors).expect("a request fits in memory") * SECTOR;
        let clients = Rc::new(Clients {
            load: load.clone(),
            began: env.now().0,
            env: env.clone(),
            set: set.clone(),
            volume,
            payload: Buffer::zeroed(bytes).freeze(),
            drawn: RefCell::new((Rng::new(load.seed), 0)),
            done: RefCell::new((Done::default(), load.depth)),
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

    pub(super) fn done(self) -> Done {
        std::mem::take(&mut self.0.done.borrow_mut().0)
    }
}
