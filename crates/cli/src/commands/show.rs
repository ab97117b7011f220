//! `bcached show`: prints a device's superblock; the text is that of `bcache-super-show`, byte for
//! byte.
//!
//! It describes what is there, damaged or not, so it reads the fields without validation and says
//! what does not match. Where that program crashes (a count of journal buckets that does not fit)
//! or stops (versions 5 and 6), this one continues.

use crate::device::{self, Access};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use crate::superblock::RawFields;
use bcached_format::checksum::checksum;
use bcached_format::superblock::{MAGIC, MAX_JOURNAL_BUCKETS, SUPERBLOCK_END_SECTOR};
use bcached_format::units::bytes_of;
use bcached_format::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Uuid};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// The content of a superblock's place. A field is absent if reading stopped before it.
#[derive(Serialize, Default)]
struct SuperblockReport {
    device: String,
    magic_matches: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_sector: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checksum: Option<Checksum>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    body: Option<SuperblockFields>,
}

#[derive(Serialize)]
struct Checksum {
    #[serde(serialize_with = "as_hexadecimal")]
    found: u64,
    #[serde(serialize_with = "as_hexadecimal")]
    expected: u64,
    matches: bool,
}

/// The fields of a superblock of known version.
#[derive(Serialize)]
struct SuperblockFields {
    label: String,
    #[serde(skip)]
    label_escaped: String,
    uuid: String,
    block_bytes: u64,
    bucket_bytes: u64,
    #[serde(flatten)]
    role: RoleFields,
    set_uuid: String,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum RoleFields {
    Cache(CacheFields),
    Backing(BackingFields),
}

#[derive(Serialize)]
struct CacheFields {
    first_sector: u64,
    cache_bytes: u64,
    total_bytes: u64,
    ordered: bool,
    discard: bool,
    position: u64,
    #[serde(serialize_with = "as_word")]
    replacement: NamedValue,
}

#[derive(Serialize)]
struct BackingFields {
    data_offset_bytes: u64,
    #[serde(serialize_with = "as_word")]
    cache_mode: NamedValue,
    #[serde(serialize_with = "as_word")]
    state: NamedValue,
}

/// A number, with the word of `bcache-super-show` for it, if it has one.
struct NamedValue(u64, Option<&'static str>);

fn as_word<S: serde::Serializer>(value: &NamedValue, serializer: S) -> Result<S::Ok, S::Error> {
    match value.1 {
        Some(word) => serializer.serialize_str(word),
        None => serializer.serialize_u64(value.0),
    }
}

/// Serialises as text: not every reader handles a 64-bit JSON number.
fn as_hexadecimal<S: serde::Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:016x}"))
}

/// Reads and describes the superblock.
pub fn run(flags: &flags::ShowArgs) -> Result<Report, Failure> {
    let device = device::open(&flags.device, Access::Look)?;
    let bytes = device::read(&device, bytes_of(SUPERBLOCK_SECTOR), SUPERBLOCK_BYTES)?;
    let Ok(bytes) = <&[u8; SUPERBLOCK_BYTES]>::try_from(bytes.as_slice()) else {
        return Err(not_bcache(&flags.device, "it is too short for a superblock"));
    };
    let (shown, failure) = describe(&flags.device, &RawFields::of(bytes), bytes, flags.ignore_checksum);
    let report = Report::of(&shown)?;
    Ok(match failure {
        Some(failure) => report.failing(failure),
        None => report,
    })
}

fn not_bcache(path: &Path, why: &str) -> Failure {
    Failure::new(Kind::NotBcache, format!("{} is not a bcache device", path.display())).why(why)
}

/// Describes as much as possible, and returns what stopped it.
fn describe(
    path: &Path,
    fields: &RawFields<'_>,
    bytes: &[u8; SUPERBLOCK_BYTES],
    ignore_checksum: bool,
) -> (SuperblockReport, Option<Failure>) {
    let mut shown = SuperblockReport { device: path.display().to_string(), ..SuperblockReport::default() };
    let damaged = |why: &str| {
        Failure::new(Kind::Damaged, format!("the superblock of {} is damaged", path.display())).why(why)
    };
    let raw = RawSuperblock::from_bytes(bytes).ok();
    let is_there = raw.as_ref().is_some_and(RawSuperblock::is_there);
    let is_erased = raw.as_ref().is_some_and(RawSuperblock::is_erased);
    shown.magic_matches = fields.bytes("magic") == MAGIC.0;
    if is_erased && !ignore_checksum {
        let erased = not_bcache(path, "bad magic: its superblock was erased");
        return (shown, Some(erased.next("-f shows the rest of the superblock").option("-f")));
    }
    if !is_there && !is_erased {
        return (shown, Some(not_bcache(path, "bad magic")));
    }
    if !shown.magic_matches && !ignore_checksum {
        return (shown, Some(damaged("bad magic").next("-f shows it anyway").option("-f")));
    }
    let sector = fields.number("offset");
    shown.first_sector = Some(sector);
    if sector != SUPERBLOCK_SECTOR {
        return (shown, Some(not_bcache(path, "the superblock gives another sector as its own")));
    }
    let count = fields.number("njournal_buckets");
    if count > MAX_JOURNAL_BUCKETS {
        return (shown, Some(damaged("it lists more journal buckets than fit, so it has no valid checksum")));
    }
    let summed = 208 + 8 * usize::try_from(count).expect("at most 256");
    let (found, expected) = (fields.number("csum"), checksum(&bytes[8..summed]));
    let matches = found == expected;
    shown.checksum = Some(Checksum { found, expected, matches });
    if !matches && !ignore_checksum {
        return (shown, Some(damaged("bad checksum").next("-f shows it anyway").option("-f")));
    }
    let version = fields.number("version");
    shown.version = Some(version);
    shown.body = body(version, fields);
    let unknown = shown.body.is_none().then(|| {
        Failure::new(Kind::Unsupported, format!("cannot describe {} further", path.display()))
            .why(format!("superblock version {version} is unknown"))
    });
    (shown, unknown)
}

fn body(version: u64, fields: &RawFields<'_>) -> Option<SuperblockFields> {
    let bucket_sectors = bucket_sectors(version, fields);
    let flags = fields.number("flags");
    let role = match version {
        0 | 3 | 5 => {
            let buckets = fields.number("nbuckets / data_offset");
            let first = fields.number("first_bucket");
            let policy = flags >> 2 & 7;
            RoleFields::Cache(CacheFields {
                first_sector: bucket_sectors.wrapping_mul(first),
                cache_bytes: bucket_sectors.wrapping_mul(buckets.wrapping_sub(first)).wrapping_mul(512),
                total_bytes: bucket_sectors.wrapping_mul(buckets).wrapping_mul(512),
                ordered: flags & 1 != 0,
                discard: flags & 2 != 0,
                position: fields.number("nr_this_dev"),
                replacement: named(policy, &["lru", "fifo", "random"]),
            })
        }
        1 | 4 | 6 => {
            let fixed = version == 1;
            let first = if fixed { SUPERBLOCK_END_SECTOR } else { fields.number("nbuckets / data_offset") };
            RoleFields::Backing(BackingFields {
                data_offset_bytes: first.wrapping_mul(512),
                cache_mode: named(flags & 15, &["writethrough", "writeback", "writearound", "no caching"]),
                state: named(flags >> 61 & 3, &["detached", "clean", "dirty", "inconsistent"]),
            })
        }
        _ => return None,
    };
    let label = fields.bytes("label");
    let label = &label[..label.iter().position(|byte| *byte == 0).unwrap_or(label.len())];
    Some(SuperblockFields {
        label: String::from_utf8_lossy(label).into_owned(),
        label_escaped: escaped(label),
        uuid: uuid(fields.bytes("uuid")),
        block_bytes: bytes_of(fields.number("block_size")),
        bucket_bytes: bucket_sectors.wrapping_mul(512),
        role,
        set_uuid: uuid(fields.bytes("set_uuid")),
    })
}

/// Returns the bucket size in sectors. With feature words the field may be a logarithm, or have its
/// upper half elsewhere.
fn bucket_sectors(version: u64, fields: &RawFields<'_>) -> u64 {
    let low = fields.number("bucket_size");
    let incompat = if version == 5 { fields.number("feature_incompat") } else { 0 };
    if incompat & 2 != 0 {
        1_u64.checked_shl(u32::try_from(low).expect("16 bits")).unwrap_or(0)
    } else if incompat & 1 != 0 {
        low | fields.number("bucket_size_hi") << 16
    } else {
        low
    }
}

fn named(value: u64, names: &[&'static str]) -> NamedValue {
    NamedValue(value, usize::try_from(value).ok().and_then(|index| names.get(index).copied()))
}

/// Escapes a label: letters, digits and `.-_` are kept, other bytes become `%` and their
/// hexadecimal number.
fn escaped(label: &[u8]) -> String {
    let mut text = String::new();
    for byte in label {
        if byte.is_ascii_alphanumeric() || b".-_".contains(byte) {
            text.push(char::from(*byte));
        } else {
            let _ = write!(text, "%{byte:x}");
        }
    }
    if text.is_empty() { "(empty)".to_owned() } else { text }
}

fn uuid(bytes: &[u8]) -> String {
    Uuid(bytes.try_into().expect("a uuid's field has 16 bytes")).to_string()
}

impl Printable for SuperblockReport {
    const SCHEMA: &'static str = "bcached.show";

    fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text
    }
}

impl SuperblockReport {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "sb.magic\t\t{}", if self.magic_matches { "ok" } else { "bad magic" })?;
        let Some(sector) = self.first_sector else { return Ok(()) };
        let verdict = if sector == SUPERBLOCK_SECTOR { "[match]" } else { "[expected 8]" };
        writeln!(text, "sb.first_sector\t\t{sector} {verdict}")?;
        let Some(sum) = &self.checksum else { return Ok(()) };
        if sum.matches {
            writeln!(text, "sb.csum\t\t\t{:X} [match]", sum.found)?;
        } else {
            writeln!(text, "sb.csum\t\t\t{:X} [expected {:X}]", sum.found, sum.expected)?;
        }
        let Some(version) = self.version else { return Ok(()) };
        let kind = match &self.body {
            Some(SuperblockFields { role: RoleFields::Cache(_), .. }) => "cache device",
            Some(SuperblockFields { role: RoleFields::Backing(_), .. }) => "backing device",
            None => "unknown",
        };
        writeln!(text, "sb.version\t\t{version} [{kind}]")?;
        self.body.as_ref().map_or(Ok(()), |body| body.write(text))
    }
}

impl SuperblockFields {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "\ndev.label\t\t{}\ndev.uuid\t\t{}", self.label_escaped, self.uuid)?;
        writeln!(text, "dev.sectors_per_block\t{}", self.block_bytes / 512)?;
        writeln!(text, "dev.sectors_per_bucket\t{}", self.bucket_bytes / 512)?;
        match &self.role {
            RoleFields::Cache(cache) => {
                let word = |yes| if yes { "yes" } else { "no" };
                writeln!(text, "dev.cache.first_sector\t{}", cache.first_sector)?;
                writeln!(text, "dev.cache.cache_sectors\t{}", cache.cache_bytes / 512)?;
                writeln!(text, "dev.cache.total_sectors\t{}", cache.total_bytes / 512)?;
                writeln!(text, "dev.cache.ordered\t{}", word(cache.ordered))?;
                writeln!(text, "dev.cache.discard\t{}", word(cache.discard))?;
                writeln!(text, "dev.cache.pos\t\t{}", cache.position)?;
                writeln!(text, "dev.cache.replacement\t{}", cache.replacement)?;
            }
            RoleFields::Backing(backing) => {
                writeln!(text, "dev.data.first_sector\t{}", backing.data_offset_bytes / 512)?;
                writeln!(text, "dev.data.cache_mode\t{}", backing.cache_mode)?;
                writeln!(text, "dev.data.cache_state\t{}", backing.state)?;
            }
        }
        writeln!(text, "\ncset.uuid\t\t{}", self.set_uuid)
    }
}

impl std::fmt::Display for NamedValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.1 {
            Some(word) => write!(f, "{} [{word}]", self.0),
            None => write!(f, "{}", self.0),
        }
    }
}
