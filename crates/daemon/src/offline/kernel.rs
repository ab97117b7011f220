//! The kernel's bcache, as its files in sysfs show it and take orders.
//!
//! `BCACHED_SYSFS` names another tree than `/sys`.

use crate::devices;
use crate::failure::{Failure, Kind};
use std::io;
use std::path::{Path, PathBuf};

/// Names another tree.
pub const VARIABLE: &str = "BCACHED_SYSFS";

/// The kernel's bcache, if it is there.
#[derive(Clone, Debug)]
pub struct Kernel {
    root: PathBuf,
}

impl Kernel {
    /// That of the machine.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let named = std::env::var_os(VARIABLE).filter(|root| !root.is_empty());
        Self { root: named.map_or_else(|| PathBuf::from("/sys"), PathBuf::from) }
    }

    fn register_file(&self) -> PathBuf {
        self.root.join("fs/bcache/register")
    }

    /// It is there, and takes devices from this process.
    ///
    /// # Errors
    /// It is not, or does not.
    pub fn check_registers(&self) -> Result<(), Failure> {
        let file = self.register_file();
        let cannot =
            |kind| Failure::new(kind, "cannot give devices to the kernel's bcache").option("--register");
        if !file.exists() {
            return Err(cannot(Kind::NotFound)
                .why(format!("there is no {}: the module is not loaded", file.display()))
                .next("`modprobe bcache`, or leave --register out"));
        }
        rustix::fs::access(&file, rustix::fs::Access::WRITE_OK).map_err(|error| {
            cannot(Kind::Permission)
                .why(format!("{}: {error}", file.display()))
                .next("be root, or leave --register out")
        })
    }

    /// Gives it a device, a path or `UUID=..`; one that it has already is no error.
    ///
    /// # Errors
    /// It does not take it.
    pub fn register(&self, name: &str) -> Result<(), Failure> {
        let path = devices::resolve(name)?;
        match write(&self.register_file(), &path.display().to_string()) {
            Ok(()) => Ok(()),
            // udev may have been faster.
            Err(_) if self.has(&path) => Ok(()),
            Err(error) => Err(Failure::new(Kind::Io, format!("the kernel does not take {}", path.display()))
                .why(error.to_string())
                .next("its log says why (`dmesg`)")),
        }
    }

    /// Whether it has the device.
    fn has(&self, device: &Path) -> bool {
        let real = std::fs::canonicalize(device).unwrap_or_else(|_| device.to_owned());
        let name = real.file_name().unwrap_or_default();
        self.root.join("class/block").join(name).join("bcache").exists()
    }
}

/// An order. The file is there, and is not made.
fn write(file: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    std::fs::File::options().write(true).open(file)?.write_all(text.as_bytes())
}
