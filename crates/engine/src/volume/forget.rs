//! Forgets a volume that is not served: its backing device is gone for good, or it was flash-only
//! and is not needed any more. All that the cache holds of it is dropped.
//!
//! The order:
//!
//! 1. The caller learns what will be lost, and can save it.
//! 2. All that the cache holds of the volume becomes holes, in pieces, journalled like those of a
//!    discard.
//! 3. When these are durable, the UUID table forgets the volume, as it forgets a detached one.
//!
//! A crash in between leaves a known volume with less dirty data, and forgetting it again does the
//! rest. After step 3 the volume is unknown. So a known volume has all of its keys, or was being
//! forgotten.
//!
//! The volume cannot be served meanwhile: its data would change while the caller saves it, and grow
//! while it is dropped.

use crate::error::Error;
use crate::gc::orphans;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::DataClass;
use crate::state::State;
use crate::uuids;
use alloc::vec::Vec;
use bcached_format::{Inode, Label, Position, Uuid};

/// Number of ranges reported at once.
const LOST_MAX: usize = 4096;

/// A volume that is about to be forgotten: it cannot be served until that is done or cancelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingForget {
    inode: Inode,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its label in the UUID table.
    pub label: Label,
    /// It has no backing device.
    pub flash_only: bool,
    /// Dirty data that is lost with it, in sectors.
    pub dirty_sectors: u64,
}

/// Dirty data that would be lost. Key space: sectors of the backing device, or of a flash-only
/// volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostRange {
    /// First sector.
    pub start: u64,
    /// One past the last sector.
    pub end: u64,
}

impl CacheSet {
    /// Begins to forget a volume. Nothing changes until [`CacheSet::forget`]. The caller must call
    /// that or [`CacheSet::keep`].
    ///
    /// # Errors
    /// The set does not know the volume, serves it or already forgets it, or the set is being
    /// stopped or has failed.
    pub fn begin_forgetting(&self, uuid: Uuid) -> Result<PendingForget, Error> {
        self.check_alive()?;
        self.with(|s| {
            if s.stopping {
                return Err(Error::Stopping);
            }
            let inode = s.uuids.find(uuid).ok_or(Error::NoVolume)?;
            if let Some(error) = s.frozen.hides(inode) {
                return Err(error);
            }
            if !s.has_counted(inode) {
                return Err(Error::NotWalked { percent: s.counted_percent() });
            }
            if s.volumes.iter().any(|(_, volume)| volume.uuid == uuid || volume.inode == Some(inode)) {
                return Err(Error::Served);
            }
            if !s.forgetting.insert(inode) {
                return Err(Error::BeingForgotten);
            }
            let slot = s.uuids.slot(inode).ok_or(Error::NoVolume)?;
            let (label, flash_only) = (slot.label, slot.is_flash_only());
            Ok(PendingForget { inode, uuid, label, flash_only, dirty_sectors: s.dirty.of(inode) })
        })
    }

    /// Lists what would be lost, in order, from sector `at` of the key space on: some of it, and
    /// where the rest begins.
    ///
    /// # Errors
    /// The index cannot be read, or the set is being stopped.
    pub async fn lost(&self, of: &PendingForget, at: u64) -> Result<(Vec<LostRange>, Option<u64>), Error> {
        self.with(State::begin_work)?;
        let found = self.find_lost(of.inode, at, Position::MAX.offset).await;
        self.end_work();
        found
    }

    /// Like [`CacheSet::lost`], up to `end`.
    pub(super) async fn find_lost(
        &self,
        inode: Inode,
        mut at: u64,
        end: u64,
    ) -> Result<(Vec<LostRange>, Option<u64>), Error> {
        let mut all: Vec<LostRange> = Vec::new();
        while at < end && all.len() < LOST_MAX {
            if self.with(|s| s.stopping) {
                return Err(Error::Stopping);
            }
            // A retried piece is collected from scratch.
            let mut piece: Vec<LostRange> = Vec::new();
            let upto = self
                .attempt_reading(|s| {
                    piece.clear();
                    s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                        if key.dirty && !buckets.is_dead(key) {
                            piece.push(LostRange { start: key.start().max(at), end: key.end.min(end) });
                        }
                    })
                })
                .await?;
            for lost in piece {
                match all.last_mut().filter(|before| before.end == lost.start) {
                    Some(before) => before.end = lost.end,
                    None => all.push(lost),
                }
            }
            at = upto;
        }
        Ok((all, Some(at).filter(|at| *at < end)))
    }

    /// Drops all that the cache holds of the volume, and then the volume. Durable when this
    /// returns. The caller must await the end of this.
    ///
    /// # Errors
    /// The set is being stopped, or its index cannot be read or written: then the volume is known
    /// as before, perhaps with less dirty data.
    pub async fn forget(&self, forgetting: PendingForget) -> Result<(), Error> {
        let forgotten = match self.with(State::begin_work) {
            Ok(()) => {
                let forgotten = self.make_void_and_forget(&forgetting).await;
                self.end_work();
                forgotten
            }
            Err(error) => Err(error),
        };
        self.keep(forgetting);
        forgotten
    }

    /// Cancels forgetting a volume.
    #[allow(clippy::needless_pass_by_value, reason = "nothing is done with it after this")]
    pub fn keep(&self, forgetting: PendingForget) {
        self.with(|s| s.forgetting.remove(&forgetting.inode));
    }

    async fn make_void_and_forget(&self, forgetting: &PendingForget) -> Result<(), Error> {
        let inode = forgetting.inode;
        self.with(|s| {
            let State { open, buckets, .. } = s;
            open.close(DataClass::Dirty(inode), buckets);
        });
        self.signals().summary_work.notify_all();
        orphans::make_void(self, inode, |_| false, |buckets, key| !buckets.is_dead(key)).await?;
        // The holes become durable first, so that an unknown volume never has dirty data.
        writer::commit(self).await?;
        let seconds = self.env().wall_seconds();
        self.with(|s| {
            if s.uuids.find(forgetting.uuid) == Some(inode) {
                s.uuids.give_up(inode, seconds);
            }
            s.dirty_behind_ends.remove(&inode);
        });
        uuids::store(self).await?;
        self.signals().allocator_work.notify_all();
        Ok(())
    }

    pub(crate) fn end_work(&self) {
        self.with(|s| s.background -= 1);
        self.signals().ranges.notify_all();
    }
}

impl State {
    /// Begins work on the set: the set does not stop before it has ended.
    pub(crate) fn begin_work(&mut self) -> Result<(), Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        self.background += 1;
        Ok(())
    }
}
