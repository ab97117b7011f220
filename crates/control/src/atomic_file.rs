//! Writing a small file whole: whoever reads it, after a power cut too, finds the old one or the new one. The one piece of code by which files
//! are replaced.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// So many links, one to another, as the kernel follows.
const LINKS_MAX: usize = 40;

/// Makes `path` say `text`, durably. If `path` is a link, the file that it leads to is replaced, and the link stays. The new file has the mode of
/// the old one and, as far as the system lets us, its owner and group. The unfinished file lies beside it, and its name ends in `.new`, which
/// nobody reads.
///
/// # Errors
/// The system's, or there is something that is not a regular file; then `path` is what it was. That the folder could not be made durable is only
/// told: `path` says `text` by then.
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
            "{path} may be its older version after a power cut: {error}"
        );
    }
    Ok(())
}

/// Sees whether [`write()`] would have room for `text`.
///
/// # Errors
/// The system's.
pub fn rehearse(path: &Path, text: &str) -> io::Result<()> {
    let place = place(path)?;
    let unfinished = unfinished(&place)?;
    let written = fill(&unfinished, &place, text);
    let removed = fs::remove_file(&unfinished);
    written.and(removed)
}

/// The file that is to be replaced: what the link `path` leads to, whether that is there or not, or `path` itself.
///
/// # Errors
/// The system's, or too many links.
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

/// Several processes may write one file at once: each has its own.
fn unfinished(place: &Path) -> io::Result<PathBuf> {
    let mut name: OsString = place.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(format!(".{}.new", std::process::id()));
    Ok(place.with_file_name(name))
}

/// Writes `text` to the file `unfinished`, which is to take the place of `place`.
fn fill(unfinished: &Path, place: &Path, text: &str) -> io::Result<()> {
    let old = match fs::metadata(place) {
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    if old.is_some() {
        // Until it has the old one's mode.
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
        // An ordinary user cannot give files away; it is the text that matters.
        let _or_ours = fchown(file, Some(old.uid()), Some(old.gid()));
    }
    file.set_permissions(old.permissions())
}

/// Makes the folder `path` durably, unless it is there.
///
/// # Errors
/// The system's.
pub fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Ok(()) => sync_folder(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes the folder `path`, and those that it lies in, durably.
///
/// # Errors
/// The system's.
pub fn make_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_folders)?;
    make_folder(path)
}

/// A name in a folder is durable once that is.
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
