//! Slots of the table that are used again (format 11).
//!
//! A kernel never does that: each detach costs a slot for ever, and a cache whose table is full takes no new volume. Here the slot of a
//! volume that is gone becomes one that was never used, when there is no other, and when its number is nobody's:
//!
//! - no volume has been served under it since this set was opened, so no request, fill or write-back of a former owner is under way;
//! - the tree has been walked, and what a crash could bring back of that number has become holes, and is looked for once more;
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

    async fn free_slot(&self) -> Result<(), Error> {
        // Who makes void what is left of such volumes must have ended before the number is somebody's.
        let _alone = self.inner.orphans.acquire(1).await;
        if self.with(|s| s.uuids.free_slot().is_some()) {
            return Ok(());
        }
        let gone = self.with(|s| s.uuids.longest_gone().ok_or_else(|| Error::NoSlot(s.uuids.count())))?;
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
