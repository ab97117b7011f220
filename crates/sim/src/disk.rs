//! The simulated device. First the faults it has, in words; then the code that has them and no
//! others.
//!
//! # Fault model
//!
//! It is the same for cache and backing devices. What the engine may lean on is what is *not* in
//! this list.
//!
//! **Order.** Operations in flight together are carried out in any order, each at some moment between its submission
//! and its completion. A write may become visible in two parts at two moments. A read sees what is there at one moment,
//! not necessarily the last before its completion.
//!
//! **The volatile cache.** On a device that has one a completed write is visible at once and durable only after a flush
//! *submitted after its completion* has completed, or at its completion if it carries FUA. At a power cut any subset of
//! the writes that are not durable survives: completed or in flight, in any order, so that a later write may be there and
//! an earlier one not. Of two writes to one sector the earlier may be what remains, except over a durable one, which
//! nothing older replaces. A flush in flight may have covered all, nothing or some.
//!
//! **Torn writes.** A write that is cut by the power loss survives in pieces of one unit, 512 or 4096 bytes by device,
//! aligned; each piece is old or new. A unit is never torn inside: all that the format rests on (a superblock within one
//! sector) needs at least that, and all devices give it.
//!
//! **Failed writes.** A write that is reported failed has landed whole, in part, or not at all, and did so before the
//! report; it does not come back later.
//!
//! **Failed flushes.** A flush that fails has dropped what it covered: reads give the older content again, and the next
//! flush succeeds as if nothing had happened. Linux does exactly this to page cache and drives do it to their own.
//! Of each write that was in flight when it was submitted, and that is not durable by itself, it may have dropped what
//! has landed: half of them it does. Such a write still ends well, without what was dropped of it.
//!
//! **FUA by flush.** Many devices have no FUA: whoever drives them carries such a write out as a write and a flush. When it
//! fails, that flush is what has failed: it has dropped what every other write had left in the volatile cache.
//!
//! **Latent read errors.** A sector cannot be read until it is written again. The error comes for the whole request.
//!
//! **Bit rot.** A bit of the medium changes in silence. Only what is summed can notice: metadata here, never user data.
//!
//! **Absence.** A device stops answering for a time and goes on, answers late, answers *unreachable* to everything, and
//! may return, with the content it had, or with an older one (a snapshot rolled back, the wrong leg of a mirror).
//! Operations in flight when it vanished ended either way before it did. One that is pulled is *gone* for whoever has it open,
//! for ever; it loses what a power cut would take from it, or keeps its power, and is there again for who opens it anew.
//!
//! **Form.** Requests off the device's logical blocks or beyond its end are refused. The runner counts a refused request
//! as a fault of the engine.
//!
//! **Zeroing** is a write of zeroes, with all that may become of one. A device refuses it where it would have to transfer
//! them: one that may unmap, any, or any although it says that it can.
//!
//! **Discard** makes each unit of the range zero or leaves it, as the device pleases; it is as volatile as a write.
//!
//! **Death of the process** (not of the power) takes nothing back: what completed is there, cache included; an operation
//! in flight lands whole, in part or not, and has decided by the time the next process opens the device.
//!
//! Not modelled, because no format of this kind survives it: a device that lies about flush, one
//! that tears inside its unit, one that redirects writes. Bit rot in user data and content from
//! before are left to scenarios, which know what answer is right then.

pub mod cut;
pub mod fault;
pub mod store;
mod version;

pub use cut::Survivors;
pub use fault::{Fault, Faults, Landed, OpKind, Rule};
pub use store::{Background, Store};
pub use version::Content;

use crate::digest::mix;
use crate::stamp::SECTOR;
use bcached_env::{DiskInfo, IoErrorKind};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use store::PAGE_SECTORS;
use version::Version;

/// What a device makes of being told to zero a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Zeroing {
    /// It does, and gives the space up if it may.
    Unmaps,
    /// It does if it need not give the space up.
    Keeps,
    /// It says that it knows no such thing.
    Unknown,
    /// It says that it does, and refuses.
    Refused,
}

impl Zeroing {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Unmaps, Self::Keeps, Self::Unknown, Self::Refused];

    /// Whether one is carried out that may `unmap`, or may not.
    #[must_use]
    pub const fn does(self, unmap: bool) -> bool {
        match self {
            Self::Unmaps => true,
            Self::Keeps => !unmap,
            Self::Unknown | Self::Refused => false,
        }
    }
}

/// What a device is. Sizes in sectors of 512 bytes.
#[derive(Clone, Debug)]
pub struct Model {
    /// Capacity.
    pub sectors: u64,
    /// Smallest unit of I/O that is accepted: 1 or 8.
    pub logical_block_sectors: u32,
    /// Unit within which a write is never torn: 1 or 8, not below the logical block.
    pub torn_sectors: u64,
    /// Completed writes may be lost at a power cut.
    pub volatile_cache: bool,
    /// A write with FUA is a write and a flush.
    pub fua_flushes: bool,
    /// Discards are carried out.
    pub discard: bool,
    /// Which zeroings are carried out.
    pub zeroing: Zeroing,
    /// Middle latency of a read or write, in nanoseconds; each one is drawn from a quarter to four
    /// times of it.
    pub latency_ns: u64,
    /// Content before the first write.
    pub background: Background,
}

impl Model {
    /// A fast device with a volatile cache that carries out discards.
    #[must_use]
    pub const fn fast(sectors: u64, block_sectors: u32) -> Self {
        Self {
            sectors,
            logical_block_sectors: block_sectors,
            torn_sectors: block_sectors as u64,
            volatile_cache: true,
            fua_flushes: false,
            discard: true,
            zeroing: Zeroing::Unmaps,
            latency_ns: 20_000,
            background: Background::Zero { data_start: 0 },
        }
    }

    /// A slow device with a volatile cache that knows no discard.
    #[must_use]
    pub const fn slow(sectors: u64, block_sectors: u32, background: Background) -> Self {
        Self { discard: false, latency_ns: 500_000, background, ..Self::fast(sectors, block_sectors) }
    }
}

/// A write, discard or zeroing between submission and completion.
#[derive(Clone, Debug)]
struct InFlight {
    range: Range<u64>,
    content: Content,
    fua: bool,
    /// From here on it has not landed yet.
    landed_to: u64,
}

/// What a flush will make durable: writes below `limit` that had completed when it was submitted.
#[derive(Clone, Debug)]
pub struct Flush {
    limit: u64,
    open: BTreeSet<u64>,
}

impl Flush {
    fn covers(&self, number: u64) -> bool {
        number < self.limit && !self.open.contains(&number)
    }
}

/// A device and all that is on its way to its medium. A clone shares content until one of the two
/// changes.
#[derive(Clone)]
pub struct Device {
    /// What it is.
    pub model: Model,
    /// What it will do wrong.
    pub faults: Faults,
    /// It answers *unreachable* to everything.
    pub gone: bool,
    /// What stands on it was damaged on purpose, and no process has ended in order since.
    pub is_spoiled: bool,
    /// Nothing completes before this virtual time (nanoseconds): a stall.
    pub stalled_until: u64,
    /// What a power cut cannot take.
    medium: Store,
    /// What a read gives: the medium and everything landed on top.
    view: Store,
    /// What has landed and is not durable, by page, in order of landing.
    volatile: BTreeMap<u64, Vec<Version>>,
    in_flight: BTreeMap<u64, InFlight>,
    unreadable: BTreeSet<u64>,
    /// Number of the next write, discard or zeroing.
    next: u64,
}

impl Device {
    /// A new device holding its background.
    #[must_use]
    pub fn new(model: Model) -> Self {
        assert!(model.torn_sectors >= u64::from(model.logical_block_sectors), "blocks are whole");
        let store = Store::new(model.background);
        Self {
            medium: store.clone(),
            view: store,
            model,
            faults: Faults::default(),
            gone: false,
            is_spoiled: false,
            stalled_until: 0,
            volatile: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            next: 0,
        }
    }

    /// What the engine is told about it.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        DiskInfo {
            sectors: self.model.sectors,
            logical_block_sectors: self.model.logical_block_sectors,
            volatile_cache: self.model.volatile_cache,
            fua: !self.model.fua_flushes,
            discard: self.model.discard,
            write_zeroes: self.model.zeroing != Zeroing::Unknown,
            unmap: matches!(self.model.zeroing, Zeroing::Unmaps | Zeroing::Refused),
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
        }
    }

    /// Where the data of a volume begins on it, in sectors; 0 if it holds no volume.
    #[must_use]
    pub const fn data_start(&self) -> u64 {
        match self.model.background {
            Background::Zero { data_start } | Background::Stamped { data_start, .. } => data_start,
        }
    }

    /// Whether the device would take a request of this form.
    #[must_use]
    pub fn accepts(&self, sector: u64, sectors: u64) -> bool {
        let block = u64::from(self.model.logical_block_sectors);
        let aligned = sector.is_multiple_of(block) && sectors.is_multiple_of(block);
        sectors > 0 && aligned && sector.checked_add(sectors).is_some_and(|end| end <= self.model.sectors)
    }

    /// Takes a write, discard or zeroing; returns its number. Nothing has landed.
    pub fn take(&mut self, range: Range<u64>, content: Content, fua: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        let landed_to = range.start;
        self.in_flight.insert(number, InFlight { range, content, fua, landed_to });
        number
    }

    /// Lets write `number` land up to sector `end` of the device.
    pub fn land(&mut self, number: u64, end: u64) {
        let write = self.in_flight.get_mut(&number).expect("only writes in flight land");
        let range = write.landed_to..end.min(write.range.end);
        write.landed_to = range.end.max(range.start);
        let (content, first) = (write.content.clone(), write.range.start);
        self.land_range(number, range, &content, first);
    }

    fn land_range(&mut self, number: u64, range: Range<u64>, content: &Content, first: u64) {
        let mut at = range.start;
        while at < range.end {
            let page = at / PAGE_SECTORS;
            let next = range.end.min((page + 1) * PAGE_SECTORS);
            let version = Version::new(number, at..next, content.slice(at - first..next - first));
            version.apply(&mut self.view, page);
            self.volatile.entry(page).or_default().push(version);
            at = next;
        }
        // A discard that is not carried out writes nothing.
        if !matches!(content, Content::Keep) {
            for sector in range {
                self.unreadable.remove(&sector);
            }
        }
    }

    /// Ends write `number`: what has not landed does, and it is durable if it carries FUA or there
    /// is no volatile cache.
    pub fn complete(&mut self, number: u64) {
        self.land(number, u64::MAX);
        let write = self.in_flight.remove(&number).expect("a write completes once");
        if write.fua || !self.model.volatile_cache {
            self.harden(write.range.start / PAGE_SECTORS..=(write.range.end - 1) / PAGE_SECTORS, |found| {
                found == number
            });
        }
    }

    /// Ends write `number` with a failure after `landed` of it had landed. If a flush of its own
    /// has failed: the sectors that lost something; `None` if there was none.
    pub fn fail(&mut self, number: u64, landed: Landed) -> Option<BTreeSet<u64>> {
        let write = self.in_flight.get(&number).expect("a write ends once").clone();
        let unit = self.model.torn_sectors;
        match landed {
            Landed::Nothing => {}
            Landed::Everything => self.land(number, u64::MAX),
            Landed::Part => {
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
    pub fn take_flush(&self) -> Flush {
        Flush { limit: self.next, open: self.in_flight.keys().copied().collect() }
    }

    /// Ends a flush: all that it covers is durable.
    pub fn complete_flush(&mut self, flush: &Flush) {
        self.harden(0..=u64::MAX, |number| flush.covers(number));
    }

    /// Ends a flush with a failure: all that it covers is lost, and some of what it need not have covered. The sectors
    /// that lost something.
    pub fn fail_flush(&mut self, flush: &Flush) -> BTreeSet<u64> {
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

    /// Which of the writes that were in flight when a flush was submitted lose what has landed of them, as it fails. None
    /// that is durable by itself when it ends: nothing would tell that it is not.
    fn dropped_beside(&self, flush: &Flush) -> BTreeSet<u64> {
        if !self.model.volatile_cache {
            return BTreeSet::new();
        }
        let is_durable = |number: &u64| self.in_flight.get(number).is_some_and(|write| write.fua);
        let is_struck = |number: &u64| mix(&[self.next, *number]).is_multiple_of(2);
        flush.open.iter().filter(|number| is_struck(number) && !is_durable(number)).copied().collect()
    }

    /// Reads what is there now.
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

    /// Makes sectors unreadable until they are written.
    pub fn make_unreadable(&mut self, range: Range<u64>) {
        self.unreadable.extend(range);
    }

    /// What could not be read can be read again.
    pub fn make_readable(&mut self) {
        self.unreadable.clear();
    }

    /// Bit rot on the medium (and in the view, which shows the medium where nothing newer stands).
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
        assert!(self.in_flight.is_empty(), "a tool works on a device that nobody uses");
        let sectors = (bytes.len() / crate::stamp::SECTOR) as u64;
        let content = Content::Data(bytes.to_vec().into_boxed_slice().into());
        let number = self.take(sector..sector + sectors, content, true);
        self.complete(number);
    }

    /// Puts content on the medium from outside, where nobody uses the device at present; elsewhere
    /// requests may be in flight.
    pub fn overwrite(&mut self, range: Range<u64>, content: Content) {
        let number = self.take(range, content, true);
        self.complete(number);
    }

    /// The device ends there from now on; or there again, with zeroes where it had been cut. False:
    /// somebody is writing behind the new end.
    #[must_use]
    pub fn resize(&mut self, sectors: u64) -> bool {
        let former = self.model.sectors;
        if sectors < former {
            if self.in_flight.values().any(|write| write.range.end > sectors) {
                return false;
            }
            self.overwrite(sectors..former, Content::Zero);
        }
        self.model.sectors = sectors;
        true
    }

    /// What would be read, for checks from outside.
    #[must_use]
    pub const fn view(&self) -> &Store {
        &self.view
    }

    /// Whether what can be read behind the superblock is what can be read of `other`.
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

    /// What would be left if the power were cut and nothing volatile survived.
    #[must_use]
    pub const fn medium(&self) -> &Store {
        &self.medium
    }

    /// The device comes back with the content of `old`, a former clone of it.
    pub fn return_as(&mut self, old: &Self) {
        self.gone = false;
        self.medium = old.view.clone();
        self.view = old.view.clone();
        self.volatile.clear();
    }

    /// Moves the volatile versions that `chosen` picks to the medium. An older one that stays
    /// volatile loses the sectors a durable one has taken.
    fn harden(&mut self, pages: std::ops::RangeInclusive<u64>, chosen: impl Fn(u64) -> bool) {
        let touched: Vec<u64> = self.volatile.range(pages).map(|(page, _)| *page).collect();
        for page in touched {
            let versions = self.volatile.remove(&page).expect("listed above");
            let mut rest: Vec<Version> = Vec::new();
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
