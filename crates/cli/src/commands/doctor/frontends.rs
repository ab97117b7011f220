//! The ways to export a volume on this machine, and what the unavailable ones need.

use super::system::SystemPaths;
use super::{Facility, FacilityState};
use bcached_front_dev::DeviceMethod;
use bcached_front_dev::methods::choose;
use bcached_front_ublk::{DriverFeatures, OrphanDevice, UblkUnavailable};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

pub(super) fn items(system: &SystemPaths) -> Vec<Facility> {
    let mut items = vec![dev(), ublk(system)];
    items.extend(orphans());
    items.extend([
        Facility::yes("nbd server", "exports on unix sockets and TCP; it needs nothing from the machine"),
        nbd(system),
        Facility::yes("vhost-user", "disks for virtual machines with shared memory"),
        device("fuse", ("/dev/fuse", "fuse"), "volumes as files", system)
            .or_else_unless(has_fusermount, "fusermount3"),
        device("loop", ("/dev/loop-control", "loop"), "block devices on files", system)
            .or_else_unless(|| has_program("losetup"), "losetup"),
    ]);
    items
}

/// Reports what `export = "dev"` would use.
fn dev() -> Facility {
    match choose() {
        Ok(chosen) => Facility::yes("dev", format!("block devices would be made by {}", chosen.method)),
        // The following lines say why.
        Err(_) => {
            Facility::no("dev", "no way to make block devices: it needs ublk, nbd, or fuse and loop", None)
        }
    }
}

fn ublk(system: &SystemPaths) -> Facility {
    const NAME: &str = "ublk";
    const NEEDED: &str = "use Linux 6.5 or newer";
    match DriverFeatures::probe() {
        Ok(features) => {
            let fault = if features.may_complete_twice() && !system.is_from(6, 15) { FAULT } else { "" };
            Facility::yes(NAME, format!("the driver has {}{fault}", features.names().join(", ")))
        }
        Err(UblkUnavailable::NoDriver) if !system.is_from(6, 5) => {
            Facility::no(NAME, format!("Linux {} is too old", system.release()), Some(NEEDED.to_owned()))
        }
        Err(UblkUnavailable::NoDriver) => {
            Facility::no(NAME, "/dev/ublk-control does not exist", Some(system.mends("ublk_drv")))
        }
        Err(UblkUnavailable::TooOld(lacks)) => {
            Facility::no(NAME, format!("the kernel's driver lacks {lacks}"), Some(NEEDED.to_owned()))
        }
        Err(other) => Facility::no(NAME, other.to_string(), other.mends().map(str::to_owned)),
    }
}

/// A fault of the driver in Linux 6.5 to 6.14.
const FAULT: &str = "; this kernel can break when a ublk daemon ends under load, rarely with bcached (CVE-2025-37906, fixed in Linux 6.15)";

/// Reports ublk devices of bcached that no daemon serves: requests to them hang.
fn orphans() -> Vec<Facility> {
    let orphans = OrphanDevice::all().unwrap_or_default().into_iter().map(|orphan| {
        let path = orphan.path().display().to_string();
        let mends = format!("`bcached serve` continues with it, `bcached remove {path}` removes it");
        let detail = format!("no daemon serves {path}: its requests wait");
        Facility::no("ublk device", detail, Some(mends)).in_state(FacilityState::Fail)
    });
    orphans.collect()
}

fn nbd(system: &SystemPaths) -> Facility {
    const NAME: &str = "nbd";
    match DeviceMethod::Nbd.probe() {
        Ok(()) => Facility::yes(NAME, "the kernel's client has a free device"),
        Err(_) if !system.path("/sys/block/nbd0").exists() => {
            Facility::no(NAME, "the kernel's client is not loaded", Some(system.mends("nbd")))
        }
        Err(why) => Facility::no(NAME, format!("the kernel's client: {why}"), None),
    }
}

/// Reports an export that needs a kernel device which must be openable.
fn device(
    name: &'static str,
    (path, module): (&str, &str),
    what: &'static str,
    system: &SystemPaths,
) -> Facility {
    match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => Facility::yes(name, what),
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => {
            Facility::no(name, format!("{path} does not exist"), Some(system.mends(module)))
        }
        Err(Errno::ACCESS | Errno::PERM) => {
            Facility::no(name, format!("{path} may not be opened"), Some("run as root".to_owned()))
        }
        Err(errno) => {
            Facility::no(name, format!("cannot open {path}: {}", std::io::Error::from(errno)), None)
        }
    }
}

impl Facility {
    /// Returns the item unless it is available but lacks a program that it needs.
    fn or_else_unless(self, has: impl Fn() -> bool, program: &str) -> Self {
        if !self.available || has() {
            return self;
        }
        let package = if program == "losetup" { "mount (Debian), util-linux" } else { "fuse3" };
        Self::no(self.name, format!("{program} is not installed"), Some(format!("install {package}")))
    }
}

/// A process that may mount does not need fusermount.
fn has_fusermount() -> bool {
    rustix::process::geteuid().is_root() || has_program("fusermount3")
}

fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(Into::into);
    std::env::split_paths(&path).chain(also).any(|folder| folder.join(name).is_file())
}
