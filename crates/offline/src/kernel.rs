//! The kernel's bcache, by its control files in sysfs.
//!
//! `BCACHED_SYSFS` names another tree than `/sys`.

use crate::devices;
use bcached_control::failure::{Failure, Kind};
use bcached_uring::DeviceIdentity;
use std::io;
use std::path::{Path, PathBuf};

/// Names another tree.
pub const VARIABLE: &str = "BCACHED_SYSFS";

/// The kernel's bcache, if it is loaded.
#[derive(Clone, Debug)]
pub struct KernelBcache {
    root: PathBuf,
}

impl KernelBcache {
    /// The kernel's bcache of this machine.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let named = std::env::var_os(VARIABLE).filter(|root| !root.is_empty());
        Self { root: named.map_or_else(|| PathBuf::from("/sys"), PathBuf::from) }
    }

    fn register_file(&self) -> PathBuf {
        self.root.join("fs/bcache/register")
    }

    /// Checks that it is loaded and accepts devices from this process.
    ///
    /// # Errors
    /// It is not, or does not.
    pub fn check_registers(&self) -> Result<(), Failure> {
        let file = self.register_file();
        let cannot =
            |kind| Failure::new(kind, "cannot give devices to the kernel's bcache").option("--register");
        if !file.exists() {
            return Err(cannot(Kind::NotFound)
                .why(format!("{} does not exist: the module is not loaded", file.display()))
                .next("run `modprobe bcache`, or leave out --register"));
        }
        rustix::fs::access(&file, rustix::fs::Access::WRITE_OK).map_err(|error| {
            cannot(Kind::Permission)
                .why(format!("{}: {error}", file.display()))
                .next("run as root, or leave out --register")
        })
    }

    /// Registers a device, given as a path or `UUID=..`. One that is registered already is no
    /// error.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn register(&self, name: &str) -> Result<(), Failure> {
        let path = devices::resolve(name)?;
        match write(&self.register_file(), &path.display().to_string()) {
            Ok(()) => Ok(()),
            // udev may have registered it first.
            Err(_) if self.has(&path) => Ok(()),
            Err(error) => Err(Failure::new(Kind::Io, format!("the kernel refuses {}", path.display()))
                .why(error.to_string())
                .next("see the kernel's log for the reason (`dmesg`)")),
        }
    }

    /// Whether the device is registered.
    fn has(&self, device: &Path) -> bool {
        let real = std::fs::canonicalize(device).unwrap_or_else(|_| device.to_owned());
        let name = real.file_name().unwrap_or_default();
        self.root.join("class/block").join(name).join("bcache").exists()
    }
}

/// A set that the kernel has.
#[derive(Clone, Debug)]
pub struct KernelSet {
    /// Its UUID.
    pub uuid: String,
    /// Its cache device.
    pub cache: PathBuf,
    /// Its backing devices.
    pub backings: Vec<PathBuf>,
    folder: PathBuf,
    /// The backing devices' directories in sysfs.
    folders: Vec<PathBuf>,
    /// The directories in sysfs of the block devices that it serves.
    volumes: Vec<PathBuf>,
}

impl KernelBcache {
    /// Finds the set that `typed` names: by its UUID or at least 8 leading digits of it, by one of
    /// its devices, or by a volume (`bcache0`).
    ///
    /// # Errors
    /// `typed` names several sets.
    pub fn set(&self, typed: &str) -> Result<Option<KernelSet>, Failure> {
        let entries = std::fs::read_dir(self.root.join("fs/bcache")).into_iter().flatten().flatten();
        let sets = entries.map(|entry| entry.path()).filter(|path| path.join("stop").exists());
        let mut meant: Vec<_> = sets.map(KernelSet::read).filter(|set| set.is_called(typed)).collect();
        if meant.len() > 1 {
            let uuids: Vec<_> = meant.iter().map(|set| set.uuid.clone()).collect();
            return Err(Failure::new(Kind::AmbiguousName, format!("`{typed}` matches several sets"))
                .next(format!("name one of: {}", uuids.join(", "))));
        }
        Ok(meant.pop())
    }
}

impl KernelSet {
    fn read(folder: PathBuf) -> Self {
        let uuid = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut found = Self {
            uuid,
            cache: PathBuf::new(),
            backings: Vec::new(),
            folders: Vec::new(),
            volumes: Vec::new(),
            folder,
        };
        let mut entries: Vec<_> = std::fs::read_dir(&found.folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect();
        entries.sort();
        for entry in entries {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is = |kind: &str| {
                name.strip_prefix(kind)
                    .is_some_and(|number| number.starts_with(|digit: char| digit.is_ascii_digit()))
            };
            // The link leads to the directory `bcache` of a block device.
            let Ok(there) = std::fs::canonicalize(&entry) else { continue };
            let Some(block) = there.parent() else { continue };
            if is("cache") {
                found.cache = node(block);
            } else if is("bdev") {
                found.backings.push(node(block));
                found.volumes.extend(std::fs::canonicalize(there.join("dev")));
                found.folders.push(there.clone());
            } else if is("volume") {
                found.volumes.push(block.to_owned());
            }
        }
        found
    }

    fn is_called(&self, typed: &str) -> bool {
        let digits = |text: &str| text.to_lowercase().replace('-', "");
        let beginning = digits(typed.strip_prefix("UUID=").unwrap_or(typed));
        let volume = typed.strip_prefix("/dev/").unwrap_or(typed);
        let path = std::fs::canonicalize(typed).ok();
        beginning.len() >= 8 && digits(&self.uuid).starts_with(&beginning)
            || self.devices().any(|device| {
                device == Path::new(typed) || path.is_some() && std::fs::canonicalize(device).ok() == path
            })
            || self.volumes.iter().any(|block| block.file_name().is_some_and(|name| name == volume))
    }

    /// Its devices, the cache first.
    pub fn devices(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.cache).chain(&self.backings)
    }

    /// Returns the users of its volumes, a sentence each: `bcache0 is in use by the mount /mnt`.
    #[must_use]
    pub fn users(&self) -> Vec<String> {
        let mut users = Vec::new();
        for volume in &self.volumes {
            let parts = std::fs::read_dir(volume).into_iter().flatten().flatten().map(|entry| entry.path());
            let parts = parts.filter(|part| part.join("partition").exists());
            for block in std::iter::once(volume.clone()).chain(parts) {
                let name = block.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let mut holders: Vec<_> = std::fs::read_dir(block.join("holders"))
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|entry| format!("the device {}", entry.file_name().to_string_lossy()))
                    .collect();
                let number = std::fs::read_to_string(block.join("dev")).ok();
                let others =
                    number.and_then(|number| DeviceIdentity::of_block(&number)).map(DeviceIdentity::users);
                holders.extend(others.into_iter().flatten().map(|holder| holder.to_string()));
                holders.sort();
                holders.dedup();
                users.extend(holders.into_iter().map(|holder| format!("{name} is in use by {holder}")));
            }
        }
        users.dedup();
        users
    }

    /// Checks that this process may stop it.
    ///
    /// # Errors
    /// It may not.
    pub fn check_stops(&self) -> Result<(), Failure> {
        let file = self.folder.join("stop");
        rustix::fs::access(&file, rustix::fs::Access::WRITE_OK).map_err(|error| {
            Failure::new(Kind::Permission, format!("cannot take {} from the kernel", self.uuid))
                .why(format!("{}: {error}", file.display()))
                .next("run as root")
        })
    }

    /// Tells the kernel to release it; dirty data stays on the cache.
    ///
    /// # Errors
    /// The kernel does not accept that.
    pub fn stop(&self) -> Result<(), Failure> {
        let cannot = |file: &Path, error: &io::Error| {
            Failure::new(Kind::Io, format!("cannot take {} from the kernel", self.uuid))
                .why(format!("{}: {error}", file.display()))
                .next("see the kernel's log for the reason (`dmesg`)")
        };
        let folders = std::iter::once(&self.folder).chain(&self.folders);
        for file in folders.map(|folder| folder.join("stop")) {
            match write(&file, "1") {
                Ok(()) => {}
                // It has disappeared with the set.
                Err(_) if !file.exists() => {}
                Err(error) => return Err(cannot(&file, &error)),
            }
        }
        Ok(())
    }

    /// Returns what the kernel still has of it.
    #[must_use]
    pub fn left(&self) -> Vec<String> {
        let all = std::iter::once(&self.folder).chain(&self.folders).chain(&self.volumes);
        all.filter(|path| path.exists()).map(|path| path.display().to_string()).collect()
    }
}

/// The node of the block device whose directory in sysfs is `block`.
fn node(block: &Path) -> PathBuf {
    let told = std::fs::read_to_string(block.join("uevent")).unwrap_or_default();
    let name = told.lines().find_map(|line| line.strip_prefix("DEVNAME=")).map(str::to_owned);
    let name =
        name.unwrap_or_else(|| block.file_name().unwrap_or_default().to_string_lossy().replace('!', "/"));
    Path::new("/dev").join(name)
}

/// Writes to a control file, which must exist.
fn write(file: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    std::fs::File::options().write(true).open(file)?.write_all(text.as_bytes())
}
