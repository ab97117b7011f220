//! Replaces a small file atomically: a reader finds either the old content or the new content, also
//! after a power cut. All code that replaces files uses this module.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// Longest chain of symbolic links that is followed, the kernel's own limit.
const LINKS_MAX: usize = 40;

/// Replaces the content of the file `path` with `text`, durably.
///
/// If `path` is a symbolic link, its target is replaced and the link stays. The new file gets the
/// mode of the old one and, as far as the system permits, its owner and group. The unfinished file
/// lies in the same folder; its name ends in `.new`, and no program reads it.
///
/// # Errors
/// The system's errors, and an error if `path` leads to something that is not a regular file. In
/// both cases `path` is unchanged. If only the folder cannot be synced, a warning is logged and the
/// call succeeds: `path` has the new content by then.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let place = place(path)?;
    let unfinished = unfinished(&place)?;
    let written = fill(&unfinished, &place, text).and_then(|()| fs::rename(&unfinished, &place));
    if let Err(error) = written {
        let _never_made = fs::remove_file(&unfinished);
        return Err(error);
    }
    if let Err(error) = sync_folder(&place) {
        let path = path.display();
        tracing::warn!(
            event = "folder-not-synced",
            "cannot sync the folder of {path}: {error}; after a power cut the file may have its old content"
        );
    }
    Ok(())
}

/// Checks that [`write()`] would have room for `text`, by writing the unfinished file and removing
/// it.
///
/// # Errors
/// The system's errors.
pub fn rehearse(path: &Path, text: &str) -> io::Result<()> {
    let place = place(path)?;
    let unfinished = unfinished(&place)?;
    let written = fill(&unfinished, &place, text);
    let removed = fs::remove_file(&unfinished);
    written.and(removed)
}

/// Returns the file that is replaced: the target of the symbolic link `path`, whether it exists or
/// not, or `path` itself.
///
/// # Errors
/// The system's errors, too many symbolic links, or something that is not a regular file.
pub fn place(path: &Path) -> io::Result<PathBuf> {
    let mut place = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::symlink_metadata(&place) {
            Ok(found) if found.is_symlink() => {
                let to = fs::read_link(&place)?;
                place = folder_of(&place).join(to);
            }
            Ok(found) if found.is_file() => return Ok(place),
            Ok(_) => return Err(io::Error::other("it is not a regular file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(place),
            Err(error) => return Err(error),
        }
    }
    Err(rustix::io::Errno::LOOP.into())
}

/// Returns the name of the unfinished file. It contains the process id, because several processes
/// may write the same file at once.
fn unfinished(place: &Path) -> io::Result<PathBuf> {
    let mut name: OsString = place.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(format!(".{}.new", std::process::id()));
    Ok(place.with_file_name(name))
}

/// Writes `text` to the file `unfinished`, which is to replace `place`.
fn fill(unfinished: &Path, place: &Path, text: &str) -> io::Result<()> {
    let old = match fs::metadata(place) {
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    if old.is_some() {
        // Restrictive until the file gets the old one's mode.
        options.mode(0o600);
    }
    let mut file = options.open(unfinished)?;
    if let Some(old) = old {
        resemble(&file, &old)?;
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

fn resemble(file: &File, old: &Metadata) -> io::Result<()> {
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
        // An unprivileged user cannot give files away. The content matters more than the owner.
        let _or_ours = fchown(file, Some(old.uid()), Some(old.gid()));
    }
    file.set_permissions(old.permissions())
}

/// Creates the folder `path` durably, unless it exists.
///
/// # Errors
/// The system's errors.
pub fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Ok(()) => sync_folder(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Creates the folder `path` and its missing parents, durably.
///
/// # Errors
/// The system's errors.
pub fn make_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_folders)?;
    make_folder(path)
}

/// Syncs the folder that contains `path`. A directory entry is durable only after that.
fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced_with_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("far")).unwrap();
        fs::write(at("far/real"), "old").unwrap();
        fs::set_permissions(at("far/real"), fs::Permissions::from_mode(0o640)).unwrap();
        symlink("far/real", at("one")).unwrap();
        symlink(at("one"), at("two")).unwrap();
        rehearse(&at("two"), "new").unwrap();
        assert_eq!(fs::read_to_string(at("far/real")).unwrap(), "old");
        write(&at("two"), "new").unwrap();
        assert_eq!(fs::read_to_string(at("far/real")).unwrap(), "new");
        assert_eq!(mode(&at("far/real")), 0o640);
        for link in ["one", "two"] {
            assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
        }
        symlink("far/later", at("dangling")).unwrap();
        write(&at("dangling"), "made").unwrap();
        assert_eq!(fs::read_to_string(at("far/later")).unwrap(), "made");
        assert_eq!(fs::read_dir(at("far")).unwrap().count(), 2, "nothing unfinished is left");
    }

    #[test]
    fn what_is_no_regular_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        symlink("/dev/null", at("null")).unwrap();
        symlink(at("around"), at("around")).unwrap();
        for name in ["null", "around", "."] {
            assert!(write(&at(name), "text").is_err(), "{name}");
        }
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing unfinished is left");
    }
}
