//! The properties of a block device as the kernel reports them, and which of them are bad for a
//! member of a set.

use super::Finding;
use super::system::SystemPaths;
use bcached_control::sizes::human;
use bcached_format::Superblock;
use bcached_format::units::bytes_of;
use bcached_uring::DeviceIdentity;
use std::path::{Path, PathBuf};

/// The engine ignores a reported optimal I/O size larger than this.
const OPTIMAL_MAX: u64 = 1 << 39;

/// The reported properties. A number that the kernel does not report is absent.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct DeviceProperties {
    pub(super) physical_block_bytes: Option<u64>,
    /// The driver's minimum and optimal I/O size; 0: not reported.
    pub(super) minimum_io_bytes: Option<u64>,
    pub(super) optimal_io_bytes: Option<u64>,
    pub(super) is_rotational: Option<bool>,
    /// The device has a volatile write cache: it may lose what no flush has covered.
    pub(super) has_volatile_cache: Option<bool>,
    pub(super) has_fua: Option<bool>,
    /// The offset of its first physical block from its start.
    alignment_offset: Option<u64>,
    /// For a partition: its start on the disk.
    start_sectors: Option<u64>,
    level: Option<String>,
}

impl DeviceProperties {
    /// Returns the properties of a block device; `None` for a file, for which there are none.
    pub(super) fn of(system: &SystemPaths, identity: DeviceIdentity) -> Option<Self> {
        let DeviceIdentity::Block { major, minor } = identity else { return None };
        // The link is resolved first: a partition lies in the directory of its disk, whose queue it
        // shares.
        let place = std::fs::canonicalize(system.path(&format!("/sys/dev/block/{major}:{minor}"))).ok()?;
        let disk = if place.join("partition").exists() { place.parent()?.to_owned() } else { place.clone() };
        let queue = |name: &str| text(&disk.join("queue").join(name));
        let number = |path: PathBuf| text(&path)?.parse::<u64>().ok();
        Some(Self {
            physical_block_bytes: number(disk.join("queue/physical_block_size")),
            minimum_io_bytes: number(disk.join("queue/minimum_io_size")),
            optimal_io_bytes: number(disk.join("queue/optimal_io_size")),
            is_rotational: queue("rotational").map(|text| text == "1"),
            has_volatile_cache: queue("write_cache").map(|text| text != "write through"),
            has_fua: queue("fua").map(|text| text == "1"),
            alignment_offset: number(place.join("alignment_offset")),
            start_sectors: place.join("partition").exists().then(|| number(place.join("start"))).flatten(),
            level: text(&disk.join("md/level")),
        })
    }

    /// Returns what the user should know about the device, given the superblock on it.
    pub(super) fn findings(&self, superblock: &Superblock) -> Vec<Finding> {
        let all =
            [self.blocks(superblock), self.alignment(superblock), self.optimal(), self.speed(superblock)];
        all.into_iter().flatten().chain(self.write_cache()).collect()
    }

    /// Finds blocks smaller than a physical block. The drive reads, modifies and writes back a
    /// whole physical block for such writes, of which a cache's journal consists.
    fn blocks(&self, superblock: &Superblock) -> Option<Finding> {
        let Superblock::Cache(cache) = superblock else { return None };
        let (block, physical) = (bytes_of(cache.block_sectors()), self.physical_block_bytes?);
        let text = || {
            format!(
                "blocks of {} are smaller than the drive's physical blocks of {}: each journal write costs the drive a read; use --block {}k in the next `make`",
                human(block),
                human(physical),
                physical >> 10
            )
        };
        (block < physical).then(|| Finding::new("block-size", text()))
    }

    fn alignment(&self, superblock: &Superblock) -> Option<Finding> {
        let physical = self.physical_block_bytes.filter(|bytes| *bytes > 512)?;
        let start = self.start_sectors.unwrap_or(0) * 512;
        let what = match superblock {
            _ if self.alignment_offset.is_some_and(|bytes| bytes != 0) || !start.is_multiple_of(physical) => {
                "the partition starts"
            }
            Superblock::Backing(backing)
                if !(start + bytes_of(backing.data_offset())).is_multiple_of(physical) =>
            {
                "the volume's data starts"
            }
            _ => return None,
        };
        let physical = human(physical);
        Some(Finding::new(
            "alignment",
            format!(
                "{what} inside a physical block of {physical}: a write of a whole block touches two of them; let it start at a multiple of 1 MiB"
            ),
        ))
    }

    /// Finds an implausible optimal I/O size, as USB bridges and some drives report it. bcached
    /// uses that value only for arrays with parity.
    fn optimal(&self) -> Option<Finding> {
        let optimal = self.optimal_io_bytes.filter(|bytes| *bytes > 0)?;
        let smaller = [self.physical_block_bytes, self.minimum_io_bytes].into_iter().flatten();
        let is_whole = smaller.filter(|bytes| *bytes > 0).all(|bytes| optimal.is_multiple_of(bytes));
        if is_whole && optimal <= OPTIMAL_MAX {
            return None;
        }
        let counts = match self.level.as_deref() {
            Some("raid4" | "raid5" | "raid6") => {
                "set the stripe size of the array: `bcached set VOLUME stripe_size=SIZE`"
            }
            _ => "bcached does not use this value",
        };
        Some(Finding::new(
            "optimal-io",
            format!(
                "its driver reports an optimal I/O size of {optimal} bytes, which is too large or no multiple of its blocks: {counts}"
            ),
        ))
    }

    fn speed(&self, superblock: &Superblock) -> Option<Finding> {
        let is_slow = matches!(superblock, Superblock::Cache(_)) && self.is_rotational == Some(true);
        let text = "the cache is on a rotating disk, which is no faster than the devices behind it";
        is_slow.then(|| Finding::new("rotating-cache", text.to_owned()))
    }

    fn write_cache(&self) -> Option<Finding> {
        let is_slow = self.has_volatile_cache == Some(true) && self.has_fua == Some(false);
        let text =
            "it has a volatile write cache and no FUA: each durable write costs a flush of that whole cache";
        is_slow.then(|| Finding::new("volatile-cache", text.to_owned()))
    }
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::{
        BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, ReplacementPolicy, Uuid,
    };

    /// Creates a disk 8:0 with a partition 8:1, as sysfs shows them.
    fn disk(root: &Path, queue: &[(&str, &str)], start: &str) {
        let partition = root.join("sys/devices/sda/sda1");
        std::fs::create_dir_all(&partition).expect("a folder");
        std::fs::create_dir_all(root.join("sys/devices/sda/queue")).expect("a folder");
        std::fs::create_dir_all(root.join("sys/dev/block")).expect("a folder");
        for (name, value) in queue {
            let path = root.join("sys/devices/sda/queue").join(name);
            std::fs::write(path, format!("{value}\n")).expect("a file");
        }
        for (name, value) in [("partition", "1"), ("start", start), ("alignment_offset", "0")] {
            std::fs::write(partition.join(name), value).expect("a file");
        }
        for (number, place) in [("8:0", "sda"), ("8:1", "sda/sda1")] {
            let link = root.join("sys/dev/block").join(number);
            std::os::unix::fs::symlink(root.join("sys/devices").join(place), link).expect("a link");
        }
    }

    fn kinds(root: &Path, minor: u32, superblock: &Superblock) -> Vec<&'static str> {
        let system = SystemPaths::at(root, "6.1");
        let hardware =
            DeviceProperties::of(&system, DeviceIdentity::Block { major: 8, minor }).expect("it is told of");
        hardware.findings(superblock).iter().map(|finding| finding.kind).collect()
    }

    fn cache(block_sectors: u16) -> Superblock {
        let format = CacheFormat {
            uuid: Uuid([1; 16]),
            set_uuid: Uuid([2; 16]),
            device_sectors: 1 << 20,
            block_sectors,
            bucket_sectors: 128,
            discard: false,
            replacement: ReplacementPolicy::Lru,
        };
        Superblock::Cache(CacheSuperblock::format(format).expect("a good one"))
    }

    fn backing() -> Superblock {
        let format = BackingFormat {
            uuid: Uuid([3; 16]),
            set_uuid: Uuid([2; 16]),
            block_sectors: 8,
            bucket_sectors: 128,
            data_offset: None,
            cache_mode: CacheMode::Writeback,
            device_sectors: 1 << 20,
        };
        Superblock::Backing(BackingSuperblock::format(format).expect("a good one"))
    }

    #[test]
    fn a_drive_that_is_as_it_should_be_gets_no_word() {
        let root = tempfile::tempdir().expect("a folder");
        let queue = [
            ("physical_block_size", "4096"),
            ("minimum_io_size", "4096"),
            ("optimal_io_size", "1048576"),
            ("rotational", "0"),
            ("write_cache", "write back"),
            ("fua", "1"),
        ];
        disk(root.path(), &queue, "2048");
        assert!(kinds(root.path(), 1, &cache(8)).is_empty());
        assert!(kinds(root.path(), 1, &backing()).is_empty());
    }

    #[test]
    fn what_is_wrong_with_a_drive_is_named() {
        let root = tempfile::tempdir().expect("a folder");
        let queue = [
            ("physical_block_size", "4096"),
            ("minimum_io_size", "4096"),
            // As a bridge between USB and SATA reports it.
            ("optimal_io_size", "33553920"),
            ("rotational", "1"),
            ("write_cache", "write back"),
            ("fua", "0"),
        ];
        disk(root.path(), &queue, "63");
        let all = ["block-size", "alignment", "optimal-io", "rotating-cache", "volatile-cache"];
        assert_eq!(kinds(root.path(), 1, &cache(1)), all);
        assert_eq!(kinds(root.path(), 0, &cache(8)), ["optimal-io", "rotating-cache", "volatile-cache"]);
        assert_eq!(kinds(root.path(), 1, &backing()), ["alignment", "optimal-io", "volatile-cache"]);
    }

    #[test]
    fn of_a_device_that_the_kernel_does_not_tell_of_nothing_is_said() {
        let root = tempfile::tempdir().expect("a folder");
        let system = SystemPaths::at(root.path(), "6.1");
        assert_eq!(DeviceProperties::of(&system, DeviceIdentity::Block { major: 8, minor: 9 }), None);
        assert_eq!(DeviceProperties::of(&system, DeviceIdentity::File { device: 1, inode: 1 }), None);
        assert!(DeviceProperties::default().findings(&cache(1)).is_empty());
    }
}
