//! Reconnects a cache device that was unplugged and is back as another device of the system. It
//! takes the place of the former device, and the set is reopened on it as after a power failure of
//! that device alone.
//!
//! The device must be as this host left it. Any kernel and any bcached writes the superblock first
//! when it starts a set. So an unchanged session in the superblock proves that no other program has
//! used the device since.
//!
//! Data that was acknowledged but not flushed may be lost with the device's volatile write cache.
//! In that case the note is no longer valid, and the next flush of each volume that had dirty data
//! fails. All data of the other volumes is on their backing devices.

use crate::Host;
use bcached_engine::{Error, ErrorContext};
use bcached_env::DiskId;
use bcached_format::CacheSuperblock;

/// Called once with the result: whether acknowledged writes that were not flushed may have been
/// lost, or why the device is not used.
pub type ReconnectCallback = Box<dyn FnOnce(Result<bool, Error>)>;

/// A device that takes the place of the former one when the set is closed.
pub struct ReturnedCache {
    disk: DiskId,
    answer: ReconnectCallback,
}

impl Host {
    /// Reopens the set, which has failed, on `disk`, if the superblock shows that it is the device
    /// that the set was on. `answer` is called when the exchange has been made or refused; a
    /// refused disk is not used.
    pub fn take_back_cache(&self, disk: DiskId, superblock: &CacheSuperblock, answer: ReconnectCallback) {
        let session = self.with(|state| state.session);
        if superblock.set_uuid() != self.inner().opening.set_uuid {
            return answer(Err(Error::DeviceMismatch("it is a different device")));
        }
        if superblock.session() != session {
            return answer(Err(Error::DeviceMismatch("another program has used it since")));
        }
        // An inconsistent set is inconsistent on any device.
        match self.failure() {
            Some(Error::Io { .. }) => {}
            Some(error) => return answer(Err(error)),
            None => return answer(Err(Error::DeviceMismatch("the cache set works on its present device"))),
        }
        let earlier = self.with(|state| state.returned.replace(ReturnedCache { disk, answer }));
        if let Some(earlier) = earlier {
            (earlier.answer)(Err(Error::DeviceMismatch("another device was found after it")));
        }
        self.alarm();
    }
}

/// Refuses the other device: the set works on its former device.
pub(crate) fn decline(host: &Host) {
    if let Some(returned) = host.with(|state| state.returned.take()) {
        (returned.answer)(Err(Error::DeviceMismatch("the cache set works again on its former device")));
    }
}

/// Replaces the former device. The set is closed.
pub(crate) fn exchange(host: &Host) {
    let Some(ReturnedCache { disk, answer }) = host.with(|state| state.returned.take()) else { return };
    let inner = host.inner();
    let is_unflushed = matches!(host.failure(), Some(Error::Io { doing: ErrorContext::CacheFlush, .. }));
    let may_have_lost = is_unflushed || inner.env.disk(disk).info().volatile_cache;
    if may_have_lost {
        // The next opening must not restore the note's content, in whichever process it happens.
        inner.opening.note.give_up();
    }
    inner.machine.remove(inner.opening.cache.replace(disk));
    let owing: Vec<_> = host.change(|state| {
        state.is_lost = false;
        if !may_have_lost {
            return Vec::new();
        }
        let dirty = state.away.iter().filter(|(_, away)| !away.is_cacheless && away.info.may_be_dirty());
        let of_flash = state.before.iter().flat_map(|before| &before.volumes).filter(|info| info.flash_only);
        dirty.map(|(id, _)| *id).chain(of_flash.map(|info| info.id)).collect()
    });
    let owes = !owing.is_empty();
    host.has_lost(owing);
    answer(Ok(owes));
}
