//! A device: what is on it, which process holds it, and what is bad about it.

use super::hardware::DeviceProperties;
use super::system::SystemPaths;
use super::{Finding, udev};
use crate::device::{self, Access};
use crate::failure::{Failure, Kind};
use crate::signatures;
use crate::sizes::human;
use crate::superblock::{self, SuperblockProbe, state_name};
use bcached_format::units::bytes_of;
use bcached_format::{Superblock, Uuid};
use bcached_offline::lost_sets::LostSets;
use bcached_offline::{bucket_memory, notes};
use bcached_uring::{Device, DeviceIdentity};
use serde::Serialize;
use std::convert::Infallible;
use std::path::Path;

/// What is reported about a device.
#[derive(Serialize)]
pub(super) struct DeviceReport {
    pub(super) device: String,
    pub(super) fit: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    size_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logical_block_bytes: Option<u64>,
    #[serde(flatten)]
    facts: ReportedProperties,
    #[serde(skip_serializing_if = "Option::is_none")]
    direct_io: Option<bool>,
    holders: Vec<String>,
    pub(super) detail: String,
    /// What the user should know although the device is fit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) findings: Vec<Finding>,
}

/// The properties of a block device, as the kernel reports them.
#[derive(Serialize, Default)]
struct ReportedProperties {
    #[serde(skip_serializing_if = "Option::is_none")]
    physical_block_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    minimum_io_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    optimal_io_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rotational: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    volatile_cache: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fua: Option<bool>,
}

/// A device after the examination.
pub(super) struct ExaminedDevice {
    pub(super) report: DeviceReport,
    /// Why it is not fit.
    pub(super) failure: Option<Failure>,
    /// Whether it is a cache or a backing device, and the set it belongs to.
    role: Option<(MemberRole, Uuid)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MemberRole {
    Cache,
    Backing,
}

impl From<&DeviceProperties> for ReportedProperties {
    fn from(hardware: &DeviceProperties) -> Self {
        Self {
            physical_block_bytes: hardware.physical_block_bytes,
            minimum_io_bytes: hardware.minimum_io_bytes,
            optimal_io_bytes: hardware.optimal_io_bytes,
            rotational: hardware.is_rotational,
            volatile_cache: hardware.has_volatile_cache,
            fua: hardware.has_fua,
        }
    }
}

impl DeviceReport {
    /// Returns a clause with its size and the kind of I/O used for it.
    pub(super) fn measures(&self) -> String {
        let Some((size, direct)) = self.size_bytes.zip(self.direct_io) else { return String::new() };
        let way = if direct { "direct I/O" } else { "I/O through the page cache" };
        format!(" ({}, {way})", human(size))
    }
}

impl ExaminedDevice {
    pub(super) fn at(path: &Path, system: &SystemPaths, lost: &LostSets) -> Self {
        let report = DeviceReport {
            device: path.display().to_string(),
            fit: false,
            size_bytes: None,
            logical_block_bytes: None,
            facts: ReportedProperties::default(),
            direct_io: None,
            holders: Vec::new(),
            detail: String::new(),
            findings: Vec::new(),
        };
        let mut examined = Self { report, failure: None, role: None };
        match examined.examine(path, system, lost) {
            Ok(detail) => {
                examined.report.fit = true;
                examined.report.detail = detail;
            }
            Err(failure) => {
                examined.report.detail = failure.to_string();
                examined.report.holders.clone_from(&failure.holders);
                examined.failure = Some(failure);
            }
        }
        examined
    }

    fn examine(&mut self, path: &Path, system: &SystemPaths, lost: &LostSets) -> Result<String, Failure> {
        let looked = Device::open(path, Access::Look)?;
        let info = looked.info();
        let report = &mut self.report;
        report.size_bytes = Some(bytes_of(info.sectors));
        report.logical_block_bytes = Some(bytes_of(info.logical_block_sectors.into()));
        report.direct_io = Some(looked.is_direct());
        let hardware = DeviceIdentity::of(path).and_then(|identity| DeviceProperties::of(system, identity));
        report.facts = hardware.as_ref().map(ReportedProperties::from).unwrap_or_default();
        let found = superblock::read(&looked)?;
        let superblock = match found {
            SuperblockProbe::Absent => match no_bcache(path, looked, lost)? {},
            SuperblockProbe::Invalid(error) => {
                let kind = Failure::kind_of_superblock(error);
                let cannot = format!("{} cannot be served", path.display());
                if let Some(claim) = lost.claim(&looked)? {
                    return Err(claim.refusal(format!("{cannot}: {error}"), path));
                }
                let next = "if it was a cache, image it before anything else";
                return Err(Failure::new(kind, cannot).why(error.to_string()).next(next));
            }
            SuperblockProbe::Valid(superblock) => superblock,
        };
        self.role = Some(role_of(&superblock));
        if let Some(hardware) = &hardware {
            report.findings.extend(hardware.findings(&superblock));
            report.findings.extend(udev::finding(system, own_uuid(&superblock)));
        }
        report.findings.extend(membership(&looked)?);
        drop(looked);
        // Claims the device and releases it at once: a refusal names its holder.
        drop(device::open(path, Access::Check)?);
        Device::may_own(path)?;
        Ok(describe(&superblock))
    }
}

/// Returns why a device without a superblock is not fit. A device that is in use, or has something
/// on it, must not be formatted.
fn no_bcache(path: &Path, looked: Device, lost: &LostSets) -> Result<Infallible, Failure> {
    if let Some(claim) = lost.claim(&looked)? {
        return Err(claim.refusal(format!("{} has no bcache superblock", path.display()), path));
    }
    let others = signatures::find(&looked)?;
    let unknown = if others.is_empty() { signatures::unknown(&looked)? } else { None };
    drop(looked);
    drop(device::open(path, Access::Check)?);
    let none = Failure::new(Kind::NotBcache, format!("{} is not a bcache device", path.display()));
    if let Some(losses) = lost.warning() {
        let next = "find that set's cache before you format any device";
        return Err(none.why(losses).next(next));
    }
    if others.is_empty() {
        Device::may_own(path)?;
        if let Some(holds) = unknown {
            let next = "check that it is the right device: `bcached make` overwrites it without asking";
            return Err(none.why(format!("it {holds}")).next(next));
        }
        return Err(none.next("`bcached make` formats it"));
    }
    let next = match others.iter().find_map(|signature| signature.class.removed_by()) {
        Some(removed_by) => {
            format!("name another device; if the signature is left over, `{removed_by}` removes it")
        }
        None => "name another device; if nothing on it is needed, `bcached make` says how to overwrite it"
            .to_owned(),
    };
    let marks = others.iter().map(|signature| signature.kind.as_ref()).collect::<Vec<_>>().join(", ");
    Err(none.why(format!("it carries the signature of {marks}")).next(next))
}

/// Finds marks of an assembler (such as RAID or LVM) beside the superblock: it may take the device
/// before any other program can.
fn membership(device: &Device) -> Result<Vec<Finding>, Failure> {
    let members = signatures::find(device)?.into_iter();
    let members = members.filter_map(|signature| Some((signature.kind, signature.class.removed_by()?)));
    let told = |(kind, removed_by)| {
        let text = format!(
            "it also carries the signature of {kind}, and another program may claim it: if the signature is left over, `{removed_by}` removes it"
        );
        Finding::new("member", text)
    };
    Ok(members.map(told).collect())
}

/// Finds rotating cache devices in front of backing devices that do not rotate.
pub(super) fn compare_roles(all: &mut [ExaminedDevice]) {
    let is_rotating = |examined: &ExaminedDevice| examined.report.facts.rotational;
    let quick: Vec<_> = all
        .iter()
        .filter(|examined| is_rotating(examined) == Some(false))
        .filter_map(|examined| Some((examined.role?, examined.report.device.clone())))
        .filter_map(|((role, set), device)| (role == MemberRole::Backing).then_some((set, device)))
        .collect();
    for examined in all.iter_mut().filter(|examined| is_rotating(examined) == Some(true)) {
        let Some((MemberRole::Cache, set)) = examined.role else { continue };
        if let Some((_, device)) = quick.iter().find(|(of, _)| *of == set) {
            let text = format!(
                "it is a rotating disk, but {device}, which it caches, is not: their roles are swapped; detach the volume, and format the two devices the other way round"
            );
            examined.report.findings.retain(|finding| finding.kind != "rotating-cache");
            examined.report.findings.push(Finding::new("swapped-roles", text));
        }
    }
}

fn role_of(superblock: &Superblock) -> (MemberRole, Uuid) {
    match superblock {
        Superblock::Cache(cache) => (MemberRole::Cache, cache.set_uuid()),
        Superblock::Backing(backing) => (MemberRole::Backing, backing.set_uuid()),
    }
}

fn own_uuid(superblock: &Superblock) -> Uuid {
    match superblock {
        Superblock::Cache(cache) => cache.uuid(),
        Superblock::Backing(backing) => backing.uuid(),
    }
}

fn describe(superblock: &Superblock) -> String {
    match superblock {
        Superblock::Cache(cache) => {
            let note = notes::left_behind(cache.set_uuid()).map_or_else(String::new, |note| {
                format!(
                    "; a killed bcached left a note, {}: serve the set once before anything else uses it",
                    note.display()
                )
            });
            format!(
                "cache of set {}, {} buckets of {} ({}), {}{note}",
                cache.set_uuid(),
                cache.buckets(),
                human(bytes_of(cache.bucket_sectors())),
                bucket_memory::of_cache(cache.buckets(), cache.bucket_sectors()),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn examined(device: &str, role: MemberRole, rotational: bool) -> ExaminedDevice {
        let facts = ReportedProperties { rotational: Some(rotational), ..ReportedProperties::default() };
        let report = DeviceReport {
            device: device.to_owned(),
            fit: true,
            size_bytes: None,
            logical_block_bytes: None,
            facts,
            direct_io: None,
            holders: Vec::new(),
            detail: String::new(),
            findings: vec![Finding::new("rotating-cache", String::new())],
        };
        ExaminedDevice { report, failure: None, role: Some((role, Uuid([1; 16]))) }
    }

    #[test]
    fn a_cache_that_rotates_before_a_quick_device_has_the_wrong_role() {
        let kinds = |examined: &ExaminedDevice| {
            examined.report.findings.iter().map(|finding| finding.kind).collect::<Vec<_>>()
        };
        let mut all = [
            examined("/dev/sda", MemberRole::Cache, true),
            examined("/dev/nvme0n1", MemberRole::Backing, false),
        ];
        compare_roles(&mut all);
        assert_eq!(kinds(&all[0]), ["swapped-roles"]);
        assert!(all[0].report.findings[0].text.contains("/dev/nvme0n1"));
        let mut other_set = [
            examined("/dev/sda", MemberRole::Cache, true),
            examined("/dev/nvme0n1", MemberRole::Backing, false),
        ];
        other_set[1].role = Some((MemberRole::Backing, Uuid([2; 16])));
        compare_roles(&mut other_set);
        assert_eq!(kinds(&other_set[0]), ["rotating-cache"], "that is nothing to it");
        let mut right = [
            examined("/dev/sda", MemberRole::Backing, true),
            examined("/dev/nvme0n1", MemberRole::Cache, false),
        ];
        compare_roles(&mut right);
        assert!(right.iter().all(|examined| !kinds(examined).contains(&"swapped-roles")));
    }
}
