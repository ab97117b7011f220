//! Sectors written by a 6.1 kernel and by bcache-tools 1.0.8 (`golden-make/` creates them). Each is
//! parsed, checked, sealed again and compared with the original.
//!
//! A seal cannot reproduce the junk that a kernel leaves in the unused parts of a journal entry's
//! header. Those bytes are masked, with a comment, and not compared. Nothing else differs.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

use bcached_format::error::FormatError;
use bcached_format::key_check::{
    check_child_key, check_child_order, check_leaf_key, check_leaf_order, check_uuid_key,
};
use bcached_format::{
    BackingFormat, BackingState, BackingSuperblock, Bset, CacheFormat, CacheMode, CacheSuperblock,
    DeviceGeometry, Geometry, Jset, Key, NodeIdentity, NodeLog, Pointer, PrioSet, RawSuperblock,
    ReplacementPolicy, Superblock, bset, jset, prio, uuid,
};
use std::path::Path;

const SMALL: DeviceGeometry = DeviceGeometry { sectors: 8 << 11, logical_block_sectors: 1 };
const LARGE: DeviceGeometry = DeviceGeometry { sectors: 64 << 11, logical_block_sectors: 1 };

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Compares bytes and names the first difference.
#[track_caller]
fn assert_same(found: &[u8], wanted: &[u8], name: &str) {
    assert_eq!(found.len(), wanted.len(), "{name}: length");
    if let Some(at) = (0..found.len()).find(|at| found[*at] != wanted[*at]) {
        panic!("{name}: byte {at} is {:#04x}, wanted {:#04x}", found[at], wanted[at]);
    }
}

/// Asserts that the sealed superblock has the bytes of the golden file.
#[track_caller]
fn assert_golden(sealed: &[u8], name: &str) {
    assert_same(sealed, &golden(name), name);
}

fn cache(name: &str, device: DeviceGeometry) -> CacheSuperblock {
    match RawSuperblock::from_bytes(&golden(name)).unwrap().check(device).unwrap() {
        Superblock::Cache(superblock) => superblock,
        Superblock::Backing(_) => panic!("{name} is a cache's"),
    }
}

fn backing(name: &str) -> BackingSuperblock {
    match RawSuperblock::from_bytes(&golden(name)).unwrap().check(SMALL).unwrap() {
        Superblock::Backing(superblock) => superblock,
        Superblock::Cache(_) => panic!("{name} is a backing device's"),
    }
}

fn geometry() -> Geometry {
    Geometry::of(&cache("superblock-cache-running.bin", SMALL))
}

fn newest() -> Vec<u8> {
    golden("jset-newest.bin")
}

#[test]
fn formatting_a_cache_gives_the_bytes_of_the_tool() {
    let wanted = cache("superblock-cache-formatted.bin", SMALL);
    let format = CacheFormat {
        uuid: wanted.uuid(),
        set_uuid: wanted.set_uuid(),
        device_sectors: SMALL.sectors,
        block_sectors: 1,
        bucket_sectors: 8,
        discard: false,
        replacement: ReplacementPolicy::Lru,
    };
    let made = CacheSuperblock::format(format).unwrap();
    assert_golden(&made.seal()[..], "superblock-cache-formatted.bin");
    assert_eq!((made.version(), made.seq(), made.first_bucket(), made.buckets()), (0, 0, 3, 2048));

    let wanted = cache("superblock-cache-formatted-fifo.bin", LARGE);
    let format = CacheFormat {
        uuid: wanted.uuid(),
        set_uuid: wanted.set_uuid(),
        device_sectors: LARGE.sectors,
        bucket_sectors: 128,
        discard: true,
        replacement: ReplacementPolicy::Fifo,
        ..format
    };
    let made = CacheSuperblock::format(format).unwrap();
    assert_golden(&made.seal()[..], "superblock-cache-formatted-fifo.bin");
}

#[test]
fn formatting_a_backing_device_gives_the_bytes_of_the_tool() {
    for (name, bucket_sectors, data_offset, cache_mode) in [
        ("superblock-backing-formatted.bin", 8, None, CacheMode::Writethrough),
        ("superblock-backing-formatted-offset.bin", 1024, Some(2048), CacheMode::Writeback),
    ] {
        let wanted = backing(name);
        let format = BackingFormat {
            uuid: wanted.uuid(),
            set_uuid: wanted.set_uuid(),
            block_sectors: 1,
            bucket_sectors,
            data_offset,
            cache_mode,
            device_sectors: SMALL.sectors,
        };
        assert_golden(&BackingSuperblock::format(format).unwrap().seal()[..], name);
    }
}

#[test]
fn superblocks_of_a_running_kernel_seal_to_the_same_bytes() {
    let running = cache("superblock-cache-running.bin", SMALL);
    assert!(running.is_synchronous());
    assert_eq!((running.version(), running.seq(), running.journal_buckets()), (3, 1, 16));
    assert_golden(&running.seal()[..], "superblock-cache-running.bin");

    let large = cache("superblock-cache-running-large.bin", LARGE);
    assert_eq!((large.version(), large.bucket_sectors(), large.features().incompat), (5, 128, 2));
    assert_eq!(large.replacement(), ReplacementPolicy::Fifo);
    assert_golden(&large.seal()[..], "superblock-cache-running-large.bin");

    let dirty = backing("superblock-backing-dirty.bin");
    assert_eq!((dirty.state(), dirty.cache_mode()), (BackingState::Dirty, CacheMode::Writeback));
    assert_eq!(dirty.set_uuid(), running.set_uuid());
    assert_eq!(dirty.label().text(), b"golden");
    assert_golden(&dirty.seal()[..], "superblock-backing-dirty.bin");

    let newer = backing("superblock-backing-version-6.bin");
    assert_eq!((newer.version(), newer.data_offset()), (6, 2048));
    assert_golden(&newer.seal()[..], "superblock-backing-version-6.bin");
}

#[test]
fn a_start_by_us_writes_the_superblock_that_a_kernel_writes() {
    let wanted = cache("superblock-cache-running.bin", SMALL);
    let mut ours = cache("superblock-cache-formatted.bin", SMALL);
    ours.set_journal_buckets(16);
    ours.set_synchronous(true);
    ours.set_last_mount(wanted.last_mount());
    ours.advance();
    assert_golden(&ours.seal()[..], "superblock-cache-running.bin");
}

/// Returns the entry's bytes with the kernel's junk zeroed: the bytes after the keys in the header,
/// those after the root's level, and the slots of devices that do not exist. The checksum covers
/// the junk, so it is zeroed as well.
fn without_junk(bytes: &[u8], entry: &Jset<'_>) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let end_of = |key: &Key| 8 * key.words();
    bytes[..8].fill(0);
    bytes[40 + end_of(&entry.header.uuids)..104].fill(0);
    bytes[104 + end_of(&entry.header.root)..168].fill(0);
    bytes[170..176].fill(0);
    bytes[184..240].fill(0);
    bytes
}

#[test]
fn journal_entries_seal_to_the_same_bytes() {
    let geometry = geometry();
    for (name, keys) in [("jset-newest.bin", 1), ("jset-without-keys.bin", 0), ("jset-with-many-keys.bin", 5)]
    {
        let bytes = golden(name);
        let entry = Jset::parse(&bytes, geometry.magic).unwrap();
        let list: Vec<Key> = entry.keys.iter().collect();
        assert_eq!(list.len(), keys, "{name}");
        for key in &list {
            assert_eq!(check_leaf_key(&geometry, key), Ok(()), "{name}");
        }
        assert_eq!(check_child_key(&geometry, &entry.header.root), Ok(()));
        assert_eq!(check_uuid_key(&geometry, &entry.header.uuids), Ok(()));
        let sealed = jset::seal(geometry.magic, &entry.header, &list);
        assert_same(&without_junk(&sealed, &entry), &without_junk(&bytes, &entry), name);
        let again = Jset::parse(&sealed, geometry.magic).unwrap();
        assert_eq!((again.header, again.keys.as_bytes()), (entry.header, entry.keys.as_bytes()));
    }
}

fn reseal_node(log: &NodeLog<'_>, bytes: &[u8], place: NodeIdentity, block_bytes: usize) {
    for set in &log.sets {
        let keys: Vec<Key> = set.bset.keys.iter().collect();
        let sealed = bset::seal(place, set.bset.seq, &keys);
        let start = set.block as usize * block_bytes;
        assert_same(&sealed, &bytes[start..start + sealed.len()], "set");
    }
}

#[test]
fn nodes_seal_to_the_same_bytes() {
    let (geometry, entry) = (geometry(), newest());
    let entry = Jset::parse(&entry, geometry.magic).unwrap();
    assert_eq!(entry.header.root_level, 1);
    let place = NodeIdentity { magic: geometry.magic, node: entry.header.root.pointers.as_slice()[0] };
    let bytes = golden("node-root.bin");
    let root = NodeLog::parse(&bytes, geometry.block_bytes(), place).unwrap();
    reseal_node(&root, &bytes, place, geometry.block_bytes());
    let children: Vec<Key> = root.sets.iter().flat_map(|set| set.bset.keys.iter()).collect();
    for set in &root.sets {
        assert_eq!(check_child_order(set.bset.keys.iter()), Ok(()));
    }
    assert!(children.iter().all(|key| check_child_key(&geometry, key).is_ok()));

    // The leaf is a child of this root; its checksums are right only under its own pointer.
    let bytes = golden("node-leaf.bin");
    let parse = |node: Pointer| {
        NodeLog::parse(&bytes, geometry.block_bytes(), NodeIdentity { node, ..place }).map(|log| (log, node))
    };
    let pointers = children.iter().map(|key| key.pointers.as_slice()[0]);
    let (leaf, node) = pointers.filter_map(|node| parse(node).ok()).next().expect("one of the children");
    assert!(leaf.sets.len() >= 3, "several sets");
    reseal_node(&leaf, &bytes, NodeIdentity { node, ..place }, geometry.block_bytes());
    for set in &leaf.sets {
        assert_eq!(check_leaf_order(set.bset.keys.iter()), Ok(()));
        assert!(set.bset.keys.iter().all(|key| check_leaf_key(&geometry, &key).is_ok()));
    }
    let bumped = node.with_generation(node.generation().next());
    assert!(
        matches!(parse(bumped), Err(error) if FormatError::from(error).to_string().contains("bad checksum"))
    );
}

#[test]
fn a_chain_of_priority_sets_seals_to_the_same_bytes() {
    let (geometry, entry) = (geometry(), newest());
    let header = Jset::parse(&entry, geometry.magic).unwrap().header;
    assert_eq!(geometry.prio_sets(), 2);
    let sets = [golden("prio-0.bin"), golden("prio-1.bin")];
    let parsed: Vec<PrioSet<'_>> =
        sets.iter().map(|bytes| PrioSet::parse(bytes, geometry.magic).unwrap()).collect();
    assert_eq!(parsed[0].seq, parsed[1].seq, "one write");
    for (set, bytes) in parsed.iter().zip(&sets) {
        let mut sealed = vec![0; bytes.len()];
        prio::seal(&mut sealed, geometry.magic, set.seq, set.next_bucket, set.entries());
        assert_same(&sealed, bytes, "priority set");
    }
    let generations: Vec<_> = parsed.iter().flat_map(PrioSet::entries).take(2048).collect();
    let root = header.root.pointers.as_slice()[0];
    let bucket = usize::try_from(root.sector() / geometry.bucket_sectors).unwrap();
    assert_eq!(generations[bucket].prio, prio::PRIO_BTREE, "the root is a node");
}

#[test]
fn the_uuid_table_seals_to_the_same_bytes() {
    let bytes = golden("uuids.bin");
    let slots: Vec<_> = uuid::parse(&bytes).unwrap().collect();
    assert_eq!(slots.len(), geometry().uuid_slots());
    assert_eq!(slots[0].uuid, backing("superblock-backing-dirty.bin").uuid());
    assert_eq!(slots[0].label.text(), b"golden");
    assert!(slots[1].is_flash_only() && slots[1].sectors == 4096, "a flash-only volume of 2 MiB");
    assert!(slots[3].is_free());
    let sealed: Vec<u8> = slots.iter().flat_map(uuid::UuidSlot::to_bytes).collect();
    assert_same(&sealed, &bytes, "uuid table");
}

#[test]
fn a_set_inside_a_node_is_a_set_by_itself() {
    let (geometry, entry) = (geometry(), newest());
    let root = Jset::parse(&entry, geometry.magic).unwrap().header.root.pointers.as_slice()[0];
    let bytes = golden("node-root.bin");
    let place = NodeIdentity { magic: geometry.magic, node: root };
    let log = NodeLog::parse(&bytes, geometry.block_bytes(), place).unwrap();
    let last = log.sets.last().unwrap();
    let alone = Bset::parse(&bytes[last.block as usize * geometry.block_bytes()..], place).unwrap();
    assert_eq!(alone, last.bset);
}
