//! Two doubly linked lists over bucket slots: those that hold nothing, and those that do, in an order.
//!
//! A bucket is on a list only while it could be given up (closed, nothing dirty); everything is O(1), so that choosing
//! victims costs the same on a terabyte as on a gigabyte.

use alloc::vec;
use alloc::vec::Vec;

const NONE: u32 = u32::MAX;

/// Which list a bucket is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rank {
    /// Holds nothing live: given up before any other.
    Empty,
    /// Holds clean data: given up as the policy says.
    Used,
}

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
    list: Option<Rank>,
}

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
    length: usize,
}

/// The two lists. Slots are indices into the caller's table of buckets.
pub struct Lists {
    links: Vec<Link>,
    empty: List,
    used: List,
}

impl Lists {
    /// Lists over `slots` buckets, none of them listed.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        let nowhere = Link { previous: NONE, next: NONE, list: None };
        let list = List { head: NONE, tail: NONE, length: 0 };
        Self { links: vec![nowhere; slots], empty: list, used: list }
    }

    /// Puts `slot` last in `rank`, wherever it was before.
    pub fn append(&mut self, slot: u32, rank: Rank) {
        self.remove(slot);
        let tail = self.list(rank).tail;
        self.links[slot as usize] = Link { previous: tail, next: NONE, list: Some(rank) };
        match tail {
            NONE => self.list_mut(rank).head = slot,
            tail => self.links[tail as usize].next = slot,
        }
        let list = self.list_mut(rank);
        list.tail = slot;
        list.length += 1;
    }

    /// `slot`, which is on a list, stands last in it.
    #[must_use]
    pub fn is_last(&self, slot: u32) -> bool {
        self.links[slot as usize].next == NONE
    }

    /// The list that `slot` is on.
    #[must_use]
    pub fn rank(&self, slot: u32) -> Option<Rank> {
        self.links[slot as usize].list
    }

    /// Takes `slot` off its list, if it is on one.
    pub fn remove(&mut self, slot: u32) {
        let Link { previous, next, list } = self.links[slot as usize];
        let Some(rank) = list else { return };
        match previous {
            NONE => self.list_mut(rank).head = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NONE => self.list_mut(rank).tail = previous,
            next => self.links[next as usize].previous = previous,
        }
        self.list_mut(rank).length -= 1;
        self.links[slot as usize].list = None;
    }

    /// How many slots are on the list.
    #[must_use]
    pub const fn length(&self, rank: Rank) -> usize {
        self.list(rank).length
    }

    /// The first slot of `rank`.
    #[must_use]
    pub const fn first(&self, rank: Rank) -> Option<u32> {
        known(self.list(rank).head)
    }

    /// The slot behind `slot` in its list.
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

    #[test]
    fn what_is_appended_is_last_and_what_is_removed_is_nowhere() {
        let mut lists = Lists::new(6);
        for slot in [0, 1, 2] {
            lists.append(slot, Rank::Used);
        }
        lists.append(3, Rank::Empty);
        lists.append(0, Rank::Used);
        let of = |lists: &Lists, rank| {
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
