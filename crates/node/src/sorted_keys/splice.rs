//! The only way in which sorted keys change: some keys are removed and a few others take their
//! place.

use alloc::vec::Vec;

use super::{CHUNK_CAPACITY, CHUNK_KEYS, JOIN_KEYS, KeyCursor, SPLICE_KEYS, SortedKeys};
use bcached_format::Key;

impl SortedKeys {
    /// Replaces the `removed` keys behind `place` by `new`, at most [`SPLICE_KEYS`] of them. The
    /// caller is responsible for the order.
    ///
    /// Costs the move of half a chunk, plus a step for each removed key.
    pub(crate) fn splice(&mut self, place: KeyCursor, removed: usize, new: &[Key]) {
        assert!(new.len() <= SPLICE_KEYS, "a chunk has room for one splice only");
        if let [new] = new
            && self.splice_one(place, removed, new)
        {
            return;
        }
        let Some(place) = self.inside(place, new.is_empty()) else {
            assert!(removed == 0, "there are no keys to remove");
            return;
        };
        let chunk = place.chunk;
        let here = removed.min(self.chunks[chunk].len() - place.index);
        let range = place.index..place.index + here;
        self.forget(chunk, range.start, range.end);
        self.chunks[chunk].splice(range, new.iter().copied());
        self.len += new.len();
        self.words += new.iter().map(Key::words).sum::<usize>();
        self.remove_front(chunk + 1, removed - here);
        self.settle(chunk);
    }

    /// Replaces one key by `new`, or inserts it between two, if that affects no other chunk: the
    /// common case. Returns false if it does.
    fn splice_one(&mut self, place: KeyCursor, removed: usize, new: &Key) -> bool {
        let Some(chunk) = self.chunks.get_mut(place.chunk) else { return false };
        match removed {
            0 if chunk.len() < CHUNK_KEYS => chunk.insert(place.index, *new),
            1 if place.index < chunk.len() => {
                self.words -= chunk[place.index].words();
                self.len -= 1;
                chunk[place.index] = *new;
            }
            _ => return false,
        }
        self.len += 1;
        self.words += new.words();
        // A chunk that grows needs no joining with its neighbours.
        if place.index + 1 == self.chunks[place.chunk].len() {
            self.rebound(place.chunk);
        }
        true
    }

    /// Converts `place` to a place inside a chunk: the end of all keys is the end of the last
    /// chunk. Without any chunk there is no such place, unless keys are to be added; then a chunk
    /// is created.
    fn inside(&mut self, place: KeyCursor, nothing_new: bool) -> Option<KeyCursor> {
        if self.chunks.is_empty() {
            if nothing_new {
                return None;
            }
            self.grow_outer();
            self.chunks.push(Vec::with_capacity(CHUNK_CAPACITY));
            self.bounds.push(bcached_format::Position::ZERO);
        }
        if place.chunk < self.chunks.len() {
            return Some(place);
        }
        let chunk = self.chunks.len() - 1;
        Some(KeyCursor { chunk, index: self.chunks[chunk].len() })
    }

    /// Subtracts keys of a chunk, which are about to be removed, from the totals.
    fn forget(&mut self, chunk: usize, start: usize, end: usize) {
        self.len -= end - start;
        self.words -= self.chunks[chunk][start..end].iter().map(Key::words).sum::<usize>();
    }

    /// Removes `count` keys from the front of `chunk` and the chunks behind it.
    fn remove_front(&mut self, chunk: usize, count: usize) {
        let mut left = count;
        let mut emptied = chunk;
        while left > 0 {
            let len = self.chunks[emptied].len();
            let here = left.min(len);
            self.forget(emptied, 0, here);
            left -= here;
            if here < len {
                self.chunks[emptied].drain(..here);
            } else {
                emptied += 1;
            }
        }
        self.chunks.drain(chunk..emptied);
        self.bounds.drain(chunk..emptied);
    }

    /// Restores the invariants around `chunk`, after its keys or the first keys of its successor
    /// have changed.
    fn settle(&mut self, chunk: usize) {
        let len = self.chunks[chunk].len();
        if len > CHUNK_KEYS {
            self.grow_outer();
            let mut upper = Vec::with_capacity(CHUNK_CAPACITY);
            upper.extend(self.chunks[chunk].drain(len / 2..));
            self.chunks.insert(chunk + 1, upper);
            self.bounds.insert(chunk + 1, self.bounds[chunk]);
            self.rebound(chunk + 1);
        }
        if len == 0 {
            self.chunks.remove(chunk);
            self.bounds.remove(chunk);
        } else {
            self.rebound(chunk);
        }
        // A chunk may be overfull although the one behind it lost keys: that one is now two chunks
        // further.
        for left in (chunk.saturating_sub(1)..=chunk + 2).rev() {
            self.join(left);
        }
    }

    fn rebound(&mut self, chunk: usize) {
        let last = self.chunks[chunk].last().expect("no chunk is empty");
        self.bounds[chunk] = last.position();
    }

    /// Joins `left` and its successor into one chunk if they are small.
    fn join(&mut self, left: usize) {
        let Some([first, second]) = self.chunks.get_mut(left..left + 2) else { return };
        if first.len() + second.len() > JOIN_KEYS {
            return;
        }
        first.append(second);
        self.chunks.remove(left + 1);
        self.bounds.remove(left);
    }
}
