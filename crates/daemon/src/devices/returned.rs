//! A device that the system has no more, or that takes nothing any more, and that may be there by another node or as another file.
//!
//! What is open is left alone as long as it may be well: a disk that the kernel still has is ill, not gone, and a second one with its UUID
//! is a copy, perhaps an old one. Only who is configured by a path has said which one is meant, wherever that leads by now.

use super::{BackingDevice, CacheDevice, look, open_backing, open_cache, twins};
use crate::failure::{Failure, Kind};
use bcached_format::{Superblock, Uuid};
use bcached_uring::Presence;
use std::path::{Path, PathBuf};

/// Opens and claims the backing device `name` of this UUID if it is not the one that `known` was. `None`: it is not back.
///
/// # Errors
/// It is, and cannot be had; or several devices may be it.
pub fn open_returned(name: &str, uuid: Uuid, known: Presence) -> Result<Option<BackingDevice>, Failure> {
    let Some(path) = whereabouts(name, uuid, known)? else { return Ok(None) };
    open_backing(&path.to_string_lossy()).map(Some)
}

/// The same for a cache device.
///
/// # Errors
/// As above.
pub fn open_returned_cache(name: &str, uuid: Uuid, known: Presence) -> Result<Option<CacheDevice>, Failure> {
    let Some(path) = whereabouts(name, uuid, known)? else { return Ok(None) };
    open_cache(&path.to_string_lossy()).map(Some)
}

fn whereabouts(name: &str, uuid: Uuid, known: Presence) -> Result<Option<PathBuf>, Failure> {
    let is_gone = known.is_gone();
    // A look at it would be one at the device that fails.
    let there = Some(Path::new(name)).filter(|path| !name.starts_with("UUID=") && !known.is_at(path));
    if let Some(path) = there.filter(|path| twins::identity_with(path, uuid).is_some()) {
        return Ok(Some(path.to_owned()));
    }
    if is_gone {
        match twins::find(name, &uuid.to_string()) {
            Ok(path) => return Ok(Some(path).filter(|path| !known.is_at(path))),
            Err(failure) if failure.kind == Kind::NotFound => {}
            Err(failure) => return Err(failure),
        }
    }
    there.and_then(|_| another(name)).map_or(Ok(None), Err)
}

/// What is to be said of what stands where the device should be, and is not the device. `None`: nothing does, or it does not say what it is.
fn another(name: &str) -> Option<Failure> {
    let why = match look(name) {
        Ok(Superblock::Backing(superblock)) => {
            format!("that is another backing device now (UUID {})", superblock.uuid())
        }
        Ok(Superblock::Cache(superblock)) => {
            format!("that is a cache device now (of set {})", superblock.set_uuid())
        }
        Err(failure) if failure.kind == Kind::NotBcache => {
            format!("what is there now is not the device: {}", failure.why.unwrap_or_default())
        }
        Err(_) => return None,
    };
    let failure = Failure::new(Kind::WrongSet, format!("cannot take up {name}")).why(why);
    Some(failure.next("bring the device back, there or elsewhere: it is looked for by its UUID, too"))
}
