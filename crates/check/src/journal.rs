//! Reads the journal: every entry of every bucket, which of them are needed, and what should not be
//! there.
//!
//! A bucket's log ends at the first position without a complete entry. A torn write looks the same.
//! So damage to the newest entry alone cannot be told from a crash, and is reported as a warning.
//! An older needed entry is noticed by its missing sequence number.

use crate::damage::{DamageKind, Location, Structure};
use crate::findings::Findings;
use crate::image::ReadAt;
use bcached_format::checksum::checksum;
use bcached_format::error::JsetError;
use bcached_format::jset::{JSET_BYTES_MAX, JSET_HEADER_BYTES};
use bcached_format::{Geometry, Jset, JsetHeader, Key, SECTOR_BYTES};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::ops::Range;

/// Where an entry's header has its magic and its sequence number. The check also looks at damaged
/// headers, which no parser accepts.
const MAGIC: Range<usize> = 8..16;
const SEQ: Range<usize> = 16..24;

/// Sectors read at once when looking for what should not be there.
const CHUNK_SECTORS: u64 = 2048;

/// A complete entry and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JournalEntry {
    pub seq: u64,
    pub last_seq: u64,
    pub sector: u64,
    pub bytes: usize,
}

/// Where a bucket's log ends.
#[derive(Clone, Copy, Debug)]
struct LogEnd {
    /// Sector after the last complete entry.
    sector: u64,
    /// End of the bucket.
    bucket_end: u64,
}

/// The result of a scan.
#[derive(Debug)]
pub(crate) struct JournalScan {
    /// The entries of each bucket, in order.
    pub buckets: Vec<Vec<JournalEntry>>,
    /// The newest entry.
    pub newest: JournalEntry,
    /// Header of the newest entry.
    pub header: JsetHeader,
    /// Whether the uuid table it names has old slots.
    pub old_uuids: bool,
    /// The entries to be replayed, in order.
    pub needed: Vec<JournalEntry>,
}

/// Reads the whole journal. Returns `None` if it has no entries.
pub(crate) fn scan(image: &dyn ReadAt, geometry: &Geometry, findings: &mut Findings) -> Option<JournalScan> {
    let mut buckets = Vec::new();
    let mut ends = Vec::new();
    for index in 0..geometry.journal_buckets {
        let (entries, end) = scan_bucket(image, geometry, index, findings);
        buckets.push(entries);
        ends.push(end);
    }
    let Some(newest) = buckets.iter().flatten().max_by_key(|entry| entry.seq).copied() else {
        findings.error(Location::whole(Structure::Journal), DamageKind::NoJournalEntries);
        return None;
    };
    for end in ends {
        look_behind(image, geometry, end, newest, findings);
    }
    let by_seq = in_order(&buckets, newest, findings);
    let needed: Vec<JournalEntry> = by_seq.range(newest.last_seq..).map(|(_, entry)| *entry).collect();
    report_missing(&needed, newest, findings);
    let bytes = read(image, newest.sector, newest.bytes, findings)?;
    let entry = Jset::parse(&bytes, geometry.magic).ok()?;
    Some(JournalScan { header: entry.header, old_uuids: entry.has_old_uuids(), buckets, newest, needed })
}

/// Returns the keys of an entry that was found complete.
pub(crate) fn keys_of(
    image: &dyn ReadAt,
    geometry: &Geometry,
    entry: JournalEntry,
    findings: &mut Findings,
) -> Vec<Key> {
    let bytes = read(image, entry.sector, entry.bytes, findings).unwrap_or_default();
    Jset::parse(&bytes, geometry.magic).map_or_else(|_| Vec::new(), |entry| entry.keys.iter().collect())
}

fn scan_bucket(
    image: &dyn ReadAt,
    geometry: &Geometry,
    index: u64,
    findings: &mut Findings,
) -> (Vec<JournalEntry>, LogEnd) {
    let mut sector = geometry.sector_of(geometry.journal_bucket(index));
    let bucket_end = sector + geometry.bucket_sectors;
    let mut entries = Vec::new();
    while let Some(bytes) = read_window(image, sector, bucket_end, findings) {
        match Jset::parse(&bytes, geometry.magic) {
            Ok(entry) => {
                let (seq, last_seq) = (entry.header.seq, entry.header.last_seq);
                entries.push(JournalEntry { seq, last_seq, sector, bytes: entry.byte_len() });
                sector += geometry.whole_blocks(entry.byte_len()) as u64 / SECTOR_BYTES;
            }
            Err(error) if error.is_end_of_log() => break,
            Err(error) => {
                findings.error(Location::cache(Structure::Journal, sector), DamageKind::JournalEntry(error));
                break;
            }
        }
    }
    (entries, LogEnd { sector, bucket_end })
}

/// Looks at every block after the end of a bucket's log. Normally these are remains of older laps,
/// all older than the newest entry.
fn look_behind(
    image: &dyn ReadAt,
    geometry: &Geometry,
    end: LogEnd,
    newest: JournalEntry,
    findings: &mut Findings,
) {
    let mut sector = end.sector;
    while sector < end.bucket_end {
        let sectors = (end.bucket_end - sector).min(CHUNK_SECTORS);
        let bytes = usize::try_from(sectors * SECTOR_BYTES).unwrap_or(0);
        let Some(chunk) = read(image, sector, bytes, findings) else { return };
        for block in chunk.chunks(geometry.block_bytes()) {
            if may_be_entry(block, geometry, newest) {
                look_at(image, geometry, sector, end.bucket_end, newest, findings);
            }
            sector += geometry.block_sectors;
        }
    }
}

/// Returns whether a block is worth reading as an entry: most blocks are not even the start of an
/// old one.
fn may_be_entry(block: &[u8], geometry: &Geometry, newest: JournalEntry) -> bool {
    let Some(header) = block.get(..JSET_HEADER_BYTES) else { return false };
    header[MAGIC] == geometry.magic.jset().to_le_bytes()
        || header[SEQ] == (newest.seq.wrapping_add(1)).to_le_bytes()
}

fn look_at(
    image: &dyn ReadAt,
    geometry: &Geometry,
    sector: u64,
    bucket_end: u64,
    newest: JournalEntry,
    findings: &mut Findings,
) {
    let Some(bytes) = read_window(image, sector, bucket_end, findings) else { return };
    let place = Location::cache(Structure::Journal, sector);
    match Jset::parse(&bytes, geometry.magic) {
        Ok(entry) if entry.header.seq > newest.seq => {
            let seq = entry.header.seq;
            findings.error(place, DamageKind::JournalHidden { seq, newest: newest.seq });
        }
        Err(error) if was_newer(&bytes, geometry, newest, error) => {
            findings.warn(place, DamageKind::JournalTorn { newest: newest.seq, error });
        }
        _ => {}
    }
}

/// Returns whether these bytes, which are not a complete entry, were meant to be one newer than all
/// others. Either the header says so; or the checksum is right with the correct magic and the next
/// sequence number, so that only one of these fields is damaged.
fn was_newer(bytes: &[u8], geometry: &Geometry, newest: JournalEntry, error: JsetError) -> bool {
    let Some(header) = bytes.get(..JSET_HEADER_BYTES) else { return false };
    let magic = geometry.magic.jset().to_le_bytes();
    let seq = u64::from_le_bytes(header[SEQ].try_into().expect("eight bytes"));
    if header[MAGIC] == magic && seq > newest.seq {
        return true;
    }
    if !error.is_end_of_log() || (header[MAGIC] != magic && seq != newest.seq.wrapping_add(1)) {
        return false;
    }
    let words = u32::from_le_bytes(header[28..32].try_into().expect("four bytes")) as usize;
    let Some(entry) = words.checked_mul(8).and_then(|keys| bytes.get(..JSET_HEADER_BYTES + keys)) else {
        return false;
    };
    let mut mended = entry.to_vec();
    mended[MAGIC].copy_from_slice(&magic);
    mended[SEQ].copy_from_slice(&(newest.seq.wrapping_add(1)).to_le_bytes());
    checksum(&mended[8..]).to_le_bytes() == mended[..8]
}

/// Returns the entries by sequence number. Reports numbers that occur twice, and a `last_seq` that
/// decreases.
fn in_order(
    buckets: &[Vec<JournalEntry>],
    newest: JournalEntry,
    findings: &mut Findings,
) -> BTreeMap<u64, JournalEntry> {
    let mut by_seq = BTreeMap::new();
    for entry in buckets.iter().flatten() {
        match by_seq.entry(entry.seq) {
            Slot::Vacant(slot) => {
                slot.insert(*entry);
            }
            Slot::Occupied(slot) if entry.seq >= newest.last_seq => {
                let kind = DamageKind::JournalDuplicate { seq: entry.seq, other: slot.get().sector };
                findings.error(Location::cache(Structure::Journal, entry.sector), kind);
            }
            Slot::Occupied(_) => {}
        }
    }
    let mut previous = 0;
    for entry in by_seq.values() {
        if entry.last_seq < previous {
            let kind = DamageKind::JournalLastSeqFalls { seq: entry.seq, last_seq: entry.last_seq, previous };
            findings.error(Location::cache(Structure::Journal, entry.sector), kind);
        }
        previous = entry.last_seq.max(previous);
    }
    by_seq
}

fn report_missing(needed: &[JournalEntry], newest: JournalEntry, findings: &mut Findings) {
    let mut expected = newest.last_seq;
    for entry in needed {
        if entry.seq > expected {
            let kind = DamageKind::JournalMissing {
                first: expected,
                last: entry.seq - 1,
                last_seq: newest.last_seq,
                newest: newest.seq,
            };
            findings.error(Location::cache(Structure::Journal, newest.sector), kind);
        }
        expected = entry.seq + 1;
    }
}

/// Reads the bytes that an entry at `sector` could take: the rest of the bucket, at most 32 KiB.
/// Returns `None` at the end of the bucket.
fn read_window(image: &dyn ReadAt, sector: u64, bucket_end: u64, findings: &mut Findings) -> Option<Vec<u8>> {
    let sectors = bucket_end.checked_sub(sector).filter(|sectors| *sectors > 0)?;
    let bytes = usize::try_from(sectors.saturating_mul(SECTOR_BYTES)).unwrap_or(usize::MAX);
    read(image, sector, bytes.min(JSET_BYTES_MAX), findings)
}

fn read(image: &dyn ReadAt, sector: u64, bytes: usize, findings: &mut Findings) -> Option<Vec<u8>> {
    crate::read_or_report(image, Location::cache(Structure::Journal, sector), sector, bytes, findings)
}
