//! Records the attachment of a volume on both devices: in the backing superblock, and in the UUID
//! table of the cache.
//!
//! A kernel records only in the table under which inode the cache holds a volume's data. bcached
//! also records it on the backing device ([`Attachment`]). So a lost table costs no data, and a
//! contradicting one is noticed. Both devices also hold a *stamp*, a random number that changes at
//! each start of the volume and at each orderly stop. The stamps differ if one of the two devices
//! was replaced by an older copy of itself.
//!
//! The order:
//!
//! 1. The superblock's content is made durable, since a killed process may have left it in the
//!    device's volatile write cache.
//! 2. The slot gets the next stamp and keeps the one in the superblock, durably.
//! 3. The superblock gets the next stamp.
//! 4. The slot forgets the previous stamp.
//!
//! A crash in between leaves the superblock with either stamp. Only afterwards is the volume
//! served. So a copy of the backing device from before this start is recognised by its stamp,
//! however the run ends. If the superblock names a journal entry that the cache does not have, the
//! cache is the older one. That also holds if the stamps agree: a copy that was made while the set
//! ran.
//!
//! What other software has written since invalidates these records automatically: those in the
//! table because the newest journal entry is a kernel's, those in the superblock because its
//! checksum differs.

use crate::error::Error;
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::record;
use alloc::vec::Vec;
use bcached_format::{Attachment, BackingState, BackingSuperblock, Inode, UuidSlot};

/// The attachment to record in the superblock of the volume that is attached under `inode`.
pub(super) fn of(s: &State, inode: Inode) -> Option<Attachment> {
    let slot = s.uuids.slot(inode)?;
    Some(Attachment { number: inode, stamp: slot.attachment[1], entry: s.journal.durable() })
}

/// Updates the attachment in a superblock that is about to be written.
pub(super) fn renew(s: &State, superblock: &mut BackingSuperblock) {
    // A stale superblock keeps its attachment, so that the next attach finds what must be
    // invalidated.
    let attachment = superblock.attachment().filter(|_| superblock.state() != BackingState::None);
    superblock.set_attachment(attachment.map(|of| Attachment { entry: s.journal.durable(), ..of }));
}

/// Makes the slot forget the previous stamp, because the newest one is durable on the superblock.
/// Durable with the next write of the table.
fn only_the_newest_counts(s: &mut State, inode: Inode) {
    if let Some(slot) = s.uuids.slot_mut(inode) {
        slot.attachment[0] = slot.attachment[1];
    }
}

/// The attachment to this set in a backing superblock, if it is attached and bcached wrote the
/// superblock last.
fn said(s: &State, superblock: &BackingSuperblock) -> Option<Attachment> {
    let is_ours =
        superblock.set_uuid() == s.superblock.set_uuid() && superblock.state() != BackingState::None;
    superblock.attachment().filter(|_| is_ours)
}

/// The inode that a backing superblock names and the UUID table has lost, if no other volume has
/// it.
fn lost_number(s: &State, superblock: &BackingSuperblock) -> Option<Inode> {
    let number = said(s, superblock)?.number;
    let is_free =
        s.uuids.is_unowned(number) && !s.volumes.iter().any(|(_, volume)| volume.inode == Some(number));
    (s.uuids.find(superblock.uuid()).is_none() && is_free).then_some(number)
}

/// The inode of a backing device that is being added; `None`: the set does not know the device. If
/// the table has lost the inode and the superblock names it, the device gets it back, provided that
/// no other volume has it.
///
/// # Errors
/// One of the two devices is an older copy of itself: their contents do not belong together.
fn recognise(s: &mut State, superblock: &BackingSuperblock, seconds: u32) -> Result<Option<Inode>, Error> {
    let known = s.uuids.find(superblock.uuid());
    let Some(attachment) = said(s, superblock) else { return Ok(known) };
    let is_stale = superblock.state() == BackingState::Stale;
    if known.is_none() && lost_number(s, superblock).is_none() {
        return Ok(None);
    }
    // A volume that this process has served may know of journal entries that this process has
    // written.
    let newest = if s.uuids.has_lived(attachment.number) { s.journal.durable() } else { s.opened_at };
    if attachment.entry > newest && !is_stale {
        return Err(Error::OlderCache { entry: attachment.entry, newest });
    }
    let Some(inode) = known else {
        let slot = UuidSlot {
            uuid: superblock.uuid(),
            label: superblock.label(),
            first_registered: seconds,
            attachment: [0, attachment.stamp],
            ..UuidSlot::FREE
        };
        s.uuids.assign(attachment.number, slot);
        return Ok(Some(attachment.number));
    };
    if is_stale {
        // What the cache holds is void in any case.
        return Ok(known);
    }
    let is_dirty = superblock.state() == BackingState::Dirty;
    // An older copy of the device is refused: invariant D20.
    let contradicts = s.uuids.slot(inode).is_some_and(|slot| slot.contradicts(inode, &attachment, is_dirty));
    // *Dirty* is durable on the superblock before anything becomes dirty, so this superblock is an
    // older one.
    let is_outdated = !is_dirty && is_vouched_for(s, superblock, inode) && has_dirty(s, inode);
    if s.uuids.is_ours() && (contradicts || is_outdated) { Err(Error::OlderBacking) } else { Ok(known) }
}

/// Returns true if the last start of the volume was completed, and only bcached has used both
/// devices since. Then *clean* on the superblock means that nothing is dirty.
pub(super) fn is_vouched_for(s: &State, superblock: &BackingSuperblock, inode: Inode) -> bool {
    let newest = said(s, superblock).map(|attachment| [attachment.stamp; 2]);
    s.uuids.is_ours() && newest.is_some() && s.uuids.slot(inode).map(|slot| slot.attachment) == newest
}

/// Returns true if the cache certainly holds dirty data under this inode: the journal said so when
/// the set was opened and it could not have been written back since, or it has been counted. A set
/// that is served before the walk has ended may have more.
fn has_dirty(s: &State, inode: Inode) -> bool {
    // While the overlay covers an extent, the tree's data there may already have been written back.
    let is_counted = || !s.overlay.has_keys_of(inode) && s.dirty.of(inode) > 0;
    (s.replayed_dirty.contains(&inode) && !s.uuids.has_lived(inode)) || is_counted()
}

impl CacheSet {
    /// Like the function [`recognise`], but first searches the tree for an inode that the table has
    /// lost. A device that says *clean* has no dirty keys, so any under that inode are newer, or
    /// belong to another volume.
    pub(super) async fn recognise(&self, superblock: &BackingSuperblock) -> Result<Option<Inode>, Error> {
        let is_clean = superblock.state() == BackingState::Clean && self.with(|s| s.uuids.is_ours());
        if let Some(number) = self.with(|s| lost_number(s, superblock)).filter(|_| is_clean)
            && self.has_dirty_from(number, 0).await?
        {
            return Err(Error::LostNumber { number });
        }
        let seconds = self.env().wall_seconds();
        self.with(|s| recognise(s, superblock, seconds))
    }

    /// Frees doubted slots without keys under their inodes: nothing can be lost with them. Skips
    /// possible flash-only volumes, of whose existence there is no other record.
    pub(super) async fn forget_empty_doubted(&self) {
        let doubted: Vec<Inode> = self.with(|s| {
            let backed = s.uuids.doubted().filter(|(_, slot)| !slot.is_flash_only());
            backed.map(|(inode, _)| inode).collect()
        });
        for inode in doubted {
            if self.with(|s| s.uuids.was_looked_at(inode)) {
                continue;
            }
            // If the set has failed or stops, storing the table reports that.
            if self.look_at(inode).await.unwrap_or(false) {
                self.with(|s| s.uuids.forget_doubted(inode));
            }
        }
    }

    /// Forgets the previous stamp, because the superblock of the volume has the newest one durably.
    /// From now on a device with the previous stamp is an older copy.
    pub(super) async fn forget_former_stamp(&self, inode: Inode) -> Result<(), Error> {
        self.with(|s| only_the_newest_counts(s, inode));
        uuids::store(self).await
    }

    /// Renews the stamps as the last step of an orderly stop, so that a copy of either device made
    /// before it is detected. What cannot be written is left as after a crash.
    pub(crate) async fn seal_attachments(&self) {
        let stamp = uuids::new_stamp(self);
        let attached: Vec<_> = self.with(|s| {
            let mut attached = Vec::new();
            for (id, volume) in s.volumes.iter() {
                let inode = volume.inode.filter(|_| volume.backing.is_some());
                if let Some(slot) = inode.and_then(|inode| s.uuids.slot_mut(inode)) {
                    slot.attachment = [slot.attachment[1], stamp];
                    attached.extend(inode.map(|inode| (id, inode)));
                }
            }
            attached
        });
        if attached.is_empty() || uuids::store(self).await.is_err() {
            return;
        }
        for (id, inode) in attached {
            let said = record::update(self, id, |s, superblock| {
                if superblock.attachment().is_some() {
                    superblock.set_attachment(of(s, inode));
                }
            });
            if said.await.is_ok() {
                self.with(|s| only_the_newest_counts(s, inode));
            }
        }
        let _as_after_a_crash = uuids::store(self).await;
    }
}
