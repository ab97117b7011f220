//! Which number a new volume gets.
//!
//! Never one under which a key of somebody else stands, whatever the table of volumes says: that has no checksum of its own, and
//! one that was lost, is older, or is another set's, calls numbers free that are not. So before a number is given the tree is looked
//! at, and with it what the journal and the note say that is not in the tree yet ([`CacheSet::find_vacant`]). That is one
//! leaf as a rule, and needs no walk.
//!
//! Slots are used again. A kernel never does that: each detach costs a slot for ever, and a cache whose table is full takes no new
//! volume. Here the slot of a volume that is gone becomes one that was never used, when there is no other, and when its number is
//! nobody's:
//!
//! - no volume has been served under it since this set was opened, so no request, fill or write-back of a former owner is under way;
//! - the tree has been walked, and what a crash could bring back of that number has become holes, and is looked for once more;
//! - bcached gave it up, when nobody needed its keys any more, or nothing of it is dirty: a damaged table may call the slot of a
//!   volume invalidated that is alive;
//! - these are durable before the table says that the slot is free, as a forgotten volume's are before it is forgotten.
//!
//! So nothing that a former owner has left is ever believed of the next, and a kernel finds a slot as it makes them itself.

use crate::error::Error;
use crate::gc::orphans;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::Buckets;
use crate::state::State;
use crate::writeback::urgent::{self, Cancel};
use bcached_format::{Inode, Key};

impl CacheSet {
    /// A transition with the slot that is chosen; if there is none it is tried again with one that is used again.
    pub(super) async fn with_slot<R>(
        &self,
        cancel: &Cancel,
        choose: impl Fn(&State) -> Option<Inode>,
        transition: impl FnOnce(&mut State, Inode) -> Result<R, Error>,
    ) -> Result<R, Error> {
        while self.with(|s| choose(s).is_none()) {
            if self.find_vacant(cancel).await? {
                continue;
            }
            // Nobody knows before what is there of whom.
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

    /// Looks at the tree for the next number that no key stands under. `false`: there is none.
    ///
    /// A number whose leaf cannot be read is left out by this process: what stands under it is not known.
    async fn find_vacant(&self, cancel: &Cancel) -> Result<bool, Error> {
        self.with(State::begin_work)?;
        let found = self.look_for_vacant(cancel).await;
        self.end_work();
        found
    }

    async fn look_for_vacant(&self, cancel: &Cancel) -> Result<bool, Error> {
        while let Some(inode) = self.with(|s| s.uuids.next_to_look_at()) {
            urgent::check(self, cancel)?;
            if self.look_at(inode).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Looks whether no key stands under a number, and keeps in mind what was found. One whose leaf cannot be read may have some.
    pub(super) async fn look_at(&self, inode: Inode) -> Result<bool, Error> {
        let is_vacant = match self.survey_beyond(inode, 0, |found| found.present || found.dirty).await {
            Ok(found) => !found.present && !found.dirty,
            Err(error @ (Error::Failed(_) | Error::Stopping)) => return Err(error),
            Err(_) => false,
        };
        self.with(|s| s.uuids.looked_at(inode, is_vacant));
        Ok(is_vacant)
    }

    async fn free_slot(&self) -> Result<(), Error> {
        // Who makes void what is left of such volumes must have ended before the number is somebody's.
        let _alone = self.inner.orphans.acquire(1).await;
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
        writer::commit(self).await?;
        if self.survey_beyond(gone, 0, |left| left.present).await?.present {
            return Err(Error::Inconsistent("a volume that is long gone has new keys"));
        }
        self.with(|s| s.uuids.free(gone));
        Ok(())
    }
}
