//! Changes to a leaf: inserting a key over older ones, and comparing for compare-and-replace.

use bcached_format::Key;

use crate::extents::{self, is_hole};
use crate::node::Node;
use crate::sorted_keys::KeyCursor;

impl Node {
    /// Inserts `key` over whatever the leaf has in its range. A key without pointers
    /// makes a hole.
    ///
    /// `removed` is called with each part of an older key that is no longer visible, cut to the
    /// replaced range and with its pointers advanced. Parts with a stale pointer are included. The
    /// caller has checked [`fits`](Node::fits)`(key.words())`.
    ///
    /// # Panics
    /// If this is not a leaf, the key covers nothing or ends behind the leaf's range, or the next
    /// set overflows.
    pub fn insert(&mut self, key: &Key, removed: &mut dyn FnMut(Key)) {
        self.insert_near(None, key, removed);
    }

    /// As [`insert`](Node::insert), with a guess at the [place](Node::place_of) of the key's start.
    /// The leaf may have changed since the guess was made.
    ///
    /// # Panics
    /// As [`insert`](Node::insert).
    pub fn insert_near(&mut self, guess: Option<KeyCursor>, key: &Key, removed: &mut dyn FnMut(Key)) {
        assert!(self.is_leaf(), "extents live in leaves");
        assert!(key.size > 0, "a key of size zero means nothing");
        assert!(key.position() <= self.position(), "the caller cuts keys at the end of the leaf");
        self.put(guess, key, removed);
        self.assert_room();
    }

    fn put(&mut self, guess: Option<KeyCursor>, key: &Key, removed: &mut dyn FnMut(Key)) {
        let bucket_sectors = self.geometry.bucket_sectors;
        // A key that surrounds the new one is cut in two. On disk it is one key and remains one.
        // The part behind is therefore written again, so that there are never many more pieces than
        // written words.
        let start = key.start_position();
        let place = match guess {
            Some(guess) => self.view.after_near(guess, start),
            None => self.view.after(start),
        };
        let behind =
            extents::overlapping_from(&self.view, place, key.inode, key.end).next().and_then(|old| {
                let surrounds = old.start() < key.start() && old.end > key.end;
                if surrounds { old.cut(key.end, u64::MAX) } else { None }
            });
        extents::put(&mut self.pending, key, Some(key), bucket_sectors, &mut |_| ());
        if let Some(behind) = behind {
            extents::put(&mut self.pending, &behind, Some(&behind), bucket_sectors, &mut |_| ());
        }
        let visible = (!is_hole(key)).then_some(key);
        extents::put_from(&mut self.view, place, key, visible, bucket_sectors, removed);
    }

    /// Returns the parts of `[expected.start(), upto)` for which the leaf still has what `expected`
    /// has: the same dirty bit, the same number of pointers, and equal pointers once advanced to
    /// the place. All such parts are returned, in order; a compare-and-replace
    /// replaces exactly these.
    pub fn matching<'a>(&'a self, expected: &'a Key, upto: u64) -> impl Iterator<Item = (u64, u64)> + 'a {
        self.overlapping(expected.inode, expected.start(), upto).filter_map(move |key| {
            let part = key.cut(expected.start(), upto)?;
            let wanted = expected.cut(part.start(), part.end)?;
            (part == wanted).then_some((part.start(), part.end))
        })
    }
}
