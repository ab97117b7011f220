//! `bcached doctor`: what this machine offers, and whether devices are fit to serve. It changes nothing; a device is
//! claimed for an instant, to find out who holds it.

use crate::device::{self, Access};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Report, Show};
use crate::sizes::human;
use crate::superblock::{self, Found, state_name};
use bcached_daemon::notes;
use bcached_format::Superblock;
use bcached_format::units::bytes_of;
use bcached_uring::{Backend, DriverOptions, open_driver};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// Capabilities that ways of serving need: bit, name, what for.
const CAPABILITIES: &[(u32, &str, &str)] = &[
    (21, "CAP_SYS_ADMIN", "ublk and kernel NBD devices, FUSE without fusermount"),
    (14, "CAP_IPC_LOCK", "locking the cache's memory (or no limit to that, LimitMEMLOCK=infinity)"),
    (
        24,
        "CAP_SYS_RESOURCE",
        "serving what is mounted on this machine: when memory is short the kernel does not wait for bcached",
    ),
    (1, "CAP_DAC_OVERRIDE", "opening block devices of other users"),
];

/// Places of udev rules, the administrator's first.
const RULE_FOLDERS: &[&str] =
    &["/etc/udev/rules.d", "/run/udev/rules.d", "/usr/lib/udev/rules.d", "/lib/udev/rules.d"];

/// What was looked at.
#[derive(Serialize)]
struct Examined {
    machine: Vec<Item>,
    devices: Vec<Patient>,
}

/// Something that a machine may offer.
#[derive(Serialize)]
struct Item {
    name: &'static str,
    available: bool,
    detail: String,
}

/// A device.
#[derive(Serialize)]
struct Patient {
    device: String,
    fit: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    size_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logical_block_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    direct_io: Option<bool>,
    holders: Vec<String>,
    detail: String,
}

/// Looks at the machine and the devices.
pub fn run(flags: &flags::Doctor) -> Result<Report, Failure> {
    let devices: Vec<_> = flags.devices.iter().map(|path| patient(path)).collect();
    let unfit = devices.iter().find(|(patient, _)| !patient.fit).and_then(|(_, failure)| failure.clone());
    let devices = devices.into_iter().map(|(patient, _)| patient).collect();
    let report = Report::of(&Examined { machine: machine(), devices })?;
    Ok(match unfit {
        // The line of its device has it.
        Some(failure) => report.failing(failure).telling_failures(),
        None => report,
    })
}

fn machine() -> Vec<Item> {
    let mut items = vec![io_uring()];
    items.push(present("ublk", "/dev/ublk-control", "volumes as block devices (`serve --export ublk`)"));
    items.push(present(
        "nbd",
        "/sys/module/nbd",
        "the kernel's client: a block device from an NBD export (`nbd-client`)",
    ));
    items.push(present(
        "fuse",
        "/dev/fuse",
        "volumes as files (`serve --export fuse`), also from an NBD export (`nbdfuse`)",
    ));
    items.push(present("loop", "/dev/loop-control", "a block device from such a file (`losetup`)"));
    items.push(kernel_bcache());
    items.push(rules(
        "udev rule of bcache-tools",
        "bcache",
        "it gives every bcache device to the kernel as it appears",
    ));
    items.push(rules(
        "udev rule of bcached",
        "bcached",
        "it keeps configured devices from the kernel's bcache",
    ));
    items.push(notes_left());
    items.extend(capabilities());
    items
}

fn io_uring() -> Item {
    let (available, detail) = match open_driver(&DriverOptions::default()) {
        Ok(opened) => (matches!(opened.backend, Backend::Uring { .. }), opened.backend.to_string()),
        Err(error) => (false, error.to_string()),
    };
    Item { name: "io_uring", available, detail }
}

fn present(name: &'static str, path: &str, detail: &str) -> Item {
    let available = Path::new(path).exists();
    let detail = if available { detail.to_owned() } else { format!("{path} does not exist; {detail}") };
    Item { name, available, detail }
}

/// The kernel's own bcache is no trouble as such; it takes devices that udev offers it.
fn kernel_bcache() -> Item {
    let available = Path::new("/sys/fs/bcache").exists();
    let detail = if available { "loaded: it may hold bcache devices" } else { "not loaded" };
    Item { name: "kernel bcache", available, detail: detail.to_owned() }
}

/// Acknowledged writes may be nowhere else.
fn notes_left() -> Item {
    let left: Vec<_> = notes::all_left_behind().iter().map(|note| note.display().to_string()).collect();
    let detail = match left.as_slice() {
        [] => "none in this user's places".to_owned(),
        left => format!(
            "{}: start bcached with its set once, before a reboot and before anything else uses the devices",
            left.join(", ")
        ),
    };
    Item { name: "notes of a killed bcached", available: !left.is_empty(), detail }
}

/// A rule file whose name has `word` in it as a whole.
fn rules(name: &'static str, word: &str, detail: &str) -> Item {
    let is_rule = |file: &str| {
        file.ends_with(".rules")
            && file.split(|letter: char| !letter.is_ascii_alphabetic()).any(|part| part == word)
    };
    let found =
        RULE_FOLDERS.iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    let found = found
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|file| is_rule(&file.to_string_lossy())));
    match found {
        Some(path) => Item { name, available: true, detail: format!("{}: {detail}", path.display()) },
        None => Item { name, available: false, detail: "not installed".to_owned() },
    }
}

fn capabilities() -> Vec<Item> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|word| u64::from_str_radix(word.trim(), 16).ok()).unwrap_or(0);
    let item = |(bit, name, purpose): &(u32, &'static str, &str)| Item {
        name,
        available: effective >> bit & 1 != 0,
        detail: (*purpose).to_owned(),
    };
    CAPABILITIES.iter().map(item).collect()
}

/// What can be said about a device, and why it is not fit to serve.
fn patient(path: &Path) -> (Patient, Option<Failure>) {
    let mut patient = Patient {
        device: path.display().to_string(),
        fit: false,
        size_bytes: None,
        logical_block_bytes: None,
        direct_io: None,
        holders: Vec::new(),
        detail: String::new(),
    };
    let outcome = examine(path, &mut patient);
    let failure = match outcome {
        Ok(detail) => {
            patient.fit = true;
            patient.detail = detail;
            None
        }
        Err(failure) => {
            patient.detail = failure.to_string();
            patient.holders.clone_from(&failure.holders);
            Some(failure)
        }
    };
    (patient, failure)
}

fn examine(path: &Path, patient: &mut Patient) -> Result<String, Failure> {
    let looked = bcached_uring::Device::open(path, Access::Look)?;
    let info = looked.info();
    patient.size_bytes = Some(bytes_of(info.sectors));
    patient.logical_block_bytes = Some(bytes_of(info.logical_block_sectors.into()));
    patient.direct_io = Some(looked.is_direct());
    let found = superblock::read(&looked)?;
    drop(looked);
    let description = match found {
        Found::Nothing => {
            return Err(Failure::new(Kind::NotBcache, format!("{} is no bcache device", path.display()))
                .next("`bcached make` makes it one"));
        }
        Found::Unfit(error) => {
            let kind = Failure::kind_of_superblock(error);
            return Err(
                Failure::new(kind, format!("{} cannot be served", path.display())).why(error.to_string())
            );
        }
        Found::Sound(superblock) => describe(&superblock),
    };
    // Claimed and given back at once: the refusal names the holder.
    drop(device::open(path, Access::Check)?);
    bcached_uring::Device::may_own(path)?;
    Ok(description)
}

fn describe(superblock: &Superblock) -> String {
    match superblock {
        Superblock::Cache(cache) => {
            let note = notes::left_behind(cache.set_uuid()).map_or_else(String::new, |note| {
                format!(
                    "; serve it before anything else does: a killed bcached left a note, {}",
                    note.display()
                )
            });
            format!(
                "cache of set {}, {} buckets of {}, {}{note}",
                cache.set_uuid(),
                cache.buckets(),
                human(bytes_of(cache.bucket_sectors())),
                if cache.is_synchronous() { "has been in use" } else { "never started" }
            )
        }
        Superblock::Backing(backing) => format!(
            "backing device {}, {}, {}, of set {}",
            backing.uuid(),
            backing.cache_mode().name(),
            state_name(backing.state()),
            backing.set_uuid()
        ),
    }
}

impl Show for Examined {
    const SCHEMA: &'static str = "bcached.doctor";

    fn text(&self) -> String {
        let mut text = String::new();
        for item in &self.machine {
            let word = if item.available { "yes" } else { "no" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:<27}{word:<5}{}", item.name, item.detail);
        }
        for patient in &self.devices {
            let word = if patient.fit { "fit" } else { "not fit" };
            let _ = write!(text, "{}: {word}, {}", patient.device, patient.detail);
            if let (Some(size), Some(direct)) = (patient.size_bytes, patient.direct_io) {
                let way = if direct { "direct I/O" } else { "I/O through the page cache" };
                let _ = write!(text, " ({}, {way})", human(size));
            }
            text.push('\n');
        }
        text
    }
}
