//! An offline checker of cache images. It reads a cache device, and backing devices if they are
//! given, and reports whether every invariant of the format holds.
//!
//! It is independent on purpose: it shares the meaning of bytes (`bcached-format`) with the engine
//! and nothing else, so that it does not repeat the engine's mistakes. It prefers simple code to
//! speed, and never writes.
//!
//! The order is that of a start: superblock, journal, priorities, root, uuid table; then the whole
//! tree, parents before children; then the journal's keys. After that every generation is known,
//! and a second pass over the leaves checks their combined content. Memory grows with the number of
//! buckets and live extents, not with the size of the device.
//!
//! `docs/format.md` lists the damage that cannot be detected.

mod buckets;
mod content;
mod damage;
mod dump;
mod extents;
mod findings;
mod image;
mod journal;
mod known;
mod search;
mod tree;
mod view;
mod volumes;

pub use buckets::Bucket;
pub use damage::{BucketUse, Damage, DamageKind, Device, Location, NodeLocation, Severity, Structure};
pub use dump::{KeyRecord, NodeRecord, Record, SetRecord, dump};
pub use findings::FindingCount;
pub use image::ReadAt;
pub use known::{Certainty, DirtyCount, HiddenRange};
pub use view::{DataSource, SetView, SourceRange};
pub use volumes::{BackingClaim, Volume};

use bcached_format::{CacheSuperblock, Geometry, SECTOR_BYTES, Uuid};
use content::ContentCheck;
use damage::as_text;
use findings::Findings;
use serde::Serialize;

/// Options of a check.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the set was stopped cleanly. If so, every clean extent must equal its backing
    /// device, unless that device says that its cached data is void. After a crash of a kernel it
    /// need not.
    pub compare_clean: bool,
    /// Number of findings kept; more are only counted.
    pub findings_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { compare_clean: false, findings_max: 1000 }
    }
}

/// The result of a check.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The cache set; `None` if there is no usable superblock.
    pub set: Option<SetSummary>,
    /// Its journal; `None` if the set was never started or has no journal.
    pub journal: Option<JournalSummary>,
    /// Its tree; `None` if it could not be walked.
    pub tree: Option<TreeSummary>,
    /// Its volumes, including those that were given up.
    pub volumes: Vec<Volume>,
    /// Its dirty data, and how far that is known.
    pub dirty: DirtyCount,
    /// Ranges of its volumes whose index is damaged.
    pub hidden: Vec<HiddenRange>,
    /// What the superblocks of backing devices that belong to the set, or may belong to it, say
    /// about their cache.
    pub claims: Vec<BackingClaim>,
    /// The findings.
    pub findings: Vec<Damage>,
    /// Number of findings that were left out.
    pub findings_left_out: u64,
    /// How often each kind was found, worst first.
    pub counts: Vec<FindingCount>,
}

/// A summary of the cache set.
#[derive(Clone, Debug, Serialize)]
pub struct SetSummary {
    /// Uuid of the cache device.
    #[serde(serialize_with = "as_text")]
    pub uuid: Uuid,
    /// Uuid of the set.
    #[serde(serialize_with = "as_text")]
    pub set_uuid: Uuid,
    /// Version of the superblock.
    pub version: u64,
    /// Whether the set was started at least once.
    pub started: bool,
    /// Block size in sectors.
    pub block_sectors: u64,
    /// Bucket size in sectors.
    pub bucket_sectors: u64,
    /// Number of buckets.
    pub buckets: u64,
}

/// A summary of the journal.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct JournalSummary {
    /// Sequence number of the newest entry.
    pub newest: u64,
    /// The oldest entry that it needs.
    pub last_seq: u64,
    /// Number of complete entries, including those of older laps.
    pub entries: u64,
    /// Number of keys that a start replays.
    pub keys_to_replay: u64,
}

/// A summary of the tree.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TreeSummary {
    /// Level of the root; 0 is a leaf.
    pub root_level: u16,
    /// Number of interior nodes.
    pub interior_nodes: u64,
    /// Number of leaves.
    pub leaves: u64,
    /// Number of sets in all nodes.
    pub sets: u64,
    /// Largest number of sets in one node.
    pub sets_max: usize,
    /// Number of nodes that could not be read.
    pub lost_nodes: u64,
}

impl Report {
    /// Returns true if no invariant is broken. There may be warnings.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.findings_left_out == 0 && self.findings.iter().all(|damage| damage.severity < Severity::Error)
    }
}

/// The report of a check, and the content that it found.
pub struct CheckResult<'a> {
    /// The report.
    pub report: Report,
    /// Every bucket of the cache device, by index; empty if the priorities could not be read.
    pub buckets: Vec<Bucket>,
    /// The content; `None` if the tree could not be walked.
    pub view: Option<SetView<'a>>,
}

/// Checks the set on `cache`, and what it says about the devices in `backings`.
#[must_use]
pub fn check<'a>(cache: &'a dyn ReadAt, backings: &'a [&'a dyn ReadAt], options: Options) -> CheckResult<'a> {
    let mut findings = Findings::new(options.findings_max);
    let mut checked = CheckResult { report: Report::new(), buckets: Vec::new(), view: None };
    if let Some(superblock) = volumes::read_cache(cache, &mut findings) {
        checked.report.set = Some(SetSummary::of(&superblock));
        // Until the first start is complete, only the superblock is valid.
        if superblock.is_synchronous() {
            if check_started(cache, backings, &superblock, options, &mut checked, &mut findings).is_none() {
                known::judge(&mut checked.report, findings.doubts(), None);
            }
        } else {
            checked.report.dirty = DirtyCount::NONE;
        }
    }
    let set = checked.report.set.as_ref().map(|set| set.set_uuid);
    checked.report.claims = volumes::claims(backings, set);
    let report = &mut checked.report;
    (report.findings, report.findings_left_out, report.counts) = findings.into_parts();
    checked
}

fn check_started<'a>(
    cache: &'a dyn ReadAt,
    backing_images: &'a [&'a dyn ReadAt],
    superblock: &CacheSuperblock,
    options: Options,
    checked: &mut CheckResult<'a>,
    findings: &mut Findings,
) -> Option<()> {
    let geometry = Geometry::of(superblock);
    let backings = volumes::read_backings(backing_images, superblock, findings);
    let journal = journal::scan(cache, &geometry, findings)?;
    let entry_place = Location::cache(Structure::Journal, journal.newest.sector);
    let found = search::newest_by_search(&journal.buckets);
    if found != Some(journal.newest.seq) {
        findings.error(entry_place, DamageKind::JournalSearch { wanted: journal.newest.seq, found });
    }
    checked.report.journal = Some(JournalSummary {
        newest: journal.newest.seq,
        last_seq: journal.newest.last_seq,
        entries: journal.buckets.iter().map(|bucket| bucket.len() as u64).sum(),
        keys_to_replay: 0,
    });
    let header = journal.header;
    // First, so that the volumes have names whatever else cannot be read.
    let sealed = (superblock.set_uuid(), &header);
    let table = volumes::read_table(cache, &geometry, sealed, journal.old_uuids, entry_place, findings)
        .unwrap_or_default();
    let mut volumes = volumes::join(&table, &header, &backings, findings);
    checked.report.volumes = volumes.values().cloned().collect();
    let (mut buckets, chain) = buckets::read_chain(cache, &geometry, &header, findings)?;
    claim_metadata(&geometry, &chain, &header, &mut buckets, findings);
    let root = tree::root(&geometry, &header.root, header.root_level, &mut buckets, entry_place, findings)?;
    let tree = tree::walk(cache, &geometry, root, &mut buckets, findings, &mut |_, _| {});
    let replay = content::replay(cache, &geometry, &journal, &mut buckets, findings);
    let judge = ContentCheck {
        image: cache,
        geometry,
        backings: &backings,
        backing_images,
        replay: &replay,
        compare_clean: options.compare_clean,
    };
    let nobodys = judge.judge(&tree, &mut buckets, &mut volumes, findings);
    if let Some(summary) = &mut checked.report.journal {
        summary.keys_to_replay = replay.count;
    }
    checked.report.tree = Some(TreeSummary::of(&tree, header.root_level));
    checked.report.volumes = volumes.into_values().collect();
    known::judge(&mut checked.report, findings.doubts(), Some((&tree, nobodys)));
    let volumes = checked.report.volumes.clone();
    let list = buckets.to_list();
    checked.view = Some(SetView::new(cache, backing_images, geometry, tree, replay, buckets, volumes));
    checked.buckets = list;
    Some(())
}

/// Marks the buckets of journal, priorities and uuid table as used: they must not be shared.
fn claim_metadata(
    geometry: &Geometry,
    chain: &[u64],
    header: &bcached_format::JsetHeader,
    buckets: &mut buckets::Buckets,
    findings: &mut Findings,
) {
    for index in 0..geometry.journal_buckets {
        let sector = geometry.sector_of(geometry.journal_bucket(index));
        buckets.claim(sector, BucketUse::Journal, Location::cache(Structure::Journal, sector), findings);
    }
    for bucket in chain {
        let sector = bucket * geometry.bucket_sectors;
        buckets.claim(
            sector,
            BucketUse::Priorities,
            Location::cache(Structure::Priorities, sector),
            findings,
        );
    }
    if let Some(pointer) = header.uuids.pointers.as_slice().first() {
        let place = Location::cache(Structure::UuidTable, pointer.sector());
        buckets.claim(pointer.sector(), BucketUse::UuidTable, place, findings);
        if bcached_format::key_check::check_uuid_key(geometry, &header.uuids).is_ok() {
            if buckets.is_live(&header.uuids) {
                buckets.raise(&header.uuids);
            } else {
                findings.error(place, DamageKind::StaleMetadata { key: header.uuids });
            }
        }
    }
}

impl Report {
    const fn new() -> Self {
        Self {
            set: None,
            journal: None,
            tree: None,
            volumes: Vec::new(),
            dirty: DirtyCount::UNKNOWN,
            hidden: Vec::new(),
            claims: Vec::new(),
            findings: Vec::new(),
            findings_left_out: 0,
            counts: Vec::new(),
        }
    }
}

impl SetSummary {
    fn of(superblock: &CacheSuperblock) -> Self {
        Self {
            uuid: superblock.uuid(),
            set_uuid: superblock.set_uuid(),
            version: superblock.version(),
            started: superblock.is_synchronous(),
            block_sectors: superblock.block_sectors(),
            bucket_sectors: superblock.bucket_sectors(),
            buckets: superblock.buckets(),
        }
    }
}

impl TreeSummary {
    fn of(tree: &tree::TreeWalk, root_level: u16) -> Self {
        Self {
            root_level,
            interior_nodes: tree.interior,
            leaves: tree.leaves.len() as u64,
            sets: tree.sets,
            sets_max: tree.sets_max,
            lost_nodes: tree.lost.len() as u64,
        }
    }
}

/// Reads from an image, and reports a failure as a finding.
fn read_or_report(
    image: &dyn ReadAt,
    place: Location,
    sector: u64,
    bytes: usize,
    findings: &mut Findings,
) -> Option<Vec<u8>> {
    let end = sector.checked_add((bytes as u64).div_ceil(SECTOR_BYTES));
    let error = if end.is_none_or(|end| end > image.sectors()) {
        "it is beyond the end of the device".to_owned()
    } else {
        let mut buffer = vec![0; bytes];
        match image.read_at(sector, &mut buffer) {
            Ok(()) => return Some(buffer),
            Err(error) => error.to_string(),
        }
    };
    findings.error(place, DamageKind::Unreadable(error));
    None
}
