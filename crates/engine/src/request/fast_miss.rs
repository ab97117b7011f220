//! Serves a read of one piece that is not cached, without a task. Its fill begins when the read
//! ends.

use crate::btree::cache::LeafHint;
use crate::btree::{Content, Piece};
use crate::error::{Error, ErrorContext};
use crate::request::fill::{self, Fill};
use crate::request::inflight::{InFlightSlot, ReplyTo};
use crate::request::read::{self, PlannedPiece, ReadSources};
use crate::request::{Reply, SectorRange, Target};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::backing_flushes::IoToken;
use bcached_env::{Buffer, IoError, Time};

/// A read of the backing device that has begun.
pub struct MissRead {
    planned: PlannedPiece,
    /// The leaf of the missing piece.
    leaf: LeafHint,
    begun: Option<IoToken>,
    /// The device was asleep, and this read wakes it.
    wakes: bool,
}

/// Such a read in flight.
pub struct MissInFlight {
    pub(super) target: Target,
    pub(super) miss: MissRead,
    pub(super) began: Time,
    /// The memory of the request, if that is foreign memory that the read cannot use.
    pub(super) lent: Option<Buffer>,
    pub(super) reply_to: ReplyTo,
}

impl State {
    /// Begins to read `hole`, which `leaf` says is not cached, from the backing device. Returns
    /// `None` if there is no backing device, or some of the range is parked in the cache; nothing
    /// has changed then.
    pub(super) fn begin_miss(
        &mut self,
        target: &Target,
        hole: SectorRange,
        leaf: LeafHint,
    ) -> Option<MissRead> {
        let volume = self.volumes.get(target.id)?;
        if target.backing.is_none() || volume.ranges.is_parked_in(hole.start, hole.end) {
            return None;
        }
        let begun = volume.backing.as_ref().map(|backing| backing.flushes.read_begins());
        let piece = Piece { start: hole.start, end: hole.end, content: Content::Hole };
        let mut fill_left = read::FILL_SECTORS_MAX;
        let planned = read::plan_piece(self, target, piece, &mut fill_left);
        let wakes = self.client_comes(target.id);
        Some(MissRead { planned, leaf, begun, wakes })
    }

    /// Ends such a read, which began at `began` and is answered now; returns its fill, if there is
    /// one.
    fn end_such_miss(
        &mut self,
        target: &Target,
        miss: &MissRead,
        is_read: bool,
        began: Time,
    ) -> Option<Fill> {
        self.client_goes(target.id, self.now.since(began));
        let fill = self.end_miss(target, &miss.planned, miss.begun.filter(|_| is_read));
        if is_read {
            read::count(self, target, ReadSources::of(&miss.planned.piece));
        }
        self.end_read(target, began, is_read);
        fill.map(|fill| fill.of(miss.leaf))
    }
}

impl CacheSet {
    /// Starts the read of the backing device for the miss in slot `place`.
    pub(super) fn begin_to_miss(&self, place: usize, buffer: Buffer) {
        let (backing, planned, wakes) = {
            let under_way = self.inner.under_way.borrow();
            let MissInFlight { target, miss, .. } = &under_way.misses[place];
            (target.backing.clone().expect("a miss is read from there"), miss.planned, miss.wakes)
        };
        if wakes {
            // The device is awake, so gathered write-back is sent, too.
            self.signals().writeback_work.notify_all();
        }
        let (lent, buffer) = fill::land(self, planned.fill.is_some(), buffer);
        if lent.is_some() {
            self.inner.under_way.borrow_mut().misses[place].lent = lent;
        }
        self.read_for(&backing, planned.piece.start, buffer, InFlightSlot::Miss(place));
    }

    /// Handles the completion of the miss in slot `place`.
    pub(super) fn miss_ended(&self, place: usize, read: Result<(), IoError>, buffer: Buffer) {
        let missing = self.inner.under_way.borrow_mut().misses.remove(place);
        let MissInFlight { target, miss, began, lent, reply_to } = missing;
        let fill = self.with(|s| s.end_such_miss(&target, &miss, read.is_ok(), began));
        let fill = fill.map(|fill| fill::with_data(self, target, fill, &buffer));
        self.signals().ranges.notify_all();
        let buffer = fill::give_back(self, lent, buffer, read.is_ok());
        reply_to.tell(Reply { result: read.map_err(Error::io(ErrorContext::Backing)), buffer: Some(buffer) });
        if let Some(fill) = fill {
            self.begin_to_fill(fill);
        }
    }
}
