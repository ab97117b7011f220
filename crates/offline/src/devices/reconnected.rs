//! Finds a device that has disappeared or does not accept I/O any more, and that may be back under
//! another node or as another file.
//!
//! An open device is left alone as long as it may work: a disk that the kernel still has is
//! failing, not gone, and a second disk with its UUID is a copy, perhaps an old one. Only a path in
//! the configuration says which device is meant, wherever that path leads by now.

use super::{BackingDevice, CacheDevice, look, open_backing, open_cache, twins};
use bcached_control::failure::{Failure, Kind};
use bcached_format::{Superblock, Uuid};
use bcached_uring::DevicePresence;
use std::path::{Path, PathBuf};

/// The result of a search for a device.
pub enum Reconnection<T> {
    /// The device is back, under another node or as another file.
    Reopened(T),
    /// Nothing was found, as far as can be determined.
    Missing,
    /// Something else is in its place; the failure says what.
    Rejected(Failure),
}

/// Opens and claims the backing device `name` with this UUID, if it is not the one that `known`
/// was.
///
/// # Errors
/// It is back and cannot be opened; or several devices may be it.
pub fn open_returned(
    name: &str,
    uuid: Uuid,
    known: DevicePresence,
) -> Result<Reconnection<BackingDevice>, Failure> {
    opened(whereabouts(name, uuid, known)?, open_backing)
}

/// The same for a cache device.
///
/// # Errors
/// As of [`open_returned`].
pub fn open_returned_cache(
    name: &str,
    uuid: Uuid,
    known: DevicePresence,
) -> Result<Reconnection<CacheDevice>, Failure> {
    opened(whereabouts(name, uuid, known)?, open_cache)
}

fn opened<T>(
    found: Reconnection<PathBuf>,
    open: fn(&str) -> Result<T, Failure>,
) -> Result<Reconnection<T>, Failure> {
    Ok(match found {
        Reconnection::Reopened(path) => Reconnection::Reopened(open(&path.to_string_lossy())?),
        Reconnection::Missing => Reconnection::Missing,
        Reconnection::Rejected(failure) => Reconnection::Rejected(failure),
    })
}

fn whereabouts(name: &str, uuid: Uuid, known: DevicePresence) -> Result<Reconnection<PathBuf>, Failure> {
    let is_gone = known.is_gone();
    // If `known` is still at this path, reading it would be I/O to the failing device.
    let there = Some(Path::new(name)).filter(|path| !name.starts_with("UUID=") && !known.is_at(path));
    if let Some(path) = there.filter(|path| twins::identity_with(path, uuid).is_some()) {
        return Ok(Reconnection::Reopened(path.to_owned()));
    }
    if is_gone {
        match twins::find(name, &uuid.to_string()) {
            Ok(path) if known.is_at(&path) => return Ok(Reconnection::Missing),
            Ok(path) => return Ok(Reconnection::Reopened(path)),
            Err(failure) if failure.kind == Kind::NotFound => {}
            Err(failure) => return Err(failure),
        }
    }
    let another = there.and_then(|_| another(name, uuid, is_gone));
    Ok(another.map_or(Reconnection::Missing, Reconnection::Rejected))
}

/// Returns what to report about something else in the device's place; `None` if there is nothing,
/// or if the device has just returned.
fn another(name: &str, uuid: Uuid, is_gone: bool) -> Option<Failure> {
    let why = match look(name) {
        Ok(Superblock::Backing(superblock)) if superblock.uuid() == uuid => return None,
        Ok(Superblock::Cache(superblock)) if superblock.uuid() == uuid => return None,
        Ok(Superblock::Backing(superblock)) => {
            format!("another backing device is there now (UUID {})", superblock.uuid())
        }
        Ok(Superblock::Cache(superblock)) => {
            format!("another cache device is there now (of set {})", superblock.set_uuid())
        }
        Err(failure) if failure.kind == Kind::NotFound => return None,
        Err(failure) => {
            format!("something else is there now: {}", failure.why.unwrap_or(failure.what))
        }
    };
    let failure = Failure::new(Kind::WrongSet, format!("cannot use {name} again")).why(why);
    Some(failure.next(if is_gone {
        "reconnect the device, there or elsewhere: it is found by its UUID as well"
    } else {
        "reconnect the device in that place: no other place is searched"
    }))
}
