//! The cache device was pulled and is back as another device of the system. That takes the place of
//! the former one, and the set is reopened on it as after a power cut of that device alone.
//!
//! It must be as this host left it. Any kernel and any bcached writes the superblock first when it
//! starts a set, so the same session in it proves that nobody has used it since. What was
//! acknowledged and not flushed may have gone with its volatile cache: then the note counts for
//! nothing any more, and the next flush of each volume that had dirty data fails. The data of the
//! others is on their backing devices.

use crate::Host;
use bcached_engine::{Doing, Error};
use bcached_env::DiskId;
use bcached_format::CacheSuperblock;

/// Called once: whether acknowledged writes that were not flushed may have been lost; or why the
/// device is not used.
pub type Answer = Box<dyn FnOnce(Result<bool, Error>)>;

/// A device that takes the place of the former one when the set is closed.
pub struct Returned {
    disk: DiskId,
    answer: Answer,
}

impl Host {
    /// Reopens the set, which has failed, on `disk`, if its superblock says that it is the device
    /// that the set was on. It is answered when the exchange has been made or refused; a refused
    /// disk is not used.
    pub fn take_back_cache(&self, disk: DiskId, superblock: &CacheSuperblock, answer: Answer) {
        let session = self.with(|state| state.session);
        if superblock.set_uuid() != self.inner().opening.set_uuid {
            return answer(Err(Error::NotAsItWas("it is another device")));
        }
        if superblock.session() != session {
            return answer(Err(Error::NotAsItWas("somebody else has used it meanwhile")));
        }
        // A set that contradicts itself does so on any device.
        match self.failure() {
            Some(Error::Io { .. }) => {}
            Some(error) => return answer(Err(error)),
            None => return answer(Err(Error::NotAsItWas("its set works"))),
        }
        let earlier = self.with(|state| state.returned.replace(Returned { disk, answer }));
        if let Some(earlier) = earlier {
            (earlier.answer)(Err(Error::NotAsItWas("another device came after it")));
        }
        self.alarm();
    }
}

/// The set works on its former device: the other one is not needed.
pub(crate) fn decline(host: &Host) {
    if let Some(returned) = host.with(|state| state.returned.take()) {
        (returned.answer)(Err(Error::NotAsItWas("its set works again")));
    }
}

/// Puts the device in the place of the former one. The set is closed.
pub(crate) fn exchange(host: &Host) {
    let Some(Returned { disk, answer }) = host.with(|state| state.returned.take()) else { return };
    let inner = host.inner();
    let is_unflushed = matches!(host.failure(), Some(Error::Io { doing: Doing::CacheFlush, .. }));
    let may_have_lost = is_unflushed || inner.env.disk(disk).info().volatile_cache;
    if may_have_lost {
        // What the note holds is not brought back by the next opening, whichever process makes it.
        match inner.machine.open_note() {
            Ok(mut note) => drop(note.give_up()),
            Err(error) => return answer(Err(error)),
        }
    }
    inner.machine.remove(inner.opening.cache.replace(disk));
    let owing: Vec<_> = host.change(|state| {
        state.is_lost = false;
        if !may_have_lost {
            return Vec::new();
        }
        let dirty = state.away.iter().filter(|(_, away)| !away.on_bypass && away.info.may_be_dirty());
        let of_flash = state.before.iter().flat_map(|before| &before.volumes).filter(|info| info.flash_only);
        dirty.map(|(id, _)| *id).chain(of_flash.map(|info| info.id)).collect()
    });
    let owes = !owing.is_empty();
    host.has_lost(owing);
    answer(Ok(owes));
}
