//! Tests with sets written by a real kernel. The check finds nothing on them, it reports the same
//! content as the kernel served, and it detects each flipped bit in a checksummed structure and
//! attributes it to that structure.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

use crate::kernel::{self, KernelImages, KernelStop};
use bcached_check::{BucketUse, Options, ReadAt, Record, Severity, Structure, check, dump};
use bcached_format::{BackingState, DeviceGeometry, Inode, RawSuperblock, Superblock};
use std::ops::Range;
use std::sync::OnceLock;

/// Creates a set with small buckets that was stopped cleanly: a tree of two levels, made once for
/// all tests.
fn small() -> Option<&'static KernelImages> {
    static IMAGES: OnceLock<KernelImages> = OnceLock::new();
    if let Some(reason) = kernel::missing() {
        println!("skipped: {reason}");
        return None;
    }
    Some(IMAGES.get_or_init(|| kernel::make("4k", "512", 16, KernelStop::Clean)))
}

fn judge(images: &KernelImages, end: KernelStop, root_level: u16) {
    let backings: [&dyn ReadAt; 1] = [&images.backing];
    // After a crash a clean copy may be older than the backing device. Everything here was flushed
    // before.
    let options = Options { compare_clean: end == KernelStop::Clean, ..Options::default() };
    let checked = check(&images.cache, &backings, options);
    let errors: Vec<String> = checked.report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(errors, Vec::<String>::new());
    assert!(checked.report.tree.unwrap().root_level >= root_level, "{:?}", checked.report.tree);
    assert!(checked.report.tree.unwrap().sets_max >= 2);
    let [backed, flash] = &checked.report.volumes[..] else { panic!("{:?}", checked.report.volumes) };
    assert_eq!((backed.label.text(), backed.start, backed.flash_only), (&b"judged"[..], 16, false));
    assert!(backed.live_sectors > backed.dirty_sectors && backed.dirty_sectors > 0);
    assert!(flash.flash_only && flash.dirty_sectors == flash.live_sectors && flash.live_sectors > 0);
    let live: u64 = checked.buckets.iter().map(|bucket| u64::from(bucket.live_sectors)).sum();
    let of_volumes: u64 = checked.report.volumes.iter().map(|volume| volume.live_sectors).sum();
    assert_eq!(live, of_volumes, "live sectors by bucket and by volume");
    let view = checked.view.as_ref().unwrap();
    for (inode, start) in [(0, backed.start), (1, 0)] {
        let wanted = &images.volumes[inode as usize];
        let mut found = vec![0; wanted.len()];
        view.read(Inode(inode), start, &mut found).unwrap();
        let differs = (0..found.len()).find(|at| found[*at] != wanted[*at]);
        assert_eq!(differs, None, "volume {inode}: first differing byte");
    }
}

#[test]
fn a_set_with_small_buckets_after_a_clean_stop() {
    let Some(images) = small() else { return };
    judge(images, KernelStop::Clean, 1);
    let raw = RawSuperblock::from_bytes(&images.backing[4096..8192]).unwrap();
    let facts = DeviceGeometry { sectors: images.backing.sectors(), logical_block_sectors: 1 };
    match raw.check(facts).unwrap() {
        Superblock::Backing(superblock) => assert_eq!(superblock.state(), BackingState::Dirty),
        Superblock::Cache(_) => panic!("a backing device"),
    }
}

#[test]
fn sets_after_a_crash() {
    if let Some(reason) = kernel::missing() {
        println!("skipped: {reason}");
        return;
    }
    judge(&kernel::make("4k", "512", 16, KernelStop::Crash), KernelStop::Crash, 1);
    judge(&kernel::make("64k", "4k", 64, KernelStop::Crash), KernelStop::Crash, 0);
}

/// Returns the checksummed bytes of every live structure, with the structure they belong to.
fn summed(images: &KernelImages) -> Vec<(Structure, Range<usize>)> {
    let mut ranges: Vec<(Structure, Range<u64>)> = Vec::new();
    let mut newest = (0, 0);
    let mut bucket_bytes = 0;
    let mut entries = Vec::new();
    let mut block_bytes = 512;
    dump(&images.cache, &mut |record| match record {
        Record::Superblock { journal_buckets, bucket_sectors, block_sectors, .. } => {
            ranges.push((Structure::Superblock, 4096..4096 + 208 + 8 * journal_buckets));
            bucket_bytes = bucket_sectors * 512;
            block_bytes = block_sectors * 512;
        }
        Record::JournalEntry { sector, seq, last_seq, keys, .. } => {
            let words: usize = keys.iter().map(|key| 2 + key.pointers.len()).sum();
            entries.push((seq, sector * 512..sector * 512 + 240 + 8 * words as u64));
            newest = newest.max((seq, last_seq));
        }
        Record::PriorityChain { buckets } => {
            let range = |bucket: &u64| bucket * bucket_bytes..(bucket + 1) * bucket_bytes;
            ranges.extend(buckets.iter().map(|bucket| (Structure::Priorities, range(bucket))));
        }
        Record::Node(node) => {
            for set in node.sets {
                let words: usize = set.keys.iter().map(|key| 2 + key.pointers.len()).sum();
                let start = node.sector * 512 + u64::from(set.block) * block_bytes;
                ranges.push((Structure::Node, start..start + 32 + 8 * words as u64));
            }
        }
        _ => {}
    });
    let needed = entries.into_iter().filter(|(seq, _)| *seq >= newest.1);
    ranges.extend(needed.map(|(_, range)| (Structure::Journal, range)));
    let index = |byte: u64| usize::try_from(byte).unwrap();
    ranges.into_iter().map(|(kind, range)| (kind, index(range.start)..index(range.end))).collect()
}

/// A random number generator that gives the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 20).unwrap() % limit
    }
}

#[test]
fn every_flipped_bit_of_a_summed_structure_is_found_and_laid_to_it() {
    let Some(images) = small() else { return };
    let ranges = summed(images);
    let mut cache = images.cache.clone();
    let mut dice = Random(1);
    for round in 0..1000 {
        // Take the structures in turn, so that the small ones get their share.
        let kinds = [Structure::Superblock, Structure::Journal, Structure::Priorities, Structure::Node];
        let kind = kinds[round % 4];
        let of_kind: Vec<_> = ranges.iter().filter(|(structure, _)| *structure == kind).collect();
        let (_, range) = of_kind[dice.below(of_kind.len())];
        let at = range.start + dice.below(range.end - range.start);
        let bit = 1 << dice.below(8);
        cache[at] ^= bit;
        let checked = check(&cache, &[], Options::default());
        let found = checked.report.findings.iter().any(|damage| damage.place.structure == kind);
        assert!(found, "byte {at} bit {bit:#x} of {kind:?} {range:?}: {:?}", checked.report.findings);
        cache[at] ^= bit;
    }
}

#[test]
fn flipped_bits_of_data_are_not_our_business() {
    let Some(images) = small() else { return };
    let checked = check(&images.cache, &[], Options::default());
    let in_use = |index: &usize| matches!(checked.buckets[*index].usage, BucketUse::Data | BucketUse::Free);
    let data: Vec<usize> = (0..checked.buckets.len()).filter(in_use).collect();
    let mut cache = images.cache.clone();
    let mut dice = Random(2);
    for round in 0..1000 {
        let bucket = data[dice.below(data.len())];
        cache[bucket * 4096 + dice.below(4096)] ^= 1 << dice.below(8);
        if round % 50 == 49 {
            let checked = check(&cache, &[], Options::default());
            assert_eq!(checked.report.findings, []);
        }
    }
}

#[test]
fn a_dump_shows_every_structure_and_serialises() {
    let Some(images) = small() else { return };
    let (mut names, mut lines) = (std::collections::BTreeMap::new(), 0);
    dump(&images.cache, &mut |record| {
        let json = serde_json::to_value(&record).unwrap();
        *names.entry(json["record"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        lines += record.to_string().lines().count();
    });
    let kinds: Vec<_> = names.keys().map(String::as_str).collect();
    assert_eq!(kinds, ["bucket", "journal-entry", "node", "priority-chain", "superblock", "uuid-slot"]);
    assert_eq!((names["superblock"], names["uuid-slot"]), (1, 2));
    assert!(lines > 100);
    let backings: [&dyn ReadAt; 1] = [&images.backing];
    let report = check(&images.cache, &backings, Options::default()).report;
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["volumes"][0]["label"], "judged");
    assert_eq!(json["findings"].as_array().unwrap().len(), 0);
    assert!(report.findings.iter().all(|damage| damage.severity == Severity::Warning));
}
