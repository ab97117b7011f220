//! What else serving needs from a machine: `io_uring`, capabilities, the state of the kernel's
//! bcache, and notes left behind.

use super::system::SystemPaths;
use super::{Facility, FacilityState, frontends, udev};
use bcached_offline::notes;
use bcached_uring::{Backend, DriverOptions, open_driver};

/// Capabilities that some exports need: bit, name, purpose.
const CAPABILITIES: &[(u32, &str, &str)] = &[
    (21, "CAP_SYS_ADMIN", "for ublk and kernel NBD devices, and FUSE without fusermount"),
    (14, "CAP_IPC_LOCK", "to lock the daemon's memory (or LimitMEMLOCK=infinity)"),
    (24, "CAP_SYS_RESOURCE", "to mount volumes here without a deadlock when memory is short"),
    (19, "CAP_SYS_PTRACE", "to find the users of a block device before it is removed"),
    (1, "CAP_DAC_OVERRIDE", "to open block devices of other users"),
];

pub(super) fn items(system: &SystemPaths) -> Vec<Facility> {
    let mut items = vec![io_uring()];
    items.extend(frontends::items(system));
    items.push(kernel_bcache(system));
    items.extend(udev::items(system));
    items.push(notes_left());
    items.extend(capabilities());
    items
}

fn io_uring() -> Facility {
    match open_driver(&DriverOptions::default()) {
        Ok(opened) if matches!(opened.backend, Backend::Uring { .. }) => {
            Facility::yes("io_uring", opened.backend.to_string())
        }
        Ok(opened) => Facility::no("io_uring", opened.backend.to_string(), None),
        Err(error) => Facility::no("io_uring", error.to_string(), None).in_state(FacilityState::Fail),
    }
}

/// Reports whether the kernel's bcache is loaded. That is no problem as such, but it takes the
/// devices that udev offers it.
fn kernel_bcache(system: &SystemPaths) -> Facility {
    if system.path("/sys/fs/bcache").exists() {
        Facility::yes("kernel bcache", "loaded: it may hold bcache devices")
    } else {
        Facility::no("kernel bcache", "not loaded", None).in_state(FacilityState::Ok)
    }
}

/// Reports notes of killed daemons: they may hold the only copy of acknowledged writes.
fn notes_left() -> Facility {
    const NAME: &str = "notes of a killed bcached";
    let left: Vec<_> = notes::all_left_behind().iter().map(|note| note.display().to_string()).collect();
    if left.is_empty() {
        return Facility::no(NAME, "none in this user's directories", None).in_state(FacilityState::Ok);
    }
    let next = "serve its set with bcached once, before a reboot and before anything else uses the devices";
    Facility {
        mends: Some(next.to_owned()),
        ..Facility::yes(NAME, left.join(", ")).in_state(FacilityState::Warn)
    }
}

fn capabilities() -> Vec<Facility> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|word| u64::from_str_radix(word.trim(), 16).ok()).unwrap_or(0);
    let item = |(bit, name, purpose): &(u32, &'static str, &'static str)| match effective >> bit & 1 {
        0 => Facility::no(name, format!("missing; needed {purpose}"), None),
        _ => Facility::yes(name, *purpose),
    };
    CAPABILITIES.iter().map(item).collect()
}
