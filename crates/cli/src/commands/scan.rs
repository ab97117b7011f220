//! `bcached scan`: lists the bcache superblocks on the named devices, or on all block devices, by
//! set. Read-only: nothing is claimed.

use crate::device::{self, Access, Device};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use crate::signatures;
use crate::superblock::{self, SuperblockProbe, state_name};
use bcached_control::sizes::human;
use bcached_format::{BackingState, Superblock, Uuid};
use bcached_offline::devices::block_devices;
use bcached_offline::lost_sets::LostSets;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The result of a scan.
#[derive(Serialize, Default)]
pub struct ScanReport {
    /// The sets, sorted by UUID.
    pub sets: Vec<ScannedSet>,
    /// Backing devices that belong to no set.
    pub without_set: Vec<ScannedDevice>,
    /// Devices with bcache's magic that cannot be used.
    pub unfit: Vec<UnusableDevice>,
    /// Block devices that this user may not read.
    pub not_readable: Vec<String>,
}

/// The devices of a set.
#[derive(Serialize)]
pub struct ScannedSet {
    pub set_uuid: String,
    /// More than one: a device and its copies.
    pub caches: Vec<ScannedDevice>,
    pub backings: Vec<ScannedDevice>,
}

/// A device with a usable superblock.
#[derive(Clone, Serialize)]
pub struct ScannedDevice {
    pub device: String,
    pub uuid: String,
    pub label: String,
    pub size_bytes: u64,
    pub block_bytes: u64,
    /// For a cache device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_bytes: Option<u64>,
    /// For a backing device: the state, in the kernel's word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_mode: Option<String>,
    /// The device is in use by the kernel's bcache.
    pub in_kernel: bool,
    /// For a backing device that has no cache yet: the set that it was made for, if any.
    #[serde(skip)]
    pub made_for: Option<Uuid>,
}

#[derive(Serialize)]
pub struct UnusableDevice {
    pub device: String,
    pub reason: String,
}

/// Scans and reports.
pub fn run(flags: &flags::ScanArgs) -> Result<Report, Failure> {
    let (scanned, failures) = scan(&flags.devices);
    Ok(failures.into_iter().fold(Report::of(&scanned)?, Report::failing))
}

/// Scans `named`, or every block device if it is empty. Also returns a failure for each named
/// device that is no bcache device.
pub fn scan(named: &[PathBuf]) -> (ScanReport, Vec<Failure>) {
    let (mut scanned, mut failures) = (ScanReport::default(), Vec::new());
    let mut sets: BTreeMap<[u8; 16], ScannedSet> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let lost = LostSets::look_with(named, None).unwrap_or_default();
    let all = if named.is_empty() { block_devices() } else { named.to_vec() };
    for path in all {
        let found = device::open(&path, Access::Look).and_then(|device| {
            let found = superblock::read(&device)?;
            Ok((device, found))
        });
        match found {
            // A device can have several names.
            Ok((device, _)) if !seen.insert(device.identity()) => {}
            Ok((device, SuperblockProbe::Valid(found))) => sort_in(&mut scanned, &mut sets, &device, &found),
            Ok((device, SuperblockProbe::Invalid(error))) => scanned.unfit.push(UnusableDevice {
                device: device.path().display().to_string(),
                reason: match lost.claim(&device) {
                    Ok(Some(claim)) => claim.refusal(error.to_string(), device.path()).to_string(),
                    _ => error.to_string(),
                },
            }),
            Ok((device, SuperblockProbe::Absent)) if !named.is_empty() => {
                failures.push(no_superblock(&device, &lost).unwrap_or_else(|failure| failure));
            }
            // Of devices that were not named, only a possible cache of a missing set is of
            // interest.
            Ok((device, SuperblockProbe::Absent)) => {
                let what = "it has no bcache superblock".to_owned();
                let reason =
                    lost.claim(&device).ok().flatten().map(|claim| claim.refusal(what, device.path()));
                scanned.unfit.extend(reason.map(|reason| UnusableDevice {
                    device: device.path().display().to_string(),
                    reason: reason.to_string(),
                }));
            }
            Err(failure) if !named.is_empty() => failures.push(failure),
            Err(failure) if failure.kind == Kind::Permission => {
                scanned.not_readable.push(path.display().to_string());
            }
            // A drive without a medium, or one that fails: it was not named, so it is skipped.
            Err(_) => {}
        }
    }
    scanned.sets = sets.into_values().collect();
    (scanned, failures)
}

/// Returns the failure for a named device without a superblock, with what is on it instead.
fn no_superblock(device: &Device, lost: &LostSets) -> Result<Failure, Failure> {
    let what = format!("{} has no bcache superblock", device.path().display());
    if let Some(claim) = lost.claim(device)? {
        return Ok(claim.refusal(what, device.path()));
    }
    let failure = Failure::new(Kind::NotBcache, what);
    Ok(match signatures::described(device)? {
        Some(described) => failure.why(described),
        None => failure,
    })
}

fn sort_in(
    scanned: &mut ScanReport,
    sets: &mut BTreeMap<[u8; 16], ScannedSet>,
    device: &Device,
    superblock: &Superblock,
) {
    let path = device.path();
    let size_bytes = device::length(device);
    let plain = |uuid: Uuid, label: String, block_sectors: u64| ScannedDevice {
        device: path.display().to_string(),
        uuid: uuid.to_string(),
        label,
        size_bytes,
        block_bytes: block_sectors * 512,
        bucket_bytes: None,
        state: None,
        cache_mode: None,
        in_kernel: is_in_kernel(path),
        made_for: None,
    };
    match superblock {
        Superblock::Cache(cache) => {
            let bucket_bytes = Some(cache.bucket_sectors() * 512);
            let member = plain(cache.uuid(), cache.label().to_string(), cache.block_sectors());
            of_set(sets, cache.set_uuid()).caches.push(ScannedDevice { bucket_bytes, ..member });
        }
        Superblock::Backing(backing) => {
            let member = plain(backing.uuid(), backing.label().to_string(), backing.block_sectors());
            let member = ScannedDevice {
                state: Some(state_name(backing.state()).to_owned()),
                cache_mode: Some(backing.cache_mode().name().to_owned()),
                ..member
            };
            if backing.state() == BackingState::None {
                let made_for = Some(backing.set_uuid()).filter(|uuid| !uuid.is_nil());
                scanned.without_set.push(ScannedDevice { made_for, ..member });
            } else {
                of_set(sets, backing.set_uuid()).backings.push(member);
            }
        }
    }
}

fn of_set(sets: &mut BTreeMap<[u8; 16], ScannedSet>, uuid: Uuid) -> &mut ScannedSet {
    let new = || ScannedSet { set_uuid: uuid.to_string(), caches: Vec::new(), backings: Vec::new() };
    sets.entry(uuid.0).or_insert_with(new)
}

fn is_in_kernel(path: &Path) -> bool {
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = real.file_name().map(|name| Path::new("/sys/class/block").join(name).join("bcache"));
    real.starts_with("/dev") && name.is_some_and(|folder| folder.exists())
}

impl ScannedDevice {
    fn line(&self, role: &str) -> String {
        let label = if self.label.is_empty() { String::new() } else { format!(" \"{}\"", self.label) };
        let mut line = format!("  {role}  {}  {}{label}  {}", self.device, self.uuid, human(self.size_bytes));
        // Writing to a string cannot fail.
        let _ = match (&self.state, &self.cache_mode, self.bucket_bytes) {
            (Some(state), Some(mode), _) => write!(line, ", {state}, {mode}"),
            (_, _, Some(bucket)) => write!(line, ", buckets of {}", human(bucket)),
            _ => Ok(()),
        };
        if self.in_kernel {
            line.push_str(", in use by the kernel's bcache");
        }
        line + "\n"
    }
}

impl Printable for ScanReport {
    const SCHEMA: &'static str = "bcached.scan";

    fn text(&self) -> String {
        let mut text = String::new();
        for set in &self.sets {
            let missing = match (set.caches.as_slice(), set.backings.iter().any(ScannedDevice::is_dirty)) {
                ([], true) => {
                    ": its cache is missing, and has the newest data: do not format a device that may be that cache"
                }
                ([], false) => ": its cache is missing",
                ([_], _) => "",
                _ => ": several devices have the superblock of its cache: all but one are copies",
            };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "set {}{missing}", set.set_uuid);
            text.extend(set.caches.iter().map(|member| member.line("cache  ")));
            text.extend(set.backings.iter().map(|member| member.line("backing")));
        }
        if !self.without_set.is_empty() {
            text.push_str("no set\n");
            text.extend(self.without_set.iter().map(|member| member.line("backing")));
        }
        for unfit in &self.unfit {
            let _ = writeln!(text, "{}: not usable: {}", unfit.device, unfit.reason);
        }
        if text.is_empty() {
            text.push_str("no bcache superblock was found\n");
        }
        if !self.not_readable.is_empty() {
            let _ = writeln!(text, "not examined, for lack of permission: {}", self.not_readable.join(", "));
        }
        text
    }
}

impl ScannedDevice {
    fn is_dirty(&self) -> bool {
        self.state.as_deref() == Some("dirty")
    }
}
