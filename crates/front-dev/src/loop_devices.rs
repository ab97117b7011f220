//! Loop devices over files of a FUSE mount that is ours. Another process, `losetup`, has them set up and taken away, for the reason in the
//! crate's description; what there is of them the kernel tells in `/sys/block`, which asks no file system.

use crate::helper_program;
use bcached_port::{Export, SECTOR_BYTES, loop_devices};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// What `losetup` has for one thing; a file of ours is opened and asked for its size meanwhile, its content is not touched.
const LIMIT: Duration = Duration::from_secs(10);
/// When nobody uses a device that was detached, the kernel lets go of it within moments. Whoever has looked at it just before, as udev does,
/// is soon done.
const LETS_GO: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// A loop device that is set up.
pub(crate) struct LoopDevice {
    path: PathBuf,
    file: PathBuf,
}

/// Whether this machine has what it takes for us.
pub(crate) fn probe() -> Result<(), String> {
    for (device, module) in [("/dev/fuse", "fuse"), ("/dev/loop-control", "loop")] {
        rustix::fs::open(device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(
            |errno| match errno {
                Errno::NOENT | Errno::NODEV | Errno::NXIO => {
                    format!("{device} does not exist: load the module (modprobe {module})")
                }
                Errno::ACCESS | Errno::PERM => format!("{device} may not be opened: root is needed"),
                other => format!("{device} cannot be opened: {}", std::io::Error::from(other)),
            },
        )?;
    }
    helper_program::run("losetup", &["--version"], LIMIT).map(drop)
}

impl LoopDevice {
    /// Sets one up over `file`, with the volume's blocks.
    pub(crate) fn bring(file: &Path, export: &Export) -> Result<Self, String> {
        let block = (u64::from(export.block_sectors) * SECTOR_BYTES).to_string();
        let mut arguments = vec!["--find", "--show", "--direct-io=on", "--sector-size", &block];
        if export.read_only {
            arguments.push("--read-only");
        }
        let name = text(file)?;
        arguments.push(name);
        let said = helper_program::run("losetup", &arguments, LIMIT)?;
        // A warning may stand before it.
        let path = said.rsplit("; ").next().unwrap_or_default();
        if !path.starts_with("/dev/") {
            return Err(format!("losetup says {said:?}, which is no device"));
        }
        Ok(Self { path: path.into(), file: file.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Nobody has detached it.
    pub(crate) fn is_there(&self) -> bool {
        loop_devices::backing_file(&self.path).is_some_and(|file| is_of(&file, &self.file))
    }

    /// The file has another size now.
    pub(crate) fn resize(&self) -> Result<(), String> {
        helper_program::run("losetup", &["--set-capacity", text(&self.path)?], LIMIT).map(drop)
    }

    /// Takes it away. Who has it open keeps it, and the kernel takes it away after him.
    pub(crate) fn remove(&self) -> Result<(), String> {
        if !self.is_there() {
            return Ok(());
        }
        detach(&self.path)?;
        let deadline = Instant::now() + LETS_GO;
        while self.is_there() {
            if Instant::now() > deadline {
                return Err(format!(
                    "{} is in use, and goes when nobody has it open any more",
                    self.path.display()
                ));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// Detaches a loop device: at once, or when nobody has it open any more.
///
/// # Errors
/// What `losetup` says.
pub fn detach(device: &Path) -> Result<(), String> {
    helper_program::run("losetup", &["--detach", text(device)?], LIMIT).map(drop)
}

/// The kernel's name for a file. One whose mount has ended may have lost its name.
fn is_of(told: &Path, file: &Path) -> bool {
    let told = told.to_string_lossy();
    Path::new(told.trim_end_matches(" (deleted)")) == file
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("{} is no text that losetup could be given", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_name_also_without_its_mount() {
        assert!(is_of(Path::new("/run/b/dev/volumes/a b (deleted)"), Path::new("/run/b/dev/volumes/a b")));
        assert!(!is_of(Path::new("/run/b/dev/volumes/a b (deleted)"), Path::new("/run/b/dev/volumes/a")));
    }
}
