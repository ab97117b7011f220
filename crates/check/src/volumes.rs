//! The volumes of a set: the slots of the uuid table, and the backing devices that were given.

use crate::buckets::sectors;
use crate::damage::{DamageKind, Device, Location, Structure, as_text};
use crate::findings::Findings;
use crate::image::ReadAt;
use crate::known::Certainty;
use bcached_format::checksum::checksum;
use bcached_format::key_check::check_uuid_key;
use bcached_format::uuid::SlotMismatch;
use bcached_format::{
    Attachment, BackingState, BackingSuperblock, CacheSuperblock, DeviceGeometry, Geometry, Inode,
    JsetHeader, Key, Label, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, Uuid, UuidSlot,
    uuid,
};
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};

/// A volume, with what the check found out about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Volume {
    /// Inode: the slot in the uuid table.
    pub inode: u32,
    /// Uuid of the backing device or volume.
    pub uuid: Uuid,
    /// Label in the table.
    pub label: Label,
    /// Whether it has no backing device.
    pub flash_only: bool,
    /// Whether it was given up.
    pub invalidated: bool,
    /// First sector of its key space: the data offset of its backing device, if that was given; 0
    /// for a flash-only volume.
    pub start: u64,
    /// End of its key space, if known.
    pub end: Option<u64>,
    /// State of its backing device, if that was given.
    pub state: Option<&'static str>,
    /// Whether its backing device says that nothing in the cache is newer, so that it can be served
    /// without the cache.
    pub claims_clean: bool,
    /// Sectors of live extents.
    pub live_sectors: u64,
    /// How many of these sectors are dirty.
    pub dirty_sectors: u64,
    /// How far both numbers are known.
    pub dirty_state: Certainty,
    pub(crate) backing: Option<usize>,
}

/// Leaves out a number that is unknown. The name of a number says if it is only a lower bound.
impl Serialize for Volume {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct VolumeFields<'a> {
            inode: u32,
            #[serde(serialize_with = "as_text")]
            uuid: Uuid,
            #[serde(serialize_with = "as_text")]
            label: &'a Label,
            flash_only: bool,
            invalidated: bool,
            start: u64,
            end: Option<u64>,
            state: Option<&'static str>,
            dirty_state: Certainty,
            #[serde(skip_serializing_if = "Option::is_none")]
            live_sectors: Option<u64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            dirty_sectors: Option<u64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            dirty_sectors_at_least: Option<u64>,
        }
        let is = |state| self.dirty_state == state;
        let flat = VolumeFields {
            inode: self.inode,
            uuid: self.uuid,
            label: &self.label,
            flash_only: self.flash_only,
            invalidated: self.invalidated,
            start: self.start,
            end: self.end,
            state: self.state,
            dirty_state: self.dirty_state,
            live_sectors: is(Certainty::Known).then_some(self.live_sectors),
            dirty_sectors: is(Certainty::Known).then_some(self.dirty_sectors),
            dirty_sectors_at_least: is(Certainty::AtLeast).then_some(self.dirty_sectors),
        };
        flat.serialize(serializer)
    }
}

/// What the superblock of a backing device says about its cache: the only source where the cache
/// cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BackingClaim {
    /// Index of the device in the order given.
    pub backing: usize,
    /// Uuid of the device.
    #[serde(serialize_with = "as_text")]
    pub uuid: Uuid,
    /// Its label.
    #[serde(serialize_with = "as_text")]
    pub label: Label,
    /// The set that it is attached to.
    #[serde(serialize_with = "as_text")]
    pub set_uuid: Uuid,
    /// `clean`, `dirty` or `stale`.
    pub state: &'static str,
}

/// Returns the claims of all devices that are attached to `set`, or to any set if it is not known
/// which set this is.
pub(crate) fn claims(images: &[&dyn ReadAt], set: Option<Uuid>) -> Vec<BackingClaim> {
    let mut nobody = Findings::new(0);
    let mut claim = |(backing, image): (usize, &&dyn ReadAt)| {
        let found = read_superblock(*image, Location::backing(backing), &mut nobody)?;
        let Superblock::Backing(found) = found else { return None };
        let is_its = set.is_none_or(|set| set == found.set_uuid());
        (is_its && found.state() != BackingState::None).then(|| BackingClaim {
            backing,
            uuid: found.uuid(),
            label: found.label(),
            set_uuid: found.set_uuid(),
            state: state_name(found.state()),
        })
    };
    images.iter().enumerate().filter_map(&mut claim).collect()
}

impl Volume {
    /// Creates the volume of a slot, before anything else is known about it.
    fn of_slot(inode: u32, slot: &UuidSlot) -> Self {
        Self {
            inode,
            uuid: slot.uuid,
            label: slot.label,
            flash_only: slot.is_flash_only(),
            invalidated: slot.is_invalidated(),
            start: 0,
            end: if slot.is_flash_only() { Some(slot.sectors) } else { None },
            state: None,
            claims_clean: false,
            live_sectors: 0,
            dirty_sectors: 0,
            dirty_state: Certainty::Unknown,
            backing: None,
        }
    }
}

/// A backing device of the set.
#[derive(Debug)]
pub(crate) struct BackingDevice {
    pub superblock: BackingSuperblock,
    pub sectors: u64,
}

/// The uuid table as read.
#[derive(Debug, Default)]
pub(crate) struct UuidTable {
    /// All slots, in order of inode.
    pub slots: Vec<UuidSlot>,
    /// Slots that may differ from what was written, by the same rule as in the engine.
    pub doubted: BTreeMap<Inode, SlotMismatch>,
    /// Whether bcached wrote it.
    pub is_ours: bool,
}

impl UuidTable {
    /// Returns true if the table gives the inode to no volume: its slot is free, or doubted.
    fn is_unowned(&self, number: Inode) -> bool {
        let slot = self.slots.get(number.0 as usize);
        slot.is_some_and(|slot| slot.is_free() || self.doubted.contains_key(&number))
    }

    /// Returns the slot, unless it is doubted.
    fn slot(&self, number: Inode) -> Option<&UuidSlot> {
        self.slots.get(number.0 as usize).filter(|_| !self.doubted.contains_key(&number))
    }
}

/// Reads the uuid table that the newest journal entry names.
pub(crate) fn read_table(
    image: &dyn ReadAt,
    geometry: &Geometry,
    (set, header): (Uuid, &JsetHeader),
    old: bool,
    place: Location,
    findings: &mut Findings,
) -> Option<UuidTable> {
    let key = &header.uuids;
    if let Err(error) = check_uuid_key(geometry, key) {
        findings.error(place, DamageKind::BadUuidKey { key: *key, error });
        return None;
    }
    let wanted = geometry.meta_sectors();
    if key.sectors() != wanted {
        findings.error(place, DamageKind::UuidTableSize { wanted, found: key.sectors() });
    }
    let sector = key.pointers.as_slice().first()?.sector();
    let place = Location::cache(Structure::UuidTable, sector);
    let bytes = crate::read_or_report(image, place, sector, usize::from(key.size) * 512, findings)?;
    let slots = if old {
        uuid::parse_old(&bytes).map(Iterator::collect::<Vec<_>>)
    } else {
        uuid::parse(&bytes).map(Iterator::collect::<Vec<_>>)
    };
    match slots {
        Ok(slots) => {
            let seal = header.table.filter(|_| !old);
            if let Some((wanted, found)) = seal.map(|seal| (seal.sum, checksum(&bytes)))
                && wanted != found
            {
                findings.error(place, DamageKind::UuidTableSum { wanted, found });
            }
            let doubted = uuid::doubted(set, &slots, seal);
            report_doubted(&slots, &doubted, place, findings);
            Some(UuidTable { slots, doubted, is_ours: seal.is_some() })
        }
        Err(error) => {
            findings.error(place, DamageKind::UuidTable(error));
            None
        }
    }
}

/// Reports doubted slots. Duplicates are reported with both of their inodes.
fn report_doubted(
    slots: &[UuidSlot],
    doubted: &BTreeMap<Inode, SlotMismatch>,
    place: Location,
    findings: &mut Findings,
) {
    for number in
        doubted.iter().filter(|(_, doubt)| **doubt != SlotMismatch::Twice).map(|(number, _)| number.0)
    {
        let uuid = slots[number as usize].uuid;
        findings.error(place, DamageKind::DoubtedSlot { number, uuid });
    }
    let mut seen = BTreeMap::new();
    for (index, slot) in (0_u32..).zip(slots).filter(|(_, slot)| slot.is_used()) {
        if let Some(first) = seen.insert(slot.uuid, index) {
            findings.error(place, DamageKind::DuplicateUuid { uuid: slot.uuid, first, second: index });
        }
    }
}

/// Reads the superblock of the cache device; `None` if there is no usable set.
pub(crate) fn read_cache(image: &dyn ReadAt, findings: &mut Findings) -> Option<CacheSuperblock> {
    let place = Location::cache(Structure::Superblock, SUPERBLOCK_SECTOR);
    match read_superblock(image, place, findings)? {
        Superblock::Cache(superblock) => Some(superblock),
        Superblock::Backing(_) => {
            findings.error(place, DamageKind::NotACache);
            None
        }
    }
}

/// Reads the superblocks of backing devices; `None` for each that does not belong to this set.
pub(crate) fn read_backings(
    images: &[&dyn ReadAt],
    cache: &CacheSuperblock,
    findings: &mut Findings,
) -> Vec<Option<BackingDevice>> {
    let one = |(index, image): (usize, &&dyn ReadAt)| {
        let place = Location::backing(index);
        let superblock = match read_superblock(*image, place, findings)? {
            Superblock::Backing(superblock) => superblock,
            Superblock::Cache(_) => {
                findings.error(place, DamageKind::NotABacking);
                return None;
            }
        };
        if superblock.state() == BackingState::None {
            return None;
        }
        if superblock.set_uuid() != cache.set_uuid() {
            findings.warn(place, DamageKind::OtherSet { found: superblock.set_uuid() });
            return None;
        }
        let (wanted, found) = (cache.block_sectors(), superblock.block_sectors());
        if found < wanted {
            findings.error(place, DamageKind::BackingBlockTooSmall { wanted, found });
        }
        Some(BackingDevice { superblock, sectors: image.sectors() })
    };
    images.iter().enumerate().map(one).collect()
}

fn read_superblock(image: &dyn ReadAt, place: Location, findings: &mut Findings) -> Option<Superblock> {
    let bytes = crate::read_or_report(image, place, SUPERBLOCK_SECTOR, SUPERBLOCK_BYTES, findings)?;
    let facts = DeviceGeometry { sectors: image.sectors(), logical_block_sectors: 1 };
    match RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts)) {
        Ok(superblock) => Some(superblock),
        Err(error) => {
            findings.error(place, DamageKind::Superblock(error));
            None
        }
    }
}

/// Joins the volumes of the table with the backing devices.
pub(crate) fn join(
    table: &UuidTable,
    header: &JsetHeader,
    backings: &[Option<BackingDevice>],
    findings: &mut Findings,
) -> BTreeMap<Inode, Volume> {
    let mut volumes = BTreeMap::new();
    // As in the engine, a slot that differs from what was written makes no volume. Of two slots
    // with the same uuid, one is right.
    let is_believed =
        |number: &Inode| table.doubted.get(number).is_none_or(|doubt| *doubt == SlotMismatch::Twice);
    for (number, slot) in (0..).map(Inode).zip(&table.slots).filter(|(_, slot)| !slot.is_free()) {
        if is_believed(&number) {
            volumes.insert(number, Volume::of_slot(number.0, slot));
        }
    }
    // A backing device may still know an inode that the table has lost, provided that it belongs to
    // no volume.
    let mut proven = BTreeSet::new();
    for superblock in backings.iter().flatten().map(|backing| &backing.superblock) {
        let Some(Attachment { number, .. }) = superblock.attachment() else { continue };
        let is_its = |(number, slot): (u32, &UuidSlot)| {
            slot.uuid == superblock.uuid() && !table.doubted.contains_key(&Inode(number))
        };
        let is_named = (0..).zip(&table.slots).any(is_its);
        if !is_named && table.is_unowned(number) && proven.insert(number) {
            let slot = UuidSlot { uuid: superblock.uuid(), label: superblock.label(), ..UuidSlot::FREE };
            volumes.retain(|_, volume| volume.uuid != slot.uuid);
            volumes.insert(number, Volume::of_slot(number.0, &slot));
        }
    }
    for (index, backing) in backings.iter().enumerate() {
        let Some(backing) = backing else { continue };
        let uuid = backing.superblock.uuid();
        let known = volumes.values_mut().find(|volume| volume.uuid == uuid && !volume.invalidated);
        if let Some(volume) = known {
            let place = Location::backing(index);
            report_older_copies(&backing.superblock, (Inode(volume.inode), table), header, place, findings);
            volume.start = backing.superblock.data_offset();
            volume.end = Some(backing.sectors);
            volume.state = Some(state_name(backing.superblock.state()));
            volume.claims_clean = backing.claims_clean();
            volume.backing = Some(index);
        } else if backing.superblock.state() == BackingState::Dirty {
            findings.error(Location::backing(index), DamageKind::DirtyButUnknown { uuid });
        }
    }
    volumes
}

fn is_attached(superblock: &BackingSuperblock) -> bool {
    matches!(superblock.state(), BackingState::Clean | BackingState::Dirty)
}

/// Reports older copies. A backing device and a cache that bcached used together agree about the
/// attachment, unless one of them is an older copy.
fn report_older_copies(
    backing: &BackingSuperblock,
    (number, table): (Inode, &UuidTable),
    header: &JsetHeader,
    place: Location,
    findings: &mut Findings,
) {
    let Some(attachment) = backing.attachment().filter(|_| is_attached(backing)) else { return };
    if attachment.entry > header.seq {
        findings.error(place, DamageKind::OlderCache { entry: attachment.entry, newest: header.seq });
        return;
    }
    let is_dirty = backing.state() == BackingState::Dirty;
    let contradicts = table.slot(number).is_some_and(|slot| slot.contradicts(number, &attachment, is_dirty));
    if table.is_ours && contradicts {
        findings.error(place, DamageKind::OlderBacking);
    }
}

const fn state_name(state: BackingState) -> &'static str {
    match state {
        BackingState::None => "none",
        BackingState::Clean => "clean",
        BackingState::Dirty => "dirty",
        BackingState::Stale => "stale",
    }
}

impl BackingDevice {
    /// Returns true if the device's state says that dirty extents do not differ from it.
    pub fn claims_clean(&self) -> bool {
        matches!(self.superblock.state(), BackingState::None | BackingState::Clean)
    }

    /// Returns true if clean data in the cache may be read: in the other states the next start
    /// voids it.
    pub fn uses_copies(&self) -> bool {
        matches!(self.superblock.state(), BackingState::Clean | BackingState::Dirty)
    }

    /// Returns true if cached data must not be used any more.
    pub fn is_stale(&self) -> bool {
        self.superblock.state() == BackingState::Stale
    }
}

/// Returns whether an extent's data in the cache equals that of the backing device. Unreadable data
/// is reported.
pub(crate) fn equals_backing(
    cache: &dyn ReadAt,
    backing: (usize, &dyn ReadAt),
    key: &Key,
    findings: &mut Findings,
) -> Option<bool> {
    let (index, image) = backing;
    let bytes = usize::from(key.size) * 512;
    let sector = key.pointers.as_slice().first()?.sector();
    let cached =
        crate::read_or_report(cache, Location::cache(Structure::Content, sector), sector, bytes, findings)?;
    let place = Location {
        device: Device::Backing(index),
        structure: Structure::Content,
        sector: Some(key.start()),
        node: None,
    };
    let below = crate::read_or_report(image, place, key.start(), bytes, findings)?;
    debug_assert_eq!(sectors(bytes), key.sectors(), "a sector is 512 bytes");
    Some(cached == below)
}
