//! A cache device that was pulled, and is back as another device of the system: it takes the place of the former one, and the set is
//! opened again on it as after a power cut of that device alone.
//!
//! It must be as this process left it: any kernel and any bcached that starts the set writes its superblock first, so the same session
//! in there says that nobody has. What was acknowledged and not flushed may be gone with its volatile cache, so what the note holds
//! counts for nothing any more, and the next flush of each volume that had dirty data says so. Data of the others is on their backing
//! devices.

use super::keeper::Keeper;
use super::{Answer, Command, Engine, NoNote, open_note};
use crate::devices::CacheDevice;
use crate::engine_failure;
use bcached_engine::{Doing, Error};
use bcached_env::Note;
use bcached_uring::Device;

/// A device that takes the place of the former one when the set has let go of that.
pub struct Returned {
    device: Device,
    answer: Answer<Result<bool, Error>>,
}

impl Engine {
    /// The set that has failed is opened again on this device, which must be the one that it was on. What is answered, before that has
    /// ended, is whether something that was acknowledged and not flushed may be gone.
    pub fn take_back_cache(&self, cache: CacheDevice, answer: Answer<Result<bool, Error>>) {
        self.send(Command::TakeBackCache(Box::new(cache), answer));
    }
}

/// Keeps the device for who opens sets again, if it is what it should be.
pub fn take_back(keeper: &Keeper, cache: CacheDevice, answer: Answer<Result<bool, Error>>) {
    let session = keeper.with(|sets| sets.session);
    if cache.superblock.set_uuid() != keeper.inner().recipe.set_uuid {
        return answer(Err(Error::NotAsItWas("it is another device")));
    }
    if cache.superblock.session() != session {
        return answer(Err(Error::NotAsItWas("somebody else has used it meanwhile")));
    }
    // Bytes of a set that contradicts itself are no better on another device.
    match keeper.failure() {
        Some(Error::Io { .. }) => {}
        Some(error) => return answer(Err(error)),
        None => return answer(Err(Error::NotAsItWas("its set works"))),
    }
    keeper.with(|sets| sets.returned = Some(Returned { device: cache.device, answer }));
    keeper.alarm();
}

/// The set works on its former device: the other one is let go of.
pub fn decline(keeper: &Keeper) {
    if let Some(returned) = keeper.with(|sets| sets.returned.take()) {
        (returned.answer)(Err(Error::NotAsItWas("its set works again")));
    }
}

/// The device takes the place of the former one, of which nobody has a handle any more.
pub fn exchange(keeper: &Keeper) {
    let Some(Returned { device, answer }) = keeper.with(|sets| sets.returned.take()) else { return };
    let is_unflushed = matches!(keeper.failure(), Some(Error::Io { doing: Doing::CacheFlush, .. }));
    let may_have_lost = is_unflushed || device.info().volatile_cache;
    if may_have_lost && let Err(error) = void_note(keeper) {
        return answer(Err(error));
    }
    let inner = keeper.inner();
    let former = inner.recipe.cache.replace(inner.disks.add(device));
    drop(inner.disks.remove(former));
    let owe = keeper.change(|sets| {
        sets.is_lost = false;
        if !may_have_lost {
            return false;
        }
        let dirty = sets.away.iter().filter(|(_, away)| !away.is_aboard && away.info.may_be_dirty());
        let of_flash = sets.before.iter().flat_map(|before| &before.volumes).filter(|info| info.flash_only);
        let owing: Vec<_> = dirty.map(|(id, _)| *id).chain(of_flash.map(|info| info.id)).collect();
        sets.owes.extend(&owing);
        !owing.is_empty()
    });
    answer(Ok(owe));
}

/// What it holds is not brought back by the next opening, whoever does that, and is told then.
fn void_note(keeper: &Keeper) -> Result<(), Error> {
    let recipe = &keeper.inner().recipe;
    let mut note: Box<dyn Note> = match &recipe.note {
        Some(place) => {
            let opened = open_note(place, recipe.set_uuid, &recipe.note_gone);
            opened.map_err(|error| Keeper::refused(&engine_failure::of_note(None, &error)))?.0
        }
        None => Box::new(NoNote),
    };
    let _told_by_the_next_opening = note.give_up();
    Ok(())
}
