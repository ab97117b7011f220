//! A device that the system has no more, or that takes nothing any more, and that may be there by another node or as another file.
//!
//! What is open is left alone as long as it may be well: a disk that the kernel still has is ill, not gone, and a second one with its UUID
//! is a copy, perhaps an old one. Only who is configured by a path has said which one is meant, wherever that leads by now.

use super::{BackingDevice, CacheDevice, look, open_backing, open_cache, twins};
use bcached_control::failure::{Failure, Kind};
use bcached_format::{Superblock, Uuid};
use bcached_uring::Presence;
use std::path::{Path, PathBuf};

/// What a look for a device has found.
pub enum Found<T> {
    /// The device, by another node or as another file.
    Back(T),
    /// Nothing, as far as anybody can tell.
    Nothing,
    /// Something else stands where it should be; what that is.
    Another(Failure),
}

/// Opens and claims the backing device `name` of this UUID if it is not the one that `known` was.
///
/// # Errors
/// It is back, and cannot be had; or several devices may be it.
pub fn open_returned(name: &str, uuid: Uuid, known: Presence) -> Result<Found<BackingDevice>, Failure> {
    opened(whereabouts(name, uuid, known)?, open_backing)
}

/// The same for a cache device.
///
/// # Errors
/// As above.
pub fn open_returned_cache(name: &str, uuid: Uuid, known: Presence) -> Result<Found<CacheDevice>, Failure> {
    opened(whereabouts(name, uuid, known)?, open_cache)
}

fn opened<T>(found: Found<PathBuf>, open: fn(&str) -> Result<T, Failure>) -> Result<Found<T>, Failure> {
    Ok(match found {
        Found::Back(path) => Found::Back(open(&path.to_string_lossy())?),
        Found::Nothing => Found::Nothing,
        Found::Another(failure) => Found::Another(failure),
    })
}

fn whereabouts(name: &str, uuid: Uuid, known: Presence) -> Result<Found<PathBuf>, Failure> {
    let is_gone = known.is_gone();
    // A look at it would be one at the device that fails.
    let there = Some(Path::new(name)).filter(|path| !name.starts_with("UUID=") && !known.is_at(path));
    if let Some(path) = there.filter(|path| twins::identity_with(path, uuid).is_some()) {
        return Ok(Found::Back(path.to_owned()));
    }
    if is_gone {
        match twins::find(name, &uuid.to_string()) {
            Ok(path) if known.is_at(&path) => return Ok(Found::Nothing),
            Ok(path) => return Ok(Found::Back(path)),
            Err(failure) if failure.kind == Kind::NotFound => {}
            Err(failure) => return Err(failure),
        }
    }
    let another = there.and_then(|_| another(name, uuid, is_gone));
    Ok(another.map_or(Found::Nothing, Found::Another))
}

/// What is to be said of what stands where the device should be, and is not the device. `None`: nothing does, or it has just come.
fn another(name: &str, uuid: Uuid, is_gone: bool) -> Option<Failure> {
    let why = match look(name) {
        Ok(Superblock::Backing(superblock)) if superblock.uuid() == uuid => return None,
        Ok(Superblock::Cache(superblock)) if superblock.uuid() == uuid => return None,
        Ok(Superblock::Backing(superblock)) => {
            format!("that is another backing device now (UUID {})", superblock.uuid())
        }
        Ok(Superblock::Cache(superblock)) => {
            format!("that is another cache device now (of set {})", superblock.set_uuid())
        }
        Err(failure) if failure.kind == Kind::NotFound => return None,
        Err(failure) => {
            format!("what is there now is not the device: {}", failure.why.unwrap_or(failure.what))
        }
    };
    let failure = Failure::new(Kind::WrongSet, format!("cannot take up {name}")).why(why);
    Some(failure.next(if is_gone {
        "bring the device back, there or elsewhere: it is looked for by its UUID, too"
    } else {
        "bring the device back to that place: it is looked for nowhere else"
    }))
}
