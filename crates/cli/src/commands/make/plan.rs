//! Computes superblocks from options and devices: defaults, geometry, and the reasons for a
//! refusal.

use super::{DeviceRole, MakeTarget};
use crate::device::{self, Access, Device};
use crate::failure::{Failure, Kind};
use crate::flags::MakeArgs;
use crate::sizes::{self, DefaultUnit, human};
use crate::superblock;
use bcached_format::superblock::BUCKETS_MIN;
use bcached_format::superblock::SUPERBLOCK_END_SECTOR;
use bcached_format::units::{PAGE_BYTES, bytes_of};
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, Label, ReplacementPolicy,
    SUPERBLOCK_BYTES, Superblock, Uuid,
};
use bcached_offline::bucket_memory;
use bcached_offline::make_checks::random_uuid;

/// The default bucket size, that of `make-bcache`.
const BUCKET_DEFAULT: u64 = 512 << 10;

/// The largest power of two whose size in sectors fits the plain 16-bit bucket size field.
const BUCKET_MAX: u64 = 16 << 20;

/// The parsed options, not yet compared with devices. Sizes are in bytes.
pub struct MakeOptions {
    bucket: u64,
    block: Option<u64>,
    data_offset: u64,
    set_uuid: Option<Uuid>,
    label: Label,
    writeback: bool,
    discard: bool,
    replacement: ReplacementPolicy,
    serves: Option<Superblock>,
}

/// A superblock to be written.
pub enum NewSuperblock {
    /// Of a cache device.
    Cache(CacheSuperblock),
    /// Of a backing device.
    Backing(BackingSuperblock),
}

impl NewSuperblock {
    /// Returns its bytes.
    pub fn seal(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        match self {
            Self::Cache(superblock) => superblock.seal(),
            Self::Backing(superblock) => superblock.seal(),
        }
    }

    /// Returns a warning if bcached has a limitation with this superblock on `device`, although it
    /// is valid for bcache.
    pub fn warning(&self, device: &str) -> Option<String> {
        match self {
            Self::Backing(backing) if !backing.data_offset().is_multiple_of(backing.block_sectors()) => {
                let (offset, block) = (backing.data_offset(), backing.block_sectors());
                Some(format!(
                    "{device}: its data starts at sector {offset}, which is not a multiple of its block \
                     size: it is served, but never cached; with --data-offset {} it would be cached",
                    offset.next_multiple_of(block)
                ))
            }
            Self::Cache(cache) => bucket_memory::advice(cache.buckets(), cache.bucket_sectors())
                .map(|advice| format!("{device}: {advice}")),
            Self::Backing(_) => None,
        }
    }
}

impl MakeOptions {
    /// Parses the options.
    pub fn from_flags(flags: &MakeArgs) -> Result<Self, Failure> {
        let bucket = size(flags.bucket.as_deref(), "--bucket", DefaultUnit::Bytes)?.unwrap_or(BUCKET_DEFAULT);
        let block = size(flags.block.as_deref(), "--block", DefaultUnit::Bytes)?;
        power_of_two(bucket, "--bucket", PAGE_BYTES, BUCKET_MAX)?;
        if let Some(block) = block {
            power_of_two(block, "--block", 512, PAGE_BYTES)?;
        }
        let data_offset = size(flags.data_offset.as_deref(), "--data-offset", DefaultUnit::Sectors)?;
        Ok(Self {
            bucket,
            block,
            data_offset: checked_data_offset(data_offset)?,
            set_uuid: flags.cset_uuid.as_deref().map(uuid).transpose()?,
            label: label(flags)?,
            writeback: flags.writeback,
            discard: flags.discard,
            replacement: replacement(flags.cache_replacement_policy.as_deref())?,
            serves: flags.serves.as_deref().map(read_partner).transpose()?,
        })
    }
}

/// Returns the superblocks of `targets`, in their order.
pub fn plan(targets: &[MakeTarget], options: &MakeOptions) -> Result<Vec<NewSuperblock>, Failure> {
    if let Some(partner) = &options.serves {
        check_partner(targets, partner)?;
    }
    let block = block_size(targets, options)?;
    let set_uuid = match (options.set_uuid, &options.serves) {
        (Some(uuid), _) => uuid,
        // A new backing device names the set that is to cache it, as one made together with the
        // cache does.
        (None, Some(Superblock::Cache(cache))) => cache.set_uuid(),
        (None, _) => random_uuid()?,
    };
    targets
        .iter()
        .map(|target| match target.role {
            DeviceRole::Cache => cache(&target.device, set_uuid, block, options).map(NewSuperblock::Cache),
            DeviceRole::Backing => {
                backing(&target.device, set_uuid, block, options).map(NewSuperblock::Backing)
            }
        })
        .collect()
}

/// Checks that a partner has the other role. A second cache of one set would be taken for the
/// first: neither knows what is written to the other, and both would return old data.
fn check_partner(targets: &[MakeTarget], partner: &Superblock) -> Result<(), Failure> {
    let refuse = |target: &MakeTarget, role, why, next| {
        let device = target.device.path().display();
        let failure =
            Failure::new(Kind::Usage, format!("cannot make {device} a {role} for the --for device"));
        failure.why(why).next(next)
    };
    let made = |role| targets.iter().find(move |target| target.role == role);
    match partner {
        Superblock::Cache(_) => made(DeviceRole::Cache).map_or(Ok(()), |target| {
            let next = "leave out --for; `bcached replace` changes the device of a cache";
            Err(refuse(target, "cache device", "that is a cache device, too, and a set has only one", next))
        }),
        Superblock::Backing(_) if made(DeviceRole::Cache).is_some() => Ok(()),
        Superblock::Backing(_) => made(DeviceRole::Backing).map_or(Ok(()), |target| {
            let next = "name the cache that it is to use, or leave out --for";
            Err(refuse(target, "backing device", "that is a backing device, too", next))
        }),
    }
}

fn cache(
    device: &Device,
    set_uuid: Uuid,
    block: u64,
    options: &MakeOptions,
) -> Result<CacheSuperblock, Failure> {
    let refuse = || {
        Failure::new(Kind::Geometry, format!("cannot make {} a cache device", device.path().display()))
            .option("--bucket")
    };
    // The same words as those of the engine, which would refuse the set.
    if options.bucket < 2 * block {
        let smaller = format!("--block {}", short(options.bucket / 2));
        let has_room = device::length(device) / (2 * block) >= BUCKETS_MIN;
        return Err(refuse().why("a bucket must hold two blocks").next(match has_room {
            true => format!("--bucket {} fits, or {smaller}", short(2 * block)),
            false => format!("{smaller} fits"),
        }));
    }
    let buckets = device::length(device) / options.bucket;
    if buckets < BUCKETS_MIN {
        let why = format!(
            "it is too small for buckets of {}: {buckets} fit, and a set needs {BUCKETS_MIN}",
            human(options.bucket)
        );
        let least = (2 * block).max(PAGE_BYTES);
        return Err(refuse().why(why).next(match largest_bucket(device::length(device), least) {
            Some(fitting) => format!("--bucket {} fits", short(fitting)),
            None => {
                format!(
                    "it needs at least {} KiB, with --bucket {}",
                    BUCKETS_MIN * least / 1024,
                    short(least)
                )
            }
        }));
    }
    CacheSuperblock::format(CacheFormat {
        uuid: random_uuid()?,
        set_uuid,
        device_sectors: device.info().sectors,
        block_sectors: sectors16(block),
        bucket_sectors: sectors16(options.bucket),
        discard: options.discard,
        replacement: options.replacement,
    })
    .map_err(|error| refuse().why(error.to_string()))
}

fn backing(
    device: &Device,
    set_uuid: Uuid,
    block: u64,
    options: &MakeOptions,
) -> Result<BackingSuperblock, Failure> {
    let refuse =
        || Failure::new(Kind::Geometry, format!("cannot make {} a backing device", device.path().display()));
    if device::length(device) < bytes_of(options.data_offset) + block {
        return Err(refuse().why(format!(
            "it is too small: {}, and its data would start at {}",
            human(device::length(device)),
            human(bytes_of(options.data_offset))
        )));
    }
    let mut superblock = BackingSuperblock::format(BackingFormat {
        uuid: random_uuid()?,
        set_uuid,
        block_sectors: sectors16(block),
        bucket_sectors: sectors16(options.bucket),
        data_offset: (options.data_offset != SUPERBLOCK_END_SECTOR).then_some(options.data_offset),
        cache_mode: if options.writeback { CacheMode::Writeback } else { CacheMode::Writethrough },
        device_sectors: device.info().sectors,
    })
    .map_err(|error| refuse().why(error.to_string()))?;
    superblock.set_label(options.label);
    Ok(superblock)
}

/// Returns the block size of all devices: the one asked for, else 4 KiB unless the partner named by
/// `--for` has smaller blocks. A backing device's block must not be smaller than that of its set.
fn block_size(targets: &[MakeTarget], options: &MakeOptions) -> Result<u64, Failure> {
    let serves = options.serves.as_ref();
    let block = match (options.block, serves) {
        (Some(block), _) => block,
        (None, Some(Superblock::Backing(backing))) => bytes_of(backing.block_sectors()).min(PAGE_BYTES),
        (None, _) => PAGE_BYTES,
    };
    let refuse = |why: String| {
        Failure::new(Kind::Geometry, format!("cannot use a block size of {}", human(block)))
            .why(why)
            .option("--block")
    };
    for target in targets {
        let logical = bytes_of(u64::from(target.device.info().logical_block_sectors));
        if block < logical {
            let failure =
                refuse(format!("{} has blocks of {}", target.device.path().display(), human(logical)));
            return Err(if logical <= PAGE_BYTES {
                failure.next(format!("--block {} fits", short(logical)))
            } else {
                failure.next(format!("bcache has no blocks larger than {}", human(PAGE_BYTES)))
            });
        }
        if block > options.bucket && target.role == DeviceRole::Cache {
            return Err(refuse(format!("buckets have {}", human(options.bucket))));
        }
    }
    match serves {
        Some(Superblock::Backing(backing)) if block > bytes_of(backing.block_sectors()) => {
            Err(refuse(format!(
                "the --for device has blocks of {}, and those of a cache must not be larger",
                human(bytes_of(backing.block_sectors()))
            )))
        }
        Some(Superblock::Cache(cache)) if block < bytes_of(cache.block_sectors()) => Err(refuse(format!(
            "the --for cache has blocks of {}, and those of a backing device must not be smaller",
            human(bytes_of(cache.block_sectors()))
        ))),
        _ => Ok(block),
    }
}

fn size(typed: Option<&str>, option: &'static str, bare: DefaultUnit) -> Result<Option<u64>, Failure> {
    typed
        .map(|typed| sizes::parse(typed, bare))
        .transpose()
        .map_err(|error| Failure::new(Kind::Usage, format!("{option}: {error}")).option(option))
}

fn power_of_two(bytes: u64, option: &'static str, least: u64, most: u64) -> Result<(), Failure> {
    let refuse = |why: String| {
        Err(Failure::new(Kind::Geometry, format!("cannot use {option} {}", short(bytes)))
            .why(why)
            .option(option))
    };
    if !bytes.is_power_of_two() {
        return refuse("it is not a power of two".to_owned());
    }
    if bytes < least {
        return refuse(format!("the smallest is {}", short(least)));
    }
    if bytes > most {
        return refuse(format!("the largest is {}", short(most)));
    }
    Ok(())
}

/// Returns the data offset in sectors.
fn checked_data_offset(bytes: Option<u64>) -> Result<u64, Failure> {
    let Some(bytes) = bytes else { return Ok(SUPERBLOCK_END_SECTOR) };
    let refuse = |why: String| {
        Err(Failure::new(Kind::Geometry, "cannot use this data offset").why(why).option("--data-offset"))
    };
    if !bytes.is_multiple_of(512) {
        return refuse(format!("{bytes} bytes are not whole sectors of 512"));
    }
    if bytes / 512 < SUPERBLOCK_END_SECTOR {
        return refuse(format!("the superblock ends at sector {SUPERBLOCK_END_SECTOR}"));
    }
    Ok(bytes / 512)
}

fn uuid(typed: &str) -> Result<Uuid, Failure> {
    Uuid::from_text(typed).filter(|uuid| !uuid.is_nil()).ok_or_else(|| {
        Failure::new(Kind::Usage, format!("`{typed}` is not a UUID"))
            .why("a UUID has 32 hexadecimal digits, and not all are zero")
            .option("--cset-uuid")
    })
}

fn label(flags: &MakeArgs) -> Result<Label, Failure> {
    let typed = flags.label.as_deref().unwrap_or_default();
    let refuse =
        |why: &str| Failure::new(Kind::Usage, "cannot use this label").why(why.to_owned()).option("--label");
    if flags.label.is_some() {
        match flags.roles.iter().filter(|(role, _)| *role == DeviceRole::Backing).count() {
            1 => {}
            0 => return Err(refuse("labels are for backing devices, and none is made")),
            _ => return Err(refuse("several devices would get the same label: make them one by one")),
        }
    }
    if typed.chars().any(char::is_control) {
        return Err(refuse("it contains control characters"));
    }
    Label::from_text(typed).ok_or_else(|| refuse("it is longer than 32 bytes"))
}

fn replacement(typed: Option<&str>) -> Result<ReplacementPolicy, Failure> {
    match typed {
        None | Some("lru") => Ok(ReplacementPolicy::Lru),
        Some("fifo") => Ok(ReplacementPolicy::Fifo),
        Some("random") => Ok(ReplacementPolicy::Random),
        Some(other) => Err(Failure::new(Kind::Usage, format!("`{other}` is not a replacement policy"))
            .next("the policies are lru, fifo and random")
            .option("--cache-replacement-policy")),
    }
}

fn read_partner(path: &std::path::Path) -> Result<Superblock, Failure> {
    superblock::read_sound(&device::open(path, Access::Look)?).map_err(|failure| failure.option("--for"))
}

/// Returns the largest bucket size, at least `least`, with which a device has enough buckets.
fn largest_bucket(device_bytes: u64, least: u64) -> Option<u64> {
    let all = (12..=24).rev().map(|shift| 1 << shift);
    all.take_while(|bucket| *bucket >= least).find(|bucket| device_bytes / bucket >= BUCKETS_MIN)
}

/// Formats a power of two as it is typed.
fn short(bytes: u64) -> String {
    match bytes {
        _ if bytes != 0 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes != 0 && bytes.is_multiple_of(1 << 10) => format!("{}k", bytes >> 10),
        _ => bytes.to_string(),
    }
}

fn sectors16(bytes: u64) -> u16 {
    u16::try_from(bytes / 512).expect("block and bucket sizes were checked to fit")
}
