//! Placement against a model: devices that come and go, sets that open, fail and are damaged,
//! caches that are replaced, processes that die. Random events ask for decisions, the model carries
//! them out, and an oracle judges each of them and what becomes of every volume in the end.

#![allow(clippy::panic, clippy::expect_used, reason = "a test fails where it cannot go on")]

use bcached_env::rng::Rng;
use bcached_format::{BackingState, Uuid};
use bcached_placement::{
    BypassedVolume, Cache, CacheFault, CacheSelector, Caches, Precheck, Reason, Role, State, Superblock,
    Verdict, Volume,
};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(30);
const NAMES: [&str; 2] = ["fast", "other"];

/// A cache device.
#[derive(Clone, Copy)]
struct CacheDevice {
    set: Uuid,
    is_connected: bool,
    condition: Condition,
}

#[derive(Clone, Copy, PartialEq)]
enum Condition {
    Good,
    Damaged,
    /// No bcache superblock is on it.
    Blank,
    /// Another program has it.
    InUse,
}

/// A backing device, and the volume on it.
struct BackingDevice {
    is_connected: bool,
    superblock: Superblock,
    /// The configuration's word.
    wanted: CacheSelector<'static>,
}

/// A cache of the configuration, which persists.
#[derive(Clone, Copy)]
struct CacheConfig {
    name: &'static str,
    ssd: usize,
    former: Option<usize>,
}

/// What a process knows of a cache.
struct KnownCache {
    name: &'static str,
    role: Role<'static>,
    ssd: usize,
    state: State,
    last_set: Option<Uuid>,
}

/// How far a volume has come in a process.
#[derive(Clone, Copy, PartialEq, Debug)]
enum VolumeState {
    Waiting,
    On(usize),
    Without,
    Refused(Option<Reason>),
}

struct Process {
    caches: Vec<KnownCache>,
    volumes: Vec<(VolumeState, Option<Duration>, Option<Uuid>)>,
}

struct World {
    rng: Rng,
    now: Duration,
    is_strict: bool,
    ssds: Vec<CacheDevice>,
    disks: Vec<BackingDevice>,
    configured: Vec<CacheConfig>,
    process: Process,
    /// When each volume was first refused its cache in this process, for the oracle.
    lacking: Vec<Option<Duration>>,
    /// What was reached, so that the test knows that it looked at something.
    reached: [u64; 6],
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let set = |number: u8| Uuid([number; 16]);
        let ssds = (0..4).map(|number| CacheDevice {
            set: set(number + 1),
            is_connected: true,
            condition: Condition::Good,
        });
        let caches = 1 + usize::try_from(rng.below(2)).expect("small");
        let configured =
            (0..caches).map(|at| CacheConfig { name: NAMES[at], ssd: at, former: None }).collect();
        let mut world = Self {
            now: Duration::ZERO,
            is_strict: rng.one_in(10),
            ssds: ssds.collect(),
            disks: Vec::new(),
            configured,
            process: Process { caches: Vec::new(), volumes: Vec::new() },
            lacking: Vec::new(),
            reached: [0; 6],
            rng,
        };
        for _ in 0..3 {
            let wanted = world.any_wanted();
            let state = world.pick([BackingState::None, BackingState::Clean, BackingState::Dirty]);
            let set = set(1 + u8::try_from(world.rng.below(2)).expect("small"));
            world.disks.push(BackingDevice {
                is_connected: true,
                superblock: Superblock { state, set },
                wanted,
            });
        }
        world.restart();
        world
    }

    fn pick<T: Copy, const N: usize>(&mut self, of: [T; N]) -> T {
        of[usize::try_from(self.rng.below(N as u64)).expect("small")]
    }

    fn any_wanted(&mut self) -> CacheSelector<'static> {
        self.pick([
            CacheSelector::Any,
            CacheSelector::Any,
            CacheSelector::Named(NAMES[0]),
            CacheSelector::Named(NAMES[1]),
            CacheSelector::NoCache,
        ])
    }

    /// A new process: nothing is known, the configuration and the devices are as they were.
    fn restart(&mut self) {
        let caches = self.configured.iter().flat_map(|cache| {
            let known = |name, role, ssd| KnownCache {
                name,
                role,
                ssd,
                state: State::Waiting(CacheFault::Other),
                last_set: None,
            };
            let former = cache.former.map(|ssd| known("former", Role::FormerOf(cache.name), ssd));
            std::iter::once(known(cache.name, Role::Permanent, cache.ssd)).chain(former)
        });
        self.process.caches = caches.collect();
        self.process.volumes = self.disks.iter().map(|_| (VolumeState::Waiting, None, None)).collect();
        self.lacking = vec![None; self.disks.len()];
    }

    fn event(&mut self) {
        match self.rng.below(24) {
            0 | 9 | 10 => {
                let at = usize::try_from(self.rng.below(4)).expect("small");
                self.ssds[at].is_connected = !self.ssds[at].is_connected;
                if !self.ssds[at].is_connected {
                    self.engine_ends(at);
                }
            }
            1 => {
                let at = usize::try_from(self.rng.below(3)).expect("small");
                self.disks[at].is_connected = !self.disks[at].is_connected;
            }
            2 => {
                let at = usize::try_from(self.rng.below(4)).expect("small");
                self.ssds[at].condition = self.pick([
                    Condition::Good,
                    Condition::Good,
                    Condition::Damaged,
                    Condition::Blank,
                    Condition::InUse,
                ]);
                self.engine_ends(at);
            }
            3 | 11 => self.now += Duration::from_secs(self.rng.below(40)),
            4 => self.restart(),
            5 => {
                let at = usize::try_from(self.rng.below(3)).expect("small");
                // The configuration is read by the next process.
                self.disks[at].wanted = self.any_wanted();
                self.restart();
            }
            6 => self.replace(),
            7 => self.clients_write(),
            8 => self.write_back(),
            12 => self.end_former(),
            _ => self.poll(),
        }
    }

    /// The engine on that device ends, and its volumes with it.
    fn engine_ends(&mut self, ssd: usize) {
        for (index, cache) in self.process.caches.iter_mut().enumerate() {
            if cache.ssd == ssd && matches!(cache.state, State::Open(_) | State::Opening(..)) {
                cache.state = State::Waiting(CacheFault::Missing);
                for (served, ..) in &mut self.process.volumes {
                    if *served == VolumeState::On(index) {
                        *served = VolumeState::Waiting;
                    }
                }
            }
        }
    }

    /// A cache becomes another device; volumes leave the former one.
    fn replace(&mut self) {
        let at = usize::try_from(self.rng.below(self.configured.len() as u64)).expect("small");
        let used: Vec<usize> =
            self.configured.iter().flat_map(|cache| [Some(cache.ssd), cache.former]).flatten().collect();
        let Some(free) = (0..4).find(|ssd| !used.contains(ssd)) else {
            self.configured[at].former = None;
            return self.restart();
        };
        let cache = &mut self.configured[at];
        cache.former = if cache.former.is_none() { Some(cache.ssd) } else { None };
        if cache.former.is_some() {
            cache.ssd = free;
        }
        self.restart();
    }

    /// A former device is being stopped, as at the end of a replacement.
    fn end_former(&mut self) {
        for index in 0..self.process.caches.len() {
            let cache = &self.process.caches[index];
            let is_served = self.process.volumes.iter().any(|(served, ..)| *served == VolumeState::On(index));
            if matches!(cache.role, Role::FormerOf(_)) && !is_served {
                self.process.caches[index].state = State::Closed;
            }
        }
    }

    fn clients_write(&mut self) {
        for (disk, (served, ..)) in self.disks.iter_mut().zip(&self.process.volumes) {
            if matches!(served, VolumeState::On(_)) && self.rng.one_in(2) {
                disk.superblock.state = BackingState::Dirty;
            }
        }
    }

    fn write_back(&mut self) {
        for (disk, (served, ..)) in self.disks.iter_mut().zip(&self.process.volumes) {
            if matches!(served, VolumeState::On(_)) && disk.superblock.state == BackingState::Dirty {
                disk.superblock.state = BackingState::Clean;
            }
        }
    }

    /// The supervisor's loop: caches first, then volumes.
    fn poll(&mut self) {
        for index in 0..self.process.caches.len() {
            let cache = &self.process.caches[index];
            let ssd = self.ssds[cache.ssd];
            let fault = match (ssd.is_connected, ssd.condition) {
                (false, _) => Some(CacheFault::Missing),
                (true, Condition::Good) => None,
                (true, Condition::Damaged) => Some(CacheFault::Damaged),
                (true, Condition::Blank) => Some(CacheFault::NotBcache),
                (true, Condition::InUse) => Some(CacheFault::Other),
            };
            let cache = &mut self.process.caches[index];
            cache.state = match (cache.state, fault) {
                (State::Waiting(_), Some(CacheFault::Damaged)) => {
                    cache.last_set = Some(ssd.set);
                    State::Failed(CacheFault::Damaged)
                }
                (State::Waiting(_), Some(fault @ (CacheFault::Missing | CacheFault::Other))) => {
                    State::Waiting(fault)
                }
                (State::Waiting(_), Some(fault)) => State::Failed(fault),
                (State::Waiting(_), None) => {
                    cache.last_set = Some(ssd.set);
                    // It may have failed to open before.
                    let before = if self.rng.one_in(3) { Some(CacheFault::Missing) } else { None };
                    State::Opening(ssd.set, before)
                }
                (State::Opening(set, _), None) => {
                    // A set has come: what was refused for want of it is looked at again.
                    for (served, ..) in &mut self.process.volumes {
                        if matches!(served, VolumeState::Refused(_)) {
                            *served = VolumeState::Waiting;
                        }
                    }
                    State::Open(set)
                }
                (state, _) => state,
            };
        }
        for index in 0..self.disks.len() {
            self.decide(index);
        }
    }

    fn views(&self) -> Vec<Cache<'static>> {
        let view = |known: &KnownCache| Cache {
            name: Some(known.name),
            role: known.role,
            state: known.state,
            last_set: known.last_set,
        };
        self.process.caches.iter().map(view).collect()
    }

    fn decide(&mut self, index: usize) {
        let views = self.views();
        let caches = Caches { all: &views, is_strict: self.is_strict };
        let disk = &self.disks[index];
        let (served, lacks_since, set) = self.process.volumes[index];
        if served == VolumeState::Without
            && let Some(set) = set
            && let Some(back) = caches.is_back(&BypassedVolume { wanted: disk.wanted, set })
        {
            assert!(matches!(views[back].state, State::Open(_)), "only an open set takes a volume back");
            assert_ne!(disk.wanted, CacheSelector::NoCache);
            self.process.volumes[index] = (VolumeState::Waiting, None, None);
            self.reached[5] += 1;
            return;
        }
        if served != VolumeState::Waiting || !disk.is_connected {
            return;
        }
        let volume = Volume { wanted: disk.wanted, wait: WAIT, lacks_since };
        match caches.before(&volume) {
            Precheck::ReadSuperblock => {}
            Precheck::Refuse(cache) => {
                self.process.volumes[index].0 = VolumeState::Refused(Some(Reason::FailedCache(cache)));
                return;
            }
            Precheck::Wait | Precheck::Ignore => return,
        }
        let decision = caches.decide(&volume, &disk.superblock, self.now);
        self.judge(index, &caches, decision.verdict);
        let disk = &mut self.disks[index];
        let state = match decision.verdict {
            Verdict::Serve { cache, adopts } => self.process.caches[cache].attach(disk, adopts, cache),
            Verdict::Without(why) => {
                if disk.superblock.state == BackingState::Clean {
                    disk.superblock.state = BackingState::Stale;
                }
                self.process.volumes[index].2 = why.map(|_| disk.superblock.set);
                VolumeState::Without
            }
            Verdict::Wait(_) => VolumeState::Waiting,
            Verdict::Refuse(why) => VolumeState::Refused(Some(why)),
        };
        self.process.volumes[index].0 = state;
        self.process.volumes[index].1 = decision.lacks_since;
    }

    /// What must be true of a decision, whatever led to it.
    fn judge(&mut self, index: usize, caches: &Caches<'_>, verdict: Verdict) {
        let disk = &self.disks[index];
        let Superblock { state, set } = disk.superblock;
        let is_held = matches!(state, BackingState::Clean | BackingState::Dirty);
        let open = |cache: &Cache<'_>| cache.state == State::Open(set) && cache.role != Role::Bypass;
        let names = |cache: &Cache<'_>| match disk.wanted {
            CacheSelector::Any => true,
            CacheSelector::NoCache => false,
            CacheSelector::Named(wanted) => {
                cache.name == Some(wanted) || cache.role == Role::FormerOf(wanted)
            }
        };
        let its = caches.all.iter().find(|cache| open(cache) && names(cache));
        match verdict {
            Verdict::Serve { cache, adopts } => {
                let serving = &caches.all[cache];
                assert!(matches!(serving.state, State::Open(_)), "it serves");
                assert!(!adopts || state == BackingState::Stale, "{state:?} belongs to a set");
                // Or it comes from the former device of that cache.
                let may_adopt =
                    names(serving) || serving.state == State::Open(set) || caches.former_of(cache).is_some();
                assert!(!adopts || may_adopt, "its section names another cache: {:?}", disk.wanted);
                let is_new_open = |former: &str| {
                    let is_it =
                        |cache: &&Cache<'_>| cache.role == Role::Permanent && cache.name == Some(former);
                    caches.all.iter().find(is_it).is_some_and(|new| matches!(new.state, State::Open(_)))
                };
                let is_left = matches!(serving.role, Role::FormerOf(name) if is_new_open(name));
                assert!(is_held || !is_left, "nothing goes to a device that is left");
                if is_held && its.is_some() {
                    assert_eq!(serving.state, State::Open(set), "its own set is open, and it may be there");
                }
                self.reached[usize::from(adopts)] += 1;
            }
            Verdict::Without(why) => {
                // Otherwise old data would be served (invariant D49).
                assert_ne!(state, BackingState::Dirty, "its newest data may be in its cache");
                assert!(why.is_none() || !self.is_strict, "its devices are needed now");
                assert!(why.is_none() || !is_held || its.is_none(), "its cache is open");
                assert!(
                    why.is_some() || state != BackingState::Clean || disk.wanted == CacheSelector::NoCache
                );
                // What its set holds would be void.
                let said = caches.said(disk.wanted);
                let is_replaced = said.is_some_and(|said| caches.former_of(said).is_some());
                let is_lost = is_replaced && is_held && caches.all.iter().any(open);
                assert!(why.is_none() || !is_lost, "what a third set holds of it would be void");
                let is_cold = why.is_none() && state == BackingState::Clean;
                assert!(!is_cold || !caches.all.iter().any(open), "its set is open");
                let is_damaged =
                    |cache: usize| matches!(caches.all[cache].state, State::Failed(CacheFault::Damaged));
                if let Some(
                    Reason::NamedCache(cache) | Reason::PossibleCache(cache) | Reason::FailedCache(cache),
                ) = why
                    && !is_damaged(cache)
                {
                    let since = self.lacking[index].expect("it was waited for before");
                    assert!(self.now - since >= WAIT, "it goes cold after {:?}", self.now - since);
                }
                self.reached[2 + usize::from(why.is_some())] += 1;
            }
            Verdict::Wait(Reason::NamedCache(_) | Reason::PossibleCache(_)) => {
                self.lacking[index].get_or_insert(self.now);
                self.reached[4] += 1;
            }
            Verdict::Wait(_) | Verdict::Refuse(_) => {}
        }
    }

    /// Lets time pass without events. A volume that still waits then must wait for something that
    /// is named, in trouble, and needed (invariant D50).
    fn settle(&mut self) {
        for _ in 0..6 {
            self.now += WAIT;
            self.poll();
        }
        let views = self.views();
        let caches = Caches { all: &views, is_strict: self.is_strict };
        for (disk, (served, lacks_since, _)) in self.disks.iter().zip(&self.process.volumes) {
            if *served != VolumeState::Waiting || !disk.is_connected {
                continue;
            }
            let volume = Volume { wanted: disk.wanted, wait: WAIT, lacks_since: *lacks_since };
            let verdict = caches.decide(&volume, &disk.superblock, self.now).verdict;
            let Verdict::Wait(why) = verdict else {
                panic!("it was asked, and has not been served: {verdict:?}")
            };
            let is_needed = self.is_strict || disk.superblock.state == BackingState::Dirty;
            match why {
                Reason::NamedCache(cache) | Reason::PossibleCache(cache) => match views[cache].state {
                    State::Waiting(CacheFault::Missing) => assert!(is_needed, "it can do without {cache}"),
                    State::Waiting(_) => {}
                    state => panic!("it waits for a cache that is {state:?}"),
                },
                Reason::FormerDevice => {
                    let is_away = |cache: &Cache<'_>| {
                        matches!(cache.role, Role::FormerOf(_)) && !matches!(cache.state, State::Open(_))
                    };
                    assert!(views.iter().any(is_away), "the former device of its cache is away");
                }
                why => panic!("it waits for {why:?}: {:?}", disk.superblock),
            }
        }
    }
}

impl KnownCache {
    /// An engine takes a device, or refuses it, as the engine does.
    fn attach(&self, disk: &mut BackingDevice, adopts: bool, index: usize) -> VolumeState {
        let State::Open(set) = self.state else { panic!("it is open") };
        match disk.superblock.state {
            BackingState::Clean | BackingState::Dirty if disk.superblock.set != set => {
                VolumeState::Refused(None)
            }
            BackingState::Stale if disk.superblock.set != set && !adopts => VolumeState::Refused(None),
            BackingState::Clean | BackingState::Dirty => VolumeState::On(index),
            BackingState::None | BackingState::Stale => {
                disk.superblock = Superblock { state: BackingState::Clean, set };
                VolumeState::On(index)
            }
        }
    }
}

#[test]
fn no_decision_serves_old_data_or_waits_for_nothing() {
    let mut reached = [0; 6];
    for seed in 0..20_000 {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..160 {
                world.event();
            }
            world.settle();
            world.reached
        });
        let run = run.unwrap_or_else(|_| panic!("seed {seed}"));
        for (all, one) in reached.iter_mut().zip(run) {
            *all += one;
        }
    }
    assert!(reached.iter().all(|times| *times > 500), "some decisions were hardly drawn: {reached:?}");
}
