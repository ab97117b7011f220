//! Decides whether a device may be overwritten, and overwrites it.

use super::device::{self, Device};
use super::image::Image;
use super::lost_sets::LostSets;
use super::signatures::{self, Signature};
use super::superblock::{self, SuperblockProbe};
use crate::notes;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::Overrides;
use bcached_control::sizes::human;
use bcached_format::units::bytes_of;
use bcached_format::{BackingState, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, SuperblockError};
use std::path::Path;

/// A device that may be overwritten, and what that takes.
#[derive(Debug)]
pub struct OverwritePlan {
    /// Signatures to be erased first; the user has named each as one that may go.
    pub erase: Vec<Signature>,
    /// The device has no signature, and holds this all the same.
    pub unknown: Option<String>,
}

impl OverwritePlan {
    /// A warning to the user about what will be overwritten at `path` without confirmation.
    #[must_use]
    pub fn warning(&self, path: &Path) -> Option<String> {
        self.unknown.as_ref().map(|holds| format!("{}: {holds}", path.display()))
    }
}

/// Returns what must be erased on `device` before it is written, or why it must not be overwritten.
///
/// # Errors
/// Something keeps it from being overwritten, or it cannot be read.
pub fn check(device: &Device, flags: &Overrides, lost: &LostSets) -> Result<OverwritePlan, Failure> {
    refuse_lost_cache(device, lost)?;
    already_bcache(device, flags, lost)?;
    let found = signatures::find(device)?;
    refuse_member(device, &found)?;
    let named = |signature: &&Signature| flags.wipe_signature.iter().any(|kind| *kind == signature.kind);
    let kept: Vec<_> = found.iter().filter(|signature| !named(signature)).collect();
    if !kept.is_empty() {
        return Err(refuse_content(device, &kept));
    }
    let unknown = if found.is_empty() { signatures::unknown(device)? } else { None };
    Ok(OverwritePlan { erase: found, unknown })
}

/// Refuses a device that may be the cache of a missing set in which a volume has its newest data.
///
/// # Errors
/// It may be one, or it cannot be read.
pub fn refuse_lost_cache(device: &Device, lost: &LostSets) -> Result<(), Failure> {
    let path = device.path();
    let claim = lost.claim(device)?;
    claim.map_or(Ok(()), |claim| Err(claim.refusal(format!("cannot make {}", path.display()), path)))
}

fn cannot_make(device: &Device, kind: Kind) -> Failure {
    Failure::new(kind, format!("cannot make {}", device.path().display()))
}

fn refuse_member(device: &Device, found: &[Signature]) -> Result<(), Failure> {
    let member = found.iter().find_map(|signature| Some((&signature.kind, signature.class.removed_by()?)));
    let Some((kind, removed_by)) = member else { return Ok(()) };
    Err(cannot_make(device, Kind::Member)
        .why(format!("it carries the signature of {kind}"))
        .next(format!("nothing overrides this; `{removed_by}` removes the signature if it is left over")))
}

/// Several programs may claim one device: all its signatures are named at once.
fn refuse_content(device: &Device, kept: &[&Signature]) -> Failure {
    let options: Vec<_> =
        kept.iter().map(|signature| format!("--wipe-signature={}", signature.kind)).collect();
    let marks: Vec<_> =
        kept.iter().map(|signature| format!("{} ({})", signature.kind, place(signature))).collect();
    let signatures = if kept.len() == 1 { "a signature" } else { "signatures" };
    cannot_make(device, Kind::Signature)
        .why(format!("it carries {signatures} of {}", marks.join(", ")))
        .next(format!("if nothing on it is needed, repeat the command with {}", options.join(" ")))
        .option(options[0].clone())
}

fn place(signature: &Signature) -> String {
    let (offset, _) = signature.marks[0];
    format!("at byte {offset:#x}")
}

/// Refuses a bcache superblock unless no data is behind it that exists nowhere else.
fn already_bcache(device: &Device, flags: &Overrides, lost: &LostSets) -> Result<(), Failure> {
    const OPTION: &str = "--wipe-bcache";
    let refuse = |why: &str| {
        Failure::new(Kind::AlreadyBcache, format!("cannot make {}", device.path().display())).why(why)
    };
    let superblock = match superblock::read(device)? {
        SuperblockProbe::Absent => return Ok(()),
        SuperblockProbe::Invalid(error) => {
            // `wipefs` does not see a superblock without a sound magic.
            let remedy = match error {
                SuperblockError::DamagedMagic { .. } => {
                    format!(
                        "dd if=/dev/zero of={} bs=4k seek=1 count=1 conv=notrunc",
                        device.path().display()
                    )
                }
                _ => format!("wipefs --all {}", device.path().display()),
            };
            let why = "it is already a bcache device, and the state of the data behind it is unknown";
            return Err(refuse(why).next(format!(
                "its superblock is not usable ({error}): if it was a cache, image it first; \
                 `{remedy}` removes the superblock if no data is needed"
            )));
        }
        SuperblockProbe::Valid(superblock) => superblock,
    };
    match &superblock {
        Superblock::Backing(backing) if backing.state() == BackingState::Dirty => {
            Err(refuse("it is a bcache backing device whose newest data is only in its cache").next(format!(
                "serve it with its cache until it is clean; if that data was given up \
                 (`bcached forget`), `wipefs --all {}` removes the superblock; nothing else \
                 overrides this",
                device.path().display()
            )))
        }
        Superblock::Cache(cache) if cache.is_synchronous() => match dirty_sectors(device)? {
            None if let Some(volumes) = lost.dirty_in(cache.set_uuid()) => Err(refuse(&format!(
                "it is the cache of a damaged set that has been in use, and holds the newest data \
                 of {volumes}"
            ))
            .next("image it first; `bcached check` reports the damage; nothing overrides this")),
            None => Err(refuse(
                "it is the cache of a damaged set that has been in use: how much dirty data it \
                 holds is unknown",
            )
            .next(format!(
                "`bcached check` reports the damage; `wipefs --all {}` removes the superblock if no \
                 data is needed",
                device.path().display()
            ))),
            // The checker does not see it, and nothing overrides it: serving the set once is all it
            // takes.
            Some(0) if let Some(note) = notes::unreplayed(cache.set_uuid()) => {
                Err(refuse("a killed bcached left a note, which may hold acknowledged writes to its set")
                    .next(format!(
                        "serve the set once, or remove {} if nothing in it is needed",
                        note.display()
                    )))
            }
            Some(0) if flags.wipe_bcache => Ok(()),
            Some(0) => Err(refuse("it is the cache of a set that has been in use")
                .next(format!("it holds no dirty data: {OPTION} overwrites it"))
                .option(OPTION)),
            Some(sectors) => Err(refuse(&format!("it holds {} of dirty data", human(bytes_of(sectors))))
                .next("serve it with its backing devices until it is clean; nothing overrides this")),
        },
        _ if !flags.wipe_bcache => Err(refuse("it is already a bcache device")
            .next(format!("it has no dirty data: {OPTION} overwrites it"))
            .option(OPTION)),
        _ => Ok(()),
    }
}

/// Dirty sectors in the set on `device`, by the offline checker; `None` if the set is damaged.
fn dirty_sectors(device: &Device) -> Result<Option<u64>, Failure> {
    let image = Image::of(device);
    let report = bcached_check::check(&image, &[], bcached_check::Options::default()).report;
    if let Some(failure) = image.failure() {
        return Err(failure);
    }
    let dirty = report.volumes.iter().map(|volume| volume.dirty_sectors).sum();
    Ok(report.is_clean().then_some(dirty))
}

/// Erases old marks first and writes the superblock last, so that a device is never two things at
/// once.
///
/// # Errors
/// The device's; then it may be nothing at all. [`Kind::Signature`] if what was erased had hidden a
/// signature that may not go.
pub fn write(
    device: &Device,
    erase: &[Signature],
    superblock: &[u8; SUPERBLOCK_BYTES],
) -> Result<(), Failure> {
    let _quiet = device.quiet_udev()?;
    erase_all(device, erase)?;
    let start = usize::try_from(bytes_of(SUPERBLOCK_SECTOR)).expect("4 KiB");
    device.write_at(0, &vec![0; start])?;
    device.sync()?;
    device.write_at(SUPERBLOCK_SECTOR, &superblock[..])?;
    Ok(device.sync()?)
}

/// Erases the marks of `consented`, and searches again until none is left: a signature may have
/// copies that show only when the first is gone.
fn erase_all(device: &Device, consented: &[Signature]) -> Result<(), Failure> {
    const ROUNDS: usize = 8;
    let mut left = consented.to_vec();
    for _ in 0..ROUNDS {
        if left.is_empty() {
            return Ok(());
        }
        for (offset, length) in left.iter().flat_map(|signature| &signature.marks) {
            device::erase(device, *offset, *length)?;
        }
        device.sync()?;
        left = signatures::find(device)?;
        let is_hidden = |signature: &&Signature| consented.iter().all(|named| named.kind != signature.kind);
        let hidden: Vec<_> = left.iter().filter(is_hidden).collect();
        if !hidden.is_empty() {
            refuse_member(device, &left)?;
            return Err(refuse_content(device, &hidden));
        }
    }
    let kinds: Vec<_> = left.iter().map(|signature| signature.kind.as_ref()).collect();
    Err(cannot_make(device, Kind::Io)
        .why(format!("the signature of {} is still there after it was erased", kinds.join(", ")))
        .next("check that the device accepts writes, then repeat the command"))
}
