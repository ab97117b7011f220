//! The decisions.

use crate::{
    BypassedVolume, Cache, CacheFault, CacheSelector, Caches, Decision, Precheck, Reason, Role, State,
    Superblock, Verdict, Volume,
};
use bcached_format::{BackingState, Uuid};
use core::time::Duration;

impl<'a> Caches<'a> {
    /// What is known of `volume` before its device is read. Reading a device can take long, so it
    /// is done only if it decides something.
    #[must_use]
    pub fn before(&self, volume: &Volume<'a>) -> Precheck {
        let Some(said) = self.said(volume.wanted) else { return Precheck::ReadSuperblock };
        if self.former_of(said).is_some() {
            // The device says on which of the two it is.
            return Precheck::ReadSuperblock;
        }
        match self.all[said].state {
            State::Failed(fault) if !self.goes_without(fault) => Precheck::Refuse(said),
            State::Opening(_, None) => Precheck::Wait,
            State::Closed | State::Released => Precheck::Ignore,
            State::Failed(_) | State::Waiting(_) | State::Opening(_, Some(_)) | State::Open(_) => {
                Precheck::ReadSuperblock
            }
        }
    }

    /// Decides about `volume`, whose device says `superblock`, at the time `now`.
    #[must_use]
    pub fn decide(&self, volume: &Volume<'a>, superblock: &Superblock, now: Duration) -> Decision {
        let decision = |verdict| Decision { verdict, lacks_since: volume.lacks_since, misses_set: false };
        let said = match volume.wanted {
            CacheSelector::NoCache => None,
            wanted => self.said(wanted).or_else(|| self.successor(superblock)),
        };
        match self.before(volume) {
            Precheck::ReadSuperblock => {}
            Precheck::Wait | Precheck::Ignore => return decision(Verdict::Wait(Reason::Opening)),
            Precheck::Refuse(cache) => return decision(Verdict::Refuse(Reason::FailedCache(cache))),
        }
        let on_former = said.and_then(|said| self.on_former(said, superblock));
        if on_former.is_none()
            && let Some(cache) = said
            && let Some(fault) = self.all[cache].fault()
        {
            if self.is_of_a_third_set(cache, superblock) {
                // What its own set holds of it stays valid.
                return decision(Verdict::Refuse(Reason::NoCache));
            }
            if matches!(self.all[cache].state, State::Failed(_)) && !self.goes_without(fault) {
                return decision(Verdict::Refuse(Reason::FailedCache(cache)));
            }
            return self.lacks(volume, superblock, (fault, Reason::NamedCache(cache)), now);
        }
        let is_alone = self.real().next().is_none();
        if !superblock.is_held() && (volume.wanted == CacheSelector::NoCache || is_alone) {
            return decision(Verdict::Without(None));
        }
        match on_former.unwrap_or_else(|| self.cache_for(said, superblock)) {
            CacheLookup::Cache(cache) => {
                let adopts =
                    superblock.state == BackingState::Stale && self.is_to_be_on(volume.wanted, cache);
                decision(Verdict::Serve { cache, adopts })
            }
            CacheLookup::Waiting(why) => decision(Verdict::Wait(why)),
            CacheLookup::Missing(fault, why) => self.lacks(volume, superblock, (fault, why), now),
            // Its cache is not served here, and all that is in it is on the device, too.
            CacheLookup::Refused(_)
                if volume.wanted == CacheSelector::NoCache && superblock.state == BackingState::Clean =>
            {
                decision(Verdict::Without(None))
            }
            CacheLookup::Refused(why) => decision(Verdict::Refuse(why)),
        }
    }

    /// The cache to which a volume goes back that is served without it, if it is open again.
    #[must_use]
    pub fn is_back(&self, volume: &BypassedVolume<'a>) -> Option<usize> {
        let is_only = self.permanent().count() == 1;
        let mut open = self.permanent().filter_map(|(index, cache)| match cache.state {
            State::Open(set) => Some((index, cache, set)),
            _ => None,
        });
        let its = open.find(|(_, cache, set)| match volume.wanted {
            CacheSelector::Named(wanted) => cache.name == Some(wanted),
            CacheSelector::Any => is_only || *set == volume.set,
            CacheSelector::NoCache => false,
        });
        its.map(|(index, ..)| index)
    }

    /// The cache that the configuration names: by name, or the only one.
    #[must_use]
    pub fn said(&self, wanted: CacheSelector<'a>) -> Option<usize> {
        match wanted {
            CacheSelector::NoCache => None,
            CacheSelector::Named(name) => {
                self.permanent().find(|(_, cache)| cache.name == Some(name)).map(|(index, _)| index)
            }
            CacheSelector::Any => {
                let mut all = self.permanent().map(|(index, _)| index);
                all.next().filter(|_| all.next().is_none())
            }
        }
    }

    /// Whether the configuration names `cache`, or names none and there is no other.
    #[must_use]
    pub fn is_meant(&self, wanted: CacheSelector<'a>, cache: usize) -> bool {
        match wanted {
            CacheSelector::Named(wanted) => self.all[cache].name == Some(wanted),
            CacheSelector::Any => self.permanent().map(|(index, _)| index).eq([cache]),
            CacheSelector::NoCache => false,
        }
    }

    /// The former device of a cache, while volumes are to leave it.
    #[must_use]
    pub fn former_of(&self, cache: usize) -> Option<usize> {
        let name = self.all.get(cache)?.name?;
        self.real().find(|(_, former)| former.role == Role::FormerOf(name)).map(|(index, _)| index)
    }

    /// The cache that takes the place of the set that `superblock` names, if that is on a former
    /// device, the volume has left it, and the new device is open. Then nothing goes back to the
    /// former one.
    fn successor(&self, superblock: &Superblock) -> Option<usize> {
        if superblock.is_held() {
            return None;
        }
        let Role::FormerOf(name) = self.all[self.open_with(superblock.set)?].role else { return None };
        let successor = self.said(CacheSelector::Named(name))?;
        matches!(self.all[successor].state, State::Open(_)).then_some(successor)
    }

    /// Whether a volume that is on neither device of a cache that is being replaced belongs to a
    /// third set: to one that is open, or at least not to the one that the new device was seen
    /// with.
    fn is_of_a_third_set(&self, said: usize, superblock: &Superblock) -> bool {
        let is_seen_with_another = self.all[said].last_set.is_some_and(|set| set != superblock.set);
        let is_elsewhere = is_seen_with_another || self.open_with(superblock.set).is_some();
        self.former_of(said).is_some() && superblock.is_held() && is_elsewhere
    }

    /// The cache that serves this set.
    fn open_with(&self, set: Uuid) -> Option<usize> {
        self.real().find(|(_, cache)| cache.state == State::Open(set)).map(|(index, _)| index)
    }

    /// Caches, those that are about to go included, without what was released.
    fn real(&self) -> impl Iterator<Item = (usize, &Cache<'a>)> {
        let all = self.all.iter().enumerate();
        all.filter(|(_, cache)| cache.role != Role::Bypass && cache.state != State::Released)
    }

    /// Caches that stay.
    fn permanent(&self) -> impl Iterator<Item = (usize, &Cache<'a>)> {
        self.real().filter(|(_, cache)| cache.role == Role::Permanent)
    }

    /// Whether a volume may be served without a cache that has failed like this, if nothing of it
    /// is dirty there; its device has to be read.
    fn goes_without(&self, fault: CacheFault) -> bool {
        !self.is_strict && (fault.is_missing() || fault == CacheFault::NotBcache)
    }

    /// Whether a volume is configured for `cache`, or comes to it from its former device.
    fn is_to_be_on(&self, wanted: CacheSelector<'a>, cache: usize) -> bool {
        self.is_meant(wanted, cache) || self.former_of(cache).is_some()
    }

    /// Its cache is missing: the volume waits for it, or is served without it once it has waited
    /// long enough. Never if the cache may have its newest data.
    fn lacks(
        &self,
        volume: &Volume<'a>,
        superblock: &Superblock,
        (fault, why): (CacheFault, Reason),
        now: Duration,
    ) -> Decision {
        // The backing device alone would serve old data (invariant D49).
        let is_needed = superblock.state == BackingState::Dirty;
        let lacks_since = match self.is_strict || !fault.is_missing() || is_needed {
            true => None,
            false => Some(volume.lacks_since.unwrap_or(now)),
        };
        // A damaged set does not come back by waiting.
        let is_enough = |since| fault == CacheFault::Damaged || now.saturating_sub(since) >= volume.wait;
        let verdict = match lacks_since {
            Some(since) if is_enough(since) => Verdict::Without(Some(why)),
            _ if matches!(fault, CacheFault::Damaged | CacheFault::NotBcache) => Verdict::Refuse(why),
            _ => Verdict::Wait(why),
        };
        Decision { verdict, lacks_since, misses_set: true }
    }

    /// The cache for a volume: the one that its section names, or else the one whose set its
    /// superblock names.
    fn cache_for(&self, said: Option<usize>, superblock: &Superblock) -> CacheLookup {
        if let Some(said) = said {
            return match self.all[said].state {
                State::Open(_) => CacheLookup::Cache(said),
                _ => CacheLookup::Waiting(Reason::Opening),
            };
        }
        if let Some(index) = self.open_with(superblock.set) {
            return CacheLookup::Cache(index);
        }
        let mut its = self.real().filter(|(_, cache)| cache.last_set == Some(superblock.set));
        let failed = its.find_map(|(index, cache)| match cache.state {
            State::Failed(fault) => Some((index, fault)),
            _ => None,
        });
        if let Some((index, fault)) = failed {
            return match !self.is_strict && fault.is_missing() {
                true => CacheLookup::Missing(fault, Reason::FailedCache(index)),
                false => CacheLookup::Refused(Reason::FailedCache(index)),
            };
        }
        if self.real().any(|(_, cache)| matches!(cache.state, State::Opening(_, None))) {
            return CacheLookup::Waiting(Reason::Opening);
        }
        // It may be any of these, also one that is only in use.
        let waits = || {
            let all = self.all.iter().enumerate();
            all.filter_map(|(index, cache)| match cache.state {
                State::Waiting(fault) | State::Opening(_, Some(fault)) => Some((index, fault)),
                _ => None,
            })
        };
        if let Some((index, _)) = waits().find(|(_, fault)| !fault.is_missing()) {
            return CacheLookup::Waiting(Reason::PossibleCache(index));
        }
        // Even if that one is damaged, the volume's may be another one that can still come.
        let first = waits().next();
        first.map_or(CacheLookup::Refused(Reason::NoCache), |(index, _)| {
            CacheLookup::Missing(CacheFault::Missing, Reason::PossibleCache(index))
        })
    }

    /// Where a volume is served that has not left the former device of its cache; `None` if it has,
    /// or there is none.
    fn on_former(&self, said: usize, superblock: &Superblock) -> Option<CacheLookup> {
        let former = self.former_of(said)?;
        if !superblock.is_held() || self.all[said].set() == Some(superblock.set) {
            return None;
        }
        match self.all[former].state {
            State::Open(set) if set == superblock.set => Some(CacheLookup::Cache(former)),
            // It is not on the former one, so nothing is left to wait for there (invariant D50).
            State::Open(_) | State::Closed | State::Released => None,
            // Which set the new device has, which may be this volume's, is not known yet.
            _ if matches!(self.all[said].state, State::Waiting(_)) => {
                Some(CacheLookup::Waiting(Reason::FormerDevice))
            }
            State::Failed(_) => Some(CacheLookup::Refused(Reason::FailedCache(former))),
            State::Waiting(_) => Some(CacheLookup::Waiting(Reason::FormerDevice)),
            State::Opening(..) => Some(CacheLookup::Waiting(Reason::Opening)),
        }
    }
}

/// The outcome of the search for a volume's cache.
enum CacheLookup {
    Cache(usize),
    Waiting(Reason),
    Missing(CacheFault, Reason),
    Refused(Reason),
}

impl Cache<'_> {
    /// The set that it serves or is about to serve.
    const fn set(&self) -> Option<Uuid> {
        match self.state {
            State::Opening(set, _) | State::Open(set) => Some(set),
            _ => None,
        }
    }

    /// What keeps it from being opened, now or the last time.
    const fn fault(&self) -> Option<CacheFault> {
        match self.state {
            State::Waiting(fault) | State::Failed(fault) | State::Opening(_, Some(fault)) => Some(fault),
            _ => None,
        }
    }
}
