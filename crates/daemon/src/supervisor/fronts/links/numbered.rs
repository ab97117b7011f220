//! `/dev/bcacheN`, for volumes whose sections ask for a number.
//!
//! The link leads to `/dev/bcache/by-uuid/UUID`, and through that to the device. It thus shows by
//! itself that it is ours, and of which volume, even after a daemon was killed. Anything else of
//! such a name is never touched. The kernel's bcache has such names for its own devices. While it
//! is loaded there is no link, because the kernel could not make the node of a device whose name is
//! taken.

use crate::supervisor::fronts::links::{LinkPaths, is_dead, target};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};

/// Makes sure that the link of that number exists. `own` is the link to the volume by its UUID, and
/// `device` the volume's block device. Returns true if the link is new, false if it existed, or why
/// there is none. `None`: `own` does not exist, as its maker has reported.
pub fn keep(
    places: &LinkPaths,
    number: usize,
    (own, device): (&Path, &Path),
) -> Option<Result<bool, String>> {
    let link = places.numbered(number);
    if target(own)? != device {
        return Some(Err(format!("{} leads to another device, and is left as it is", own.display())));
    }
    if places.has_kernel() {
        remove_if(&link, own);
        return Some(Err(
            "the kernel's bcache is loaded, and uses this name for its own devices; the link is made when it is \
             unloaded (modprobe -r bcache)"
                .to_owned(),
        ));
    }
    Some(linked(places, &link, own))
}

fn linked(places: &LinkPaths, link: &Path, own: &Path) -> Result<bool, String> {
    if target(link).as_deref() == Some(own) {
        return Ok(false);
    }
    if is_stale(places, link) {
        // If that fails it is tried again.
        let _gone = std::fs::remove_file(link);
    }
    match symlink(own, link) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(taken(places, link)),
        Err(error) => {
            Err(format!("cannot make {}: {error}; the link is made when that is fixed", link.display()))
        }
    }
}

/// Removes the numbered links to `own`, except that of the number `but`: a volume loses its former
/// number.
pub fn remove(places: &LinkPaths, own: &Path, but: Option<usize>) {
    let but = but.map(|number| places.numbered(number));
    let entries = std::fs::read_dir(places.devices()).into_iter().flatten().flatten();
    let links =
        entries.map(|entry| entry.path()).filter(|link| is_numbered(link) && Some(link) != but.as_ref());
    links.for_each(|link| remove_if(&link, own));
}

fn remove_if(link: &Path, own: &Path) {
    if target(link).as_deref() == Some(own) {
        // Without the permission to remove it, it could not have been made.
        drop(std::fs::remove_file(link));
    }
}

fn is_numbered(link: &Path) -> bool {
    let name = link.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("bcache").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
}

/// Returns the by-UUID link that one of our links leads to.
fn volume_of(places: &LinkPaths, link: &Path) -> Option<PathBuf> {
    target(link).filter(|target| target.parent() == Some(&places.by_uuid()))
}

/// Checks for one of our links that leads nowhere.
fn is_stale(places: &LinkPaths, link: &Path) -> bool {
    volume_of(places, link).is_some_and(|volume| !link.exists() || is_dead(&volume, &places.block()))
}

fn taken(places: &LinkPaths, link: &Path) -> String {
    let what = match (volume_of(places, link), target(link), std::fs::symlink_metadata(link)) {
        (Some(volume), ..) => {
            let uuid = volume.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return format!(
                "it leads to the volume {uuid}, of another daemon, or of this one until that volume's own device \
                 appears; if this does not change, choose another `number`"
            );
        }
        (None, Some(target), _) => format!("a link to {}", target.display()),
        (None, None, Ok(file)) if file.file_type().is_block_device() => "a block device".to_owned(),
        _ => "a file".to_owned(),
    };
    format!(
        "{what} that bcached did not make has this name, and is left as it is; remove it, or choose another `number`"
    )
}
