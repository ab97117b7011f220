//! Chooses the inode (the slot in the UUID table) of a new volume.
//!
//! An inode is never chosen while keys of another volume exist under it, whatever the UUID table
//! says. The table has no checksum of its own. If it was lost, is older, or belongs to another set,
//! it reports used inodes as free. So before an inode is assigned, the tree is searched for its
//! keys, and with it the keys of the journal and the note that are not in the tree yet
//! ([`CacheSet::find_vacant`]). That usually reads one leaf, and needs no walk.
//!
//! Slots are reused. A kernel never reuses them: each detach costs a slot permanently, and a cache
//! with a full table takes no new volume. bcached makes the slot of a removed volume one that was
//! never used, when there is no other and its inode is unused. The conditions:
//!
//! - No volume has been served under the inode since this set was opened. So no request, fill or
//!   write-back of a former owner is in flight.
//! - The tree has been walked. Whatever a crash could bring back of the inode has become holes, and
//!   is searched for once more.
//! - bcached released the slot when its keys were not needed any more, or nothing under it is
//!   dirty. A damaged table may report the slot of a live volume as invalidated.
//! - The holes are durable before the table says that the slot is free, just like those of a
//!   forgotten volume.
//!
//! So no remains of a former owner are ever taken for data of the next one, and a kernel finds a
//! slot as it creates them itself.

use crate::error::Error;
use crate::gc::orphans;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::Buckets;
use crate::state::State;
use crate::writeback::urgent::{self, CancelToken};
use bcached_format::{Inode, Key};

impl CacheSet {
    /// Runs a transition with the slot that `choose` returns. If there is none, looks for a vacant
    /// slot, or frees one, and tries again.
    pub(super) async fn with_slot<R>(
        &self,
        cancel: &CancelToken,
        choose: impl Fn(&State) -> Option<Inode>,
        transition: impl FnOnce(&mut State, Inode) -> Result<R, Error>,
    ) -> Result<R, Error> {
        while self.with(|s| choose(s).is_none()) {
            if self.find_vacant(cancel).await? {
                continue;
            }
            // Before the walk has ended, the owners of all keys are not known.
            urgent::walked(self, cancel).await?;
            self.with(State::begin_work)?;
            let freed = self.free_slot().await;
            self.end_work();
            freed?;
        }
        self.with(|s| {
            let inode = choose(s).ok_or_else(|| Error::NoSlot(s.uuids.count()))?;
            transition(s, inode)
        })
    }

    /// Searches the tree for the next inode without keys. Returns false if there is none.
    ///
    /// An inode whose leaf cannot be read is skipped by this process: its keys are unknown.
    async fn find_vacant(&self, cancel: &CancelToken) -> Result<bool, Error> {
        self.with(State::begin_work)?;
        let found = self.look_for_vacant(cancel).await;
        self.end_work();
        found
    }

    async fn look_for_vacant(&self, cancel: &CancelToken) -> Result<bool, Error> {
        while let Some(inode) = self.with(|s| s.uuids.next_to_look_at()) {
            urgent::check(self, cancel)?;
            if self.look_at(inode).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Checks that no key exists under an inode, and records the result. An inode whose leaf cannot
    /// be read may have keys.
    pub(super) async fn look_at(&self, inode: Inode) -> Result<bool, Error> {
        let is_vacant = match self.survey_beyond(inode, 0, |found| found.present || found.dirty).await {
            // Whatever the table says, there is no key: invariant D19.
            Ok(found) => !found.present && !found.dirty,
            Err(error @ (Error::Failed(_) | Error::Stopping)) => return Err(error),
            Err(_) => false,
        };
        self.with(|s| s.uuids.looked_at(inode, is_vacant));
        Ok(is_vacant)
    }

    async fn free_slot(&self) -> Result<(), Error> {
        // The task that invalidates the remains of such volumes must have ended before the inode
        // gets a new owner.
        let _alone = self.inner.orphans.acquire(1).await;
        // Only if the table has no other: invariant D18.
        if self.with(|s| s.uuids.vacant().is_some()) {
            return Ok(());
        }
        let gone = self.with(|s| s.uuids.longest_gone().ok_or_else(|| Error::NoSlot(s.uuids.count())))?;
        let is_released = self.with(|s| s.uuids.is_released(gone));
        if !is_released && self.survey_beyond(gone, 0, |left| left.dirty).await?.dirty {
            self.with(|s| s.uuids.keep_gone(gone));
            return Ok(());
        }
        let unwanted = |buckets: &Buckets, key: &Key| key.dirty || buckets.could_return(key);
        orphans::make_void(self, gone, |_| false, unwanted).await?;
        // A crash cannot bring back anything under this inode: invariant D18.
        writer::commit(self).await?;
        if self.survey_beyond(gone, 0, |left| left.present).await?.present {
            return Err(Error::Inconsistent("a volume whose slot was invalidated long ago has new keys"));
        }
        self.with(|s| s.uuids.free(gone));
        Ok(())
    }
}
