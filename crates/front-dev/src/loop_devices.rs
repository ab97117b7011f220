//! Loop devices over files of our own FUSE mount. Another process, `losetup`, sets them up and
//! removes them, for the reason given in the crate's documentation. Their state is read from
//! `/sys/block`, which involves no file system.

use crate::helper_program;
use bcached_port::{Export, SECTOR_BYTES, loop_devices};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of one `losetup` command. It opens a file of our mount and asks for its size, but
/// does not touch its content.
const LIMIT: Duration = Duration::from_secs(10);
/// How long [`LoopDevice::remove`] waits for a detached device to disappear. The kernel releases an
/// unused device within moments; a program that has just probed it, as udev does, soon closes it.
const LETS_GO: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// A configured loop device.
pub(crate) struct LoopDevice {
    path: PathBuf,
    file: PathBuf,
}

/// Checks whether this machine has what loop devices over our mount require.
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
    /// Sets up a loop device over `file`, with the volume's block size.
    pub(crate) fn bring(file: &Path, export: &Export) -> Result<Self, String> {
        let block = (u64::from(export.block_sectors) * SECTOR_BYTES).to_string();
        let mut arguments = vec!["--find", "--show", "--direct-io=on", "--sector-size", &block];
        if export.read_only {
            arguments.push("--read-only");
        }
        let name = text(file)?;
        arguments.push(name);
        let said = helper_program::run("losetup", &arguments, LIMIT)?;
        // `losetup` may print a warning before the device.
        let path = said.rsplit("; ").next().unwrap_or_default();
        if !path.starts_with("/dev/") {
            return Err(format!("losetup printed {said:?}, which is not a device"));
        }
        Ok(Self { path: path.into(), file: file.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the device still exists, that is, has not been detached.
    pub(crate) fn is_there(&self) -> bool {
        loop_devices::backing_file(&self.path).is_some_and(|file| is_of(&file, &self.file))
    }

    /// Makes the device take over the new size of its file.
    pub(crate) fn resize(&self) -> Result<(), String> {
        helper_program::run("losetup", &["--set-capacity", text(&self.path)?], LIMIT).map(drop)
    }

    /// Removes the device. If a program still has it open, the kernel removes it once that program
    /// closes it.
    pub(crate) fn remove(&self) -> Result<(), String> {
        if !self.is_there() {
            return Ok(());
        }
        detach(&self.path)?;
        let deadline = Instant::now() + LETS_GO;
        while self.is_there() {
            if Instant::now() > deadline {
                return Err(format!(
                    "{} is in use, and is removed once no process has it open any more",
                    self.path.display()
                ));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// Detaches a loop device: immediately, or once no program has it open any more.
///
/// # Errors
/// The message of `losetup`.
pub fn detach(device: &Path) -> Result<(), String> {
    helper_program::run("losetup", &["--detach", text(device)?], LIMIT).map(drop)
}

/// Compares the kernel's name for a backing file with ours. If the file's mount has ended, the
/// kernel may append ` (deleted)`.
fn is_of(told: &Path, file: &Path) -> bool {
    let told = told.to_string_lossy();
    Path::new(told.trim_end_matches(" (deleted)")) == file
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("losetup cannot be given {}, which is not UTF-8", path.display()))
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
