//! Converts the statistics of the engine to those of the status.

use bcached_control::statistics::{
    CacheStatistics, OperationTiming, PathLatency, PriorityStats, RequestCounts, RequestWindows,
    VolumeStatistics, WITHIN_POWERS,
};
use bcached_engine::{self as engine, Histogram, Latencies, RequestPath, VolumeInfo, Window, WriteCause};
use bcached_env::Time;
use std::time::Duration;

/// Returns the statistics of a set, with `ages` if they were asked for.
pub fn of_cache(status: &engine::Status, ages: Option<engine::PriorityStats>) -> CacheStatistics {
    let stats = &status.stats;
    let percent = |buckets: u64| buckets * 100 / status.buckets.max(1);
    let written = |cause: WriteCause| (cause.name().to_owned(), stats.written.of(cause));
    let found = stats.found;
    CacheStatistics {
        windows: windows(stats.totals(), |window| stats.of_late(window)),
        written_bytes: stats.written.total(),
        written_by_cause_bytes: WriteCause::ALL.map(written).into(),
        // As the kernel reports it: 100 minus the share in use.
        cache_available_percent: 100 - percent(status.buckets - status.buckets_available.min(status.buckets)),
        buckets_unused: status.buckets_unused,
        buckets_clean: status.buckets_clean,
        buckets_dirty: status.buckets_dirty,
        buckets_open: status.buckets_open,
        unused_percent: percent(status.buckets_unused),
        clean_percent: percent(status.buckets_clean),
        dirty_percent: percent(status.buckets_dirty),
        metadata_percent: percent(status.buckets_metadata),
        root_usage_percent: status.root_usage_percent,
        active_journal_entries: status.journal_active,
        io_errors: status.cache_health.errors,
        io_errors_recent: status.io_errors,
        btree_coalesces: stats.btree_coalesces,
        writeback_keys_done: stats.writeback_keys_done,
        writeback_keys_failed: stats.writeback_keys_failed,
        writeback_errors: stats.writeback_errors,
        average_key_bytes: (found.key_sectors * 512).checked_div(found.keys),
        btree_nodes: found.nodes,
        btree_used_percent: found.key_bytes * 100 / (found.leaves * status.node_sectors * 512).max(1),
        btree_gc: times(&stats.gc, status.now),
        btree_split: times(&stats.splits, status.now),
        btree_read: times(&stats.node_reads, status.now),
        ages: ages.map(|ages| PriorityStats {
            buckets: ages.buckets,
            average: ages.average,
            bytes_per_quantile: ages.sectors_per_quantile * 512,
            quantiles: ages.quantiles,
        }),
    }
}

/// Returns the statistics of a served volume.
pub fn of_volume(info: &VolumeInfo, latencies: Option<&Latencies>) -> VolumeStatistics {
    let bytes = |sectors: i64| sectors.saturating_mul(512);
    let rate = &info.writeback_rate;
    let paths = RequestPath::ALL.into_iter().filter_map(|path| Some((path, latencies?.of(path))));
    VolumeStatistics {
        windows: windows(info.stats.totals(), |window| info.stats.of_late(window)),
        latency: paths
            .filter_map(|(path, histogram)| Some((path.name().to_owned(), latency(histogram)?)))
            .collect(),
        io_errors: info.backing_health.map(|health| health.errors),
        number: info.inode.filter(|_| !info.flash_only).map(|inode| inode.0),
        slot: info.inode.map(|inode| inode.0),
        next_writeback: rate.next,
        writeback_proportional_bytes: bytes(rate.proportional),
        writeback_integral_bytes: bytes(rate.integral),
        writeback_change_bytes: bytes(rate.change),
    }
}

fn windows(
    total: engine::RequestCounts,
    of_late: impl Fn(Window) -> engine::RequestCounts,
) -> RequestWindows {
    RequestWindows {
        total: counted(total),
        five_minute: counted(of_late(Window::FiveMinutes)),
        hour: counted(of_late(Window::Hour)),
        day: counted(of_late(Window::Day)),
    }
}

fn counted(counted: engine::RequestCounts) -> RequestCounts {
    RequestCounts {
        hits: counted.hits,
        misses: counted.misses,
        hit_percent: counted.hit_percent(),
        bypass_hits: counted.bypass_hits,
        bypass_misses: counted.bypass_misses,
        miss_collisions: counted.miss_collisions,
        bypassed_bytes: counted.bypassed_bytes,
    }
}

/// Returns `None` if there were no requests.
fn latency(histogram: &Histogram) -> Option<PathLatency> {
    let requests = histogram.requests();
    let part = |permille| histogram.permille(permille).map(us);
    let mean_ns = histogram.total_ns().checked_div(u128::from(requests))?;
    Some(PathLatency {
        requests,
        mean_us: u64::try_from(mean_ns / 1000).unwrap_or(u64::MAX),
        p50_us: part(500)?,
        p90_us: part(900)?,
        p99_us: part(990)?,
        p999_us: part(999)?,
        max_us: us(histogram.longest()?),
        within: WITHIN_POWERS.map(|power| histogram.within_power_us(power)).into(),
        total_seconds: histogram.total_ns() as f64 / 1e9,
    })
}

fn times(times: &engine::TimeStats, now: Time) -> OperationTiming {
    OperationTiming {
        count: times.count,
        average_us: us(times.average),
        between_us: us(times.between),
        max_us: us(times.longest),
        last_us: times.since_last(now).map(us),
    }
}

/// Converts to microseconds, rounded up, so that no duration becomes zero.
fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::WriteCause;
    use bcached_control::statistics::DATA_CAUSES;

    #[test]
    fn the_status_counts_as_data_what_the_engine_does() {
        let data = WriteCause::ALL.into_iter().filter(|cause| cause.is_data());
        assert_eq!(data.map(WriteCause::name).collect::<Vec<_>>(), DATA_CAUSES);
    }
}
