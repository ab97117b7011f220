//! The simulated device: first its fault model in words, then the code, which has these faults and
//! no others.
//!
//! # Fault model
//!
//! The model is the same for cache and backing devices. The engine may rely only on what is *not*
//! in this list.
//!
//! **Order.** Operations that are in flight together are carried out in any order, each at some
//! moment between its submission and its completion. A write may become visible in two parts, at
//! two moments. A read sees the content of one moment, which is not necessarily the last before its
//! completion.
//!
//! **Volatile cache.** On a device with a volatile cache, a completed write is visible at once. It
//! is durable only after the completion of a flush that was *submitted after the write completed*,
//! or at its own completion if it carries FUA. At a power cut any subset of the writes that are not
//! durable survives, completed or in flight, in any order. So a later write may survive and an
//! earlier one may not. Of two writes to one sector, the earlier may be the one that remains; but
//! nothing older replaces a durable write. A flush that was in flight may have covered all, some or
//! none of the writes.
//!
//! **Torn writes.** A write that the power cut interrupts survives in aligned pieces of one unit,
//! 512 or 4096 bytes depending on the device; each piece is old or new. No unit is torn inside.
//! Everything that the format rests on (a superblock within one sector) needs at least that, and
//! all devices guarantee it.
//!
//! **Failed writes.** A write that is reported as failed has landed entirely, in part, or not at
//! all. It landed before the report and does not come back later.
//!
//! **Failed flushes.** A flush that fails has dropped what it covered: reads return the older
//! content again, and the next flush succeeds as if nothing had happened. Linux does exactly this
//! to its page cache, and drives do it to theirs. The failure may also affect writes that were in
//! flight when the flush was submitted and that are not durable by themselves: from half of them it
//! drops what has landed. Such a write still completes successfully, without the dropped part.
//!
//! **FUA by flush.** Many devices have no FUA: their driver carries out such a write as a write and
//! a flush. When it fails, that flush is what has failed: it has dropped what all other writes had
//! left in the volatile cache.
//!
//! **Latent read errors.** A sector cannot be read until it is written again. The whole request
//! fails.
//!
//! **Bit rot.** A bit of the medium changes silently. Only checksums can detect it, and here only
//! metadata has them, never user data.
//!
//! **Absence.** A device may stop answering for a time and then continue, answer late, or answer
//! *unreachable* to everything. It may return with the content it had or with an older one (a
//! snapshot rolled back, the wrong leg of a mirror). Operations that were in flight when it
//! vanished had either taken effect before that or not. A device that is pulled is *gone*
//! permanently for every process that has it open. It loses what a power cut would take from it, or
//! keeps its power, and is available again to a process that opens it anew.
//!
//! **Form.** The device refuses requests that are not aligned to its logical blocks or that reach
//! beyond its end. The runner counts a refused request as a fault of the engine.
//!
//! **Zeroing** is a write of zeroes, and everything that can happen to a write can happen to it. A
//! device refuses it where it would have to transfer the zeroes. Depending on the model, it refuses
//! a zeroing that may unmap, every zeroing, or every zeroing although it advertises support.
//!
//! **Discard** makes each unit of the range zero or leaves it alone, as the device chooses. It is
//! as volatile as a write.
//!
//! **Death of the process** (without a power cut) takes nothing back: completed writes remain,
//! volatile cache included. An operation in flight lands entirely, in part or not at all, and this
//! is settled before the next process opens the device.
//!
//! Not modelled, because no format of this kind survives it: a device that lies about flushes, one
//! that tears inside its unit, and one that redirects writes. Bit rot in user data and the return
//! of earlier content are left to scenarios, which know the right answer then.

pub mod cut;
pub mod fault;
pub mod store;
mod version;

pub use cut::Survivors;
pub use fault::{DiskFault, FaultRule, FaultRules, OpKind, WrittenPart};
pub use store::{InitialContent, SectorStore};
pub use version::WriteContent;

use crate::digest::mix;
use crate::stamp::SECTOR;
use bcached_env::{DiskInfo, IoErrorKind};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use store::PAGE_SECTORS;
use version::PageVersion;

/// How a device responds to a request to zero a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZeroSupport {
    /// It zeroes, and deallocates the space if the request allows it.
    WithUnmap,
    /// It zeroes only if the request does not allow it to deallocate the space.
    WithoutUnmap,
    /// It reports that it does not support zeroing.
    Unsupported,
    /// It reports support, and refuses every request.
    Refused,
}

impl ZeroSupport {
    /// All variants.
    pub const ALL: [Self; 4] = [Self::WithUnmap, Self::WithoutUnmap, Self::Unsupported, Self::Refused];

    /// Returns whether the device carries out a zeroing; `unmap` says whether the request allows
    /// deallocation.
    #[must_use]
    pub const fn does(self, unmap: bool) -> bool {
        match self {
            Self::WithUnmap => true,
            Self::WithoutUnmap => !unmap,
            Self::Unsupported | Self::Refused => false,
        }
    }
}

/// The properties of a device. Sizes are in sectors of 512 bytes.
#[derive(Clone, Debug)]
pub struct DeviceModel {
    /// Capacity in sectors.
    pub sectors: u64,
    /// Smallest unit of I/O that the device accepts: 1 or 8.
    pub logical_block_sectors: u32,
    /// Unit within which a write is never torn: 1 or 8, and at least the logical block.
    pub torn_sectors: u64,
    /// Whether completed writes may be lost at a power cut.
    pub volatile_cache: bool,
    /// Whether a write with FUA is carried out as a write and a flush.
    pub fua_flushes: bool,
    /// Whether discards are carried out.
    pub discard: bool,
    /// Which zeroings are carried out.
    pub zeroing: ZeroSupport,
    /// Nominal latency of a read or write, in nanoseconds; each one is drawn from a quarter of it
    /// to four times it.
    pub latency_ns: u64,
    /// Content before the first write.
    pub background: InitialContent,
}

impl DeviceModel {
    /// Returns a fast device with a volatile cache that carries out discards.
    #[must_use]
    pub const fn fast(sectors: u64, block_sectors: u32) -> Self {
        Self {
            sectors,
            logical_block_sectors: block_sectors,
            torn_sectors: block_sectors as u64,
            volatile_cache: true,
            fua_flushes: false,
            discard: true,
            zeroing: ZeroSupport::WithUnmap,
            latency_ns: 20_000,
            background: InitialContent::Zero { data_start: 0 },
        }
    }

    /// Returns a slow device with a volatile cache and without discard support.
    #[must_use]
    pub const fn slow(sectors: u64, block_sectors: u32, background: InitialContent) -> Self {
        Self { discard: false, latency_ns: 500_000, background, ..Self::fast(sectors, block_sectors) }
    }
}

/// A write, discard or zeroing between submission and completion.
#[derive(Clone, Debug)]
struct InFlightWrite {
    range: Range<u64>,
    content: WriteContent,
    fua: bool,
    /// The write has not landed yet from this sector on.
    landed_to: u64,
}

/// What a flush will make durable: writes numbered below `limit` that had completed when it was
/// submitted.
#[derive(Clone, Debug)]
pub struct FlushScope {
    limit: u64,
    open: BTreeSet<u64>,
}

impl FlushScope {
    fn covers(&self, number: u64) -> bool {
        number < self.limit && !self.open.contains(&number)
    }
}

/// A device and all writes that have not reached its medium yet. A clone shares content until one
/// of the two changes.
#[derive(Clone)]
pub struct Device {
    /// Its properties.
    pub model: DeviceModel,
    /// The faults it will have.
    pub faults: FaultRules,
    /// Whether it answers *unreachable* to everything.
    pub gone: bool,
    /// Whether its content was damaged on purpose and no process has shut down cleanly since.
    pub is_spoiled: bool,
    /// No operation completes before this virtual time (nanoseconds): a stall.
    pub stalled_until: u64,
    /// Content that a power cut cannot take.
    medium: SectorStore,
    /// Content that a read returns: the medium and everything that landed on top of it.
    view: SectorStore,
    /// Versions that have landed and are not durable, by page, in order of landing.
    volatile: BTreeMap<u64, Vec<PageVersion>>,
    in_flight: BTreeMap<u64, InFlightWrite>,
    unreadable: BTreeSet<u64>,
    /// Number of the next write, discard or zeroing.
    next: u64,
}

impl Device {
    /// Creates a device that holds its background.
    #[must_use]
    pub fn new(model: DeviceModel) -> Self {
        assert!(model.torn_sectors >= u64::from(model.logical_block_sectors), "blocks are whole");
        let store = SectorStore::new(model.background);
        Self {
            medium: store.clone(),
            view: store,
            model,
            faults: FaultRules::default(),
            gone: false,
            is_spoiled: false,
            stalled_until: 0,
            volatile: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            next: 0,
        }
    }

    /// Returns what the engine is told about it.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        DiskInfo {
            sectors: self.model.sectors,
            logical_block_sectors: self.model.logical_block_sectors,
            volatile_cache: self.model.volatile_cache,
            fua: !self.model.fua_flushes,
            discard: self.model.discard,
            write_zeroes: self.model.zeroing != ZeroSupport::Unsupported,
            unmap: matches!(self.model.zeroing, ZeroSupport::WithUnmap | ZeroSupport::Refused),
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
        }
    }

    /// Returns the sector at which the data of its volume begins; 0 if it holds no volume.
    #[must_use]
    pub const fn data_start(&self) -> u64 {
        match self.model.background {
            InitialContent::Zero { data_start } | InitialContent::Stamped { data_start, .. } => data_start,
        }
    }

    /// Returns whether the device accepts a request of this form.
    #[must_use]
    pub fn accepts(&self, sector: u64, sectors: u64) -> bool {
        let block = u64::from(self.model.logical_block_sectors);
        let aligned = sector.is_multiple_of(block) && sectors.is_multiple_of(block);
        sectors > 0 && aligned && sector.checked_add(sectors).is_some_and(|end| end <= self.model.sectors)
    }

    /// Accepts a write, discard or zeroing and returns its number. Nothing has landed yet.
    pub fn take(&mut self, range: Range<u64>, content: WriteContent, fua: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        let landed_to = range.start;
        self.in_flight.insert(number, InFlightWrite { range, content, fua, landed_to });
        number
    }

    /// Lands write `number` up to sector `end` of the device.
    pub fn land(&mut self, number: u64, end: u64) {
        let write = self.in_flight.get_mut(&number).expect("only writes in flight land");
        let range = write.landed_to..end.min(write.range.end);
        write.landed_to = range.end.max(range.start);
        let (content, first) = (write.content.clone(), write.range.start);
        self.land_range(number, range, &content, first);
    }

    fn land_range(&mut self, number: u64, range: Range<u64>, content: &WriteContent, first: u64) {
        let mut at = range.start;
        while at < range.end {
            let page = at / PAGE_SECTORS;
            let next = range.end.min((page + 1) * PAGE_SECTORS);
            let version = PageVersion::new(number, at..next, content.slice(at - first..next - first));
            version.apply(&mut self.view, page);
            self.volatile.entry(page).or_default().push(version);
            at = next;
        }
        // A discard that the device ignores writes nothing.
        if !matches!(content, WriteContent::Keep) {
            for sector in range {
                self.unreadable.remove(&sector);
            }
        }
    }

    /// Completes write `number`: the rest of it lands. It is durable if it carries FUA or the
    /// device has no volatile cache.
    pub fn complete(&mut self, number: u64) {
        self.land(number, u64::MAX);
        let write = self.in_flight.remove(&number).expect("a write completes once");
        if write.fua || !self.model.volatile_cache {
            self.harden(write.range.start / PAGE_SECTORS..=(write.range.end - 1) / PAGE_SECTORS, |found| {
                found == number
            });
        }
    }

    /// Fails write `number` after the part given by `landed` has landed. If this also failed the
    /// write's own flush, returns the sectors that lost content; returns `None` if the write had no
    /// such flush.
    pub fn fail(&mut self, number: u64, landed: WrittenPart) -> Option<BTreeSet<u64>> {
        let write = self.in_flight.get(&number).expect("a write ends once").clone();
        let unit = self.model.torn_sectors;
        match landed {
            WrittenPart::Nothing => {}
            WrittenPart::Everything => self.land(number, u64::MAX),
            WrittenPart::Part => {
                let half = (write.range.start + write.range.end) / 2 / unit * unit;
                self.land(number, half.max(write.range.start));
            }
        }
        self.in_flight.remove(&number);
        if !self.model.volatile_cache {
            self.harden(write.range.start / PAGE_SECTORS..=(write.range.end - 1) / PAGE_SECTORS, |found| {
                found == number
            });
            return None;
        }
        if self.model.fua_flushes && write.fua {
            let flush = self.take_flush();
            return Some(self.fail_flush(&flush));
        }
        None
    }

    /// Starts a flush.
    #[must_use]
    pub fn take_flush(&self) -> FlushScope {
        FlushScope { limit: self.next, open: self.in_flight.keys().copied().collect() }
    }

    /// Completes a flush: all that it covers is durable.
    pub fn complete_flush(&mut self, flush: &FlushScope) {
        self.harden(0..=u64::MAX, |number| flush.covers(number));
    }

    /// Fails a flush: all that it covers is lost, and some writes that it did not have to cover.
    /// Returns the sectors that lost content.
    pub fn fail_flush(&mut self, flush: &FlushScope) -> BTreeSet<u64> {
        let beside = self.dropped_beside(flush);
        let mut dropped = BTreeSet::new();
        let is_lost = |number| flush.covers(number) || beside.contains(&number);
        for (page, versions) in &mut self.volatile {
            for version in versions.extract_if(.., |version| is_lost(version.number)) {
                dropped.extend(version.sectors(*page));
            }
            self.view.copy_page(*page * PAGE_SECTORS, &self.medium);
            for version in versions.iter() {
                version.apply(&mut self.view, *page);
            }
        }
        self.volatile.retain(|_, versions| !versions.is_empty());
        dropped
    }

    /// Chooses which writes that were in flight when a flush was submitted lose what has landed of
    /// them as the flush fails. A write that will be durable by itself at its completion loses
    /// nothing: nothing would report that it is not durable.
    fn dropped_beside(&self, flush: &FlushScope) -> BTreeSet<u64> {
        if !self.model.volatile_cache {
            return BTreeSet::new();
        }
        let is_durable = |number: &u64| self.in_flight.get(number).is_some_and(|write| write.fua);
        let is_struck = |number: &u64| mix(&[self.next, *number]).is_multiple_of(2);
        flush.open.iter().filter(|number| is_struck(number) && !is_durable(number)).copied().collect()
    }

    /// Reads the current content.
    ///
    /// # Errors
    /// [`IoErrorKind::Io`] if a sector of the range is unreadable.
    pub fn read(&self, sector: u64, into: &mut [u8]) -> Result<(), IoErrorKind> {
        let end = sector + (into.len() / crate::stamp::SECTOR) as u64;
        if self.unreadable.range(sector..end).next().is_some() {
            return Err(IoErrorKind::Io);
        }
        self.view.read(sector, into);
        Ok(())
    }

    /// Makes sectors unreadable until they are written again.
    pub fn make_unreadable(&mut self, range: Range<u64>) {
        self.unreadable.extend(range);
    }

    /// Makes all unreadable sectors readable again.
    pub fn make_readable(&mut self) {
        self.unreadable.clear();
    }

    /// Flips a bit on the medium, and in the view where no newer version covers the medium.
    pub fn rot(&mut self, sector: u64, bit: u16) {
        self.medium.flip(sector, bit);
        let versions = self.volatile.get(&(sector / PAGE_SECTORS)).into_iter().flatten();
        if !versions.into_iter().any(|version| version.stands_for(sector % PAGE_SECTORS)) {
            self.view.flip(sector, bit);
        }
    }

    /// Puts content on the medium from outside, as a tool that makes a cache set does. Nothing may
    /// be in flight.
    pub fn place(&mut self, sector: u64, bytes: &[u8]) {
        assert!(self.in_flight.is_empty(), "a tool works on a device that is not in use");
        let sectors = (bytes.len() / crate::stamp::SECTOR) as u64;
        let content = WriteContent::Data(bytes.to_vec().into_boxed_slice().into());
        let number = self.take(sector..sector + sectors, content, true);
        self.complete(number);
    }

    /// Puts content on the medium from outside. The range must not be in use; requests elsewhere
    /// may be in flight.
    pub fn overwrite(&mut self, range: Range<u64>, content: WriteContent) {
        let number = self.take(range, content, true);
        self.complete(number);
    }

    /// Moves the end of the device. Sectors beyond the new end read as zeroes if the device grows
    /// again. Returns false if a write beyond the new end is in flight.
    #[must_use]
    pub fn resize(&mut self, sectors: u64) -> bool {
        let former = self.model.sectors;
        if sectors < former {
            if self.in_flight.values().any(|write| write.range.end > sectors) {
                return false;
            }
            self.overwrite(sectors..former, WriteContent::Zero);
        }
        self.model.sectors = sectors;
        true
    }

    /// Returns the content that reads would return, for checks from outside.
    #[must_use]
    pub const fn view(&self) -> &SectorStore {
        &self.view
    }

    /// Returns whether the readable content after the superblock equals that of `other`.
    #[must_use]
    pub fn has_content_of(&self, other: &Self) -> bool {
        let start = self.data_start().max(other.data_start());
        let (mut here, mut there) = ([0; SECTOR], [0; SECTOR]);
        (start..self.model.sectors.min(other.model.sectors)).all(|sector| {
            self.view().read(sector, &mut here);
            other.view().read(sector, &mut there);
            here == there
        })
    }

    /// Returns what would be left if the power were cut and nothing volatile survived.
    #[must_use]
    pub const fn medium(&self) -> &SectorStore {
        &self.medium
    }

    /// Brings the device back with the content of `old`, an earlier clone of it.
    pub fn return_as(&mut self, old: &Self) {
        self.gone = false;
        self.medium = old.view.clone();
        self.view = old.view.clone();
        self.volatile.clear();
    }

    /// Moves the volatile versions that `chosen` picks to the medium. An older version that stays
    /// volatile gives up the sectors that a durable one has taken.
    fn harden(&mut self, pages: std::ops::RangeInclusive<u64>, chosen: impl Fn(u64) -> bool) {
        let touched: Vec<u64> = self.volatile.range(pages).map(|(page, _)| *page).collect();
        for page in touched {
            let versions = self.volatile.remove(&page).expect("listed above");
            let mut rest: Vec<PageVersion> = Vec::new();
            for version in versions {
                if chosen(version.number) {
                    version.apply(&mut self.medium, page);
                    for older in &mut rest {
                        older.give_up(&version);
                    }
                } else {
                    rest.push(version);
                }
            }
            rest.retain(|version| !version.is_empty());
            if !rest.is_empty() {
                self.volatile.insert(page, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests;
