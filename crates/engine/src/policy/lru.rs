//! Least recently used, exactly: two doubly linked lists over bucket slots, empty buckets first.
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
    /// Holds clean data: given up in order of the last touch.
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
pub struct Lru {
    links: Vec<Link>,
    empty: List,
    used: List,
}

impl Lru {
    /// Lists over `slots` buckets, none of them listed.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        let nowhere = Link { previous: NONE, next: NONE, list: None };
        let list = List { head: NONE, tail: NONE, length: 0 };
        Self { links: vec![nowhere; slots], empty: list, used: list }
    }

    /// Puts `slot` at the recently used end of `rank`, wherever it was before.
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

    /// Slots in the order they should be given up: empty ones first, then by last touch. From `slot` on, or from the
    /// start if there is none or it is on no list any more.
    pub fn victims(&self, from: Option<u32>) -> impl Iterator<Item = u32> + '_ {
        let (empty, used) = match from.and_then(|slot| Some((self.rank(slot)?, slot))) {
            Some((Rank::Empty, slot)) => (slot, self.used.head),
            Some((Rank::Used, slot)) => (NONE, slot),
            None => (self.empty.head, self.used.head),
        };
        self.walk(empty).chain(self.walk(used))
    }

    fn walk(&self, head: u32) -> impl Iterator<Item = u32> + '_ {
        let known = |slot: u32| (slot != NONE).then_some(slot);
        core::iter::successors(known(head), move |slot| known(self.links[*slot as usize].next))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn victims_come_empty_first_then_by_last_touch() {
        let mut lru = Lru::new(6);
        for slot in [0, 1, 2] {
            lru.append(slot, Rank::Used);
        }
        lru.append(3, Rank::Empty);
        lru.append(0, Rank::Used); // a touch
        assert_eq!(lru.victims(None).collect::<Vec<_>>(), [3, 1, 2, 0]);
        lru.remove(2);
        lru.remove(2);
        lru.append(1, Rank::Empty); // its last data died
        assert_eq!(lru.victims(None).collect::<Vec<_>>(), [3, 1, 0]);
        assert_eq!(lru.rank(2), None);
        assert_eq!((lru.length(Rank::Empty), lru.length(Rank::Used)), (2, 1));
    }
}
