//! Finds the journal's entries: every bucket is read to the end of its log, and only what the newest entry still
//! needs is kept (format 9.3). A journal may hold many laps; what the newest entry met so far does not need is let go at
//! once.

use crate::error::{Doing, Error};
use crate::work::entry_ns;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env, join_all};
use bcached_format::jset::{Jset, JsetHeader};
use bcached_format::{Geometry, Key};

/// Journal buckets read at once.
const DEPTH: usize = 8;
/// Bytes read at a time from one bucket: most logs end early.
const STEP_BYTES: usize = 128 << 10;

/// An entry, out of its bytes.
#[derive(Debug)]
pub struct Entry {
    /// Where root, table and priorities were.
    pub header: JsetHeader,
    /// Its table of volumes has the old slots.
    pub old_uuids: bool,
    /// Its keys, in the order of insertion.
    pub keys: Vec<Key>,
}

impl Entry {
    fn of(jset: &Jset<'_>) -> Self {
        Self { header: jset.header, old_uuids: jset.has_old_uuids(), keys: jset.keys.iter().collect() }
    }
}

/// What the journal holds.
#[derive(Debug)]
pub struct Scan {
    /// The entries to replay, oldest first; the last is the newest.
    pub entries: Vec<Entry>,
    /// Newest sequence in each journal bucket, 0 = none.
    pub newest: Vec<u64>,
    /// Journal bucket of the newest entry.
    pub current: usize,
    /// Where that entry ends in its bucket, in sectors.
    pub used_sectors: u64,
}

struct Found {
    entry: Entry,
    end_sector: u64,
}

/// Reads the journal. An unreadable bucket fails the scan: it may hold the newest entry.
pub async fn scan(device: (&Env, &Disk), geometry: &Geometry) -> Result<Scan, Error> {
    let mut kept = Kept::default();
    let mut newest = alloc::vec![0; usize::try_from(geometry.journal_buckets).expect("at most 256")];
    let mut ends = newest.clone();
    let mut current = (0, 0, 0);
    let indices: Vec<u64> = (0..geometry.journal_buckets).collect();
    for indices in indices.chunks(DEPTH) {
        let logs = join_all(indices.iter().map(|index| read_bucket(device, geometry, *index))).await;
        for (index, log) in indices.iter().zip(logs) {
            let index = usize::try_from(*index).expect("at most 256");
            for Found { entry, end_sector } in log? {
                let sequence = entry.header.seq;
                newest[index] = newest[index].max(sequence);
                ends[index] = end_sector;
                current = current.max((sequence, index, end_sector));
                kept.add(entry);
            }
        }
    }
    let before = current.0;
    let (mut index, mut left) = (current.1, 2);
    while left > 0 {
        let hidden = hidden_behind(device, geometry, index, ends[index], current.0).await?;
        for Found { entry, end_sector } in hidden {
            newest[index] = entry.header.seq;
            current = (entry.header.seq, index, end_sector);
            // The next bucket may go on from there.
            left = 2;
            kept.add(entry);
        }
        left -= 1;
        index = (index + 1) % ends.len();
    }
    let (sequence, bucket, used_sectors) = current;
    let entries = match kept.complete(sequence) {
        Err(Error::JournalGap { .. }) if sequence > before => {
            return Err(Error::JournalHidden { sequence, found: before });
        }
        entries => entries?,
    };
    Ok(Scan { entries, newest, current: bucket, used_sectors })
}

/// The entries newer than `newest` that stand at or behind sector `from` of a journal bucket, in their order.
///
/// An entry is written only when the one before it is durable (ours and a kernel's), and goes behind it or to the start of the
/// next bucket. So no crash leaves an entry behind the end of a log that is newer than the log's: what is there was hidden when
/// an entry before it was damaged, and a start that did not look would put older keys over newer ones. They are the journal's
/// end, if what they need is whole: the damaged one was not needed any more.
///
/// # Errors
/// The first of them follows `newest` without a gap: then nothing between them has been damaged, and what it is nobody can say.
async fn hidden_behind(
    device: (&Env, &Disk),
    geometry: &Geometry,
    index: usize,
    from: u64,
    newest: u64,
) -> Result<Vec<Found>, Error> {
    let mut hidden: Vec<Found> = Vec::new();
    each_whole(device, geometry, index as u64, from, |jset, end_sector| {
        let before = hidden.last().map_or(newest, |before| before.entry.header.seq);
        if jset.header.seq > before {
            hidden.push(Found { entry: Entry::of(jset), end_sector });
        }
    })
    .await;
    match hidden.first().map(|first| first.entry.header.seq) {
        Some(sequence) if sequence == newest + 1 => Err(Error::JournalHidden { sequence, found: newest }),
        _ => Ok(hidden),
    }
}

/// Shows `look` each whole entry at or behind sector `from` of a journal bucket, whatever stands between them, and the sector of
/// the bucket where it ends.
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
    // What cannot be read there is nobody's log, and is no reason to refuse a set.
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

/// The newest whole entry wherever it stands, with the journal bucket it stands in; `None` if there is none: a set that is made
/// anew with the uuid of a former one takes that one's entries for its own, and has to begin behind them.
pub async fn newest_of_all(device: (&Env, &Disk), geometry: &Geometry) -> Option<(u64, usize)> {
    let mut newest = None;
    for index in 0..geometry.journal_buckets {
        let bucket = usize::try_from(index).expect("at most 256");
        each_whole(device, geometry, index, 0, |jset, _| {
            newest = newest.max(Some((jset.header.seq, bucket)));
        })
        .await;
    }
    newest
}

/// The entries that may have to be replayed.
#[derive(Default)]
struct Kept {
    found: BTreeMap<u64, Entry>,
    /// Number of the newest entry met, and the oldest that it needs.
    newest: (u64, u64),
}

impl Kept {
    fn add(&mut self, entry: Entry) {
        let (sequence, last) = (entry.header.seq, entry.header.last_seq);
        if sequence > self.newest.0 {
            self.newest = (sequence, last);
            self.found = self.found.split_off(&last);
        }
        if sequence >= self.newest.1 {
            self.found.entry(sequence).or_insert(entry);
        }
    }

    /// All that entry `newest` needs, oldest first.
    fn complete(mut self, newest: u64) -> Result<Vec<Entry>, Error> {
        let last = self.found.get(&newest).ok_or(Error::NoJournal)?;
        let mut entries = Vec::new();
        for wanted in last.header.last_seq..=newest {
            match self.found.remove(&wanted) {
                Some(entry) => entries.push(entry),
                None => return Err(gap(&self.found, wanted, newest)),
            }
        }
        Ok(entries)
    }
}

fn gap(found: &BTreeMap<u64, Entry>, from: u64, newest: u64) -> Error {
    let next = found.range(from..).next().map_or(newest, |(sequence, _)| *sequence);
    Error::JournalGap { from, to: next - 1 }
}

/// The log of one bucket. It ends at the first place that is not a valid entry, and where sequence numbers go back:
/// behind the newest entry of this lap lie those of the former one.
async fn read_bucket(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    index: u64,
) -> Result<Vec<Found>, Error> {
    let start = geometry.sector_of(geometry.journal_bucket(index));
    let bucket_bytes = usize::try_from(geometry.bucket_bytes()).expect("a bucket fits in memory");
    let mut bytes: Vec<u8> = Vec::new();
    let mut at = 0;
    let mut log: Vec<Found> = Vec::new();
    loop {
        env.breathe().await;
        match Jset::parse(&bytes[at..], geometry.magic) {
            Ok(jset) => {
                env.charge(entry_ns(jset.byte_len()));
                if log.last().is_some_and(|before| before.entry.header.seq >= jset.header.seq) {
                    return Ok(log);
                }
                at += geometry.whole_blocks(jset.byte_len());
                log.push(Found { entry: Entry::of(&jset), end_sector: at as u64 / 512 });
                if at >= bucket_bytes {
                    return Ok(log);
                }
                if at > bytes.len() {
                    read_more(disk, start, &mut bytes, bucket_bytes).await?;
                }
            }
            // An entry may go on behind what has been read.
            Err(_) if bytes.len() < bucket_bytes && bytes.len() - at < geometry.jset_bytes_max() => {
                read_more(disk, start, &mut bytes, bucket_bytes).await?;
            }
            Err(error) if error.is_end_of_log() => return Ok(log),
            Err(error) => return Err(Error::Format { doing: Doing::Journal, source: error.into() }),
        }
    }
}

async fn read_more(disk: &Disk, start: u64, bytes: &mut Vec<u8>, limit: usize) -> Result<(), Error> {
    let length = STEP_BYTES.min(limit - bytes.len());
    let (result, buffer) = disk.read(start + bytes.len() as u64 / 512, Buffer::zeroed(length)).await;
    result.map_err(Error::io(Doing::Journal))?;
    bytes.extend_from_slice(buffer.as_slice());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(seq: u64, last_seq: u64) -> Entry {
        let header = JsetHeader {
            seq,
            last_seq,
            uuids: Key::default(),
            root: Key::default(),
            root_level: 0,
            prio_bucket: 0,
        };
        Entry { header, old_uuids: false, keys: Vec::new() }
    }

    /// A large journal is gone round many times, and each lap's keys once stayed in memory until the end of the scan.
    #[test]
    fn only_what_the_newest_entry_needs_is_kept() {
        let mut kept = Kept::default();
        // Two laps, the newer one first in the ring, as buckets are read.
        for seq in (1000..1500).chain(500..1000) {
            kept.add(entry(seq, seq - 20));
            assert!(kept.found.len() <= 21, "{} entries are kept", kept.found.len());
        }
        let entries = kept.complete(1499).expect("all are there");
        let sequences: Vec<u64> = entries.iter().map(|entry| entry.header.seq).collect();
        assert_eq!(sequences, (1479..1500).collect::<Vec<u64>>());
    }

    #[test]
    fn a_missing_entry_is_named() {
        let mut kept = Kept::default();
        for seq in [5, 6, 9] {
            kept.add(entry(seq, 5));
        }
        assert_eq!(kept.complete(9).expect_err("two are missing"), Error::JournalGap { from: 7, to: 8 });
    }
}
