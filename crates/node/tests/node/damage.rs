//! Damaged and hostile bytes produce an error that says what is wrong and where, never a panic or a
//! wrong answer.

use bcached_format::bset::{BSET_HEADER_BYTES, seal_in_place};
use bcached_format::{Inode, Key, Position};
use bcached_node::{Node, NodeError};
use proptest::prelude::*;

use crate::sample::{GEOMETRY, Image, SEQ, extent, live_keys, own, place, zeroed};

const SECTORS: u16 = 16;

fn node_key() -> Key {
    own(36, SECTORS, Position::MAX)
}

/// A leaf of three sets that overlap each other.
fn leaf() -> Image {
    let set = |shift: u64, sector| {
        (0..20).map(|i| extent(0, i * 20 + shift, i * 20 + shift + 9, sector + i * 30, true)).collect()
    };
    Image::of_sets(&node_key(), &[set(0, 20_480), set(5, 22_528), set(12, 24_576)])
}

/// An interior node of three sets of children and freeing keys.
fn interior() -> Image {
    let own_key = node_key();
    let mut image = Image::new(&own_key);
    let mut node = Node::create(own_key, 1, SEQ, &GEOMETRY);
    let child = |bucket, offset| own(bucket, SECTORS, Position::new(Inode(0), offset));
    let last = own(50, SECTORS, Position::MAX);
    node.replace_children(&[], &[child(40, 100), child(41, 200), last]);
    image.write(&mut node);
    node.replace_children(&[child(40, 100)], &[child(42, 50), child(43, 100)]);
    image.write(&mut node);
    node.replace_children(&[child(42, 50), child(43, 100)], &[child(44, 100)]);
    image.write(&mut node);
    image
}

/// Reads the node and, if it is accepted, uses it as an engine would.
fn use_node(level: u8, bytes: &[u8]) -> Result<Node, NodeError> {
    let mut node = Node::read(node_key(), level, &GEOMETRY, bytes)?;
    if level == 0 {
        let _ = node.check_extents(Position::ZERO);
        if node.fits(3) {
            node.insert(&extent(0, 10, 200, 40_960, true), &mut |_| ());
        }
        let _ = node.matching(&extent(0, 0, 60, 40_950, true), 50).count();
        let _ = live_keys(&node, &mut |_| true).divide(node.total_blocks(), &GEOMETRY);
    } else {
        let _ = node.check_children(Position::ZERO);
        node.drop_dead(&mut |pointer| pointer.sector() % 3 == 0);
        let _ = (node.child_for(Position::ZERO), live_keys(&node, &mut |_| true));
    }
    if node.has_pending() {
        assert!(node.seal_pending(zeroed).is_some());
    }
    Ok(node)
}

/// Byte ranges of the first three sets that their checksums cover.
fn summed(image: &Image) -> Vec<std::ops::Range<usize>> {
    let log = bcached_format::NodeLog::parse(&image.bytes, 512, place(&node_key())).expect("sound");
    let range = |block: u32, length| (block as usize * 512)..(block as usize * 512 + length);
    log.sets.iter().map(|set| range(set.block, set.bset.byte_len())).collect()
}

proptest! {
    #[test]
    fn a_flipped_bit_in_a_set_is_refused(at in any::<prop::sample::Index>(), bit in 0..8_u32, level in 0_u8..2) {
        let mut image = if level == 0 { leaf() } else { interior() };
        let sets = summed(&image);
        let offsets: Vec<usize> = sets.into_iter().flatten().collect();
        let offset = *at.get(&offsets);
        image.bytes[offset] ^= 1_u8 << bit;
        let header = offset % 512;
        match use_node(level, &image.bytes) {
            // A changed sequence number ends the log there; only a set behind it reveals that.
            Ok(node) => prop_assert!((16..24).contains(&header) && node.written_blocks() > 0, "byte {offset}"),
            Err(error) => prop_assert_eq!(error.level, level),
        }
    }

    #[test]
    fn any_bytes_are_judged_without_a_panic(
        level in 0_u8..2,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
    ) {
        let mut image = if level == 0 { leaf() } else { interior() };
        for (at, value) in changes {
            let offset = at.index(image.bytes.len());
            image.bytes[offset] = value;
        }
        let _ = use_node(level, &image.bytes);
    }

    /// Invalid keys under a valid checksum, as a broken program would write them, never cause a
    /// panic.
    #[test]
    fn sealed_nonsense_is_judged_without_a_panic(
        level in 0_u8..2,
        changes in prop::collection::vec((any::<prop::sample::Index>(), word()), 1..4),
    ) {
        let mut image = if level == 0 { leaf() } else { interior() };
        let sets = summed(&image);
        for (at, word) in changes {
            let words: Vec<usize> =
                sets.iter().flat_map(|set| (set.start + BSET_HEADER_BYTES..set.end).step_by(8)).collect();
            let offset = *at.get(&words);
            image.bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        }
        for set in &sets {
            seal_in_place(&mut image.bytes[set.clone()], place(&node_key()), SEQ);
        }
        let _ = use_node(level, &image.bytes);
    }
}

/// A word of a key: a plausible header, offset or pointer, or any value.
fn word() -> impl Strategy<Value = u64> {
    let header = (0..3_u64, 0..2_u64, 0..64_u64, 0..3_u64).prop_map(|(pointers, dirty, size, inode)| {
        1 << 63 | pointers << 60 | dirty << 36 | size << 20 | inode
    });
    let pointer = (0..2050_u64 * 1024, 0..4_u64).prop_map(|(sector, generation)| sector << 8 | generation);
    prop_oneof![header, 0..1000_u64, pointer, any::<u64>()]
}
