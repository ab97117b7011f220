//! Finds the journal's entries: reads every bucket to the end of its log, and keeps only what the
//! newest entry still needs. A journal may hold many laps of the ring, so entries that
//! the newest one found so far does not need are dropped at once.

use crate::cpu_cost::entry_ns;
use crate::error::{Error, ErrorContext};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env, join_all};
use bcached_format::jset::{Jset, JsetHeader};
use bcached_format::{Geometry, Key};

/// Journal buckets read at once.
const DEPTH: usize = 8;
/// Bytes read at a time from one bucket: most logs end early.
const STEP_BYTES: usize = 128 << 10;

/// A parsed journal entry.
#[derive(Debug)]
pub struct JournalEntry {
    /// Where the root, the UUID table and the priorities were.
    pub header: JsetHeader,
    /// Its UUID table uses the old slot layout.
    pub old_uuids: bool,
    /// Its keys, in the order of insertion.
    pub keys: Vec<Key>,
}

impl JournalEntry {
    fn of(jset: &Jset<'_>) -> Self {
        Self { header: jset.header, old_uuids: jset.has_old_uuids(), keys: jset.keys.iter().collect() }
    }
}

/// What the journal holds.
#[derive(Debug)]
pub struct JournalScan {
    /// The entries to replay, oldest first; the last is the newest.
    pub entries: Vec<JournalEntry>,
    /// Newest sequence in each journal bucket, 0 = none.
    pub newest: Vec<u64>,
    /// Journal bucket of the newest entry.
    pub current: usize,
    /// Where that entry ends in its bucket, in sectors.
    pub used_sectors: u64,
}

struct FoundEntry {
    entry: JournalEntry,
    end_sector: u64,
}

/// Reads the journal. An unreadable bucket fails the scan, because it may hold the newest entry.
pub async fn scan(device: (&Env, &Disk), geometry: &Geometry) -> Result<JournalScan, Error> {
    let mut kept = ReplayCandidates::default();
    let mut newest = alloc::vec![0; usize::try_from(geometry.journal_buckets).expect("at most 256 buckets")];
    let mut ends = newest.clone();
    let mut current = (0, 0, 0);
    let indices: Vec<u64> = (0..geometry.journal_buckets).collect();
    for indices in indices.chunks(DEPTH) {
        let logs = join_all(indices.iter().map(|index| read_bucket(device, geometry, *index))).await;
        for (index, log) in indices.iter().zip(logs) {
            let index = usize::try_from(*index).expect("at most 256 buckets");
            for FoundEntry { entry, end_sector } in log? {
                let sequence = entry.header.seq;
                newest[index] = newest[index].max(sequence);
                ends[index] = end_sector;
                current = current.max((sequence, index, end_sector));
                kept.add(entry);
            }
        }
    }
    let visible = current.0;
    let (mut index, mut unseen) = (current.1, 2);
    while unseen > 0 {
        unseen -= 1;
        for FoundEntry { entry, end_sector } in hidden_behind(device, geometry, index, (&newest, &ends)).await
        {
            if entry.header.seq > current.0 {
                current = (entry.header.seq, index, end_sector);
                (newest[index], ends[index]) = (entry.header.seq, end_sector);
                kept.add(entry);
                // The sequence may continue in the next bucket.
                unseen = 1;
            }
        }
        index = (index + 1) % ends.len();
    }
    let (sequence, bucket, used_sectors) = current;
    if kept.gap(sequence).is_some() {
        // Needed entries may lie behind damage in any bucket: an earlier start continued behind it
        // and was cut short.
        for index in 0..ends.len() {
            for FoundEntry { entry, .. } in hidden_behind(device, geometry, index, (&newest, &ends)).await {
                if entry.header.seq < sequence {
                    newest[index] = newest[index].max(entry.header.seq);
                    kept.add(entry);
                }
            }
        }
    }
    // An entry that is needed and cannot be read refuses the start: invariant D42.
    match kept.gap(sequence) {
        Some(_) if sequence > visible => Err(Error::JournalHidden { sequence, found: visible }),
        Some(gap) => Err(gap),
        None => Ok(JournalScan { entries: kept.complete(sequence), newest, current: bucket, used_sectors }),
    }
}

/// Returns the entries that damage hides behind the log of a journal bucket, in order. For each
/// bucket, `newest` is the newest entry of its log (0 if the log is empty), and `ends` the sector
/// at which the log ends.
///
/// An entry is written (by bcached and by a kernel) only when the one before it is durable, either
/// right behind it or at the start of the next bucket. So no crash leaves a newer entry behind the
/// end of a log. An entry found there was hidden when one before it was damaged. A start that did
/// not look would put older keys over newer ones. If the hidden entries have all that they need,
/// they are the journal's end: the damaged entry was not needed any more (invariant D42).
///
/// For each missing sequence number before a hidden entry there must have been room for one block.
/// An entry without that room was not hidden. It is left over from a history that was not
/// continued, because a start took the damage for the end of the log.
async fn hidden_behind(
    device: (&Env, &Disk),
    geometry: &Geometry,
    index: usize,
    (newest, ends): (&[u64], &[u64]),
) -> Vec<FoundEntry> {
    let (mut before, mut room) = (newest[index], 0);
    if before == 0 {
        let former = (index + ends.len() - 1) % ends.len();
        before = newest[former];
        room = (geometry.bucket_sectors - ends[former]) / geometry.block_sectors;
    }
    let mut hidden: Vec<FoundEntry> = Vec::new();
    let (mut end, mut is_over) = (ends[index], false);
    each_whole(device, geometry, index as u64, ends[index], |jset, end_sector| {
        let begin = end_sector - (geometry.whole_blocks(jset.byte_len()) / 512) as u64;
        let missing = jset.header.seq.saturating_sub(before).saturating_sub(1);
        let blocks = room + (begin - end) / geometry.block_sectors;
        let is_next = jset.header.seq > before && missing <= blocks && (missing > 0 || blocks == 0);
        if is_over || !is_next {
            is_over = true;
            return;
        }
        hidden.push(FoundEntry { entry: JournalEntry::of(jset), end_sector });
        (before, end, room) = (jset.header.seq, end_sector, 0);
    })
    .await;
    hidden
}

/// Calls `look` with each intact entry at or behind sector `from` of a journal bucket, whatever
/// lies between them, and with the sector of the bucket where the entry ends.
async fn each_whole(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    index: u64,
    from: u64,
    mut look: impl FnMut(&Jset<'_>, u64),
) {
    let start = geometry.sector_of(geometry.journal_bucket(index)) + from;
    let limit = usize::try_from((geometry.bucket_sectors - from) * 512).expect("a bucket fits in memory");
    let mut bytes: Vec<u8> = Vec::new();
    // An unreadable area here belongs to no log, and is no reason to refuse the set.
    while bytes.len() < limit && read_more(disk, start, &mut bytes, limit).await.is_ok() {}
    let mut at = 0;
    while at < bytes.len() {
        env.breathe().await;
        let jset = Jset::parse(&bytes[at..], geometry.magic).ok();
        env.charge(entry_ns(jset.as_ref().map_or(0, Jset::byte_len)));
        at += geometry.whole_blocks(jset.as_ref().map_or(1, Jset::byte_len));
        if let Some(jset) = jset {
            look(&jset, from + at as u64 / 512);
        }
    }
}

/// Returns the newest intact entry, wherever it is, and its journal bucket; `None` if there is
/// none. A set that is made anew with the UUID of a former one would take that set's entries for
/// its own, so its own must begin behind them.
pub async fn newest_of_all(device: (&Env, &Disk), geometry: &Geometry) -> Option<(u64, usize)> {
    let mut newest = None;
    for index in 0..geometry.journal_buckets {
        let bucket = usize::try_from(index).expect("at most 256 buckets");
        each_whole(device, geometry, index, 0, |jset, _| {
            newest = newest.max(Some((jset.header.seq, bucket)));
        })
        .await;
    }
    newest
}

/// The entries that may have to be replayed.
#[derive(Default)]
struct ReplayCandidates {
    found: BTreeMap<u64, JournalEntry>,
    /// Sequence of the newest entry found, and of the oldest entry that it needs.
    newest: (u64, u64),
}

impl ReplayCandidates {
    fn add(&mut self, entry: JournalEntry) {
        let (sequence, last) = (entry.header.seq, entry.header.last_seq);
        if sequence > self.newest.0 {
            self.newest = (sequence, last);
            self.found = self.found.split_off(&last);
        }
        if sequence >= self.newest.1 {
            self.found.entry(sequence).or_insert(entry);
        }
    }

    /// Returns an error for the first gap in what entry `newest` needs, if any.
    fn gap(&self, newest: u64) -> Option<Error> {
        let Some(last) = self.found.get(&newest) else { return Some(Error::NoJournal) };
        let from = (last.header.last_seq..=newest).find(|wanted| !self.found.contains_key(wanted))?;
        let next = self.found.range(from..).next().map_or(newest, |(sequence, _)| *sequence);
        Some(Error::JournalGap { from, to: next - 1 })
    }

    /// All entries that entry `newest` needs, oldest first. There must be no gap.
    fn complete(mut self, newest: u64) -> Vec<JournalEntry> {
        let last = self.found.get(&newest).map_or(newest, |last| last.header.last_seq);
        self.found.split_off(&last).into_values().collect()
    }
}

/// Reads the log of one bucket, a run of consecutive sequence numbers. The log ends at the first
/// invalid entry, or where the numbers are not consecutive: behind the newest entry of this lap lie
/// those of the previous lap.
async fn read_bucket(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    index: u64,
) -> Result<Vec<FoundEntry>, Error> {
    let start = geometry.sector_of(geometry.journal_bucket(index));
    let bucket_bytes = usize::try_from(geometry.bucket_bytes()).expect("a bucket fits in memory");
    let mut bytes: Vec<u8> = Vec::new();
    let mut at = 0;
    let mut log: Vec<FoundEntry> = Vec::new();
    loop {
        env.breathe().await;
        match Jset::parse(&bytes[at..], geometry.magic) {
            Ok(jset) => {
                env.charge(entry_ns(jset.byte_len()));
                if log
                    .last()
                    .is_some_and(|before| Some(before.entry.header.seq) != jset.header.seq.checked_sub(1))
                {
                    return Ok(log);
                }
                at += geometry.whole_blocks(jset.byte_len());
                log.push(FoundEntry { entry: JournalEntry::of(&jset), end_sector: at as u64 / 512 });
                if at >= bucket_bytes {
                    return Ok(log);
                }
                if at > bytes.len() {
                    read_more(disk, start, &mut bytes, bucket_bytes).await?;
                }
            }
            // An entry may extend beyond what has been read.
            Err(_) if bytes.len() < bucket_bytes && bytes.len() - at < geometry.jset_bytes_max() => {
                read_more(disk, start, &mut bytes, bucket_bytes).await?;
            }
            Err(error) if error.is_end_of_log() => return Ok(log),
            Err(error) => return Err(Error::Format { doing: ErrorContext::Journal, source: error.into() }),
        }
    }
}

async fn read_more(disk: &Disk, start: u64, bytes: &mut Vec<u8>, limit: usize) -> Result<(), Error> {
    let length = STEP_BYTES.min(limit - bytes.len());
    let (result, buffer) = disk.read(start + bytes.len() as u64 / 512, Buffer::zeroed(length)).await;
    result.map_err(Error::io(ErrorContext::Journal))?;
    bytes.extend_from_slice(buffer.as_slice());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(seq: u64, last_seq: u64) -> JournalEntry {
        let header = JsetHeader {
            seq,
            last_seq,
            uuids: Key::default(),
            root: Key::default(),
            root_level: 0,
            prio_bucket: 0,
            marks_reserve: false,
            table: None,
        };
        JournalEntry { header, old_uuids: false, keys: Vec::new() }
    }

    /// Regression: a large journal has been through many laps, and the keys of each lap stayed in
    /// memory until the end of the scan.
    #[test]
    fn only_what_the_newest_entry_needs_is_kept() {
        let mut kept = ReplayCandidates::default();
        // Two laps, the newer one first in the ring, as buckets are read.
        for seq in (1000..1500).chain(500..1000) {
            kept.add(entry(seq, seq - 20));
            assert!(kept.found.len() <= 21, "{} entries are kept", kept.found.len());
        }
        assert_eq!(kept.gap(1499), None, "all are there");
        let entries = kept.complete(1499);
        let sequences: Vec<u64> = entries.iter().map(|entry| entry.header.seq).collect();
        assert_eq!(sequences, (1479..1500).collect::<Vec<u64>>());
    }

    #[test]
    fn a_missing_entry_is_named() {
        let mut kept = ReplayCandidates::default();
        for seq in [5, 6, 9] {
            kept.add(entry(seq, 5));
        }
        assert_eq!(kept.gap(9), Some(Error::JournalGap { from: 7, to: 8 }), "two are missing");
        assert_eq!(ReplayCandidates::default().gap(0), Some(Error::NoJournal));
    }
}
