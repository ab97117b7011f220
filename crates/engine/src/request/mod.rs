//! Serves requests: turns a volume-relative range into flows over the cache and the backing device.
//!
//! | file | what |
//! |---|---|
//! | `inflight` | requests that need no task: how they begin and end |
//! | `admission` | whether a request adds to the cache |
//! | `fast_hit` | a read of one piece |
//! | `fast_miss` | a read of one piece that is not cached |
//! | `fast_write` | a write of one piece to the cache alone |
//! | `read` | pieces from the cache, holes from the backing device, fills |
//! | `write` | the table of modes: back, through, around |
//! | `holes` | invalidates what the cache holds of a range |
//! | `insert` | space, data, then keys |
//! | `fill` | puts data that was read into the cache, after the reader has it |
//! | `flush` | flush, and what a flush of the backing device releases |
//! | `discard` | discard |
//! | `zeroes` | write-zeroes |
//! | `ranges` | which operation waits for which |
//! | `parked` | clean data that waits for a flush of the backing device |
//! | `without_cache` | how a volume continues without its cache |

pub mod admission;
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
pub mod without_cache;
pub mod write;
pub mod zeroes;

use crate::error::Error;
use crate::journal::writer;
use crate::latency::RequestPath;
use crate::policy::ClientId;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::backing_flushes::{FlushStamp, RequestToken};
use crate::volume::{Lifecycle, Volume, VolumeId};
use admission::BypassReason;
use bcached_env::{Buffer, Disk, Payload, Time};
use bcached_format::{CacheMode, Inode};
use core::cell::Cell;
use core::time::Duration;
use inflight::PendingRequest;
use ranges::Claim;
use without_cache::or_uncached;

/// Most requests in flight at once that the engine is built for. The front end enforces this limit.
///
/// Each request may need a task and may leave a fill behind, which may need one. Each of the two
/// may also wait for the rewrite of a leaf, which is a task as well. All of them must be admitted
/// together, or the tasks that wait keep out those that they wait for. So the limit covers the
/// tasks of two sets, one of which is giving up its volumes, the background tasks, and as many idle
/// tasks as the front end keeps for requests.
pub const REQUESTS_MAX: usize = 1024;
const BACKGROUND_TASKS_MAX: usize = 1024;
const OF_A_SET_MAX: usize = REQUESTS_MAX + 2 * fill::FILLS_MAX;
const _: () = assert!(2 * OF_A_SET_MAX + BACKGROUND_TASKS_MAX + REQUESTS_MAX <= bcached_env::TASKS_MAX);

/// One request. Sectors have 512 bytes and are relative to the volume; buffers are whole sectors.
#[derive(Debug)]
pub enum Request {
    /// Reads into `buffer`.
    Read {
        /// First sector.
        sector: u64,
        /// Destination; returned in the reply.
        buffer: Buffer,
    },
    /// Writes `payload`.
    Write {
        /// First sector.
        sector: u64,
        /// The data.
        payload: Payload,
        /// The write is durable when it is answered.
        fua: bool,
    },
    /// Makes everything durable that was answered before this request arrived.
    Flush,
    /// Like `Flush`, but the client requested it at this time and it has waited since. If it fails,
    /// that says nothing about changes answered later, or at the same time.
    FlushRequestedAt(Time),
    /// The content is no longer needed.
    Discard {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
    },
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// The zeroes are durable when this is answered.
        fua: bool,
        /// The space under the range may be given up, and none is taken.
        may_unmap: bool,
    },
}

impl Request {
    /// Returns whether the request changes something, if it is carried out.
    const fn changes(&self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Flush | Self::FlushRequestedAt(_))
    }

    /// Returns the first sector and the length, in sectors, of a request that has a range.
    fn place(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { sector, buffer } => Some((*sector, buffer.len() as u64 / 512)),
            Self::Write { sector, payload, .. } => Some((*sector, payload.len() as u64 / 512)),
            Self::Discard { sector, sectors } | Self::WriteZeroes { sector, sectors, .. } => {
                Some((*sector, *sectors))
            }
            Self::Flush | Self::FlushRequestedAt(_) => None,
        }
    }
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    /// The result.
    pub result: Result<(), Error>,
    /// The buffer of a read, also after a failure.
    pub buffer: Option<Buffer>,
}

/// What a flow must know of its volume. It does not change while requests are in flight, except for
/// `mode`, `inode` and `bypass`, which each request takes as they are when it begins. If the volume
/// has left the cache meanwhile, or has a new number, a flow finds out when it has its turn
/// ([`without_cache::in_turn`]), or when it inserts.
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
    /// Why the request adds nothing to the cache, if it does not. The engine's own requests are
    /// never bypassed.
    pub bypass: Option<BypassReason>,
    /// The path that the request has taken so far, for its latency.
    path: Cell<Option<RequestPath>>,
}

/// A range of a volume in the key space (backing device sectors).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SectorRange {
    pub start: u64,
    pub end: u64,
}

impl SectorRange {
    pub const fn sectors(self) -> u64 {
        self.end - self.start
    }
}

impl Target {
    /// Returns what a flow must know of `volume` as it is now.
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

    /// Returns whether a request has failed because the backing device is gone.
    fn misses_backing(&self, result: &Result<(), Error>) -> bool {
        let Err(error @ Error::Io { source, .. }) = result else { return false };
        error.is_absence() && self.backing.as_ref().is_some_and(|disk| disk.id() == source.disk)
    }

    /// Records that the request has been answered after `latency`.
    fn is_done(&self, volume: &mut Volume, latency: Duration) {
        if let Some(path) = self.path.get() {
            volume.latencies.add(path, latency);
        }
    }

    /// Records that the request takes this path. If its parts take several, the last in the order
    /// of [`RequestPath`] counts, which is the longest (invariant N3).
    pub fn goes(&self, path: RequestPath) {
        self.path.set(self.path.get().max(Some(path)));
    }

    /// Returns the blocks that `range` touches, wherever they lie.
    pub const fn whole_blocks(&self, range: SectorRange) -> SectorRange {
        let start = range.start - range.start % self.block_sectors;
        SectorRange { start, end: range.end.next_multiple_of(self.block_sectors) }
    }

    /// Returns the blocks that `range` touches, as far as they lie in the cacheable part; `None` if
    /// none does.
    pub fn blocks_around(&self, range: SectorRange) -> Option<SectorRange> {
        let SectorRange { start, end } = self.whole_blocks(range);
        let end = end.min(self.cacheable_end);
        (self.inode.is_some() && start < end && start >= self.data_offset)
            .then_some(SectorRange { start, end })
    }
}

/// Releases an entry of the table of ranges: a write, fill, cleaning or miss. Wakes all that wait
/// for it (invariant L1).
pub(crate) fn release(set: &CacheSet, target: &Target, claim: Claim) {
    set.with(|s| {
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.ranges.release(claim);
        }
    });
    set.signals().ranges.notify_all();
}

impl CacheSet {
    /// Serves the rest of a request that has begun and needs a task.
    pub async fn serve_rest(&self, rest: PendingRequest) -> Reply {
        let PendingRequest { target, asked, request, began } = rest;
        let changes = request.changes();
        let place = request.place().filter(|_| changes);
        let place = place.and_then(|(sector, sectors)| target.range(sector, sectors).ok());
        match request {
            Request::Flush | Request::FlushRequestedAt(_) => target.goes(RequestPath::Flush),
            Request::Discard { .. } => target.goes(RequestPath::Discard),
            Request::WriteZeroes { .. } => target.goes(RequestPath::WriteZeroes),
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

    /// Waits, before a change is answered, until its keys survive the process. The note ensures
    /// that immediately; while there is no note, only the journal does (invariant D6). Without an
    /// inode number no keys were made.
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
        // Taken once, even if the flush is retried without the cache.
        let answers = flush::flushes(self, target.id, |flushes| flushes.answers(asked));
        let flush = async |target: &Target| flush::flush(self, target, answers).await;
        or_uncached(self, target, flush).await
    }

    /// Carries out a request. Returns the reply, and the oldest stamp of what was written to the
    /// backing device and is not proven durable.
    async fn dispatch(&self, target: &Target, request: Request) -> (Reply, Option<FlushStamp>) {
        let written = |result: Result<Option<FlushStamp>, Error>| match result {
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
            // `Time::MAX`: the flush answers for everything answered before it arrived, even if no
            // time has passed since.
            Request::Flush => plain(self.client_flush(target, Time::MAX).await),
            Request::FlushRequestedAt(asked) => plain(self.client_flush(target, asked).await),
            Request::Discard { sector, sectors } => match target.range(sector, sectors) {
                Err(error) => plain(Err(error)),
                Ok(range) => plain(discard::discard(self, target, range).await),
            },
            Request::WriteZeroes { sector, sectors, fua, may_unmap } => {
                let asked = zeroes::ZeroOptions { fua, may_unmap };
                match target.range(sector, sectors) {
                    Err(error) => plain(Err(error)),
                    Ok(range) => written(zeroes::write_zeroes(self, target, range, asked).await),
                }
            }
        }
    }
}

impl State {
    /// Counts a request. Returns its target, its position relative to the backing device's flushes,
    /// and its range, if it has one in the volume.
    fn begin_request(
        &mut self,
        client: ClientId,
        id: VolumeId,
        request: &Request,
    ) -> Result<(Target, Option<RequestToken>, Option<SectorRange>), Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        self.last_request = self.now;
        let Self { volumes, geometry, .. } = self;
        let volume = volumes.get_mut(id).filter(|volume| volume.lifecycle != Lifecycle::Leaving);
        let volume = volume.ok_or(Error::NoVolume)?;
        volume.requests += 1;
        volume.changes += u64::from(request.changes());
        let mut target = Target::of(id, volume, geometry.block_sectors);
        let asked = volume.backing.as_ref().map(|backing| backing.flushes.asks());
        // A range that is not in the volume is refused later.
        let range = request.place().and_then(|(sector, sectors)| target.range(sector, sectors).ok());
        let decided = range.map_or(Ok(()), |range| admission::decide(self, &target, client, request, range));
        target.bypass = decided.err();
        Ok((target, asked, range))
    }

    /// Counts the end of a request; returns its volume, if that still exists.
    fn end_request(&mut self, target: &Target) -> Option<&mut Volume> {
        self.last_request = self.now;
        let volume = self.volumes.get_mut(target.id)?;
        volume.requests -= 1;
        volume.earlier_requests -= u64::from(target.attachment != volume.attachment);
        Some(volume)
    }

    /// Ends a change that began at `began`. Returns its result, which includes whether its backing
    /// device may have lost data meanwhile. `unproven` is the oldest stamp of what the change has
    /// written there.
    fn end_change(
        &mut self,
        target: &Target,
        (asked, unproven): (Option<RequestToken>, Option<FlushStamp>),
        place: Option<SectorRange>,
        result: Result<(), Error>,
        began: Time,
    ) -> Result<(), Error> {
        let (now, latency) = (self.now, self.now - began);
        let Some(volume) = self.end_request(target) else { return result };
        volume.changes -= 1;
        volume.earlier_changes -= u64::from(target.round != volume.round);
        // A backing device cannot have lost a change for which it was absent: the client is
        // refused, or asks the device that replaces it.
        let asked = asked.filter(|_| !target.misses_backing(&result));
        if let Some(range) = place.filter(|_| result.is_err()) {
            // Write-back may have left the range to a write that has now failed.
            volume.pace.age.write_failed(range.start, range.end);
        }
        let mut result = result;
        if let Some((backing, asked)) = volume.backing.as_mut().zip(asked)
            && !backing.flushes.change_ends(asked, unproven, now)
            && result.is_ok()
        {
            result = Err(Error::LostWrites);
        }
        // What failed enters no histogram: invariant N3.
        if result.is_ok() {
            target.is_done(volume, latency);
        }
        result
    }

    /// Ends a read or a flush that began at `began`.
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
    /// Returns the range in the key space; fails if it is empty or leaves the volume.
    fn range(&self, sector: u64, sectors: u64) -> Result<SectorRange, Error> {
        match sector.checked_add(sectors).filter(|end| sectors > 0 && *end <= self.sectors) {
            Some(end) => Ok(SectorRange { start: self.data_offset + sector, end: self.data_offset + end }),
            None => Err(Error::Range { sector, sectors, volume_sectors: self.sectors }),
        }
    }
}

fn refuse(request: Request, error: Error) -> Reply {
    let buffer = if let Request::Read { buffer, .. } = request { Some(buffer) } else { None };
    Reply { result: Err(error), buffer }
}
