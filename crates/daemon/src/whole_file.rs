//! Writing a small file whole: whoever reads it, after a power cut too, finds the old one or the new one.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

/// Makes `path` say `text`, durably. The unfinished file lies beside it, and its name ends in `.new`, which nobody reads.
///
/// # Errors
/// The system's; then `path` is what it was. That the folder could not be made durable is only told: `path` says `text` by then.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let written = File::create(&unfinished).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, path)
    });
    if let Err(error) = written {
        let _never_made = fs::remove_file(&unfinished);
        return Err(error);
    }
    if let Err(error) = sync_folder(path) {
        let path = path.display();
        tracing::warn!(
            event = "folder-not-synced",
            "{path} may be its older version after a power cut: {error}"
        );
    }
    Ok(())
}

/// Sees whether [`write`] would have room for `text`.
///
/// # Errors
/// The system's.
pub fn rehearse(path: &Path, text: &str) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let written = File::create(&unfinished).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let removed = fs::remove_file(&unfinished);
    written.and(removed)
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
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}
