//! Metrics under node_exporter's names for the kernel's bcache, for its textfile collector:
//! dashboards and alerts for the kernel's bcache work for bcached, too. The labels of devices are
//! those of the kernel: `bdev0`, `cache0`.
//!
//! There are no HELP lines: node_exporter has them, and would refuse two texts for one name.

use super::text::{Exposition, Label};
use super::{Metric, counter, gauge, tell};
use bcached_control::statistics::{CacheStatistics, RequestCounts, VolumeStatistics};
use bcached_control::status::{CacheCounts, Status, VolumeProperties, VolumeStatus};

struct SetSample<'a> {
    counts: &'a CacheCounts,
    numbers: &'a CacheStatistics,
}

struct VolumeSample<'a> {
    facts: &'a VolumeProperties,
    numbers: &'a VolumeStatistics,
}

fn of_sets<'a>() -> Vec<Metric<SetSample<'a>>> {
    vec![
        gauge("node_bcache_average_key_size_sectors", "", |set| {
            Some(set.numbers.average_key_bytes? as f64 / 512.0)
        }),
        gauge("node_bcache_btree_cache_size_bytes", "", |set| Some(set.counts.node_bytes as f64)),
        gauge("node_bcache_cache_available_percent", "", |set| {
            Some(set.numbers.cache_available_percent as f64)
        }),
        gauge("node_bcache_congested", "", |set| Some(set.counts.congested_bytes? as f64)),
        gauge("node_bcache_root_usage_percent", "", |set| Some(set.numbers.root_usage_percent as f64)),
        gauge("node_bcache_tree_depth", "", |set| Some(set.counts.tree_depth as f64)),
        gauge("node_bcache_active_journal_entries", "", |set| {
            Some(set.numbers.active_journal_entries as f64)
        }),
        gauge("node_bcache_btree_nodes", "", |set| Some(set.numbers.btree_nodes as f64)),
        gauge("node_bcache_btree_read_average_duration_seconds", "", |set| {
            Some(set.numbers.btree_read.average_us as f64 / 1e6)
        }),
        // A bucket that is being read is never reused here.
        counter("node_bcache_cache_read_races_total", "", |_| Some(0.0)),
    ]
}

fn of_members<'a>() -> Vec<Metric<VolumeSample<'a>>> {
    const fn total<'a>(member: &'a VolumeSample<'_>) -> &'a RequestCounts {
        &member.numbers.windows.total
    }
    vec![
        gauge("node_bcache_dirty_data_bytes", "", |member| {
            member.facts.dirty.dirty_bytes.map(|bytes| bytes as f64)
        }),
        gauge("node_bcache_dirty_target_bytes", "", |member| {
            Some(member.facts.writeback.as_ref()?.dirty_target_bytes as f64)
        }),
        gauge("node_bcache_writeback_rate", "", |member| {
            Some(member.facts.writeback.as_ref()?.writeback_rate_bytes? as f64)
        }),
        // node_exporter has this misspelling.
        gauge("node_bcache_writeback_rate_proportinal_term", "", |member| {
            Some(member.numbers.writeback_proportional_bytes as f64)
        }),
        gauge("node_bcache_writeback_rate_integral_term", "", |member| {
            Some(member.numbers.writeback_integral_bytes as f64)
        }),
        gauge("node_bcache_writeback_change", "", |member| {
            Some(member.numbers.writeback_change_bytes as f64)
        }),
        counter("node_bcache_bypassed_bytes_total", "", |member| Some(total(member).bypassed_bytes as f64)),
        counter("node_bcache_cache_hits_total", "", |member| Some(total(member).hits as f64)),
        counter("node_bcache_cache_misses_total", "", |member| Some(total(member).misses as f64)),
        counter("node_bcache_cache_bypass_hits_total", "", |member| Some(total(member).bypass_hits as f64)),
        counter("node_bcache_cache_bypass_misses_total", "", |member| {
            Some(total(member).bypass_misses as f64)
        }),
        counter("node_bcache_cache_miss_collisions_total", "", |member| {
            Some(total(member).miss_collisions as f64)
        }),
        // The kernel has not read ahead since 6.0; neither does bcached.
        counter("node_bcache_cache_readaheads_total", "", |_| Some(0.0)),
    ]
}

fn of_devices<'a>() -> Vec<Metric<SetSample<'a>>> {
    vec![
        // The kernel shows the errors that have not faded.
        gauge("node_bcache_io_errors", "", |set| Some(set.numbers.io_errors_recent as f64)),
        counter("node_bcache_metadata_written_bytes_total", "", |set| {
            Some(set.numbers.written_of(false) as f64)
        }),
        counter("node_bcache_written_bytes_total", "", |set| Some(set.numbers.written_of(true) as f64)),
        gauge("node_bcache_priority_stats_unused_percent", "", |set| Some(set.numbers.unused_percent as f64)),
        gauge("node_bcache_priority_stats_metadata_percent", "", |set| {
            Some(set.numbers.metadata_percent as f64)
        }),
    ]
}

/// Returns all metrics under node_exporter's names.
#[must_use]
pub fn text(status: &Status) -> String {
    let mut text = Exposition::default();
    let sets: Vec<_> = status
        .caches
        .iter()
        .filter_map(|cache| {
            let counts = cache.counts.as_ref()?;
            Some((cache.name.as_str(), SetSample { counts, numbers: counts.numbers.as_ref()? }))
        })
        .collect();
    let labelled = |device: Option<Label<'static>>| {
        let label = move |(_, set): &'_ (&str, SetSample<'_>)| {
            let mut labels = vec![("uuid", set.counts.set_uuid.clone())];
            labels.extend(device.map(|(name, value)| (name, value.to_owned())));
            labels
        };
        sets.iter().map(label).collect::<Vec<_>>()
    };
    tell_owned(&mut text, &of_sets(), &labelled(None), sets.iter().map(|(_, set)| set));
    let members: Vec<_> = status.volumes.iter().filter_map(|volume| member(volume, &sets)).collect();
    let labels: Vec<_> = members.iter().map(|(labels, _)| labels.clone()).collect();
    tell_owned(&mut text, &of_members(), &labels, members.iter().map(|(_, member)| member));
    let labels = labelled(Some(("cache_device", "cache0")));
    tell_owned(&mut text, &of_devices(), &labels, sets.iter().map(|(_, set)| set));
    text.finish()
}

type Labels = Vec<(&'static str, String)>;

/// Returns the labels and numbers of a volume with a backing device, on an open set.
fn member<'a>(
    volume: &'a VolumeStatus,
    sets: &[(&str, SetSample<'_>)],
) -> Option<(Labels, VolumeSample<'a>)> {
    let facts = volume.facts.as_ref()?;
    let numbers = facts.numbers.as_ref()?;
    let (_, set) = sets.iter().find(|(name, _)| Some(*name) == volume.cache.as_deref())?;
    let number = numbers.number?;
    let labels = vec![("uuid", set.counts.set_uuid.clone()), ("backing_device", format!("bdev{number}"))];
    Some((labels, VolumeSample { facts, numbers }))
}

fn tell_owned<'a, T: 'a>(
    text: &mut Exposition,
    metrics: &[Metric<T>],
    labels: &[Labels],
    things: impl Iterator<Item = &'a T>,
) {
    let things: Vec<(Vec<Label<'_>>, &T)> = labels
        .iter()
        .zip(things)
        .map(|(labels, thing)| (labels.iter().map(|(name, value)| (*name, value.as_str())).collect(), thing))
        .collect();
    tell(text, metrics, &things);
}
