//! Two doubly linked lists over bucket slots: the empty ones, and the used ones in an order.
//!
//! A bucket is on a list only while it can be evicted (closed, no dirty data). All operations are
//! O(1), so choosing victims costs the same on a terabyte as on a gigabyte.
//!
//! There are as many slots as the device has buckets, so each byte of a slot counts. While a slot
//! is on no list, its caller can store a number in place of a link ([`SlotLists::spare`]).

use alloc::collections::TryReserveError;
use alloc::vec::Vec;

const NONE: u32 = u32::MAX;

/// The list that a bucket is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rank {
    /// Holds no live data: evicted before any other.
    Empty,
    /// Holds clean data: evicted in the order of the policy.
    Used,
}

/// The neighbours of a slot on a list. For any other slot, `previous` is the caller's number.
#[derive(Clone, Copy, Default)]
struct Link {
    previous: u32,
    next: u32,
}

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
    length: usize,
}

/// The two lists. Slots are indices into the caller's table of buckets.
pub struct SlotLists {
    links: Vec<Link>,
    ranks: Vec<Option<Rank>>,
    empty: List,
    used: List,
}

impl SlotLists {
    /// Memory that the lists take for each slot, in bytes.
    pub const SLOT_BYTES: usize = size_of::<Link>() + size_of::<Option<Rank>>();

    /// Creates lists over `slots` buckets, none of them listed.
    ///
    /// # Errors
    /// There is no memory for so many.
    pub fn new(slots: usize) -> Result<Self, TryReserveError> {
        let (mut links, mut ranks) = (Vec::new(), Vec::new());
        links.try_reserve_exact(slots)?;
        ranks.try_reserve_exact(slots)?;
        links.resize(slots, Link::default());
        ranks.resize(slots, None);
        let list = List { head: NONE, tail: NONE, length: 0 };
        Ok(Self { links, ranks, empty: list, used: list })
    }

    /// The number stored for `slot`: 0 while it is on a list, and when it has just left one.
    #[inline]
    #[must_use]
    pub fn spare(&self, slot: u32) -> u32 {
        if self.rank(slot).is_none() { self.links[slot as usize].previous } else { 0 }
    }

    /// Stores a number for `slot` for as long as it is on no list.
    ///
    /// # Panics
    /// If it is on a list.
    #[inline]
    pub fn set_spare(&mut self, slot: u32, number: u32) {
        assert!(self.rank(slot).is_none(), "slot {slot} is on a list, so it has no room for a number");
        self.links[slot as usize].previous = number;
    }

    /// Moves `slot` to the end of list `rank`, wherever it was before.
    pub fn append(&mut self, slot: u32, rank: Rank) {
        self.remove(slot);
        let tail = self.list(rank).tail;
        self.links[slot as usize] = Link { previous: tail, next: NONE };
        self.ranks[slot as usize] = Some(rank);
        match tail {
            NONE => self.list_mut(rank).head = slot,
            tail => self.links[tail as usize].next = slot,
        }
        let list = self.list_mut(rank);
        list.tail = slot;
        list.length += 1;
    }

    /// Returns whether `slot`, which is on a list, is the last one.
    #[must_use]
    pub fn is_last(&self, slot: u32) -> bool {
        self.links[slot as usize].next == NONE
    }

    /// The list that `slot` is on.
    #[inline]
    #[must_use]
    pub fn rank(&self, slot: u32) -> Option<Rank> {
        self.ranks[slot as usize]
    }

    /// Takes `slot` off its list, if it is on one.
    pub fn remove(&mut self, slot: u32) {
        let Some(rank) = self.ranks[slot as usize] else { return };
        let Link { previous, next } = self.links[slot as usize];
        match previous {
            NONE => self.list_mut(rank).head = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NONE => self.list_mut(rank).tail = previous,
            next => self.links[next as usize].previous = previous,
        }
        self.list_mut(rank).length -= 1;
        self.ranks[slot as usize] = None;
        self.links[slot as usize] = Link::default();
    }

    /// Number of slots on the list.
    #[must_use]
    pub const fn length(&self, rank: Rank) -> usize {
        self.list(rank).length
    }

    /// The first slot of `rank`.
    #[must_use]
    pub const fn first(&self, rank: Rank) -> Option<u32> {
        known(self.list(rank).head)
    }

    /// The slot after `slot` in its list.
    #[must_use]
    pub fn after(&self, slot: u32) -> Option<u32> {
        known(self.links[slot as usize].next)
    }

    const fn list(&self, rank: Rank) -> &List {
        match rank {
            Rank::Empty => &self.empty,
            Rank::Used => &self.used,
        }
    }

    const fn list_mut(&mut self, rank: Rank) -> &mut List {
        match rank {
            Rank::Empty => &mut self.empty,
            Rank::Used => &mut self.used,
        }
    }
}

const fn known(slot: u32) -> Option<u32> {
    if slot == NONE { None } else { Some(slot) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// The dirty sectors of a bucket are stored in place of its links.
    #[test]
    fn a_slot_keeps_a_number_while_it_is_on_no_list() {
        let mut lists = SlotLists::new(3).expect("three slots");
        lists.set_spare(1, 7);
        lists.append(0, Rank::Used);
        lists.append(2, Rank::Used);
        assert_eq!([0, 1, 2].map(|slot| lists.spare(slot)), [0, 7, 0]);
        lists.append(1, Rank::Used);
        assert_eq!((lists.spare(1), lists.after(2)), (0, Some(1)));
        lists.remove(2);
        assert_eq!((lists.spare(2), lists.after(0)), (0, Some(1)), "nothing is left of its links");
        assert!(SlotLists::new(usize::MAX / 64).is_err(), "no memory is an error, and no abort");
    }

    #[test]
    fn what_is_appended_is_last_and_what_is_removed_is_nowhere() {
        let mut lists = SlotLists::new(6).expect("six slots");
        for slot in [0, 1, 2] {
            lists.append(slot, Rank::Used);
        }
        lists.append(3, Rank::Empty);
        lists.append(0, Rank::Used);
        let of = |lists: &SlotLists, rank| {
            core::iter::successors(lists.first(rank), |slot| lists.after(*slot)).collect::<Vec<_>>()
        };
        assert_eq!(of(&lists, Rank::Used), [1, 2, 0]);
        lists.remove(2);
        lists.remove(2);
        lists.append(1, Rank::Empty);
        assert_eq!((of(&lists, Rank::Empty), of(&lists, Rank::Used)), (vec![3, 1], vec![0]));
        assert_eq!(lists.rank(2), None);
        assert_eq!((lists.length(Rank::Empty), lists.length(Rank::Used)), (2, 1));
    }
}
