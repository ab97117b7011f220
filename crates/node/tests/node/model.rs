//! Tests a leaf against a model that knows where each sector's data is.
//!
//! The steps are random inserts, replacements, holes, writes, re-reads and splits. After each step
//! the leaf must agree with the model, and the parts of keys that it reported as removed must be
//! exactly what the model lost.

use std::collections::BTreeMap;

use bcached_format::{Inode, Key, Pointer, Pointers, Position};
use bcached_node::{LiveKeys, Node, memory_bytes_limit, memory_bytes_max};
use proptest::prelude::*;

use crate::sample::{GEOMETRY, Image, SEQ, build, deal, extent, live_keys, own, pointer};

const NODE_SECTORS: u16 = 24;
const VOLUME_SECTORS: u64 = 3000;

/// Where each cached sector's data is, and whether it is dirty.
type Sectors = BTreeMap<(u32, u64), (Pointer, bool)>;

fn sectors_of<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Sectors {
    let mut sectors = Sectors::new();
    for key in keys {
        for sector in key.start()..key.end {
            let Some(pointer) = key.pointers.as_slice().first() else { continue };
            let there = (pointer.advanced(sector - key.start()), key.dirty);
            let before = sectors.insert((key.inode.0, sector), there);
            assert_eq!(before, None, "keys of a view do not overlap");
        }
    }
    sectors
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Key),
    /// Replace the key that the step with this number inserted (or what is left of it).
    Replace(prop::sample::Index, NewContent),
    Write,
    /// Write, then read the bytes back.
    Read,
    /// Move the living keys to fresh nodes, and continue with the left one.
    Split,
    /// As `Split`, while these keys arrive.
    SplitBeside(Vec<Key>),
    Query(u32, u64, u64),
}

/// What a replacement puts in the place of a key.
#[derive(Clone, Debug)]
enum NewContent {
    Clean,
    Moved(u64),
    Hole,
}

/// A key whose data is in one of a few buckets, so that neighbours often merge.
fn key() -> impl Strategy<Value = Key> {
    let range = (0..2_u32, 0..VOLUME_SECTORS, 1..60_u64, 20..24_u64);
    (range, any::<bool>(), 0..4_u8).prop_map(|((inode, start, length, bucket), dirty, kind)| {
        let end = start + length;
        let bucket_start = bucket * GEOMETRY.bucket_sectors;
        let length = length.min(GEOMETRY.bucket_sectors - start % GEOMETRY.bucket_sectors);
        match kind {
            0 => Key::hole(Inode(inode), start, end),
            _ => extent(inode, start, start + length, bucket_start + start % GEOMETRY.bucket_sectors, dirty),
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    let new = prop_oneof![
        Just(NewContent::Clean),
        (30..34_u64).prop_map(NewContent::Moved),
        Just(NewContent::Hole)
    ];
    let query = (0..3_u32, 0..VOLUME_SECTORS, 1..200_u64);
    prop_oneof![
        10 => key().prop_map(Step::Insert),
        4 => (any::<prop::sample::Index>(), new).prop_map(|(index, new)| Step::Replace(index, new)),
        1 => Just(Step::Write),
        1 => Just(Step::Read),
        1 => Just(Step::Split),
        1 => prop::collection::vec(key(), 1..15).prop_map(Step::SplitBeside),
        3 => query.prop_map(|(inode, start, length)| Step::Query(inode, start, start + length)),
    ]
}

/// A leaf, its bytes, and the model.
struct ModelledLeaf {
    node: Node,
    image: Image,
    sectors: Sectors,
    inserted: Vec<Key>,
}

impl ModelledLeaf {
    fn new() -> Self {
        let own = own(36, NODE_SECTORS, Position::MAX);
        let node = Node::create(own, 0, SEQ, &GEOMETRY);
        Self { node, image: Image::new(&own), sectors: Sectors::new(), inserted: Vec::new() }
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Insert(key) => self.insert(key),
            Step::Replace(index, new) if !self.inserted.is_empty() => {
                let expected = *index.get(&self.inserted);
                self.replace(&expected, new);
            }
            Step::Replace(..) => {}
            Step::Write => self.image.write(&mut self.node),
            Step::Read => self.read(),
            Step::Split => self.split(),
            Step::SplitBeside(keys) => self.split_beside(keys),
            Step::Query(inode, start, end) => self.query(*inode, *start, *end),
        }
        self.check();
    }

    /// The part of a key that belongs into this leaf.
    fn part(&self, key: &Key) -> Option<Key> {
        let position = self.node.position();
        if key.position() <= position {
            return Some(*key);
        }
        if key.inode == position.inode { key.cut(0, position.offset) } else { None }
    }

    fn insert(&mut self, key: &Key) {
        let Some(key) = self.part(key) else { return };
        while !self.node.fits(key.words()) {
            self.split();
        }
        let Some(key) = self.part(&key) else { return };
        let mut removed = Vec::new();
        let memory = self.node.memory_bytes() + self.node.insert_growth_bytes_max(1);
        self.node.insert(&key, &mut |part| removed.push(part));
        assert!(self.node.memory_bytes() <= memory, "an insert adds no more than was said");
        assert_eq!(sectors_of(&removed), self.take(&key), "removed by {key:?}");
        self.sectors.extend(sectors_of([&key]));
        self.inserted.push(key);
    }

    fn take(&mut self, range: &Key) -> Sectors {
        let inode = range.inode.0;
        let taken: Sectors = self
            .sectors
            .range((inode, range.start())..(inode, range.end))
            .map(|(at, there)| (*at, *there))
            .collect();
        self.sectors.retain(|at, _| !taken.contains_key(at));
        taken
    }

    fn replace(&mut self, expected: &Key, new: &NewContent) {
        let new = match new {
            NewContent::Clean => Key { dirty: false, ..*expected },
            NewContent::Moved(bucket) => {
                Key { pointers: Pointers::one(pointer(bucket * 1024, 7)), ..*expected }
            }
            NewContent::Hole => Key::hole(expected.inode, expected.start(), expected.end),
        };
        let matching: Vec<(u64, u64)> = self.node.matching(expected, expected.end).collect();
        if !self.node.fits(matching.len() * new.words()) {
            return;
        }
        let wanted: Sectors = sectors_of([expected])
            .into_iter()
            .filter(|(at, there)| self.sectors.get(at) == Some(there))
            .collect();
        let (mut removed, mut inserted) = (Vec::new(), Vec::new());
        for (start, end) in matching {
            let part = new.cut(start, end).expect("a match lies in the range");
            self.node.insert(&part, &mut |gone| removed.push(gone));
            self.take(&part);
            inserted.push(part);
        }
        assert_eq!(sectors_of(&removed), wanted, "exactly the matching sectors go");
        assert_eq!(inserted.iter().map(Key::sectors).sum::<u64>(), wanted.len() as u64);
        self.sectors.extend(sectors_of(&inserted));
        self.inserted.push(new);
    }

    fn read(&mut self) {
        self.image.write(&mut self.node);
        let read = Node::read(*self.node.own(), 0, &GEOMETRY, &self.image.bytes).expect("we wrote it");
        assert_eq!(read.written_blocks(), self.node.written_blocks());
        assert_eq!(read.words_on_disk(), self.node.words_on_disk());
        assert_eq!(read.keys().collect::<Vec<_>>(), self.node.keys().collect::<Vec<_>>());
        assert!(read.memory_bytes() + read.insert_growth_bytes_max(1) <= memory_bytes_limit(NODE_SECTORS));
        self.node = read;
    }

    fn split(&mut self) {
        let living = live_keys(&self.node, &mut |_| true);
        let parts = deal(&living, self.node.total_blocks(), &GEOMETRY);
        assert_eq!(parts.concat(), living.keys(), "every key goes into one of the nodes");
        if parts.len() == 1 {
            self.go_on(self.node.position(), &parts[0]);
            return;
        }
        let position = parts[0].last().expect("not empty").position();
        self.go_on(position, &parts[0]);
        self.sectors.retain(|(inode, sector), _| Position::new(Inode(*inode), *sector) < position);
    }

    /// Moves the living keys to fresh nodes while `keys` arrive, as many of them as are certain to
    /// fit there.
    fn split_beside(&mut self, keys: &[Key]) {
        let parts: Vec<Key> = keys.iter().filter_map(|key| self.part(key)).collect();
        let late: Vec<Key> = parts.into_iter().take(self.node.late_keys_max()).collect();
        self.node.close();
        let mut coming = late.iter();
        let (mut living, mut after) = (LiveKeys::default(), Some(Position::ZERO));
        while let Some(from) = after {
            after = self.node.gather(from, 3, &mut living, &mut |_| true);
            coming.by_ref().take(2).for_each(|key| self.insert_late(key));
        }
        coming.for_each(|key| self.insert_late(key));
        assert_eq!(sectors_of(self.node.keys()), self.sectors, "the old leaf shows them");
        let parts = deal(&living, self.node.total_blocks(), &GEOMETRY);
        let position = match &parts[..] {
            [left, _] => left.last().expect("not empty").position(),
            _ => self.node.position(),
        };
        self.go_on(position, &parts[0]);
        self.sectors.retain(|(inode, sector), _| Position::new(Inode(*inode), *sector) < position);
        let late: Vec<Key> = late.iter().filter_map(|key| self.part(key)).collect();
        late.iter().for_each(|key| self.node.insert(key, &mut |_| ()));
        assert!(self.node.memory_bytes() <= memory_bytes_limit(NODE_SECTORS), "they find room in memory");
        self.inserted.extend(late);
    }

    fn insert_late(&mut self, key: &Key) {
        let mut removed = Vec::new();
        self.node.insert_late(key, &mut |part| removed.push(part));
        assert_eq!(sectors_of(&removed), self.take(key), "removed by {key:?}");
        self.sectors.extend(sectors_of([key]));
    }

    fn go_on(&mut self, position: Position, keys: &[Key]) {
        let own = own(37, NODE_SECTORS, position);
        let first;
        (self.node, first) = build(own, SEQ + 1, keys);
        self.image = Image::new(&own);
        self.image.append(&first);
        self.inserted.retain(|key| key.position() <= position);
    }

    fn query(&self, inode: u32, start: u64, end: u64) {
        let (inode, all): (_, Vec<&Key>) = (Inode(inode), self.node.keys().collect());
        let overlaps = |key: &&&Key| key.inode == inode && key.start() < end && key.end > start;
        let wanted: Vec<&Key> = all.iter().filter(overlaps).copied().collect();
        assert_eq!(self.node.overlapping(inode, start, end).collect::<Vec<_>>(), wanted);
    }

    fn check(&self) {
        assert_eq!(sectors_of(self.node.keys()), self.sectors);
        let words: usize = self.node.keys().map(Key::words).sum();
        assert_eq!((self.node.words_in_view(), self.node.len()), (words, self.node.keys().count()));
        assert!(self.node.memory_bytes() <= memory_bytes_max(NODE_SECTORS));
        // No more pieces than written words: what two fresh nodes can hold.
        let pending = self.node.pending_bytes().saturating_sub(32) / 8;
        assert!(words <= self.node.words_on_disk() + pending, "every piece has a key of its own");
    }
}

proptest! {
    #[test]
    fn a_leaf_says_what_a_table_of_sectors_says(steps in prop::collection::vec(step(), 1..250)) {
        let mut pair = ModelledLeaf::new();
        for step in &steps {
            pair.apply(step);
        }
        pair.read();
    }
}
