//! Volumes whose newest data is in a cache set that is not here, and devices that may be the cache of such a set: with
//! a damaged superblock, or with a new one that somebody has made over it. Nothing may overwrite those.
//!
//! What can be seen is asked: the devices that are named, those of the configuration, and all block devices. A device
//! may be the cache if its damaged superblock says so, if remains of the set are on it, or if the configuration names it
//! as the cache of the volume.

use super::device::{self, Access, Device};
use super::superblock::{self, Fields, Found};
use crate::devices::block_devices;
use bcached_config::{CommandLine, Config};
use bcached_control::failure::{Failure, Kind};
use bcached_format::{
    BackingState, BackingSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, SetMagic, Superblock, Uuid,
    units::bytes_of,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How far from the start remains are looked for, in bytes: the journal begins in the first buckets.
const LOOKED_AT: u64 = 64 << 20;

/// How much of that is read at once, in bytes.
const PIECE: usize = 1 << 20;

/// Where what to do with such a device is written.
const HOW: &str = "docs/failures.md, \"A cache whose superblock is damaged\"";

/// A volume whose newest data is in a cache set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stranded {
    /// As it is configured, its label, or its UUID.
    name: String,
    device: String,
    uuid: Uuid,
    set: Uuid,
    /// When it was attached last, in seconds since 1970; 0: not known.
    since: u32,
    /// Its section, if there is one, and the cache that this names.
    section: Option<Option<String>>,
}

/// What is configured: names and devices.
#[derive(Clone, Default, Debug)]
pub struct Known {
    /// Of each cache.
    pub caches: Vec<(String, String)>,
    /// Of each volume with a backing device, and the cache that its section names.
    pub volumes: Vec<(String, String, Option<String>)>,
}

impl From<&Config> for Known {
    fn from(config: &Config) -> Self {
        let caches = config.caches.iter();
        let volumes = config.volumes.iter();
        let served = volumes.filter_map(|it| Some((it.name.clone()?, it.backing.clone(), it.cache.clone())));
        // What was removed may have left its newest data in a cache.
        let removed = config.not_served.iter();
        let removed = removed.filter_map(|it| Some((it.name.clone(), it.backing.clone()?, None)));
        Self {
            caches: caches.filter_map(|it| Some((it.name.clone()?, it.device.clone()))).collect(),
            volumes: served.chain(removed).collect(),
        }
    }
}

impl Stranded {
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

    /// How much of it is missing with the set, and since when, as far as that is known.
    #[must_use]
    pub fn loss(&self) -> String {
        let since = match self.since {
            0 => "since when is not known either".to_owned(),
            since => match jiff::Timestamp::from_second(since.into()) {
                Ok(moment) => format!("it was attached last at {moment}"),
                Err(_) => "since when is not known either".to_owned(),
            },
        };
        format!(
            "the newest data of {} is in the cache set {}, which is missing: how much is not known, {since}",
            self.called(),
            self.set
        )
    }
}

/// What can be seen of volumes with dirty data and of the sets that have it.
#[derive(Clone, Default, Debug)]
pub struct LostSets {
    /// Dirty volumes whose set is missing.
    stranded: Vec<Stranded>,
    /// Dirty volumes whose set is here.
    kept: Vec<Stranded>,
    /// The configured caches: name and device.
    caches: Vec<(String, String)>,
}

/// Why a device may be the cache of a missing set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sign {
    Superblock,
    Remains,
    Configured,
}

/// A device that may be the cache of a missing set.
#[derive(Debug)]
pub struct Claim<'a> {
    set: Uuid,
    sign: Sign,
    volumes: Vec<&'a Stranded>,
}

impl LostSets {
    /// Looks at the devices `named`, those that are `known`, and all block devices. What cannot be read is passed by.
    #[must_use]
    pub fn look(named: &[PathBuf], known: &Known) -> Self {
        let mut found = Self { caches: known.caches.clone(), ..Self::default() };
        let mut paths = named.to_vec();
        let caches = known.caches.iter().map(|(_, device)| device);
        let all = caches.chain(known.volumes.iter().map(|(_, backing, _)| backing));
        // What is called by its UUID is among the block devices.
        paths.extend(all.filter(|name| !name.starts_with("UUID=")).map(PathBuf::from));
        paths.extend(block_devices());
        let (mut seen, mut here, mut dirty) = (BTreeSet::new(), BTreeSet::new(), Vec::<Stranded>::new());
        for path in paths {
            let Ok(device) = device::open(&path, Access::Look) else { continue };
            if !seen.insert(device.identity()) {
                continue;
            }
            match superblock::read(&device) {
                Ok(Found::Sound(Superblock::Cache(cache))) => drop(here.insert(cache.set_uuid().0)),
                Ok(Found::Sound(Superblock::Backing(backing))) => {
                    let volume = named_volume(&path, &device, &backing, known);
                    // The parts of a mirror say the same.
                    dirty.extend(volume.filter(|volume| dirty.iter().all(|other| other.uuid != volume.uuid)));
                }
                _ => {}
            }
        }
        (found.kept, found.stranded) = dirty.into_iter().partition(|volume| here.contains(&volume.set.0));
        found
    }

    /// The same with the configuration in the file `config`, or else at the usual place if there is one.
    ///
    /// # Errors
    /// The file that is named cannot be read.
    pub fn look_with(named: &[PathBuf], config: Option<&Path>) -> Result<Self, Failure> {
        let line = CommandLine { config: config.map(Path::to_owned), ..CommandLine::default() };
        let known = match Config::findings(&line) {
            Ok((found, _)) => Known::from(&found),
            Err(failure) if config.is_some() => return Err(failure),
            Err(_) => Known::default(),
        };
        Ok(Self::look(named, &known))
    }

    /// No volume is missing its newest data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stranded.is_empty()
    }

    /// The volumes whose newest data is missing.
    #[must_use]
    pub fn stranded(&self) -> &[Stranded] {
        &self.stranded
    }

    /// The volumes whose newest data is in the set, which is here, as a clause; `None`: there is none.
    #[must_use]
    pub fn dirty_in(&self, set: Uuid) -> Option<String> {
        let volumes: Vec<_> =
            self.kept.iter().filter(|volume| volume.set == set).map(Stranded::called).collect();
        (!volumes.is_empty()).then(|| volumes.join(", "))
    }

    /// Why nobody should make any device anew now.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let losses: Vec<_> = self.stranded.iter().map(Stranded::loss).collect();
        (!losses.is_empty()).then(|| losses.join("; "))
    }

    /// Which missing set `device` may be the cache of.
    ///
    /// # Errors
    /// The device's.
    pub fn claim(&self, device: &Device) -> Result<Option<Claim<'_>>, Failure> {
        if self.is_empty() {
            return Ok(None);
        }
        let found = match self.damaged_superblock(device)? {
            Some(set) => Some((set, Sign::Superblock)),
            None => self.remains(device)?.map(|set| (set, Sign::Remains)),
        };
        let found = found.or_else(|| Some((self.configured(device)?, Sign::Configured)));
        Ok(found.map(|(set, sign)| {
            let volumes = self.stranded.iter().filter(|volume| volume.set == set).collect();
            Claim { set, sign, volumes }
        }))
    }

    fn has(&self, set: Uuid) -> bool {
        self.stranded.iter().any(|volume| volume.set == set)
    }

    fn damaged_superblock(&self, device: &Device) -> Result<Option<Uuid>, Failure> {
        if !matches!(superblock::read(device)?, Found::Unfit(_)) {
            return Ok(None);
        }
        let bytes = device::read(device, bytes_of(SUPERBLOCK_SECTOR), SUPERBLOCK_BYTES)?;
        let bytes: Option<&[u8; SUPERBLOCK_BYTES]> = bytes.as_slice().try_into().ok();
        let set = bytes.and_then(|bytes| Fields::of(bytes).bytes("set_uuid").try_into().ok()).map(Uuid);
        Ok(set.filter(|set| self.has(*set)))
    }

    /// The set of which something is in the first part of the device: entries of its journal, nodes of its tree,
    /// priorities. Each begins at a block, with its sum and then a magic that depends on the set.
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

    /// The set of a volume whose section names the cache that is configured with this device.
    fn configured(&self, device: &Device) -> Option<Uuid> {
        let (name, _) = self.caches.iter().find(|(_, path)| leads_to(path, device))?;
        let is_only = self.caches.len() == 1;
        let is_its = |volume: &&Stranded| {
            let cache =
                volume.section.as_ref().map(|cache| cache.as_ref().map_or(is_only, |cache| cache == name));
            cache == Some(true)
        };
        self.stranded.iter().find(is_its).map(Stranded::set)
    }
}

/// Whether what is configured as `path` is this device, however either is spelt.
fn leads_to(path: &str, device: &Device) -> bool {
    let found = device::open(Path::new(path), Access::Look);
    found.is_ok_and(|other| other.identity() == device.identity())
}

/// A dirty volume, by the name that is configured for it.
fn named_volume(
    path: &Path,
    device: &Device,
    superblock: &BackingSuperblock,
    known: &Known,
) -> Option<Stranded> {
    let uuid = format!("UUID={}", superblock.uuid());
    let text = path.display().to_string();
    let is_it = |backing: &str| backing.eq_ignore_ascii_case(&uuid) || leads_to(backing, device);
    let section = known.volumes.iter().find(|(_, backing, _)| is_it(backing));
    let label = Some(superblock.label().to_string()).filter(|label| !label.is_empty());
    let name = section.map(|(name, ..)| name.clone()).or(label);
    let name = name.unwrap_or_else(|| superblock.uuid().to_string());
    let found = Stranded::of(&name, &text, superblock)?;
    Some(Stranded { section: section.map(|(_, _, cache)| cache.clone()), ..found })
}

impl Claim<'_> {
    /// Why it must not be overwritten, and what to do: `what` is not done.
    #[must_use]
    pub fn refusal(&self, what: String, device: &Path) -> Failure {
        let set = self.set;
        let sign = match self.sign {
            Sign::Superblock => format!("its superblock, which is damaged, is that of the cache set {set}"),
            Sign::Remains => format!("remains of the cache set {set} are on it"),
            Sign::Configured => {
                format!(
                    "it is configured as the cache of a volume whose newest data is in the cache set {set}"
                )
            }
        };
        let losses: Vec<_> = self.volumes.iter().map(|volume| volume.loss()).collect();
        let device = device.display();
        Failure::new(Kind::DataLoss, what).why(format!("{sign}; {}", losses.join("; "))).next(format!(
            "do not write to it: image it first (`dd if={device} of=IMAGE bs=1M`, or ddrescue); {HOW}, says how its \
             superblock is written back into the image, and how the data is given up"
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
        let volume = Stranded {
            name: "media".to_owned(),
            device: "/dev/none".to_owned(),
            uuid: Uuid([7; 16]),
            set,
            since: 0,
            section: None,
        };
        LostSets { stranded: vec![volume], ..LostSets::default() }
    }

    /// The superblock is all zeroes, and what tells whose the device was lies behind it.
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
                assert_eq!(claim(&lost), Some((SET, Sign::Remains)));
                assert_eq!(claim(&stranded(Uuid([9; 16]))), None, "of another set");
                file.as_file().write_all_at(&[0; 8], at + 8).unwrap();
            }
        }
    }
}
