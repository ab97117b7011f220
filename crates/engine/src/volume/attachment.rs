//! What a backing device says of its attachment, and the table of volumes of the backing device.
//!
//! A kernel keeps in the table alone under which number the cache holds a volume's data. bcached says it on the backing device, too
//! ([`Attachment`]), so a table that was lost costs no data, and one that contradicts is noticed. And both hold a *stamp*, a
//! random number that changes at each start of the volume and at each orderly stop: if one of the two devices was exchanged for an
//! older copy of itself they differ.
//!
//! The order is: what the superblock says is made durable, since a process that was killed may have left it in the device's volatile
//! cache; the slot gets the next stamp and keeps that one, durably; then the superblock gets the next one, and then the slot forgets
//! the one before. A crash in between leaves the superblock with either. Only afterwards is the volume served: a copy of the backing
//! device from before its start is told by its stamp, whatever ends the run. A journal entry that the superblock has seen and the cache
//! has not tells that the cache is the older one, also where the stamps agree: a copy that was made while the set ran.
//!
//! What somebody else has written since is void, by itself: of the table because the newest journal entry is a kernel's, of the
//! superblock because its sum is another one.

use crate::error::Error;
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::record;
use alloc::vec::Vec;
use bcached_format::{Attachment, BackingState, BackingSuperblock, Inode, UuidSlot};

/// What the superblock of a volume is to say that is attached under this number.
pub(super) fn of(s: &State, inode: Inode) -> Option<Attachment> {
    let slot = s.uuids.slot(inode)?;
    Some(Attachment { number: inode, stamp: slot.attachment[1], entry: s.journal.durable() })
}

/// The superblock is about to be written: what it says of its attachment is of now.
pub(super) fn renew(s: &State, superblock: &mut BackingSuperblock) {
    // One that is stale keeps it: whoever attaches it anew finds what is to become void.
    let attachment = superblock.attachment().filter(|_| superblock.state() != BackingState::None);
    superblock.set_attachment(attachment.map(|of| Attachment { entry: s.journal.durable(), ..of }));
}

/// The superblock says the newest stamp durably: the slot forgets the one before, which is durable with the next table.
fn only_the_newest_counts(s: &mut State, inode: Inode) {
    if let Some(slot) = s.uuids.slot_mut(inode) {
        slot.attachment[0] = slot.attachment[1];
    }
}

/// What a backing device says of its attachment to this set, if it is attached and bcached has said so last.
fn said(s: &State, superblock: &BackingSuperblock) -> Option<Attachment> {
    let is_ours =
        superblock.set_uuid() == s.superblock.set_uuid() && superblock.state() != BackingState::None;
    superblock.attachment().filter(|_| is_ours)
}

/// The number that the table has lost of a backing device which says it, if it is nobody's.
fn lost_number(s: &State, superblock: &BackingSuperblock) -> Option<Inode> {
    let number = said(s, superblock)?.number;
    let is_free =
        s.uuids.is_unowned(number) && !s.volumes.iter().any(|(_, volume)| volume.inode == Some(number));
    (s.uuids.find(superblock.uuid()).is_none() && is_free).then_some(number)
}

/// The number of a backing device that comes to the set; `None`: the set does not know it. If the table has lost it, and the device
/// says which it was, it gets that one back, provided that it is nobody's.
///
/// # Errors
/// One of the two devices is an older copy of itself: what they hold does not belong together.
fn recognise(s: &mut State, superblock: &BackingSuperblock, seconds: u32) -> Result<Option<Inode>, Error> {
    let known = s.uuids.find(superblock.uuid());
    let Some(attachment) = said(s, superblock) else { return Ok(known) };
    let is_stale = superblock.state() == BackingState::Stale;
    if known.is_none() && lost_number(s, superblock).is_none() {
        return Ok(None);
    }
    // One that has been served by this process may know of entries that this process has made.
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
        // What the cache holds is void, whatever it is.
        return Ok(known);
    }
    let is_dirty = superblock.state() == BackingState::Dirty;
    let contradicts = s.uuids.slot(inode).is_some_and(|slot| slot.contradicts(inode, &attachment, is_dirty));
    // Before anything became dirty that was durable on the superblock, so this one is from before.
    let is_outdated = !is_dirty && is_vouched_for(s, superblock, inode) && has_dirty(s, inode);
    if s.uuids.is_ours() && (contradicts || is_outdated) { Err(Error::OlderBacking) } else { Ok(known) }
}

/// The last start of the volume came to its end, and bcached has used both devices alone since: *clean* on the superblock means that
/// nothing of it is dirty.
pub(super) fn is_vouched_for(s: &State, superblock: &BackingSuperblock, inode: Inode) -> bool {
    let newest = said(s, superblock).map(|attachment| [attachment.stamp; 2]);
    s.uuids.is_ours() && newest.is_some() && s.uuids.slot(inode).map(|slot| slot.attachment) == newest
}

/// The cache surely holds dirty data under this number: the journal has said so when the set was opened, and nobody could write that back
/// since; or it has been counted. A set that is served before it has been walked may have more.
fn has_dirty(s: &State, inode: Inode) -> bool {
    // What the tree says of a place may have been written back since, as long as the journal lies over it.
    let is_counted = || !s.overlay.has_keys_of(inode) && s.dirty.of(inode) > 0;
    (s.replayed_dirty.contains(&inode) && !s.uuids.has_lived(inode)) || is_counted()
}

impl CacheSet {
    /// As [`recognise`]. A number that the table has lost is looked at before: a device that says *clean* has no dirty keys, so those that
    /// stand there are newer, or somebody else's.
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

    /// Doubted slots under whose numbers no key stands are free again: nothing can be lost with them. Not what may be a volume in the
    /// cache alone, of which nothing else tells that it exists.
    pub(super) async fn forget_empty_doubted(&self) {
        let doubted: Vec<Inode> = self.with(|s| {
            let backed = s.uuids.doubted().filter(|(_, slot)| !slot.is_flash_only());
            backed.map(|(inode, _)| inode).collect()
        });
        for inode in doubted {
            if self.with(|s| s.uuids.was_looked_at(inode)) {
                continue;
            }
            // A set that has failed or stops says so where the table is stored.
            if self.look_at(inode).await.unwrap_or(false) {
                self.with(|s| s.uuids.forget_doubted(inode));
            }
        }
    }

    /// The superblock of the volume says the newest stamp, durably: from now on a device that says the one before is an older copy.
    pub(super) async fn forget_former_stamp(&self, inode: Inode) -> Result<(), Error> {
        self.with(|s| only_the_newest_counts(s, inode));
        uuids::store(self).await
    }

    /// The last that is said of attachments in an orderly stop: whoever brings back a copy of either device that was made before it is
    /// noticed. What cannot be said is as after a crash.
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
