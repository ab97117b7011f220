//! Requests: from a volume-relative range to flows over the cache and the backing device.
//!
//! | file | what |
//! |---|---|
//! | `under_way` | those that want no task: how they begin and end |
//! | `bypass` | whether a request adds to the cache |
//! | `at_once` | a read that is of one piece |
//! | `miss_at_once` | the same of what is not in the cache |
//! | `put_at_once` | a write of one piece to the cache alone |
//! | `read` | pieces from the cache, holes from the backing device, fills |
//! | `write` | the table of modes: back, through, around |
//! | `holes` | what makes void what the cache holds of a range |
//! | `insert` | space, data, then keys |
//! | `fill` | the same for what was read, when the reader has it |
//! | `flush` | flush, and what a backing flush sets free |
//! | `discard` | discard |
//! | `zeroes` | write-zeroes |
//! | `ranges` | who waits for whom |
//! | `parked` | clean data that waits for the backing device's flush |
//! | `uncached` | how a volume goes on without its cache |

pub mod bypass;
pub mod discard;
mod fast_hit;
mod fast_miss;
mod fast_write;
mod fill;
pub mod flush;
pub mod holes;
pub mod inflight;
pub mod insert;
pub mod parked;
pub mod ranges;
pub mod read;
pub mod uncached;
pub mod write;
pub mod zeroes;

use crate::error::Error;
use crate::journal::writer;
use crate::latency::Path;
use crate::policy::Client;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::epoch::{Asked, Stamp};
use crate::volume::{Course, Volume, VolumeId};
use bcached_env::{Buffer, Disk, Payload, Time};
use bcached_format::{CacheMode, Inode};
use bypass::Bypass;
use core::cell::Cell;
use core::time::Duration;
use inflight::Rest;
use ranges::Claim;
use uncached::or_uncached;

/// Requests in flight at once, at most, for which the engine is made: whoever brings them sees to that.
///
/// Each may want a task, may leave a fill behind it, which may want one, and each of both may wait for the rewrite of a leaf, which is one as
/// well. All of them must be let in together, or those that wait keep out what they wait for: that of two sets, of which one gives its
/// volumes up, what works in the background, and as many idle tasks as whoever brings requests keeps for them.
pub const REQUESTS_MAX: usize = 1024;
const BACKGROUND_TASKS_MAX: usize = 1024;
const OF_A_SET_MAX: usize = REQUESTS_MAX + 2 * fill::FILLS_MAX;
const _: () = assert!(2 * OF_A_SET_MAX + BACKGROUND_TASKS_MAX + REQUESTS_MAX <= bcached_env::TASKS_MAX);

/// One request. Sectors of 512 bytes, relative to the volume; memory is whole sectors.
#[derive(Debug)]
pub enum Request {
    /// Fill `buffer`.
    Read {
        /// First sector.
        sector: u64,
        /// Where to; comes back in the reply.
        buffer: Buffer,
    },
    /// Write `payload`.
    Write {
        /// First sector.
        sector: u64,
        /// What.
        payload: Payload,
        /// Durable when answered.
        fua: bool,
    },
    /// Everything answered before this came here becomes durable.
    Flush,
    /// The same of one that was asked for at that time and has waited since. If it fails that tells of nothing
    /// that was answered later, or at the same time.
    FlushAskedAt(Time),
    /// The content is not needed any more.
    Discard {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
    },
    /// The range reads as zeroes from here on.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// Durable when answered.
        fua: bool,
        /// The space under the range may be given up, and none is taken.
        may_unmap: bool,
    },
}

impl Request {
    /// Whether it changes something, if it is carried out.
    const fn changes(&self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Flush | Self::FlushAskedAt(_))
    }

    /// First sector and length, in sectors, of what has a place.
    fn place(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { sector, buffer } => Some((*sector, buffer.len() as u64 / 512)),
            Self::Write { sector, payload, .. } => Some((*sector, payload.len() as u64 / 512)),
            Self::Discard { sector, sectors } | Self::WriteZeroes { sector, sectors, .. } => {
                Some((*sector, *sectors))
            }
            Self::Flush | Self::FlushAskedAt(_) => None,
        }
    }
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    /// How it ended.
    pub result: Result<(), Error>,
    /// A read's memory, also after a failure.
    pub buffer: Option<Buffer>,
}

/// What a flow must know of its volume; it does not change while requests are in flight, except `mode`, `inode` and `bypass`,
/// which each request takes as they are when it begins. If the volume has left that number meanwhile a flow finds out when it
/// is its turn ([`uncached::in_turn`]), or inserts.
#[derive(Clone)]
pub(crate) struct Target {
    pub id: VolumeId,
    pub inode: Option<Inode>,
    /// [`Volume::attachment`] when the request began.
    pub attachment: u64,
    /// [`Volume::round`] when it began.
    pub round: u64,
    pub backing: Option<Disk>,
    pub data_offset: u64,
    pub sectors: u64,
    pub cacheable_end: u64,
    pub mode: CacheMode,
    pub block_sectors: u64,
    /// Why the request adds nothing to the cache, if so. None of the engine's own is bypassed.
    pub bypass: Option<Bypass>,
    /// The way that the request has gone until now, for its latency.
    path: Cell<Option<Path>>,
}

/// A range of a volume in the key space (backing device sectors).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Range {
    pub start: u64,
    pub end: u64,
}

impl Range {
    pub const fn sectors(self) -> u64 {
        self.end - self.start
    }
}

impl Target {
    /// What a flow must know of `volume` as it is now.
    pub fn of(id: VolumeId, volume: &Volume, block_sectors: u64) -> Self {
        Self {
            id,
            inode: volume.inode,
            attachment: volume.attachment,
            round: volume.round,
            backing: volume.backing.as_ref().map(|backing| backing.disk.clone()),
            data_offset: volume.data_offset,
            sectors: volume.sectors,
            cacheable_end: volume.cacheable_end,
            mode: volume.mode,
            block_sectors,
            bypass: None,
            path: Cell::new(None),
        }
    }

    /// A request has failed because the backing device is not there any more.
    fn misses_backing(&self, result: &Result<(), Error>) -> bool {
        let Err(error @ Error::Io { source, .. }) = result else { return false };
        error.is_absence() && self.backing.as_ref().is_some_and(|disk| disk.id() == source.disk)
    }

    /// The request has been answered after so long.
    fn is_done(&self, volume: &mut Volume, latency: Duration) {
        if let Some(path) = self.path.get() {
            volume.latencies.add(path, latency);
        }
    }

    /// The request goes this way. Of the ways of its parts the last in the order of [`Path`] counts, which is the longest.
    pub fn goes(&self, path: Path) {
        self.path.set(self.path.get().max(Some(path)));
    }

    /// The blocks that `range` touches, wherever they lie.
    pub const fn whole_blocks(&self, range: Range) -> Range {
        let start = range.start - range.start % self.block_sectors;
        Range { start, end: range.end.next_multiple_of(self.block_sectors) }
    }

    /// The blocks that `range` touches, as far as they lie in the cacheable part; `None` if none does.
    pub fn blocks_around(&self, range: Range) -> Option<Range> {
        let Range { start, end } = self.whole_blocks(range);
        let end = end.min(self.cacheable_end);
        (self.inode.is_some() && start < end && start >= self.data_offset).then_some(Range { start, end })
    }
}

/// The end of what was entered in the table of ranges: a write, fill, cleaning or miss.
pub(crate) fn release(set: &CacheSet, target: &Target, claim: Claim) {
    set.with(|s| {
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.ranges.release(claim);
        }
    });
    set.signals().ranges.notify_all();
}

impl CacheSet {
    /// The rest of a request that has begun and wants a task.
    pub async fn serve_rest(&self, rest: Rest) -> Reply {
        let Rest { target, asked, request, began } = rest;
        let changes = request.changes();
        let place = request.place().filter(|_| changes);
        let place = place.and_then(|(sector, sectors)| target.range(sector, sectors).ok());
        match request {
            Request::Flush | Request::FlushAskedAt(_) => target.goes(Path::Flush),
            Request::Discard { .. } => target.goes(Path::Discard),
            Request::WriteZeroes { .. } => target.goes(Path::WriteZeroes),
            _ => {}
        }
        let (mut reply, unproven) = self.dispatch(&target, request).await;
        if changes && reply.result.is_ok() {
            reply.result = self.outlast_process(&target).await;
        }
        reply.result = self.with(|s| match changes {
            true => s.end_change(&target, (asked, unproven), place, reply.result, began),
            false => {
                s.end_read(&target, began, reply.result.is_ok());
                reply.result
            }
        });
        self.signals().ranges.notify_all();
        reply
    }

    /// Before a change is answered: waits until its keys outlive the process. The note sees to that by
    /// itself; while it is gone only the journal does. Without a number no keys were made.
    async fn outlast_process(&self, target: &Target) -> Result<(), Error> {
        if target.inode.is_none() || self.with(|s| s.note.is_kept()) {
            return Ok(());
        }
        or_uncached(self, target, async |target| match target.inode {
            Some(_) => writer::commit(self).await,
            None => Ok(()),
        })
        .await
    }

    async fn client_flush(&self, target: &Target, asked: Time) -> Result<(), Error> {
        // Once, also if it is tried again without the cache.
        let answers = flush::epoch(self, target.id, |epoch| epoch.answers(asked));
        let flush = async |target: &Target| flush::flush(self, target, answers).await;
        or_uncached(self, target, flush).await
    }

    /// The reply, and the oldest stamp of what was put on the backing device and is not proven durable.
    async fn dispatch(&self, target: &Target, request: Request) -> (Reply, Option<Stamp>) {
        let written = |result: Result<Option<Stamp>, Error>| match result {
            Ok(unproven) => (Reply { result: Ok(()), buffer: None }, unproven),
            Err(error) => (Reply { result: Err(error), buffer: None }, None),
        };
        let plain = |result: Result<(), Error>| written(result.map(|()| None));
        match request {
            Request::Read { sector, buffer } => match target.range(sector, buffer.len() as u64 / 512) {
                Err(error) => (Reply { result: Err(error), buffer: Some(buffer) }, None),
                Ok(range) => {
                    let (result, buffer) = read::read(self, target, range, buffer).await;
                    (Reply { result, buffer: Some(buffer) }, None)
                }
            },
            Request::Write { sector, payload, fua } => match target.range(sector, payload.len() as u64 / 512)
            {
                Err(error) => plain(Err(error)),
                Ok(range) => written(write::write(self, target, range, payload, fua).await),
            },
            // Whatever was answered before it came is known to have been, even if no time has passed since.
            Request::Flush => plain(self.client_flush(target, Time::MAX).await),
            Request::FlushAskedAt(asked) => plain(self.client_flush(target, asked).await),
            Request::Discard { sector, sectors } => match target.range(sector, sectors) {
                Err(error) => plain(Err(error)),
                Ok(range) => plain(discard::discard(self, target, range).await),
            },
            Request::WriteZeroes { sector, sectors, fua, may_unmap } => {
                let asked = zeroes::Asked { fua, may_unmap };
                match target.range(sector, sectors) {
                    Err(error) => plain(Err(error)),
                    Ok(range) => written(zeroes::write_zeroes(self, target, range, asked).await),
                }
            }
        }
    }
}

impl State {
    /// Counts a request; what it must know, when it was asked for by the backing device's flushes, and its place, if it has one in the volume.
    fn begin_request(
        &mut self,
        client: Client,
        id: VolumeId,
        request: &Request,
    ) -> Result<(Target, Option<Asked>, Option<Range>), Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        self.last_request = self.now;
        let Self { volumes, geometry, .. } = self;
        let volume = volumes.get_mut(id).filter(|volume| volume.course != Course::Leaving);
        let volume = volume.ok_or(Error::NoVolume)?;
        volume.requests += 1;
        volume.changes += u64::from(request.changes());
        let mut target = Target::of(id, volume, geometry.block_sectors);
        let asked = volume.backing.as_ref().map(|backing| backing.epoch.asks());
        // What is not in the volume is refused later.
        let range = request.place().and_then(|(sector, sectors)| target.range(sector, sectors).ok());
        let decided = range.map_or(Ok(()), |range| bypass::decide(self, &target, client, request, range));
        target.bypass = decided.err();
        Ok((target, asked, range))
    }

    /// Counts the end of a request; its volume, if that is still here.
    fn end_request(&mut self, target: &Target) -> Option<&mut Volume> {
        self.last_request = self.now;
        let volume = self.volumes.get_mut(target.id)?;
        volume.requests -= 1;
        volume.earlier_requests -= u64::from(target.attachment != volume.attachment);
        Some(volume)
    }

    /// The same of a change that `began` then; its result, with what its backing device may have lost meanwhile. `unproven`: the oldest stamp
    /// of what it has written there.
    fn end_change(
        &mut self,
        target: &Target,
        (asked, unproven): (Option<Asked>, Option<Stamp>),
        place: Option<Range>,
        result: Result<(), Error>,
        began: Time,
    ) -> Result<(), Error> {
        let (now, latency) = (self.now, self.now - began);
        let Some(volume) = self.end_request(target) else { return result };
        volume.changes -= 1;
        volume.earlier_changes -= u64::from(target.round != volume.round);
        // What the backing device was not there for is nothing that it could have lost: whoever asked is refused, or asks the one
        // that takes its place.
        let asked = asked.filter(|_| !target.misses_backing(&result));
        if let Some(range) = place.filter(|_| result.is_err()) {
            // Write-back may have left the place to a write that has not come.
            volume.pace.age.write_failed(range.start, range.end);
        }
        let mut result = result;
        if let Some((backing, asked)) = volume.backing.as_mut().zip(asked)
            && !backing.epoch.change_ends(asked, unproven, now)
            && result.is_ok()
        {
            result = Err(Error::LostWrites);
        }
        if result.is_ok() {
            target.is_done(volume, latency);
        }
        result
    }

    /// The same of a read, or a flush, that `began` then.
    fn end_read(&mut self, target: &Target, began: Time, is_done: bool) {
        let latency = self.now - began;
        if let Some(volume) = self.end_request(target)
            && is_done
        {
            target.is_done(volume, latency);
        }
    }
}

impl Target {
    /// The range in the key space; refused if it is empty or leaves the volume.
    fn range(&self, sector: u64, sectors: u64) -> Result<Range, Error> {
        match sector.checked_add(sectors).filter(|end| sectors > 0 && *end <= self.sectors) {
            Some(end) => Ok(Range { start: self.data_offset + sector, end: self.data_offset + end }),
            None => Err(Error::Range { sector, sectors, volume_sectors: self.sectors }),
        }
    }
}

fn refuse(request: Request, error: Error) -> Reply {
    let buffer = if let Request::Read { buffer, .. } = request { Some(buffer) } else { None };
    Reply { result: Err(error), buffer }
}
