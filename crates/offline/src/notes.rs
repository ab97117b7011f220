//! Finds the directory of the notes: acknowledged writes that must survive a daemon's death.
//!
//! A note is found again only in the same directory. So the directory follows from the user who
//! runs the daemon, and from nothing that changes between two starts, such as the path of the
//! control socket. It must be in memory and outlive the process.

use bcached_control::failure::{Failure, Kind};
use bcached_control::paths;
use bcached_format::Uuid;
use bcached_uring::note::may_hold_records;
use bcached_uring::{Access, Device, DeviceErrorKind, NoteIdentity};
use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Overrides the directory; for containers that keep one across their restarts, and for tests.
pub const VARIABLE: &str = "BCACHED_NOTES";

/// Returns the directory of the notes, created if it is missing.
///
/// # Errors
/// No directory can be used, or the one that was named depends on the working directory.
pub fn directory() -> Result<PathBuf, Failure> {
    let places = match chosen() {
        Some(chosen) => {
            if !chosen.is_absolute() {
                return Err(relative(&chosen));
            }
            return usable(&chosen).map(|()| chosen.clone()).map_err(|why| refused(&chosen, why));
        }
        None => usual(),
    };
    let last = places.last().cloned().unwrap_or_default();
    let usable = places.into_iter().find(|place| usable(place).is_ok());
    usable.ok_or_else(|| refused(&last, "neither it nor the usual runtime directory can be used".to_owned()))
}

/// A warning about notes in `place` that are not in memory: the id of the event, and a sentence.
#[must_use]
pub fn warning(place: &Path) -> Option<(&'static str, String)> {
    /// tmpfs and ramfs, from `linux/magic.h`.
    const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58F6];
    let kind = rustix::fs::statfs(place).ok().and_then(|found| u64::try_from(found.f_type).ok())?;
    let told = || {
        let place = place.display();
        (
            "notes-on-disk",
            format!(
                "the notes in {place} are not in memory: each write may have to wait until the \
                 disk below has its note; set {VARIABLE} to a directory on a tmpfs"
            ),
        )
    };
    (!IN_MEMORY.contains(&kind)).then(told)
}

/// Returns the note of the set in this user's directories, if there is one. An orderly stop leaves
/// none. So if no daemon runs, it is the note of a killed one, and may hold acknowledged writes. It
/// is only looked for, not opened.
#[must_use]
pub fn left_behind(set: Uuid) -> Option<PathBuf> {
    let places = looked_through(chosen());
    places.iter().map(|place| place.join(format!("{set}.note"))).find(|note| is_ours(note))
}

/// Returns the notes in this user's directories that no daemon keeps at present. Each is claimed
/// for an instant to find that out.
#[must_use]
pub fn all_left_behind() -> Vec<PathBuf> {
    let places = looked_through(chosen());
    let files = places.iter().flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten());
    let is_left = |note: &PathBuf| {
        note.extension().is_some_and(|extension| extension == "note") && is_ours(note) && !is_kept(note)
    };
    let mut left: Vec<_> = files.map(|entry| entry.path()).filter(is_left).collect();
    // Two paths to one directory yield the same notes.
    left.sort();
    left.dedup();
    left
}

/// Whether a running daemon has it.
fn is_kept(note: &Path) -> bool {
    let claimed = Device::open(note, Access::Check);
    matches!(claimed, Err(error) if matches!(error.kind, DeviceErrorKind::Busy(_) | DeviceErrorKind::Twice))
}

/// Whether it is a note of this user.
fn is_ours(note: &Path) -> bool {
    let user = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(note).is_ok_and(|found| is_note(&found) && found.uid() == user)
}

/// Whether it is a regular file with content: an empty file holds nothing that could be replayed.
fn is_note(found: &fs::Metadata) -> bool {
    found.is_file() && found.len() > 0
}

/// The same as [`left_behind`], if the note may hold anything.
#[must_use]
pub fn unreplayed(set: Uuid) -> Option<PathBuf> {
    left_behind(set).filter(|note| {
        NoteIdentity::of_this_boot(set.0).map_or(true, |identity| may_hold_records(note, &identity))
    })
}

/// Returns the path of the set's note in `directory`.
///
/// # Errors
/// There is none, and a killed process has left one in another of this user's directories, since it
/// ran with or without the directory of a login session: what that note holds would be lost
/// silently.
pub fn of_set(directory: &Path, set: Uuid) -> Result<PathBuf, Failure> {
    let note = directory.join(format!("{set}.note"));
    let elsewhere = if note.is_file() { None } else { unreplayed(set) };
    match elsewhere.as_deref().and_then(Path::parent) {
        Some(place) if place != directory => Err(elsewhere_left(&note, place)),
        _ => Ok(note),
    }
}

fn elsewhere_left(note: &Path, place: &Path) -> Failure {
    Failure::new(Kind::Config, format!("cannot keep the note {}", note.display()))
        .why(format!(
            "a killed bcached left a note in {}, which may hold acknowledged writes",
            place.display()
        ))
        .next(format!(
            "start once with {VARIABLE}={}, or remove that note if nothing in it is needed",
            place.display()
        ))
}

/// Whether the process runs as root.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().as_raw() == 0
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The directory that the user has named.
fn chosen() -> Option<PathBuf> {
    variable(VARIABLE)
}

/// The directories of this user, the preferred one first.
fn usual() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let better = match user {
        0 => Some(PathBuf::from("/run/bcached")),
        _ => variable("XDG_RUNTIME_DIR").map(|runtime| runtime.join("bcached")),
    };
    let places = better.into_iter().chain([PathBuf::from(format!("/dev/shm/bcached-{user}"))]);
    places.map(paths::of_machine).collect()
}

/// All directories that may have notes, the `chosen` one first. They include the usual ones even if
/// they are not used this time, and the directory of the user's login session even if the process
/// does not know it from its environment.
fn looked_through(chosen: Option<PathBuf>) -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let session = (user != 0).then(|| paths::of_machine(format!("/run/user/{user}/bcached")));
    chosen.into_iter().chain(usual()).chain(session).collect()
}

/// A relative path is refused: a daemon that starts in another working directory would not find the
/// note again, and would silently lose what it holds.
fn relative(place: &Path) -> Failure {
    Failure::new(Kind::Config, format!("{VARIABLE} is not an absolute path: {}", place.display()))
        .why("a start in another working directory would not find the notes again")
        .next("set it to a path that begins with /")
}

fn refused(place: &Path, why: String) -> Failure {
    Failure::new(Kind::Permission, format!("cannot keep notes in {}", place.display()))
        .why(why)
        .next(format!("set {VARIABLE} to a directory of your own in memory"))
}

/// Creates the directory if it is missing. It must belong to this user: anyone who can write there
/// could forge a note.
fn usable(place: &Path) -> Result<(), String> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(place);
    made.map_err(|error| error.to_string())?;
    let found = fs::symlink_metadata(place).map_err(|error| error.to_string())?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err("it is not a directory owned by this user".to_owned());
    }
    if found.mode() & 0o022 != 0 {
        return Err("other users may write to it".to_owned());
    }
    rustix::fs::access(place, rustix::fs::Access::WRITE_OK).map_err(|errno| errno.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_note_that_nobody_left_goes_where_notes_go() {
        let folder = tempfile::tempdir().unwrap();
        let note = of_set(folder.path(), Uuid([0x5a; 16])).expect("none is elsewhere");
        assert_eq!(note.parent(), Some(folder.path()));
        let refused = elsewhere_left(&note, Path::new("/run/user/7/bcached"));
        assert!(refused.to_string().contains("BCACHED_NOTES=/run/user/7/bcached"), "{refused}");
        assert_eq!(refused.kind.exit(), 2);
    }

    /// The usual directories are searched whatever is chosen. A daemon started with another
    /// directory after a kill once served silently without what the note in the usual one held.
    #[test]
    fn the_usual_places_are_looked_through_whatever_is_chosen() {
        let chosen = PathBuf::from("/somewhere/else");
        let places = looked_through(Some(chosen.clone()));
        assert_eq!(places.first(), Some(&chosen));
        assert!(usual().iter().all(|usual| places.contains(usual)), "{places:?}");
        assert_eq!(looked_through(None), places[1..]);
    }

    #[test]
    fn a_place_is_made_and_must_be_ours_alone() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("a/b");
        assert_eq!(usable(&place), Ok(()));
        fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(usable(&place), Err("other users may write to it".to_owned()));
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(usable(&file).is_err());
        std::os::unix::fs::symlink(folder.path(), folder.path().join("link")).unwrap();
        assert!(usable(&folder.path().join("link")).is_err());
    }
}
