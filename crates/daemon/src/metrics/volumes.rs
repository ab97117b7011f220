//! Metrics of the volumes.

use super::text::{Exposition, Label, MetricKind};
use super::{Metric, counter, gauge, tell};
use bcached_control::statistics::{RequestCounts, WITHIN_POWERS};
use bcached_control::status::{VolumeProperties, VolumeStatus};

fn metrics() -> Vec<Metric<VolumeProperties>> {
    vec![
        gauge("bcached_volume_size_bytes", "Size of the volume.", |facts| Some(facts.size_bytes as f64)),
        gauge(
            "bcached_volume_dirty_bytes",
            "Dirty data, not yet on the backing device; absent if unknown.",
            |facts| facts.dirty.dirty_bytes.map(|bytes| bytes as f64),
        ),
        gauge(
            "bcached_volume_dirty_target_bytes",
            "Amount of dirty data that write-back aims at.",
            |facts| facts.writeback.as_ref().map(|writeback| writeback.dirty_target_bytes as f64),
        ),
        gauge(
            "bcached_volume_oldest_dirty_seconds",
            "Upper limit of how long data has been dirty; 0 if none is, absent if some was at the last start.",
            |facts| {
                let writeback = facts.writeback.as_ref().filter(|writeback| !writeback.dirty_age_unknown)?;
                Some(writeback.oldest_dirty_seconds.unwrap_or(0) as f64)
            },
        ),
        gauge(
            "bcached_volume_unwritable_bytes",
            "Dirty data whose last write-back attempt failed.",
            |facts| {
                let writeback = facts.writeback.as_ref()?;
                Some(writeback.unwritable.as_ref().map_or(0, |unwritable| unwritable.bytes) as f64)
            },
        ),
        gauge(
            "bcached_volume_unwritable_ranges",
            "Ranges of the dirty data whose last write-back attempt failed.",
            |facts| {
                let writeback = facts.writeback.as_ref()?;
                Some(writeback.unwritable.as_ref().map_or(0, |unwritable| unwritable.ranges) as f64)
            },
        ),
        counter(
            "bcached_volume_io_errors_total",
            "Failed operations of the backing device since it was opened.",
            |facts| Some(facts.numbers.as_ref()?.io_errors? as f64),
        ),
        gauge(
            "bcached_volume_writeback_rate_bytes",
            "Write-back rate in bytes a second; absent if only the devices limit it.",
            |facts| Some(facts.writeback.as_ref()?.writeback_rate_bytes? as f64),
        ),
        counter(
            "bcached_volume_miss_collisions_total",
            "Fills dropped because of a write to the same place in the meantime.",
            |facts| facts.counts.as_ref().map(|counts| counts.miss_collisions as f64),
        ),
    ]
}

/// The kinds of reads.
pub fn reads(counted: &RequestCounts) -> [(&'static str, u64); 4] {
    [
        ("hit", counted.hits),
        ("miss", counted.misses),
        ("bypass_hit", counted.bypass_hits),
        ("bypass_miss", counted.bypass_misses),
    ]
}

/// Writes all of them.
pub fn tell_all(text: &mut Exposition, volumes: &[VolumeStatus]) {
    let mut family = text.family("bcached_volume_served", MetricKind::Gauge, "1 if the volume is served.");
    for volume in volumes {
        let is_served = matches!(volume.state.as_str(), "served" | "degraded");
        family.sample(&[("volume", &volume.name)], u8::from(is_served));
    }
    let mut family = text.family(
        "bcached_volume_healthy",
        MetricKind::Gauge,
        "1 if the volume is served and not degraded.",
    );
    for volume in volumes {
        family.sample(&[("volume", &volume.name)], u8::from(volume.state == "served"));
    }
    let served: Vec<(Vec<Label<'_>>, &VolumeProperties)> = volumes
        .iter()
        .filter_map(|volume| Some((vec![("volume", volume.name.as_str())], volume.facts.as_ref()?)))
        .collect();
    tell_info(text, volumes);
    tell(text, &metrics(), &served);
    tell_reads(text, &served);
    tell_bypassed(text, &served);
    tell_latency(text, &served);
}

fn tell_info(text: &mut Exposition, volumes: &[VolumeStatus]) {
    let mut family =
        text.family("bcached_volume_info", MetricKind::Gauge, "Cache, mode and UUID of a served volume.");
    for volume in volumes {
        let Some(facts) = &volume.facts else { continue };
        let cache = volume.cache.as_deref().unwrap_or_default();
        let mode = ("cache_mode", facts.cache_mode.as_str());
        family.sample(&[("volume", &volume.name), ("cache", cache), mode, ("uuid", &facts.uuid)], 1);
    }
}

fn tell_reads(text: &mut Exposition, served: &[(Vec<Label<'_>>, &VolumeProperties)]) {
    let mut family = text.family(
        "bcached_volume_reads_total",
        MetricKind::Counter,
        "Reads, by whether they were bypassed and whether they found everything in the cache.",
    );
    for (labels, facts) in served {
        let Some(numbers) = &facts.numbers else { continue };
        for (result, reads) in reads(&numbers.windows.total) {
            family.sample(&[labels[0], ("result", result)], reads);
        }
    }
    let mut family = text.family(
        "bcached_volume_hit_percent",
        MetricKind::Gauge,
        "Share of the reads not bypassed that found everything in the cache; absent without such reads.",
    );
    for (labels, facts) in served {
        let Some(numbers) = &facts.numbers else { continue };
        let windows = &numbers.windows;
        let named = [
            ("five_minute", &windows.five_minute),
            ("hour", &windows.hour),
            ("day", &windows.day),
            ("total", &windows.total),
        ];
        for (window, counted) in named {
            if let Some(percent) = counted.hit_percent {
                family.sample(&[labels[0], ("window", window)], percent);
            }
        }
    }
}

fn tell_bypassed(text: &mut Exposition, served: &[(Vec<Label<'_>>, &VolumeProperties)]) {
    let by_reason = |facts: &VolumeProperties| {
        facts.counts.iter().flat_map(|counts| counts.bypass.bypassed.clone()).collect()
    };
    let mut family = text.family(
        "bcached_volume_bypassed_bytes_total",
        MetricKind::Counter,
        "Bytes not added to the cache, by reason.",
    );
    for (labels, facts) in served {
        let reasons: Vec<_> = by_reason(facts);
        for (reason, one) in &reasons {
            family.sample(&[labels[0], ("reason", reason)], one.bytes);
        }
    }
    let mut family = text.family(
        "bcached_volume_bypassed_requests_total",
        MetricKind::Counter,
        "Requests that added nothing to the cache, by reason.",
    );
    for (labels, facts) in served {
        let reasons: Vec<_> = by_reason(facts);
        for (reason, one) in &reasons {
            family.sample(&[labels[0], ("reason", reason)], one.requests);
        }
    }
}

fn tell_latency(text: &mut Exposition, served: &[(Vec<Label<'_>>, &VolumeProperties)]) {
    let mut family = text.family(
        "bcached_volume_request_seconds",
        MetricKind::Histogram,
        "Time that requests took in the engine, by their path; failed requests are not counted.",
    );
    for (labels, facts) in served {
        let Some(numbers) = &facts.numbers else { continue };
        for (path, latency) in &numbers.latency {
            let bound = |power: u32| f64::from(1_u32 << power) / 1e6;
            let bounds = WITHIN_POWERS.into_iter().map(bound);
            let within: Vec<_> = bounds.zip(latency.within.iter().copied()).collect();
            family.histogram(&[labels[0], ("path", path)], &within, latency.requests, latency.total_seconds);
        }
    }
}
