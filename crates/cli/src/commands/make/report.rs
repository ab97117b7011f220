//! The report of `make`: its text is what `make-bcache` prints, with a heading for each device if
//! there are several.

use super::MakeTarget;
use super::plan::NewSuperblock;
use crate::output::Printable;
use bcached_format::units::bytes_of;
use bcached_offline::bucket_memory;
use serde::Serialize;
use std::fmt::Write as _;

/// The devices that were (or would be) written.
#[derive(Serialize)]
pub struct MakeReport {
    dry_run: bool,
    set_uuid: String,
    devices: Vec<MadeDevice>,
}

#[derive(Serialize)]
struct MadeDevice {
    device: String,
    role: &'static str,
    uuid: String,
    version: u64,
    block_bytes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    wiped_signatures: Vec<String>,
    /// It carries no known signature, but is not empty.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    holds_unknown_data: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    #[serde(skip)]
    overwrites: Option<String>,
    #[serde(flatten)]
    kind: RoleDetails,
}

#[derive(Serialize)]
#[serde(untagged)]
enum RoleDetails {
    Cache {
        bucket_bytes: u64,
        buckets: u64,
        /// The memory of the bucket table while the cache is served.
        bucket_table_bytes: u64,
        first_bucket: u64,
        discard: bool,
        replacement: &'static str,
    },
    Backing {
        data_offset_bytes: u64,
        cache_mode: &'static str,
        label: String,
    },
}

impl MakeReport {
    /// Describes `planned`, which correspond to `targets` one by one.
    pub fn new(planned: &[NewSuperblock], targets: &[MakeTarget], dry_run: bool) -> Self {
        let set_uuid = match planned.first() {
            Some(NewSuperblock::Cache(cache)) => cache.set_uuid().to_string(),
            Some(NewSuperblock::Backing(backing)) => backing.set_uuid().to_string(),
            None => String::new(),
        };
        let devices = planned.iter().zip(targets).map(|(planned, target)| device(planned, target)).collect();
        Self { dry_run, set_uuid, devices }
    }

    /// Returns what the user should know about devices that were made as asked for.
    pub fn warnings(&self) -> Vec<String> {
        self.devices.iter().flat_map(|made| made.overwrites.iter().chain(&made.warning).cloned()).collect()
    }
}

fn device(planned: &NewSuperblock, target: &MakeTarget) -> MadeDevice {
    let (uuid, version, block_sectors, kind) = match planned {
        NewSuperblock::Cache(cache) => (
            cache.uuid(),
            cache.version(),
            cache.block_sectors(),
            RoleDetails::Cache {
                bucket_bytes: bytes_of(cache.bucket_sectors()),
                buckets: cache.buckets(),
                bucket_table_bytes: bucket_memory::of(cache.buckets()),
                first_bucket: cache.first_bucket(),
                discard: cache.discard(),
                replacement: cache.replacement().name(),
            },
        ),
        NewSuperblock::Backing(backing) => (
            backing.uuid(),
            backing.version(),
            backing.block_sectors(),
            RoleDetails::Backing {
                data_offset_bytes: bytes_of(backing.data_offset()),
                cache_mode: backing.cache_mode().name(),
                label: backing.label().to_string(),
            },
        ),
    };
    MadeDevice {
        device: target.device.path().display().to_string(),
        role: target.role.name(),
        uuid: uuid.to_string(),
        version,
        block_bytes: bytes_of(block_sectors),
        wiped_signatures: target.cleared.erase.iter().map(|signature| signature.kind.to_string()).collect(),
        holds_unknown_data: target.cleared.unknown.is_some(),
        overwrites: target.cleared.warning(target.device.path()),
        warning: planned.warning(&target.device.path().display().to_string()),
        kind,
    }
}

impl Printable for MakeReport {
    const SCHEMA: &'static str = "bcached.make";

    fn text(&self) -> String {
        let mut text = String::new();
        if self.dry_run {
            text.push_str(
                "Nothing is written (--dry-run). The devices would become as follows, with other random \
                 UUIDs:\n",
            );
        }
        for device in &self.devices {
            // With several devices, headings tell them apart.
            if self.dry_run || self.devices.len() > 1 {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{} ({} device)", device.device, device.role);
            }
            if self.dry_run {
                for signature in &device.wiped_signatures {
                    let _ = writeln!(text, "erased first:\t\t{signature}");
                }
            }
            let _ = device.write_fields(&self.set_uuid, &mut text);
        }
        text
    }
}

impl MadeDevice {
    /// Writes sizes in sectors, as `make-bcache` prints them.
    fn write_fields(&self, set_uuid: &str, text: &mut String) -> std::fmt::Result {
        let block = self.block_bytes / 512;
        writeln!(text, "UUID:\t\t\t{}\nSet UUID:\t\t{set_uuid}\nversion:\t\t{}", self.uuid, self.version)?;
        match &self.kind {
            RoleDetails::Cache { bucket_bytes, buckets, first_bucket, .. } => writeln!(
                text,
                "nbuckets:\t\t{buckets}\nblock_size:\t\t{block}\nbucket_size:\t\t{}\nnr_in_set:\t\t1\n\
                 nr_this_dev:\t\t0\nfirst_bucket:\t\t{first_bucket}",
                bucket_bytes / 512
            ),
            RoleDetails::Backing { data_offset_bytes, cache_mode, label } => {
                writeln!(text, "block_size:\t\t{block}\ndata_offset:\t\t{}", data_offset_bytes / 512)?;
                // Not printed by `make-bcache`: the volume's name, and its initial cache mode.
                if !label.is_empty() {
                    writeln!(text, "label:\t\t\t{label}")?;
                }
                writeln!(text, "cache_mode:\t\t{cache_mode}")
            }
        }
    }
}
