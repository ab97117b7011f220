//! The layout of the tree. Names and links are the kernel's, relative to the mount:
//!
//! ```text
//!   fs/bcache/SET/                            a set, by its UUID
//!   fs/bcache/SET/cache0 -> ../../../block/CDEV/bcache
//!   fs/bcache/SET/bdevN -> ../../../block/BDEV/bcache
//!   fs/bcache/SET/volumeN -> ../../../block/bcacheM/bcache
//!   block/CDEV/bcache/set -> ../../../fs/bcache/SET
//!   block/BDEV/bcache/cache -> ../../../fs/bcache/SET
//!   block/BDEV/bcache/dev -> ../../bcacheM
//!   block/bcacheM/bcache -> ../BDEV/bcache    a directory for a flash-only volume
//! ```
//!
//! BDEV and CDEV are the kernel's names of the devices, with partitions beside disks; for a file it
//! is the file's name. If a name is taken, a number is appended. Only what is served appears: open
//! sets and usable volumes.

use super::files::{self, File, SetView, VolumeView, WrittenBytes};
use bcached_control::hardware::DeviceName;
use bcached_control::statistics::{RequestCounts, RequestWindows};
use bcached_control::status::Status;
use std::collections::BTreeSet;

/// Everything in the tree, as it was at one moment.
pub struct TreeSnapshot {
    pub status: Status,
    /// Names of the devices of caches and volumes, in the order of the status; `None` if the device
    /// does not appear.
    caches: Vec<Option<String>>,
    backings: Vec<Option<String>>,
}

/// A directory, link or file.
#[derive(Clone, Debug)]
pub enum Node {
    Directory(Directory),
    Link(String),
    File(FileOwner, Content),
}

/// The content of a file.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    /// As in one of the tables.
    Listed(&'static File),
    /// Major and minor number.
    Number(Option<(u32, u32)>),
    /// A number of sectors.
    Sectors(u64),
}

/// What a file or a directory belongs to, by its index in the status.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FileOwner {
    Nobody,
    Cache(usize),
    /// The device of a cache.
    CacheDevice(usize),
    Volume(usize),
    /// The statistics of either, in one of the [`Window`]s.
    CacheCounts(usize, Window),
    VolumeCounts(usize, Window),
}

/// One of the directories of statistics.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Window {
    Total,
    Day,
    Hour,
    FiveMinute,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Directory {
    Top,
    Fs,
    /// The directory of the sets.
    Sets,
    Set(usize),
    Internal(usize),
    Stats(FileOwner),
    Block,
    /// `bcacheN`.
    Device(usize),
    /// The `bcache` of a flash-only volume.
    Flash(usize),
    /// A backing device.
    Backing(usize),
    OfBacking(usize),
    /// A cache device.
    Cache(usize),
    OfCache(usize),
}

type NamedNode = (String, Node);

impl Window {
    const ALL: [Self; 4] = [Self::Total, Self::Day, Self::Hour, Self::FiveMinute];

    const fn name(self) -> &'static str {
        match self {
            Self::Total => "stats_total",
            Self::Day => "stats_day",
            Self::Hour => "stats_hour",
            Self::FiveMinute => "stats_five_minute",
        }
    }

    /// Returns the statistics of this window.
    pub const fn of(self, windows: &RequestWindows) -> RequestCounts {
        match self {
            Self::Total => windows.total,
            Self::Day => windows.day,
            Self::Hour => windows.hour,
            Self::FiveMinute => windows.five_minute,
        }
    }
}

impl TreeSnapshot {
    pub fn new(status: Status) -> Self {
        let is_open = |index: &usize| set(&status, *index).is_some();
        let mut taken: BTreeSet<String> =
            status.volumes.iter().map(|volume| volume.kernel_name.clone()).collect();
        let mut name = |device: Option<&DeviceName>| {
            let wanted = device?.name.replace('/', "!");
            let wanted =
                if matches!(wanted.as_str(), "" | "." | "..") { "device".to_owned() } else { wanted };
            let others = (2..).map(|number| format!("{wanted}-{number}"));
            let free = std::iter::once(wanted.clone()).chain(others).find(|name| !taken.contains(name))?;
            taken.insert(free.clone());
            Some(free)
        };
        let caches = (0..status.caches.len())
            .map(|index| name(status.caches[index].hardware.as_ref().filter(|_| is_open(&index))))
            .collect();
        let backings = (0..status.volumes.len())
            .map(|index| {
                let device = status.volumes[index].hardware.as_ref().map(|(device, _)| device);
                name(device.filter(|_| member(&status, index).is_some()))
            })
            .collect();
        Self { status, caches, backings }
    }

    pub fn set(&self, index: usize, cleared: WrittenBytes) -> Option<SetView<'_>> {
        set(&self.status, index).map(|set| SetView { cleared, ..set })
    }

    pub fn member(&self, index: usize) -> Option<VolumeView<'_>> {
        member(&self.status, index)
    }

    /// Returns what is at `path`, which has no slashes at its ends.
    pub fn find(&self, path: &str) -> Option<Node> {
        path.split('/').filter(|name| !name.is_empty()).try_fold(
            Node::Directory(Directory::Top),
            |at, name| {
                let Node::Directory(directory) = at else { return None };
                let mut listed = self.list(directory).into_iter();
                listed.find(|(listed, _)| listed == name).map(|(_, node)| node)
            },
        )
    }

    pub fn list(&self, directory: Directory) -> Vec<NamedNode> {
        match directory {
            Directory::Top => {
                vec![named("block", Directory::Block), named("fs", Directory::Fs)]
            }
            Directory::Fs => vec![named("bcache", Directory::Sets)],
            Directory::Sets => self.sets(),
            Directory::Set(cache) => self.of_set(cache),
            Directory::Internal(cache) => listed(FileOwner::Cache(cache), files::INTERNAL),
            Directory::Stats(of) => listed(of, files::STATS),
            Directory::Block => self.block(),
            Directory::Device(volume) => self.device(volume),
            Directory::Flash(volume) => {
                let mut all = listed(FileOwner::Volume(volume), files::FLASH);
                all.extend(self.link_to_set(volume));
                all
            }
            Directory::Backing(volume) => self.backing(volume),
            Directory::OfBacking(volume) => self.of_backing(volume),
            Directory::Cache(cache) => {
                let number = self.status.caches[cache].hardware.as_ref().and_then(|device| device.number);
                let sectors = self.set(cache, WrittenBytes::default());
                let sectors = sectors.map_or(0, |set| set.counts.buckets * (set.counts.bucket_bytes / 512));
                device(number, sectors, Node::Directory(Directory::OfCache(cache)))
            }
            Directory::OfCache(cache) => {
                let mut all = listed(FileOwner::CacheDevice(cache), files::CACHE);
                let set = self.set(cache, WrittenBytes::default());
                all.extend(set.map(|set| link("set", format!("../../../fs/bcache/{}", set.counts.set_uuid))));
                all
            }
        }
    }

    fn sets(&self) -> Vec<NamedNode> {
        let mut all = listed(FileOwner::Nobody, files::TOP);
        let sets = (0..self.status.caches.len()).filter_map(|index| {
            let set = self.set(index, WrittenBytes::default())?;
            Some(named(&set.counts.set_uuid, Directory::Set(index)))
        });
        all.extend(sets);
        all
    }

    fn of_set(&self, cache: usize) -> Vec<NamedNode> {
        let mut all = listed(FileOwner::Cache(cache), files::SET);
        all.push(named("internal", Directory::Internal(cache)));
        all.extend(
            Window::ALL
                .map(|window| named(window.name(), Directory::Stats(FileOwner::CacheCounts(cache, window)))),
        );
        let to = |name: &str| format!("../../../block/{name}/bcache");
        all.extend(self.caches[cache].as_ref().map(|name| link("cache0", to(name))));
        for index in 0..self.status.volumes.len() {
            let Some((member, slot)) = self.attached(index, cache) else { continue };
            all.extend(match &self.backings[index] {
                Some(name) => Some(link(&format!("bdev{slot}"), to(name))),
                None if member.facts.flash_only => {
                    Some(link(&format!("volume{slot}"), to(&member.volume.kernel_name)))
                }
                None => None,
            });
        }
        all
    }

    /// Returns the volume and its number in that set, if it belongs to it.
    fn attached(&self, index: usize, cache: usize) -> Option<(VolumeView<'_>, u32)> {
        let member = self.member(index)?;
        let is_its = member.volume.cache.as_ref() == Some(&self.status.caches[cache].name);
        Some((member, member.numbers.slot?)).filter(|_| is_its)
    }

    /// Returns the index of a volume's set.
    pub fn cache_of(&self, volume: usize) -> Option<usize> {
        let name = self.status.volumes.get(volume)?.cache.as_ref()?;
        self.status.caches.iter().position(|cache| cache.name == *name)
    }

    fn link_to_set(&self, volume: usize) -> Option<NamedNode> {
        let set = self.set(self.cache_of(volume)?, WrittenBytes::default())?;
        let target = format!("../../../fs/bcache/{}", set.counts.set_uuid);
        self.member(volume)?.facts.attached.unwrap_or(true).then(|| link("cache", target))
    }

    fn block(&self) -> Vec<NamedNode> {
        let mut all = Vec::new();
        let named_all = |names: &[Option<String>], make: fn(usize) -> Directory| -> Vec<NamedNode> {
            let some = names.iter().enumerate().filter_map(|(index, name)| Some((index, name.as_ref()?)));
            some.map(|(index, name)| named(name, make(index))).collect()
        };
        all.extend(named_all(&self.caches, Directory::Cache));
        all.extend(named_all(&self.backings, Directory::Backing));
        let volumes =
            (0..self.status.volumes.len()).filter_map(|index| self.member(index).map(|it| (index, it)));
        all.extend(volumes.map(|(index, it)| named(&it.volume.kernel_name, Directory::Device(index))));
        all
    }

    /// The content of `bcacheN`. It has no device number, as it is no device of the kernel.
    fn device(&self, index: usize) -> Vec<NamedNode> {
        let sectors = self.member(index).map_or(0, |member| member.facts.size_bytes / 512);
        let bcache = match &self.backings[index] {
            Some(name) => Node::Link(format!("../{name}/bcache")),
            None => Node::Directory(Directory::Flash(index)),
        };
        device(None, sectors, bcache)
    }

    fn backing(&self, index: usize) -> Vec<NamedNode> {
        let hardware = self.status.volumes[index].hardware.as_ref();
        let number = hardware.and_then(|(device, _)| device.number);
        let offset = hardware.map_or(0, |(_, offset)| *offset);
        let sectors = self.member(index).map_or(0, |member| member.facts.size_bytes / 512 + offset);
        device(number, sectors, Node::Directory(Directory::OfBacking(index)))
    }

    fn of_backing(&self, index: usize) -> Vec<NamedNode> {
        let mut all = listed(FileOwner::Volume(index), files::BACKING);
        all.extend(
            Window::ALL
                .map(|window| named(window.name(), Directory::Stats(FileOwner::VolumeCounts(index, window)))),
        );
        all.push(link("dev", format!("../../{}", self.status.volumes[index].kernel_name)));
        all.extend(self.link_to_set(index));
        all
    }
}

/// Returns a set if it is open.
fn set(status: &Status, index: usize) -> Option<SetView<'_>> {
    let cache = status.caches.get(index).filter(|cache| cache.state == "open")?;
    let counts = cache.counts.as_ref()?;
    Some(SetView { cache, counts, numbers: counts.numbers.as_ref()?, cleared: WrittenBytes::default() })
}

/// Returns a volume if it is served.
fn member(status: &Status, index: usize) -> Option<VolumeView<'_>> {
    let volume = status.volumes.get(index)?;
    let facts = volume.facts.as_ref()?;
    Some(VolumeView { volume, facts, numbers: facts.numbers.as_ref()? })
}

fn named(name: &str, directory: Directory) -> NamedNode {
    (name.to_owned(), Node::Directory(directory))
}

fn link(name: &str, target: String) -> NamedNode {
    (name.to_owned(), Node::Link(target))
}

fn listed(of: FileOwner, table: &'static [File]) -> Vec<NamedNode> {
    table.iter().map(|file| (file.name.to_owned(), Node::File(of, Content::Listed(file)))).collect()
}

/// The directory of a block device.
fn device(number: Option<(u32, u32)>, sectors: u64, bcache: Node) -> Vec<NamedNode> {
    vec![
        ("bcache".to_owned(), bcache),
        ("dev".to_owned(), Node::File(FileOwner::Nobody, Content::Number(number))),
        ("size".to_owned(), Node::File(FileOwner::Nobody, Content::Sectors(sectors))),
    ]
}
