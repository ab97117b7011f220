//! The order in which buckets are evicted: first the empty ones, then by the policy of the
//! superblock.
//!
//! The policy can be changed at any time at no cost: policies differ only in whether a touch counts
//! and where a search looks. Least recently used is exact. First in first out is the same list
//! without touches. Random is a walk over all slots with a new random stride for each search, which
//! visits each slot once, in an order unrelated to their use.

use crate::policy::lists::{Rank, SlotLists};
use alloc::collections::TryReserveError;
use bcached_env::rng::Rng;
use bcached_format::ReplacementPolicy;

/// The buckets that can be evicted, and their order.
pub struct EvictionOrder {
    lists: SlotLists,
    slots: u32,
    policy: ReplacementPolicy,
    rng: Rng,
}

/// The position of a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VictimCursor {
    /// At this slot of the lists.
    Listed(u32),
    /// On its walk over all slots.
    Striding {
        /// The next slot.
        at: u32,
        /// Distance to the slot after it.
        stride: u32,
        /// Number of slots left.
        left: u32,
    },
}

impl EvictionOrder {
    /// Creates the order for `slots` buckets, none of which can be evicted.
    ///
    /// # Errors
    /// There is no memory for so many.
    ///
    /// # Panics
    /// If there are more than 2^32, which an opening refuses.
    pub fn new(slots: usize) -> Result<Self, TryReserveError> {
        let count = u32::try_from(slots).expect("open refuses devices with more than 2^32 buckets");
        let lists = SlotLists::new(slots)?;
        Ok(Self { lists, slots: count, policy: ReplacementPolicy::default(), rng: Rng::new(0) })
    }

    /// Returns whether the bucket can be evicted.
    #[inline]
    #[must_use]
    pub fn is_listed(&self, slot: u32) -> bool {
        self.lists.rank(slot).is_some()
    }

    /// The number stored for a bucket that cannot be evicted ([`SlotLists::spare`]).
    #[inline]
    #[must_use]
    pub fn spare(&self, slot: u32) -> u32 {
        self.lists.spare(slot)
    }

    /// Stores a number for a bucket until it can be evicted.
    ///
    /// # Panics
    /// If it can be evicted now.
    #[inline]
    pub fn set_spare(&mut self, slot: u32, number: u32) {
        self.lists.set_spare(slot, number);
    }

    /// Sets the policy from now on. `seed`: for random choices.
    pub const fn set_policy(&mut self, policy: ReplacementPolicy, seed: u64) {
        self.policy = policy;
        self.rng = Rng::new(seed);
    }

    /// Number of buckets of `rank` that can be evicted.
    #[must_use]
    pub const fn length(&self, rank: Rank) -> usize {
        self.lists.length(rank)
    }

    /// Moves the bucket to `rank`; `None`: it cannot be evicted.
    pub fn place(&mut self, slot: u32, rank: Option<Rank>) {
        match rank {
            None => self.lists.remove(slot),
            Some(rank) if self.lists.rank(slot) == Some(rank) => {}
            Some(rank) => self.lists.append(slot, rank),
        }
    }

    /// Records that the bucket was read from or written to.
    pub fn touch(&mut self, slot: u32) {
        let counts = self.policy == ReplacementPolicy::Lru && self.lists.rank(slot) == Some(Rank::Used);
        // The most recently used bucket is last already.
        if counts && !self.lists.is_last(slot) {
            self.lists.append(slot, Rank::Used);
        }
    }

    /// The position where a search begins; `None` if nothing can be evicted.
    pub fn begin(&mut self) -> Option<VictimCursor> {
        self.lists.first(Rank::Empty).map(VictimCursor::Listed).or_else(|| self.begin_used())
    }

    fn begin_used(&mut self) -> Option<VictimCursor> {
        let first = self.lists.first(Rank::Used)?;
        if self.policy != ReplacementPolicy::Random {
            return Some(VictimCursor::Listed(first));
        }
        let below = |rng: &mut Rng, bound: u32| u32::try_from(rng.below(bound.into())).unwrap_or(0);
        let at = below(&mut self.rng, self.slots);
        let mut stride = below(&mut self.rng, self.slots).max(1);
        // Without a common divisor, the walk visits every slot.
        while common_divisor(stride, self.slots) > 1 {
            stride = stride % self.slots + 1;
        }
        Some(VictimCursor::Striding { at, stride, left: self.slots })
    }

    /// Returns a position from which an interrupted search can continue. The lists may have changed
    /// since.
    pub fn resume(&mut self, place: Option<VictimCursor>) -> Option<VictimCursor> {
        match place {
            Some(VictimCursor::Listed(slot)) if self.lists.rank(slot).is_none() => self.begin(),
            Some(place) => Some(place),
            None => self.begin(),
        }
    }

    /// Returns the slot at `place`, if it can be evicted, and the next position.
    pub fn look(&mut self, place: VictimCursor) -> (Option<u32>, Option<VictimCursor>) {
        match place {
            VictimCursor::Listed(slot) => {
                let was_empty = self.lists.rank(slot) == Some(Rank::Empty);
                let next = self.lists.after(slot).map(VictimCursor::Listed);
                (Some(slot), if next.is_none() && was_empty { self.begin_used() } else { next })
            }
            VictimCursor::Striding { at, stride, left } => {
                let found = (self.lists.rank(at) == Some(Rank::Used)).then_some(at);
                let next = (u64::from(at) + u64::from(stride)) % u64::from(self.slots);
                let next = u32::try_from(next).unwrap_or(0);
                (found, (left > 1).then_some(VictimCursor::Striding { at: next, stride, left: left - 1 }))
            }
        }
    }
}

const fn common_divisor(mut a: u32, mut b: u32) -> u32 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    /// All victims, in the order of a search that is interrupted after each.
    fn searched(victims: &mut EvictionOrder) -> Vec<u32> {
        let mut found = Vec::new();
        let mut at = victims.begin();
        while let Some(place) = at {
            let (slot, next) = victims.look(place);
            found.extend(slot);
            at = next.and_then(|next| victims.resume(Some(next)));
        }
        found
    }

    fn with_policy(policy: ReplacementPolicy) -> EvictionOrder {
        let mut victims = EvictionOrder::new(8).expect("eight slots");
        victims.set_policy(policy, 7);
        for slot in [0, 1, 2, 5] {
            victims.place(slot, Some(Rank::Used));
        }
        victims.place(3, Some(Rank::Empty));
        victims.touch(0);
        victims
    }

    #[test]
    fn victims_come_empty_first_then_by_last_touch() {
        let mut victims = with_policy(ReplacementPolicy::Lru);
        assert_eq!(searched(&mut victims), [3, 1, 2, 5, 0]);
        victims.place(2, None);
        victims.place(1, Some(Rank::Empty));
        assert_eq!(searched(&mut victims), [3, 1, 5, 0]);
    }

    #[test]
    fn a_touch_keeps_nothing_that_was_filled_first() {
        let mut victims = with_policy(ReplacementPolicy::Fifo);
        assert_eq!(searched(&mut victims), [3, 0, 1, 2, 5]);
        victims.set_policy(ReplacementPolicy::Lru, 7);
        victims.touch(1);
        assert_eq!(searched(&mut victims), [3, 0, 2, 5, 1], "touches count from here on");
    }

    #[test]
    fn any_may_come_first_and_each_comes_once() {
        let mut victims = with_policy(ReplacementPolicy::Random);
        let mut first = Vec::new();
        for _ in 0..200 {
            let mut found = searched(&mut victims);
            assert_eq!(found[0], 3, "what holds nothing comes first");
            first.push(found[1]);
            found.sort_unstable();
            assert_eq!(found, [0, 1, 2, 3, 5]);
        }
        for slot in [0, 1, 2, 5] {
            let times = first.iter().filter(|found| **found == slot).count();
            assert!((20..=100).contains(&times), "{slot} came first {times} times of 200");
        }
    }

    #[test]
    fn nothing_to_give_up_is_no_search() {
        for policy in [ReplacementPolicy::Lru, ReplacementPolicy::Fifo, ReplacementPolicy::Random] {
            let mut victims = EvictionOrder::new(1).expect("one slot");
            victims.set_policy(policy, 7);
            assert_eq!(victims.begin(), None);
            victims.place(0, Some(Rank::Used));
            assert_eq!(searched(&mut victims), [0], "{policy:?}");
        }
    }
}
