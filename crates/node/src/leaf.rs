//! Changes to a leaf: a newer key over older ones, and the replacement of what is still as expected.

use bcached_format::{Key, Pointers};

use crate::extents::{self, is_hole};
use crate::node::Node;

impl Node {
    /// Puts `key` over whatever the leaf says about its range (format 7.2). A key without pointers makes a hole.
    ///
    /// `removed` is told each part of an older key that is no longer visible, cut to the replaced range and its
    /// pointers advanced; parts whose pointer is stale are among them. The caller has asked
    /// [`fits`](Node::fits)`(key.words())`.
    ///
    /// # Panics
    /// If this is no leaf, the key covers nothing or ends behind the leaf's range, or the next set overflows.
    pub fn insert(&mut self, key: &Key, removed: &mut dyn FnMut(Key)) {
        assert!(self.is_leaf(), "extents live in leaves");
        assert!(key.size > 0, "a key of size zero means nothing");
        assert!(key.position() <= self.position(), "the caller cuts keys at the end of the leaf");
        self.put(key, removed);
        self.assert_room();
    }

    fn put(&mut self, key: &Key, removed: &mut dyn FnMut(Key)) {
        let bucket_sectors = self.geometry.bucket_sectors;
        // A key that surrounds the new one falls in two. On disk it is one key, and stays it: so that there are never
        // many more pieces than written words, the part behind goes to disk once more.
        let behind = self.overlapping(key.inode, key.start(), key.end).next().and_then(|old| {
            let surrounds = old.start() < key.start();
            if surrounds { old.cut(key.end, u64::MAX) } else { None }
        });
        extents::put(&mut self.pending, key, Some(key), bucket_sectors, &mut |_| ());
        if let Some(behind) = behind {
            extents::put(&mut self.pending, &behind, Some(&behind), bucket_sectors, &mut |_| ());
        }
        let visible = (!is_hole(key)).then_some(key);
        extents::put(&mut self.view, key, visible, bucket_sectors, removed);
    }

    /// Replaces `expected` by `new`, wherever in their common range the leaf still says `expected`: same dirty bit,
    /// same number of pointers, and the pointers equal after advancing them to the place (format 7.3). All matching
    /// pieces are replaced, not only the first. Where the leaf says something else nothing changes.
    ///
    /// `removed` is told each replaced piece as it was, then `inserted` the piece of `new` in its place. The caller
    /// has asked [`fits`](Node::fits)`(`[`words_to_replace`](Node::words_to_replace)`)`.
    ///
    /// # Panics
    /// If this is no leaf, the keys do not cover the same range, or the next set overflows.
    pub fn replace(
        &mut self,
        expected: &Key,
        new: &Key,
        removed: &mut dyn FnMut(Key),
        inserted: &mut dyn FnMut(Key),
    ) {
        assert!(self.is_leaf(), "extents live in leaves");
        assert_eq!((expected.inode, expected.size, expected.end), (new.inode, new.size, new.end));
        let mut start = expected.start();
        while let Some((from, to)) = self.first_match(expected, start) {
            let piece = new.cut(from, to).expect("a match lies in the range");
            self.put(&piece, removed);
            inserted(piece);
            start = to;
        }
        self.assert_room();
    }

    /// Words that [`replace`](Node::replace) of `expected` by a key with `pointers` would add at most, for
    /// [`fits`](Node::fits). Zero: nothing matches, and nothing would change.
    #[must_use]
    pub fn words_to_replace(&self, expected: &Key, pointers: &Pointers) -> usize {
        let words = Key { pointers: *pointers, ..*expected }.words();
        let mut start = expected.start();
        let mut sum = 0;
        while let Some((_, to)) = self.first_match(expected, start) {
            sum += words;
            start = to;
        }
        sum
    }

    /// The first run of sectors from `start` on for which the leaf says what `expected` says.
    fn first_match(&self, expected: &Key, start: u64) -> Option<(u64, u64)> {
        if start >= expected.end {
            return None;
        }
        let mut run: Option<(u64, u64)> = None;
        for key in self.overlapping(expected.inode, start, expected.end) {
            let there = key.cut(start, expected.end).expect("it overlaps the range");
            if expected.cut(there.start(), there.end) != Some(there) {
                if run.is_some() {
                    break;
                }
                continue;
            }
            match run {
                Some((from, to)) if to == there.start() => run = Some((from, there.end)),
                Some(_) => break,
                None => run = Some((there.start(), there.end)),
            }
        }
        run
    }
}
