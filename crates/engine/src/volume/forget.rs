//! Forgetting a volume that is not served: its backing device is gone for good, or it lived in the cache alone and is not wanted any
//! more. All that the cache holds of it is given up.
//!
//! The order: whoever asks first learns what will be lost, and can write that down. Then everything that the cache holds of the
//! volume becomes holes, journalled like those of a discard, in pieces. When these are durable the table forgets the volume, as it
//! forgets one that is detached. A crash in between leaves a volume that is known with less dirty data, and forgetting it again does
//! the rest; after a crash behind the last step nobody knows it any more. So what is known has all of its keys or was being forgotten.
//!
//! Nobody serves it meanwhile: what it has would change under who writes it down, and grow under who removes it.

use crate::error::Error;
use crate::gc::orphans;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::Class;
use crate::state::State;
use crate::uuids;
use alloc::vec::Vec;
use bcached_format::{Inode, Label, Position, Uuid};

/// Ranges that are told at once.
const LOST_MAX: usize = 4096;

/// A volume that is about to be forgotten: nobody can serve it until that is done or given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forgetting {
    inode: Inode,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its label in the table.
    pub label: Label,
    /// It has no backing device.
    pub flash_only: bool,
    /// Dirty data that is lost with it, in sectors.
    pub dirty_sectors: u64,
}

/// Dirty data that would be lost. Key space: sectors of the backing device, or of a volume without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// First sector.
    pub start: u64,
    /// Behind the last one.
    pub end: u64,
}

impl CacheSet {
    /// Sets out to forget a volume. Nothing has changed until [`CacheSet::forget`]; that or [`CacheSet::keep`] must follow.
    ///
    /// # Errors
    /// If the set does not know the volume, serves it or forgets it already, or if it is being stopped or has failed.
    pub fn begin_forgetting(&self, uuid: Uuid) -> Result<Forgetting, Error> {
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
            Ok(Forgetting { inode, uuid, label, flash_only, dirty_sectors: s.dirty.of(inode) })
        })
    }

    /// What would be lost, in order, from sector `at` of the key space on: some of it, and where the rest begins.
    ///
    /// # Errors
    /// The index cannot be read, or the set is being stopped.
    pub async fn lost(&self, of: &Forgetting, at: u64) -> Result<(Vec<Lost>, Option<u64>), Error> {
        self.with(State::begin_work)?;
        let found = self.find_lost(of.inode, at, Position::MAX.offset).await;
        self.end_work();
        found
    }

    /// Likewise, up to `end`.
    pub(super) async fn find_lost(
        &self,
        inode: Inode,
        mut at: u64,
        end: u64,
    ) -> Result<(Vec<Lost>, Option<u64>), Error> {
        let mut all: Vec<Lost> = Vec::new();
        while at < end && all.len() < LOST_MAX {
            if self.with(|s| s.stopping) {
                return Err(Error::Stopping);
            }
            // A piece that is tried again finds the same once more.
            let mut piece: Vec<Lost> = Vec::new();
            let upto = self
                .attempt_reading(|s| {
                    piece.clear();
                    s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                        if key.dirty && !buckets.is_dead(key) {
                            piece.push(Lost { start: key.start().max(at), end: key.end.min(end) });
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

    /// Gives up all that the cache holds of the volume, and then the volume; durable when this returns. To be waited for to its end.
    ///
    /// # Errors
    /// If the set is being stopped, or its index cannot be read or written: then the volume is known as before, perhaps with
    /// less dirty data.
    pub async fn forget(&self, forgetting: Forgetting) -> Result<(), Error> {
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

    /// The volume is not to be forgotten after all.
    #[allow(clippy::needless_pass_by_value, reason = "nothing is done with it after this")]
    pub fn keep(&self, forgetting: Forgetting) {
        self.with(|s| s.forgetting.remove(&forgetting.inode));
    }

    async fn make_void_and_forget(&self, forgetting: &Forgetting) -> Result<(), Error> {
        let inode = forgetting.inode;
        self.with(|s| {
            let State { open, buckets, .. } = s;
            open.close(Class::Dirty(inode), buckets);
        });
        self.signals().summary_work.notify_all();
        orphans::make_void(self, inode, |_| false, |buckets, key| !buckets.is_dead(key)).await?;
        // Whoever finds a volume that is not known finds nothing dirty of it either.
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
    /// Somebody works on the set: it does not stop before the end of that.
    pub(crate) fn begin_work(&mut self) -> Result<(), Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        self.background += 1;
        Ok(())
    }
}
