//! A device that the system has no more, or that takes nothing any more, and that may be there by another node or as another file.
//!
//! What is open is left alone as long as it may be well: a disk that the kernel still has is ill, not gone, and a second one with its UUID
//! is a copy, perhaps an old one. Only who is configured by a path has said which one is meant, wherever that leads by now.

use super::{BackingDevice, CacheDevice, open_backing, open_cache, resolve, twins};
use crate::failure::{Failure, Kind};
use bcached_format::Uuid;
use bcached_uring::Presence;
use std::path::PathBuf;

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
    if !name.starts_with("UUID=") {
        let path = resolve(name)?;
        // A look at it would be one at the device that fails.
        if !known.is_at(&path) && twins::identity_with(&path, uuid).is_some() {
            return Ok(Some(path));
        }
    }
    if !is_gone {
        return Ok(None);
    }
    match twins::find(name, &uuid.to_string()) {
        Ok(path) => Ok(Some(path).filter(|path| !known.is_at(path))),
        Err(failure) if failure.kind == Kind::NotFound => Ok(None),
        Err(failure) => Err(failure),
    }
}
