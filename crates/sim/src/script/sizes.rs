//! Geometry and tuning in a script: one line for each value, in a fixed order. This module writes
//! and reads them.

use super::limits::{
    BATCH_SECTORS, BUCKET_SECTORS, BUCKETS, DELAY_MS, LATENCY_US, NODE_BUDGET_MIB, NODE_READ_US,
    NOTE_RECORDS, PARKED, VOLUME_SECTORS, VOLUMES_MAX,
};
use super::parse::{ScriptErrorKind, ScriptReader, number, value};
use super::yes;
use crate::system::Geometry;
use crate::system::policy::VolumePolicy;
use crate::system::tuning::{
    CUTOFF_CACHE_ADD, CUTOFF_WRITEBACK, DeviceTuning, SUMMARY_SHARE, SetTuning, Tuning,
};
use std::fmt;

const VOLUMES: &str = "volume-sectors";
/// Sizes of flash-only volumes; the line is omitted if there are none.
const LODGERS: &str = "lodger-sectors";
// These lines are omitted if they have the default value.
const NODE_READ: &str = "node-read-us";
const REPLACEMENT: &str = "replacement";
const ZEROING: &str = "backing-zeroing";
const SHARE: &str = "summary-share";
const CACHE_ADD: &str = "cutoff-cache-add";
const WRITEBACK: &str = "cutoff-writeback";

/// Writes the lines of `geometry`.
pub(super) fn write(f: &mut fmt::Formatter<'_>, geometry: &Geometry) -> fmt::Result {
    let volumes: Vec<String> = geometry.volumes.iter().map(u64::to_string).collect();
    writeln!(f, "block-sectors {}", geometry.block_sectors)?;
    writeln!(f, "set-block-sectors {}", geometry.set_block_sectors)?;
    writeln!(f, "bucket-sectors {}", geometry.bucket_sectors)?;
    writeln!(f, "buckets {}", geometry.buckets)?;
    writeln!(f, "{VOLUMES} {}", volumes.join(" "))?;
    if !geometry.lodgers.is_empty() {
        let lodgers: Vec<String> = geometry.lodgers.iter().map(u64::to_string).collect();
        writeln!(f, "{LODGERS} {}", lodgers.join(" "))?;
    }
    writeln!(f, "torn-sectors {}", geometry.torn_sectors)?;
    writeln!(f, "backing-volatile {}", yes(geometry.backing_volatile))?;
    writeln!(f, "cache-volatile {}", yes(geometry.cache_volatile))?;
    writeln!(f, "note-records {}", geometry.note_records)?;
    let Tuning { devices, set } = &geometry.tuning;
    writeln!(f, "cache-fua-flushes {}", yes(devices.cache_fua_flushes))?;
    writeln!(f, "backing-fua-flushes {}", yes(devices.backing_fua_flushes))?;
    writeln!(f, "cache-latency-us {}", devices.cache_latency_us)?;
    writeln!(f, "backing-latency-us {}", devices.backing_latency_us)?;
    unless(f, NODE_READ, devices.node_read_us, 0)?;
    writeln!(f, "discard {}", yes(devices.discard))?;
    writeln!(f, "backing-discard {}", yes(devices.backing_discard))?;
    unless(f, ZEROING, devices.backing_zeroing, 0)?;
    writeln!(f, "first-mode {}", devices.first_mode)?;
    unless(f, REPLACEMENT, devices.replacement, 0)?;
    writeln!(f, "node-budget-mib {}", set.node_budget_mib)?;
    writeln!(f, "journal-delay-ms {}", set.journal_delay_ms)?;
    writeln!(f, "leaf-delay-ms {}", set.leaf_delay_ms)?;
    writeln!(f, "parked-delay-ms {}", set.parked_delay_ms)?;
    writeln!(f, "parked-max {}", set.parked_max)?;
    writeln!(f, "writeback-delay-ms {}", set.writeback_delay_ms)?;
    writeln!(f, "writeback-batch-sectors {}", set.writeback_batch_sectors)?;
    writeln!(f, "writeback-running {}", yes(set.writeback_running))?;
    writeln!(f, "writeback-percent {}", set.writeback_percent)?;
    unless(f, SHARE, set.summary_share, SUMMARY_SHARE)?;
    unless(f, CACHE_ADD, set.cutoff_cache_add, CUTOFF_CACHE_ADD)?;
    unless(f, WRITEBACK, set.cutoff_writeback, CUTOFF_WRITEBACK)?;
    let plain = VolumePolicy::plain(set.has_parity());
    set.policy.values().try_for_each(|(option, value)| unless(f, option.word(), value, plain.value(option)))
}

/// Writes a line, unless its value is the one that older scripts imply, which do not have the line.
fn unless(f: &mut fmt::Formatter<'_>, key: &str, value: u64, meant: u64) -> fmt::Result {
    if value == meant { Ok(()) } else { writeln!(f, "{key} {value}") }
}

impl ScriptReader<'_> {
    /// Parses the geometry of a set that can be made.
    pub(super) fn geometry(&mut self) -> Result<Geometry, ScriptErrorKind> {
        let block_sectors = self.one_of("block-sectors", &[1, 8])?;
        let set_block_sectors = self.one_of("set-block-sectors", &[1, 2, 4, 8])?;
        if set_block_sectors < block_sectors {
            return Err(value("set-block-sectors", "at least block-sectors", set_block_sectors));
        }
        let bucket_sectors = self.number("bucket-sectors", BUCKET_SECTORS)?;
        if !bucket_sectors.is_power_of_two() || bucket_sectors < 2 * set_block_sectors {
            return Err(value("bucket-sectors", "a power of two, and two blocks or more", bucket_sectors));
        }
        let buckets = self.number("buckets", BUCKETS)?;
        let volumes = self.volumes(VOLUMES, block_sectors)?;
        let lodgers = self.may_be(|reader| reader.volumes(LODGERS, set_block_sectors))?.unwrap_or_default();
        if volumes.len() + lodgers.len() > VOLUMES_MAX {
            return Err(ScriptErrorKind::TooMuch(format!("{VOLUMES_MAX} volumes")));
        }
        let torn_sectors = self.one_of("torn-sectors", &[1, 8])?;
        if torn_sectors < block_sectors {
            return Err(value("torn-sectors", "at least block-sectors", torn_sectors));
        }
        Ok(Geometry {
            block_sectors,
            set_block_sectors,
            bucket_sectors,
            buckets,
            volumes,
            lodgers,
            torn_sectors: u64::from(torn_sectors),
            backing_volatile: self.is("backing-volatile")?,
            cache_volatile: self.is("cache-volatile")?,
            note_records: self.number("note-records", NOTE_RECORDS)?,
            tuning: Tuning { devices: self.device_tuning()?, set: self.set_tuning()? },
        })
    }

    fn volumes(&mut self, key: &'static str, block_sectors: u32) -> Result<Vec<u64>, ScriptErrorKind> {
        let block = u64::from(block_sectors);
        let size = |word| {
            let sectors: u64 = number(key, word, VOLUME_SECTORS)?;
            let whole = sectors.is_multiple_of(block).then_some(sectors);
            whole.ok_or_else(|| value(key, "whole blocks", sectors))
        };
        let words = self.field(key)?.split(' ').take(VOLUMES_MAX + 1);
        let volumes = words.map(size).collect::<Result<Vec<u64>, _>>()?;
        if volumes.len() > VOLUMES_MAX {
            return Err(ScriptErrorKind::TooMuch(format!("{VOLUMES_MAX} volumes")));
        }
        Ok(volumes)
    }

    fn device_tuning(&mut self) -> Result<DeviceTuning, ScriptErrorKind> {
        Ok(DeviceTuning {
            cache_fua_flushes: self.is("cache-fua-flushes")?,
            backing_fua_flushes: self.is("backing-fua-flushes")?,
            cache_latency_us: self.number("cache-latency-us", LATENCY_US)?,
            backing_latency_us: self.number("backing-latency-us", LATENCY_US)?,
            node_read_us: self.number_or(NODE_READ, 0, NODE_READ_US)?,
            discard: self.is("discard")?,
            backing_discard: self.is("backing-discard")?,
            backing_zeroing: self.number_or(ZEROING, 0, 0..=3)?,
            first_mode: self.number("first-mode", 0..=5)?,
            replacement: self.number_or(REPLACEMENT, 0, 0..=2)?,
        })
    }

    fn set_tuning(&mut self) -> Result<SetTuning, ScriptErrorKind> {
        let mut set = SetTuning {
            node_budget_mib: self.number("node-budget-mib", NODE_BUDGET_MIB)?,
            journal_delay_ms: self.number("journal-delay-ms", DELAY_MS)?,
            leaf_delay_ms: self.number("leaf-delay-ms", DELAY_MS)?,
            parked_delay_ms: self.number("parked-delay-ms", DELAY_MS)?,
            parked_max: self.number("parked-max", PARKED)?,
            writeback_delay_ms: self.number("writeback-delay-ms", DELAY_MS)?,
            writeback_batch_sectors: self.number("writeback-batch-sectors", BATCH_SECTORS)?,
            writeback_running: self.is("writeback-running")?,
            writeback_percent: self.number("writeback-percent", 0..=100)?,
            summary_share: self.number_or(SHARE, SUMMARY_SHARE, 0..=1 << 16)?,
            cutoff_cache_add: self.number_or(CACHE_ADD, CUTOFF_CACHE_ADD, 0..=100)?,
            cutoff_writeback: self.number_or(WRITEBACK, CUTOFF_WRITEBACK, 0..=100)?,
            policy: VolumePolicy::plain(false),
        };
        let mut policy = VolumePolicy::plain(set.has_parity());
        for (option, plain) in policy.values() {
            policy =
                policy.with(option, self.number_or(option.word(), plain, option.least()..=option.most())?);
        }
        set.policy = policy;
        Ok(set)
    }
}
