//! `bcached make`: writes superblocks as `make-bcache` does, byte for byte.
//!
//! It is stricter than that program: it refuses a second cache device, a geometry that no kernel
//! runs, and unknown words. All devices are opened and checked before the first is written, and
//! stay claimed throughout.

mod plan;
mod report;

use crate::device::{self, Access, Device};
use crate::failure::{Failure, Kind};
use crate::flags::MakeArgs;
use crate::future_commands;
use crate::output::Report;
use bcached_control::jobs::Overrides;
use bcached_offline::lost_sets::LostSets;
use bcached_offline::overwrite::{self, OverwritePlan};
use plan::{MakeOptions, NewSuperblock};
use std::path::PathBuf;

/// What a device becomes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceRole {
    /// The fast device of a set.
    Cache,
    /// A slow device that is served through a cache.
    Backing,
}

impl DeviceRole {
    /// The role in a sentence.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Backing => "backing",
        }
    }
}

/// A device that passed its checks, and what must be erased before its superblock is written.
struct MakeTarget {
    role: DeviceRole,
    device: Device,
    cleared: OverwritePlan,
}

/// Checks everything, then writes.
pub fn run(flags: &MakeArgs) -> Result<Report, Failure> {
    if flags.add {
        return Err(future_commands::refuse_option(
            "--add",
            "name the devices to `bcached serve` after this",
        ));
    }
    let options = MakeOptions::from_flags(flags)?;
    let devices = ordered(&flags.roles)?;
    let targets = open(&devices, flags)?;
    let planned = plan::plan(&targets, &options)?;
    if !flags.dry_run {
        write_all(&targets, &planned)?;
    }
    let made = report::MakeReport::new(&planned, &targets, flags.dry_run);
    Ok(Report::of(&made)?.warning(made.warnings()))
}

/// Returns the cache first, then the backing devices: the order in which they are written and
/// printed.
fn ordered(roles: &[(DeviceRole, PathBuf)]) -> Result<Vec<(DeviceRole, PathBuf)>, Failure> {
    if roles.is_empty() {
        return Err(
            Failure::new(Kind::Usage, "no device given").next("name one with --cache (-C) or --backing (-B)")
        );
    }
    let mut devices = roles.to_vec();
    devices.sort_by_key(|(role, _)| *role == DeviceRole::Backing);
    if let Some((DeviceRole::Cache, second)) = devices.get(1) {
        return Err(Failure::new(
            Kind::Usage,
            format!("cannot make {} a second cache device", second.display()),
        )
        .why("a cache set has exactly one; kernels since 5.10 refuse more")
        .next("make another set with another `bcached make`")
        .option("--cache"));
    }
    Ok(devices)
}

/// Opens and checks all devices.
fn open(devices: &[(DeviceRole, PathBuf)], flags: &MakeArgs) -> Result<Vec<MakeTarget>, Failure> {
    let mut targets: Vec<MakeTarget> = Vec::new();
    let overrides =
        Overrides { wipe_signature: flags.wipe_signature.clone(), wipe_bcache: flags.wipe_bcache };
    let named: Vec<_> = devices.iter().map(|(_, path)| path).chain(&flags.serves).cloned().collect();
    let lost = LostSets::look_with(&named, flags.configuration.config.as_deref())?;
    for (role, path) in devices {
        let access = if flags.dry_run { Access::Check } else { Access::Own };
        let device = device::open(path, access)?;
        let cleared = overwrite::check(&device, &overrides, &lost)?;
        targets.push(MakeTarget { role: *role, device, cleared });
    }
    signatures_named_in_vain(&targets, flags)?;
    Ok(targets)
}

/// Refuses a signature type that no device carries: it is a typing error, or the device is not the
/// one meant.
fn signatures_named_in_vain(targets: &[MakeTarget], flags: &MakeArgs) -> Result<(), Failure> {
    for kind in &flags.wipe_signature {
        let found =
            targets.iter().any(|target| target.cleared.erase.iter().any(|signature| signature.kind == *kind));
        if !found {
            return Err(Failure::new(Kind::Usage, format!("no device carries the signature `{kind}`"))
                .next("leave out the option, or check the device's name")
                .option("--wipe-signature"));
        }
    }
    Ok(())
}

/// Writes one device after the other. A failure lists what is written already; the same command
/// with `--wipe-bcache` completes it.
fn write_all(targets: &[MakeTarget], planned: &[NewSuperblock]) -> Result<(), Failure> {
    let mut written: Vec<String> = Vec::new();
    for (target, planned) in targets.iter().zip(planned) {
        if let Err(failure) = overwrite::write(&target.device, &target.cleared.erase, &planned.seal()) {
            let done = if written.is_empty() { "none".to_owned() } else { written.join(", ") };
            return Err(failure.next(format!(
                "devices already written: {done}; correct the cause and repeat the command with --wipe-bcache"
            )));
        }
        written.push(target.device.path().display().to_string());
    }
    Ok(())
}
