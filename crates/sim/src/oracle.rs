//! The oracle: decides which values each sector of each volume may be read as.
//!
//! Clients tell it what they request and what answers they get. For every read it says whether a
//! correct block device could have returned that content. It knows nothing of caches, so it is the
//! same for every system under test.
//!
//! The rules (`sector.rs` implements them as a state machine; for each, `tests.rs` has a run that
//! must pass and a run that must be caught):
//!
//! 1. A read returns the last acknowledged write, or one that was in flight during the read.
//! 2. Overlapping writes that are in flight together may take effect in either order, sector by
//!    sector. Once a read has shown the order, it stays.
//! 3. After a power cut a sector holds what the last successful flush (or FUA) made durable, or any
//!    later write, in flight or acknowledged; never a third value. The value that is read first
//!    then stays, over further power cuts too.
//! 4. After the death of a process every acknowledged write is there; writes in flight are there or
//!    not (invariant D6).
//! 5. A value that was read once stays until the sector is written or the power is cut.
//! 6. A failed write left each sector old or new.
//! 7. A discard leaves each sector with any former value or zero; the first read fixes it. A value
//!    written while the discard was in flight counts as a former value too, because the write may
//!    have come first.
//! 8. Data that a device drops when a flush fails may revert to an older value. When a client's
//!    flush fails, data acknowledged before the flush was submitted is no longer promised; a flush
//!    that succeeds after a drop promises it all the same. If no client has been told of a drop
//!    when the process ends, its exit status and log report it; the next process knows nothing of
//!    it. If the cache dropped something, data that was acknowledged before the drop and is not
//!    durable may revert at the death of the process. A read in flight while a backing device drops
//!    something may see what the device reverts to, even if the cache has long replaced that. A
//!    write of part of a block that is in flight during a drop may bring back dropped data in the
//!    rest of the block. A backing device that was pulled has dropped what it lost with its power.
//!    The system may not know this before the device is back, or ever if its process dies. A read
//!    that begins earlier may see a copy in the cache of data that is lost, and a write that was in
//!    flight may be acknowledged although it is lost.
//! 9. An orderly stop is a flush (invariant D33).
//! 10. If a process dies while the file of its note is gone, data that was acknowledged before the
//!     removal and is not durable may be lost, until the process has made up for the removal. Data
//!     that was submitted later and acknowledged is there.
//!
//! A flush covers what was acknowledged before the flush was *submitted*. Time is a count of
//! events; no clock is involved.

mod presence;
mod sector;

use crate::stamp::{self, SECTOR, SectorValue, StampError};
pub use presence::VolumePresence;
use sector::{NEVER, Sector, SectorRead, SectorVersion, VersionContent};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

/// Sectors per chunk; clones share chunks that do not change.
const CHUNK: u64 = 64;

/// One in this many chunks is sampled; see [`Oracle::thin_out`].
const THIN: u64 = 4;

type SectorChunk = Vec<Option<Sector>>;

/// Identifies an operation of a client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpId(u64);

impl OpId {
    /// Returns the number that the operation's data is stamped with.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

#[derive(Clone, Debug)]
enum PendingOpKind {
    Write { fua: bool },
    Discard,
    Flush,
    Stop,
    Read,
}

#[derive(Clone, Debug)]
struct PendingOp {
    kind: PendingOpKind,
    volume: u32,
    sectors: Range<u64>,
    start: u64,
    /// Sectors outside the range, each with the number of the version by which this write may have
    /// brought back data; see rule 8.
    echoes: Vec<(u64, u64)>,
}

/// A backing device that was pulled.
#[derive(Clone, Debug)]
struct PulledDevice {
    /// When it was pulled.
    since: u64,
    /// When it came back; [`NEVER`] while it is away. Reads that began before then say nothing
    /// about its content.
    until: u64,
    /// Sectors of the volume in which it has dropped something.
    dropped: BTreeSet<u64>,
}

/// A read result that no correct device could have returned.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct Violation {
    /// The volume.
    pub volume: u32,
    /// The sector.
    pub sector: u64,
    /// The value found, or why the content is no value at all.
    pub found: Result<SectorValue, StampError>,
    /// The values that were allowed.
    pub allowed: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume {} sector {} read as ", self.volume, self.sector)?;
        match self.found {
            Ok(value) => write!(f, "{value}")?,
            Err(error) => write!(f, "{error}")?,
        }
        write!(f, ", allowed: {}", self.allowed.join(" or "))
    }
}

/// What is known about all volumes. Cheap to clone: each crash point judges a clone.
#[derive(Clone)]
pub struct Oracle {
    /// What volume `i` holds where nothing was written.
    firsts: Vec<SectorValue>,
    chunks: BTreeMap<(u32, u64), Rc<SectorChunk>>,
    /// Volumes that are created and deleted.
    presences: BTreeMap<u32, VolumePresence>,
    open: BTreeMap<OpId, PendingOp>,
    /// Unit in which the system writes data, in sectors; a power of two.
    block: u64,
    /// Volumes for which a device, such as the cache, has dropped unknown data in the life of this
    /// process, and when it last did.
    cache_dropped: BTreeMap<u32, u64>,
    /// Volumes whose backing device is away, or was away in the life of this process.
    away: BTreeMap<u32, PulledDevice>,
    /// When the file of the note was removed, if it is gone.
    note_gone: Option<u64>,
    /// The range of each write, by number.
    writes: Rc<BTreeMap<u64, (u32, Range<u64>)>>,
    /// The first operation whose sectors are all reported; see [`Oracle::thin_out`].
    dense_from: u64,
    /// The `writes` from before that.
    thin_writes: Rc<BTreeMap<u64, (u32, Range<u64>)>>,
    /// Number of events so far.
    clock: u64,
    next: u64,
}

impl Oracle {
    /// Creates an oracle for volumes that hold `firsts` where nothing was written: zeroes or stamps
    /// of write 0.
    #[must_use]
    pub fn new(firsts: Vec<SectorValue>) -> Self {
        Self {
            firsts,
            chunks: BTreeMap::new(),
            presences: BTreeMap::new(),
            open: BTreeMap::new(),
            block: 1,
            cache_dropped: BTreeMap::new(),
            away: BTreeMap::new(),
            note_gone: None,
            writes: Rc::default(),
            dense_from: 0,
            thin_writes: Rc::default(),
            clock: 0,
            next: 1,
        }
    }

    /// Returns the same volumes behind a system that reads and writes blocks of `sectors` even for
    /// smaller requests.
    #[must_use]
    pub const fn with_blocks(mut self, sectors: u64) -> Self {
        self.block = sectors;
        self
    }

    /// Records that a client submits a write of its stamp.
    pub fn begin_write(&mut self, volume: u32, sectors: Range<u64>, fua: bool) -> OpId {
        let id = self.begin(PendingOpKind::Write { fua }, volume, sectors.clone());
        Rc::make_mut(&mut self.writes).insert(id.0, (volume, sectors.clone()));
        self.put_down(id, volume, sectors, VersionContent::Value(SectorValue::Written(id.0)));
        id
    }

    /// Records that a client submits a write of zeroes.
    pub fn begin_zeroes(&mut self, volume: u32, sectors: Range<u64>, fua: bool) -> OpId {
        let id = self.begin(PendingOpKind::Write { fua }, volume, sectors.clone());
        self.put_down(id, volume, sectors, VersionContent::Value(SectorValue::Zero));
        id
    }

    /// Records that a client submits a discard.
    pub fn begin_discard(&mut self, volume: u32, sectors: Range<u64>) -> OpId {
        let id = self.begin(PendingOpKind::Discard, volume, sectors.clone());
        self.put_down(id, volume, sectors, VersionContent::Former { before: NEVER });
        id
    }

    /// Records that a client submits a flush of its volume.
    pub fn begin_flush(&mut self, volume: u32) -> OpId {
        self.begin(PendingOpKind::Flush, volume, 0..0)
    }

    /// Records that the system is asked for an orderly stop.
    pub fn begin_stop(&mut self) -> OpId {
        self.begin(PendingOpKind::Stop, 0, 0..0)
    }

    /// Records that a client submits a read.
    pub fn begin_read(&mut self, volume: u32, sectors: Range<u64>) -> OpId {
        self.begin(PendingOpKind::Read, volume, sectors)
    }

    /// Records the answer to a write, zeroing, discard, flush or stop: success or an error.
    pub fn end(&mut self, id: OpId, success: bool) {
        let Some(open) = self.open.remove(&id) else { return };
        let now = self.tick();
        for (sector, number) in open.echoes {
            self.sector_mut(open.volume, sector).give_up(number, now);
        }
        let (oldest_read, next) = (self.oldest_read(), self.next);
        let is_discard = matches!(open.kind, PendingOpKind::Discard);
        match open.kind {
            PendingOpKind::Write { .. } | PendingOpKind::Discard => {
                let fua = matches!(open.kind, PendingOpKind::Write { fua: true });
                self.each(open.volume, open.sectors, |sector| {
                    if success {
                        sector.acknowledge(id.0, now, fua);
                    } else {
                        sector.give_up(id.0, now);
                    }
                    if is_discard {
                        sector.end_discard(id.0, next);
                    }
                    sector.prune(oldest_read);
                });
            }
            PendingOpKind::Flush if success => self.flush(Some(open.volume), open.start),
            PendingOpKind::Stop if success => self.flush(None, open.start),
            PendingOpKind::Flush => {
                self.each_touched(Some(open.volume), |sector| sector.forget_promises(open.start));
            }
            PendingOpKind::Stop | PendingOpKind::Read => {}
        }
    }

    /// Judges a read that was answered with `bytes`.
    ///
    /// # Errors
    /// The first sector whose content is not allowed.
    pub fn end_read(&mut self, id: OpId, bytes: &[u8]) -> Result<(), Violation> {
        let Some(open) = self.open.remove(&id) else { return Ok(()) };
        let end = self.tick();
        let sectors = open.sectors.clone();
        assert_eq!(bytes.len() as u64, (sectors.end - sectors.start) * SECTOR as u64, "the buffer asked for");
        let oldest_read = self.oldest_read();
        // A read that may have seen the content from before a drop says nothing about the content
        // now.
        let is_crossed = self.cache_dropped.get(&open.volume).is_some_and(|dropped| open.start < *dropped)
            || self.away.get(&open.volume).is_some_and(|away| open.start < away.until);
        for (sector, bytes) in sectors.zip(bytes.chunks_exact(SECTOR)) {
            let found = stamp::parse(bytes, open.volume, sector);
            let Ok(value) = found else { return Err(self.violation(&open, sector, found)) };
            let former = self.former(value, open.volume, sector);
            let seen = SectorRead { value, start: open.start, end, number: id.0, former };
            // Most reads provide no new information, and a chunk that does not change stays shared
            // with its clones.
            let is_known = match self.sector(open.volume, sector) {
                Some(state) => state.is_known(&seen),
                None => value == self.firsts[open.volume as usize],
            };
            if is_known {
                continue;
            }
            let state = self.sector_mut(open.volume, sector);
            let is_allowed = if state.is_crossed(open.start) {
                state.has_been(&seen)
            } else if is_crossed {
                state.may_return(&seen)
            } else {
                state.read(&seen)
            };
            if !is_allowed {
                return Err(self.violation(&open, sector, found));
            }
            state.prune(oldest_read);
        }
        Ok(())
    }

    /// Records that a read failed, or that a flush did not take place: that says nothing about the
    /// content.
    pub fn abandon(&mut self, id: OpId) {
        self.open.remove(&id);
    }

    /// Records a power cut: every unanswered operation has ended.
    pub fn power_cut(&mut self) {
        let now = self.tick();
        self.end_all();
        self.cache_dropped.clear();
        self.away.clear();
        self.note_gone = None;
        self.each_touched(None, |sector| sector.cut_power(now));
    }

    /// Records the death of the process: its unanswered operations were carried out or not.
    pub fn process_death(&mut self) {
        let now = self.tick();
        self.end_all();
        self.each_touched(None, |sector| {
            sector.kill(now);
            sector.forget_untold();
            sector.prune(NEVER);
        });
        for (volume, away) in
            core::mem::take(&mut self.away).into_iter().filter(|(_, away)| away.until == NEVER)
        {
            for sector in away.dropped {
                self.sector_mut(volume, sector).go_back(now, away.since);
            }
        }
        for (volume, dropped) in core::mem::take(&mut self.cache_dropped) {
            self.each_touched(Some(volume), |sector| sector.go_back(now, dropped));
        }
        if let Some(gone) = self.note_gone.take() {
            self.each_touched(None, |sector| sector.lose_note(now, gone));
        }
    }

    /// Records that the file of the note is removed, or that another one takes its place. Returns
    /// since when it is gone.
    pub fn note_is(&mut self, is_there: bool) -> Option<u64> {
        let now = self.tick();
        // A file that is gone already promises nothing more.
        self.note_gone = if is_there { None } else { self.note_gone.or(Some(now)) };
        self.note_gone
    }

    /// Returns whether the file of the note is gone.
    #[must_use]
    pub const fn is_note_gone(&self) -> bool {
        self.note_gone.is_some()
    }

    /// Records that the system has made up for the file that was removed at `gone`, the event that
    /// [`Oracle::note_is`] returned: what was acknowledged before then is there, too.
    pub fn note_is_made_up_for(&mut self, gone: u64) {
        // This does not apply to another file that was removed since.
        if self.note_gone == Some(gone) {
            self.note_gone = Some(0);
        }
    }

    /// Records that the backing device of a volume is pulled, and has dropped these sectors of the
    /// volume.
    pub fn device_goes(&mut self, volume: u32, dropped: BTreeSet<u64>) {
        self.device_dropped(volume, Some(&dropped));
        self.away.insert(volume, PulledDevice { since: self.clock, until: NEVER, dropped });
    }

    /// Records that the device is back, and that the volume is served from it again.
    pub fn device_is_back(&mut self, volume: u32) {
        let now = self.tick();
        let Some(away) = self.away.get_mut(&volume) else { return };
        away.until = now;
        let (since, dropped) = (away.since, std::mem::take(&mut away.dropped));
        for sector in dropped {
            self.sector_mut(volume, sector).is_back(now, since);
        }
    }

    /// Ends all operations in flight.
    fn end_all(&mut self) {
        let next = self.next;
        for (id, open) in core::mem::take(&mut self.open) {
            if matches!(open.kind, PendingOpKind::Discard) {
                self.each(open.volume, open.sectors, |sector| sector.end_discard(id.0, next));
            }
        }
    }

    /// Records that a device under `volume` has dropped data that it had not made durable: its
    /// backing device in these sectors of the volume, or (`None`) its cache in any.
    pub fn device_dropped(&mut self, volume: u32, sectors: Option<&BTreeSet<u64>>) {
        let now = self.tick();
        let Some(sectors) = sectors else {
            let oldest_read = self.oldest_read();
            self.cache_dropped.insert(volume, now);
            self.each_touched(Some(volume), |sector| sector.revert(now, oldest_read));
            return;
        };
        for sector in sectors {
            self.sector_mut(volume, *sector).drop_backing(now);
        }
        self.add_echoes(volume, sectors);
    }

    /// Records that partial writes of a block that are in flight may have read the rest of the
    /// block before the drop, and may write it back.
    fn add_echoes(&mut self, volume: u32, dropped: &BTreeSet<u64>) {
        let (block, now) = (self.block, self.clock);
        let mut open = std::mem::take(&mut self.open);
        for write in open
            .values_mut()
            .filter(|open| matches!(open.kind, PendingOpKind::Write { .. }) && open.volume == volume)
        {
            let Range { start, end } = write.sectors;
            let edges = (start / block * block..start).chain(end..end.next_multiple_of(block));
            for sector in edges.filter(|sector| dropped.contains(sector)) {
                for content in self.sector_mut(volume, sector).candidates() {
                    let number = self.next;
                    self.next += 1;
                    self.sector_mut(volume, sector).begin(SectorVersion::begun(number, content, now));
                    write.echoes.push((sector, number));
                }
            }
        }
        self.open = open;
    }

    /// Returns all ranges that any client has written, zeroed, discarded, or read unexpected values
    /// from, in order and with neighbours joined. From the time before [`Oracle::thin_out`] it
    /// returns a sample.
    #[must_use]
    pub fn touched(&self) -> Vec<(u32, Range<u64>)> {
        let mut ranges: Vec<(u32, Range<u64>)> = Vec::new();
        for ((volume, chunk), sectors) in &self.chunks {
            for (index, sector) in sectors.iter().enumerate() {
                let at = chunk * CHUNK + index as u64;
                let is_sample = index == 0 && chunk.is_multiple_of(THIN);
                if !sector.as_ref().is_some_and(|sector| is_sample || sector.newest() >= self.dense_from) {
                    continue;
                }
                match ranges.last_mut() {
                    Some((last, range)) if last == volume && range.end == at => range.end += 1,
                    _ => ranges.push((*volume, at..at + 1)),
                }
            }
        }
        ranges
    }

    /// Thins out the sectors that only operations so far have touched: from now on
    /// [`Oracle::touched`] reports just the first sector of every fourth chunk of 64. That is some
    /// in the range of each node that they fill. Every read is judged as before.
    pub fn thin_out(&mut self) {
        self.dense_from = self.next;
        self.thin_writes = std::mem::take(&mut self.writes);
    }

    /// Returns the number of operations submitted so far.
    #[must_use]
    pub const fn asked(&self) -> u64 {
        self.next - 1
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn begin(&mut self, kind: PendingOpKind, volume: u32, sectors: Range<u64>) -> OpId {
        let start = self.tick();
        let id = OpId(self.next);
        self.next += 1;
        self.open.insert(id, PendingOp { kind, volume, sectors, start, echoes: Vec::new() });
        id
    }

    fn put_down(&mut self, id: OpId, volume: u32, sectors: Range<u64>, content: VersionContent) {
        let start = self.clock;
        self.each(volume, sectors, |sector| sector.begin(SectorVersion::begun(id.0, content, start)));
    }

    fn flush(&mut self, volume: Option<u32>, started: u64) {
        let oldest_read = self.oldest_read();
        let in_volume = |key: &(u32, u64)| volume.is_none_or(|volume| key.0 == volume);
        for (_, chunk) in self.chunks.iter_mut().filter(|(key, _)| in_volume(key)) {
            if chunk.iter().flatten().any(|sector| sector.flush_matters(started)) {
                for sector in Rc::make_mut(chunk).iter_mut().flatten() {
                    sector.flush(started);
                    sector.prune(oldest_read);
                }
            }
        }
    }

    /// Returns the event at which the oldest read in flight began.
    fn oldest_read(&self) -> u64 {
        let reads = self.open.values().filter(|open| matches!(open.kind, PendingOpKind::Read));
        reads.map(|open| open.start).min().unwrap_or(NEVER)
    }

    fn each(&mut self, volume: u32, sectors: Range<u64>, change: impl Fn(&mut Sector)) {
        for sector in sectors {
            change(self.sector_mut(volume, sector));
        }
    }

    fn each_touched(&mut self, volume: Option<u32>, change: impl Fn(&mut Sector)) {
        let in_volume = |key: &(u32, u64)| volume.is_none_or(|volume| key.0 == volume);
        for (_, chunk) in self.chunks.iter_mut().filter(|(key, _)| in_volume(key)) {
            if chunk.iter().flatten().any(|sector| !sector.is_settled()) {
                Rc::make_mut(chunk).iter_mut().flatten().for_each(&change);
            }
        }
    }

    fn sector(&self, volume: u32, sector: u64) -> Option<&Sector> {
        let chunk = self.chunks.get(&(volume, sector / CHUNK))?;
        chunk[usize::try_from(sector % CHUNK).expect("below 64")].as_ref()
    }

    fn sector_mut(&mut self, volume: u32, sector: u64) -> &mut Sector {
        let empty = || Rc::new((0..CHUNK).map(|_| None).collect());
        let chunk = self.chunks.entry((volume, sector / CHUNK)).or_insert_with(empty);
        let place = &mut Rc::make_mut(chunk)[usize::try_from(sector % CHUNK).expect("below 64")];
        place.get_or_insert_with(|| Sector::new(self.firsts[volume as usize]))
    }

    /// Returns the write number by which a value can be a former value of this sector.
    fn former(&self, value: SectorValue, volume: u32, sector: u64) -> Option<u64> {
        match value {
            SectorValue::Zero => Some(0),
            SectorValue::Written(0) => (self.firsts[volume as usize] == value).then_some(0),
            SectorValue::Written(number) => {
                let (written, sectors) =
                    self.writes.get(&number).or_else(|| self.thin_writes.get(&number))?;
                (*written == volume && sectors.contains(&sector)).then_some(number)
            }
        }
    }

    fn violation(&self, open: &PendingOp, sector: u64, found: Result<SectorValue, StampError>) -> Violation {
        let allowed = match self.sector(open.volume, sector) {
            Some(state) => state.allowed(open.start),
            None => vec![VersionContent::Value(self.firsts[open.volume as usize])],
        };
        let text = |content: &VersionContent| match content {
            VersionContent::Value(value) => value.to_string(),
            VersionContent::Former { before: NEVER } => "zeroes or anything written so far".to_owned(),
            VersionContent::Former { before } => format!("zeroes or anything before write {before}"),
        };
        Violation { volume: open.volume, sector, found, allowed: allowed.iter().map(text).collect() }
    }
}

#[cfg(test)]
mod tests;
