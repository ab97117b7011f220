//! Finds volumes whose newest data is in a missing cache set, and devices that may be the cache of
//! such a set: with a damaged superblock, or with a new one made over it. Such devices must not be
//! overwritten.
//!
//! The search covers the devices that are named, those of the configuration, and all block devices.
//! A device may be the missing cache for one of three reasons:
//!
//! * its damaged superblock has the set's UUID;
//! * remains of the set are on it;
//! * the configuration names it as the cache of the volume.

use super::device::{self, Access, Device};
use super::superblock::{self, RawFields, SuperblockProbe};
use crate::devices::block_devices;
use bcached_config::{CommandLine, Config};
use bcached_control::failure::{Failure, Kind};
use bcached_format::{
    BackingState, BackingSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, SetMagic, Superblock, Uuid,
    units::bytes_of,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How far from the start remains are searched for, in bytes: the journal begins in the first
/// buckets.
const LOOKED_AT: u64 = 64 << 20;

/// How much of that is read at once, in bytes.
const PIECE: usize = 1 << 20;

/// The documentation of what to do with such a device.
const HOW: &str = "docs/failures.md, \"A cache whose superblock is damaged\"";

/// A volume whose newest data is in a cache set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirtyVolume {
    /// Its configured name, its label, or its UUID.
    name: String,
    device: String,
    uuid: Uuid,
    set: Uuid,
    /// When it was attached last, in seconds since 1970; 0 if not known.
    since: u32,
    /// Whether it has a section, and the cache that the section names, if any.
    section: Option<Option<String>>,
}

/// The configured names and devices.
#[derive(Clone, Default, Debug)]
pub struct ConfiguredNames {
    /// Of each cache.
    pub caches: Vec<(String, String)>,
    /// Of each volume with a backing device, and the cache that its section names.
    pub volumes: Vec<(String, String, Option<String>)>,
}

impl From<&Config> for ConfiguredNames {
    fn from(config: &Config) -> Self {
        let caches = config.caches.iter();
        let volumes = config.volumes.iter();
        let served = volumes.filter_map(|it| Some((it.name.clone()?, it.backing.clone(), it.cache.clone())));
        // A volume that was removed may have its newest data in a cache.
        let removed = config.not_served.iter();
        let removed = removed.filter_map(|it| Some((it.name.clone(), it.backing.clone()?, None)));
        Self {
            caches: caches.filter_map(|it| Some((it.name.clone()?, it.device.clone()))).collect(),
            volumes: served.chain(removed).collect(),
        }
    }
}

impl DirtyVolume {
    /// The volume `name` on `device`, if its superblock says that its newest data is in a set.
    #[must_use]
    pub fn of(name: &str, device: &str, superblock: &BackingSuperblock) -> Option<Self> {
        (superblock.state() == BackingState::Dirty).then(|| Self {
            name: name.to_owned(),
            device: device.to_owned(),
            uuid: superblock.uuid(),
            set: superblock.set_uuid(),
            since: superblock.last_mount(),
            section: None,
        })
    }

    /// The set that has the data.
    #[must_use]
    pub const fn set(&self) -> Uuid {
        self.set
    }

    /// The volume and its device.
    fn called(&self) -> String {
        format!("{} ({})", self.name, self.device)
    }

    /// Says how much of it is missing with the set, and since when, as far as that is known.
    #[must_use]
    pub fn loss(&self) -> String {
        let since = match self.since {
            0 => "time of the last attachment unknown".to_owned(),
            since => match jiff::Timestamp::from_second(since.into()) {
                Ok(moment) => format!("last attached at {moment}"),
                Err(_) => "time of the last attachment unknown".to_owned(),
            },
        };
        format!(
            "the newest data of {} is in the cache set {}, which is missing: amount unknown, \
             {since}",
            self.called(),
            self.set
        )
    }
}

/// All volumes with dirty data that were found, and the configured caches.
#[derive(Clone, Default, Debug)]
pub struct LostSets {
    /// Dirty volumes whose set is missing.
    stranded: Vec<DirtyVolume>,
    /// Dirty volumes whose set is here.
    kept: Vec<DirtyVolume>,
    /// The configured caches: name and device.
    caches: Vec<(String, String)>,
}

/// Why a device may be the cache of a missing set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Evidence {
    Superblock,
    Remains,
    Configured,
}

/// A device that may be the cache of a missing set.
#[derive(Debug)]
pub struct CacheCandidate<'a> {
    set: Uuid,
    sign: Evidence,
    volumes: Vec<&'a DirtyVolume>,
}

impl LostSets {
    /// Searches the devices `named`, those that are `known`, and all block devices. Devices that
    /// cannot be read are skipped.
    #[must_use]
    pub fn look(named: &[PathBuf], known: &ConfiguredNames) -> Self {
        let mut found = Self { caches: known.caches.clone(), ..Self::default() };
        let mut paths = named.to_vec();
        let caches = known.caches.iter().map(|(_, device)| device);
        let all = caches.chain(known.volumes.iter().map(|(_, backing, _)| backing));
        // Devices named by UUID are among the block devices.
        paths.extend(all.filter(|name| !name.starts_with("UUID=")).map(PathBuf::from));
        paths.extend(block_devices());
        let (mut seen, mut here, mut dirty) = (BTreeSet::new(), BTreeSet::new(), Vec::<DirtyVolume>::new());
        for path in paths {
            let Ok(device) = device::open(&path, Access::Look) else { continue };
            if !seen.insert(device.identity()) {
                continue;
            }
            match superblock::read(&device) {
                Ok(SuperblockProbe::Valid(Superblock::Cache(cache))) => drop(here.insert(cache.set_uuid().0)),
                Ok(SuperblockProbe::Valid(Superblock::Backing(backing))) => {
                    let volume = named_volume(&path, &device, &backing, known);
                    // The components of a mirror have the same superblock.
                    dirty.extend(volume.filter(|volume| dirty.iter().all(|other| other.uuid != volume.uuid)));
                }
                _ => {}
            }
        }
        (found.kept, found.stranded) = dirty.into_iter().partition(|volume| here.contains(&volume.set.0));
        found
    }

    /// The same with the configuration in the file `config`, or else in the usual file if that
    /// exists.
    ///
    /// # Errors
    /// The file `config` cannot be read.
    pub fn look_with(named: &[PathBuf], config: Option<&Path>) -> Result<Self, Failure> {
        let line = CommandLine { config: config.map(Path::to_owned), ..CommandLine::default() };
        let known = match Config::findings(&line) {
            Ok((found, _)) => ConfiguredNames::from(&found),
            Err(failure) if config.is_some() => return Err(failure),
            Err(_) => ConfiguredNames::default(),
        };
        Ok(Self::look(named, &known))
    }

    /// True if no volume is missing its newest data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stranded.is_empty()
    }

    /// The volumes whose newest data is missing.
    #[must_use]
    pub fn stranded(&self) -> &[DirtyVolume] {
        &self.stranded
    }

    /// Returns, as a clause, the volumes whose newest data is in this set, which is here; `None` if
    /// there are none.
    #[must_use]
    pub fn dirty_in(&self, set: Uuid) -> Option<String> {
        let volumes: Vec<_> =
            self.kept.iter().filter(|volume| volume.set == set).map(DirtyVolume::called).collect();
        (!volumes.is_empty()).then(|| volumes.join(", "))
    }

    /// Says why no device should be made anew now.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let losses: Vec<_> = self.stranded.iter().map(DirtyVolume::loss).collect();
        (!losses.is_empty()).then(|| losses.join("; "))
    }

    /// Returns the missing set of which `device` may be the cache.
    ///
    /// # Errors
    /// The device's.
    pub fn claim(&self, device: &Device) -> Result<Option<CacheCandidate<'_>>, Failure> {
        if self.is_empty() {
            return Ok(None);
        }
        let found = match self.damaged_superblock(device)? {
            Some(set) => Some((set, Evidence::Superblock)),
            None => self.remains(device)?.map(|set| (set, Evidence::Remains)),
        };
        let found = found.or_else(|| Some((self.configured(device)?, Evidence::Configured)));
        Ok(found.map(|(set, sign)| {
            let volumes = self.stranded.iter().filter(|volume| volume.set == set).collect();
            CacheCandidate { set, sign, volumes }
        }))
    }

    fn has(&self, set: Uuid) -> bool {
        self.stranded.iter().any(|volume| volume.set == set)
    }

    fn damaged_superblock(&self, device: &Device) -> Result<Option<Uuid>, Failure> {
        if !matches!(superblock::read(device)?, SuperblockProbe::Invalid(_)) {
            return Ok(None);
        }
        let bytes = device::read(device, bytes_of(SUPERBLOCK_SECTOR), SUPERBLOCK_BYTES)?;
        let bytes: Option<&[u8; SUPERBLOCK_BYTES]> = bytes.as_slice().try_into().ok();
        let set = bytes.and_then(|bytes| RawFields::of(bytes).bytes("set_uuid").try_into().ok()).map(Uuid);
        Ok(set.filter(|set| self.has(*set)))
    }

    /// Returns the set of which there are remains in the first part of the device: journal entries,
    /// B-tree nodes, priorities. Each begins at a block, with its checksum followed by a magic that
    /// depends on the set.
    fn remains(&self, device: &Device) -> Result<Option<Uuid>, Failure> {
        let magics: Vec<_> =
            self.stranded.iter().map(|volume| (SetMagic::of(volume.set), volume.set)).collect();
        let end = device::length(device).min(LOOKED_AT);
        let mut at = 0;
        while at < end {
            let piece = device::read(device, at, PIECE)?;
            for block in piece.chunks_exact(512) {
                let Some(word) = block[8..].first_chunk().copied().map(u64::from_le_bytes) else { continue };
                let is_of = |set: &SetMagic| {
                    [set.jset(), set.bset(), set.prio(), set.stamp(), set.summary()].contains(&word)
                };
                if let Some((_, set)) = magics.iter().find(|(magic, _)| is_of(magic)) {
                    return Ok(Some(*set));
                }
            }
            at += PIECE as u64;
        }
        Ok(None)
    }

    /// Returns the set of a volume whose section names the cache that is configured with this
    /// device.
    fn configured(&self, device: &Device) -> Option<Uuid> {
        let (name, _) = self.caches.iter().find(|(_, path)| leads_to(path, device))?;
        let is_only = self.caches.len() == 1;
        let is_its = |volume: &&DirtyVolume| {
            let cache =
                volume.section.as_ref().map(|cache| cache.as_ref().map_or(is_only, |cache| cache == name));
            cache == Some(true)
        };
        self.stranded.iter().find(is_its).map(DirtyVolume::set)
    }
}

/// Whether the configured `path` is this device, by whatever name.
fn leads_to(path: &str, device: &Device) -> bool {
    let found = device::open(Path::new(path), Access::Look);
    found.is_ok_and(|other| other.identity() == device.identity())
}

/// A dirty volume, under its configured name.
fn named_volume(
    path: &Path,
    device: &Device,
    superblock: &BackingSuperblock,
    known: &ConfiguredNames,
) -> Option<DirtyVolume> {
    let uuid = format!("UUID={}", superblock.uuid());
    let text = path.display().to_string();
    let is_it = |backing: &str| backing.eq_ignore_ascii_case(&uuid) || leads_to(backing, device);
    let section = known.volumes.iter().find(|(_, backing, _)| is_it(backing));
    let label = Some(superblock.label().to_string()).filter(|label| !label.is_empty());
    let name = section.map(|(name, ..)| name.clone()).or(label);
    let name = name.unwrap_or_else(|| superblock.uuid().to_string());
    let found = DirtyVolume::of(&name, &text, superblock)?;
    Some(DirtyVolume { section: section.map(|(_, _, cache)| cache.clone()), ..found })
}

impl CacheCandidate<'_> {
    /// Why it must not be overwritten, and what to do. `what` says what is refused.
    #[must_use]
    pub fn refusal(&self, what: String, device: &Path) -> Failure {
        let set = self.set;
        let sign = match self.sign {
            Evidence::Superblock => format!("its damaged superblock is that of the cache set {set}"),
            Evidence::Remains => format!("it holds remains of the cache set {set}"),
            Evidence::Configured => {
                format!(
                    "it is configured as the cache of a volume whose newest data is in the cache set {set}"
                )
            }
        };
        let losses: Vec<_> = self.volumes.iter().map(|volume| volume.loss()).collect();
        let device = device.display();
        Failure::new(Kind::DataLoss, what).why(format!("{sign}; {}", losses.join("; "))).next(format!(
            "do not write to it: image it first (`dd if={device} of=IMAGE bs=1M`, or ddrescue); \
             then see {HOW}, for how to restore its superblock in the image, or how to give up the \
             data"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;

    const SET: Uuid = Uuid(*b"a missing set ..");

    fn stranded(set: Uuid) -> LostSets {
        let volume = DirtyVolume {
            name: "media".to_owned(),
            device: "/dev/none".to_owned(),
            uuid: Uuid([7; 16]),
            set,
            since: 0,
            section: None,
        };
        LostSets { stranded: vec![volume], ..LostSets::default() }
    }

    /// Remains of a missing set are found if the superblock is all zeroes: the data after it tells
    /// which set the device belonged to.
    #[test]
    fn remains_of_a_missing_set_are_found_where_its_superblock_is_gone() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[0; 8 << 20]).unwrap();
        let claim = |lost: &LostSets| {
            let device = device::open(file.path(), Access::Look).unwrap();
            lost.claim(&device).unwrap().map(|claim| (claim.set, claim.sign))
        };
        let lost = stranded(SET);
        assert_eq!(claim(&lost), None);
        let magic = SetMagic::of(SET);
        for word in [magic.jset(), magic.bset(), magic.prio(), magic.stamp(), magic.summary()] {
            for at in [512_u64 * 9, 5 << 20] {
                file.as_file().write_all_at(&word.to_le_bytes(), at + 8).unwrap();
                assert_eq!(claim(&lost), Some((SET, Evidence::Remains)));
                assert_eq!(claim(&stranded(Uuid([9; 16]))), None, "of another set");
                file.as_file().write_all_at(&[0; 8], at + 8).unwrap();
            }
        }
    }
}
