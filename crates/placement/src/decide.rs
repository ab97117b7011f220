//! The decisions.

use crate::{
    Before, Bypassed, Cache, Caches, Decision, Role, State, Superblock, Trouble, Verdict, Volume, Wanted, Why,
};
use bcached_format::{BackingState, Uuid};
use core::time::Duration;

impl<'a> Caches<'a> {
    /// What is known of `volume` before its device is read. Reading a device can take long, so it
    /// is done only if it decides something.
    #[must_use]
    pub fn before(&self, volume: &Volume<'a>) -> Before {
        let Some(said) = self.said(volume.wanted) else { return Before::Look };
        if self.former_of(said).is_some() {
            // The device says on which of the two it is.
            return Before::Look;
        }
        match self.all[said].state {
            State::Failed(trouble) if !self.goes_without(trouble) => Before::Refuse(said),
            State::Opening(_, None) => Before::Wait,
            State::Closed | State::Released => Before::Nothing,
            State::Failed(_) | State::Waiting(_) | State::Opening(_, Some(_)) | State::Open(_) => {
                Before::Look
            }
        }
    }

    /// Decides about `volume`, whose device says `superblock`, at the time `now`.
    #[must_use]
    pub fn decide(&self, volume: &Volume<'a>, superblock: &Superblock, now: Duration) -> Decision {
        let decision = |verdict| Decision { verdict, lacks_since: volume.lacks_since, misses_set: false };
        let said = match volume.wanted {
            Wanted::NoCache => None,
            wanted => self.said(wanted).or_else(|| self.successor(superblock)),
        };
        match self.before(volume) {
            Before::Look => {}
            Before::Wait | Before::Nothing => return decision(Verdict::Wait(Why::Opens)),
            Before::Refuse(cache) => return decision(Verdict::Refuse(Why::Failed(cache))),
        }
        let on_former = said.and_then(|said| self.on_former(said, superblock));
        if on_former.is_none()
            && let Some(cache) = said
            && let Some(trouble) = self.all[cache].trouble()
        {
            if self.is_of_a_third_set(cache, superblock) {
                // What its own set holds of it stays valid.
                return decision(Verdict::Refuse(Why::NoCache));
            }
            if matches!(self.all[cache].state, State::Failed(_)) && !self.goes_without(trouble) {
                return decision(Verdict::Refuse(Why::Failed(cache)));
            }
            return self.lacks(volume, superblock, (trouble, Why::Its(cache)), now);
        }
        let is_alone = self.real().next().is_none();
        if !superblock.is_held() && (volume.wanted == Wanted::NoCache || is_alone) {
            return decision(Verdict::Without(None));
        }
        match on_former.unwrap_or_else(|| self.cache_for(said, superblock)) {
            Found::Cache(cache) => {
                let adopts =
                    superblock.state == BackingState::Stale && self.is_to_be_on(volume.wanted, cache);
                decision(Verdict::Serve { cache, adopts })
            }
            Found::Waits(why) => decision(Verdict::Wait(why)),
            Found::Missing(trouble, why) => self.lacks(volume, superblock, (trouble, why), now),
            // Its cache is not served here, and all that is in it is on the device, too.
            Found::Refused(_)
                if volume.wanted == Wanted::NoCache && superblock.state == BackingState::Clean =>
            {
                decision(Verdict::Without(None))
            }
            Found::Refused(why) => decision(Verdict::Refuse(why)),
        }
    }

    /// The cache to which a volume goes back that is served without it, if it is open again.
    #[must_use]
    pub fn is_back(&self, volume: &Bypassed<'a>) -> Option<usize> {
        let is_only = self.lasting().count() == 1;
        let mut open = self.lasting().filter_map(|(index, cache)| match cache.state {
            State::Open(set) => Some((index, cache, set)),
            _ => None,
        });
        let its = open.find(|(_, cache, set)| match volume.wanted {
            Wanted::Named(wanted) => cache.name == Some(wanted),
            Wanted::Any => is_only || *set == volume.set,
            Wanted::NoCache => false,
        });
        its.map(|(index, ..)| index)
    }

    /// The cache that the configuration names: by name, or the only one.
    #[must_use]
    pub fn said(&self, wanted: Wanted<'a>) -> Option<usize> {
        match wanted {
            Wanted::NoCache => None,
            Wanted::Named(name) => {
                self.lasting().find(|(_, cache)| cache.name == Some(name)).map(|(index, _)| index)
            }
            Wanted::Any => {
                let mut all = self.lasting().map(|(index, _)| index);
                all.next().filter(|_| all.next().is_none())
            }
        }
    }

    /// Whether the configuration names `cache`, or names none and there is no other.
    #[must_use]
    pub fn is_meant(&self, wanted: Wanted<'a>, cache: usize) -> bool {
        match wanted {
            Wanted::Named(wanted) => self.all[cache].name == Some(wanted),
            Wanted::Any => self.lasting().map(|(index, _)| index).eq([cache]),
            Wanted::NoCache => false,
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
        let successor = self.said(Wanted::Named(name))?;
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
    fn lasting(&self) -> impl Iterator<Item = (usize, &Cache<'a>)> {
        self.real().filter(|(_, cache)| cache.role == Role::Lasting)
    }

    /// Whether a volume may be served without a cache that has failed like this, if nothing of it
    /// is dirty there; its device has to be read.
    fn goes_without(&self, trouble: Trouble) -> bool {
        !self.is_strict && (trouble.is_missing() || trouble == Trouble::NotBcache)
    }

    /// Whether a volume is configured for `cache`, or comes to it from its former device.
    fn is_to_be_on(&self, wanted: Wanted<'a>, cache: usize) -> bool {
        self.is_meant(wanted, cache) || self.former_of(cache).is_some()
    }

    /// Its cache is missing: the volume waits for it, or is served without it once it has waited
    /// long enough. Never if the cache may have its newest data.
    fn lacks(
        &self,
        volume: &Volume<'a>,
        superblock: &Superblock,
        (trouble, why): (Trouble, Why),
        now: Duration,
    ) -> Decision {
        // The backing device alone would serve old data (invariant D49).
        let is_needed = superblock.state == BackingState::Dirty;
        let lacks_since = match self.is_strict || !trouble.is_missing() || is_needed {
            true => None,
            false => Some(volume.lacks_since.unwrap_or(now)),
        };
        // A damaged set does not come back by waiting.
        let is_enough = |since| trouble == Trouble::Damaged || now.saturating_sub(since) >= volume.wait;
        let verdict = match lacks_since {
            Some(since) if is_enough(since) => Verdict::Without(Some(why)),
            _ if matches!(trouble, Trouble::Damaged | Trouble::NotBcache) => Verdict::Refuse(why),
            _ => Verdict::Wait(why),
        };
        Decision { verdict, lacks_since, misses_set: true }
    }

    /// The cache for a volume: the one that its section names, or else the one whose set its
    /// superblock names.
    fn cache_for(&self, said: Option<usize>, superblock: &Superblock) -> Found {
        if let Some(said) = said {
            return match self.all[said].state {
                State::Open(_) => Found::Cache(said),
                _ => Found::Waits(Why::Opens),
            };
        }
        if let Some(index) = self.open_with(superblock.set) {
            return Found::Cache(index);
        }
        let mut its = self.real().filter(|(_, cache)| cache.last_set == Some(superblock.set));
        let failed = its.find_map(|(index, cache)| match cache.state {
            State::Failed(trouble) => Some((index, trouble)),
            _ => None,
        });
        if let Some((index, trouble)) = failed {
            return match !self.is_strict && trouble.is_missing() {
                true => Found::Missing(trouble, Why::Failed(index)),
                false => Found::Refused(Why::Failed(index)),
            };
        }
        if self.real().any(|(_, cache)| matches!(cache.state, State::Opening(_, None))) {
            return Found::Waits(Why::Opens);
        }
        // It may be any of these, also one that is only in use.
        let waits = || {
            let all = self.all.iter().enumerate();
            all.filter_map(|(index, cache)| match cache.state {
                State::Waiting(trouble) | State::Opening(_, Some(trouble)) => Some((index, trouble)),
                _ => None,
            })
        };
        if let Some((index, _)) = waits().find(|(_, trouble)| !trouble.is_missing()) {
            return Found::Waits(Why::Perhaps(index));
        }
        // Even if that one is damaged, the volume's may be another one that can still come.
        let first = waits().next();
        first.map_or(Found::Refused(Why::NoCache), |(index, _)| {
            Found::Missing(Trouble::Missing, Why::Perhaps(index))
        })
    }

    /// Where a volume is served that has not left the former device of its cache; `None` if it has,
    /// or there is none.
    fn on_former(&self, said: usize, superblock: &Superblock) -> Option<Found> {
        let former = self.former_of(said)?;
        if !superblock.is_held() || self.all[said].set() == Some(superblock.set) {
            return None;
        }
        match self.all[former].state {
            State::Open(set) if set == superblock.set => Some(Found::Cache(former)),
            // It is not on the former one, so nothing is left to wait for there (invariant D50).
            State::Open(_) | State::Closed | State::Released => None,
            // Which set the new device has, which may be this volume's, is not known yet.
            _ if matches!(self.all[said].state, State::Waiting(_)) => Some(Found::Waits(Why::Former)),
            State::Failed(_) => Some(Found::Refused(Why::Failed(former))),
            State::Waiting(_) => Some(Found::Waits(Why::Former)),
            State::Opening(..) => Some(Found::Waits(Why::Opens)),
        }
    }
}

/// The outcome of the search for a volume's cache.
enum Found {
    Cache(usize),
    Waits(Why),
    Missing(Trouble, Why),
    Refused(Why),
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
    const fn trouble(&self) -> Option<Trouble> {
        match self.state {
            State::Waiting(trouble) | State::Failed(trouble) | State::Opening(_, Some(trouble)) => {
                Some(trouble)
            }
            _ => None,
        }
    }
}
