//! `bcached remove DEVICE` for a ublk device that no daemon serves any more: it works without a
//! running daemon, and without one that knows its volume.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use bcached_front_ublk::{DeviceError, OrphanDevice};
use bcached_uring::DeviceIdentity;
use rustix::io::Errno;
use serde::Serialize;
use std::path::Path;

/// The result.
#[derive(Serialize)]
struct RemovedDevice {
    device: String,
    /// The device would have been removed, but nothing was done.
    dry_run: bool,
}

/// Removes the device that `flags` name; `None` if it is no such device.
pub fn remove(flags: &flags::RemoveArgs) -> Option<Result<Report, Failure>> {
    if !flags.volume.starts_with("/dev/") {
        return None;
    }
    match OrphanDevice::at(Path::new(&flags.volume)) {
        Ok(orphan) => orphan.map(|orphan| taken_away(orphan, flags)),
        // Without the driver there are no such devices.
        Err(DeviceError::Control(error))
            if matches!(error.why, Errno::NOENT | Errno::NODEV | Errno::NXIO) =>
        {
            None
        }
        Err(error) => Some(Err(failure(&flags.volume, &error))),
    }
}

fn taken_away(orphan: OrphanDevice, flags: &flags::RemoveArgs) -> Result<Report, Failure> {
    let path = orphan.path();
    let device = path.display().to_string();
    let users: Vec<_> = DeviceIdentity::of(&path).map_or_else(Vec::new, DeviceIdentity::users);
    if !users.is_empty() && !flags.in_use {
        let users: Vec<_> = users.iter().map(ToString::to_string).collect();
        let what = format!("{device} is in use by {}", users.join(", "));
        return Err(Failure::new(Kind::InUse, what)
            .why("its requests wait for a daemon that serves its volume, and unwritten data would be lost")
            .next(
                "`bcached serve` continues with it; --in-use removes it anyway, and its users get errors",
            ));
    }
    if !flags.watch.dry_run {
        orphan.remove().map_err(|error| failure(&device, &error))?;
    }
    Report::of(&RemovedDevice { device, dry_run: flags.watch.dry_run })
}

fn failure(device: &str, error: &DeviceError) -> Failure {
    let kind = match error {
        DeviceError::Control(error) if matches!(error.why, Errno::ACCESS | Errno::PERM) => Kind::Permission,
        DeviceError::Control(error) if error.why == Errno::TIMEDOUT => Kind::TimeLimit,
        _ => Kind::Io,
    };
    Failure::new(kind, format!("cannot remove {device}")).why(error.to_string())
}

impl Printable for RemovedDevice {
    const SCHEMA: &'static str = "bcached.removed-device";

    fn text(&self) -> String {
        let Self { device, dry_run } = self;
        if *dry_run { format!("{device} would be removed\n") } else { format!("{device} is removed\n") }
    }
}
