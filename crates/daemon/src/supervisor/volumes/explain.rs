//! Explains where the data at an offset is, and why it is not in the cache, as far as that is
//! known.

use crate::control_server::ExplainHandler;
use crate::engine_error;
use crate::supervisor::Shared;
use crate::supervisor::options::{resolve_called, served_by};
use crate::supervisor::report::reasons::not_served;
use crate::supervisor::table::VolumeState;
use bcached_control::explain::ExplainReport;
use bcached_control::failure::{Failure, Kind};
use bcached_control::sizes::{exact, human};
use bcached_engine::{BypassReason, CacheLocation, DataLocation, Error, Explanation, Traffic, VolumeInfo};
use bcached_format::CacheMode;
use std::cmp::Reverse;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long an engine may take: it may have to read a node of its index.
const LIMIT: Duration = Duration::from_secs(8);

/// The handler for the control thread. It holds no lock while it waits for an engine.
pub fn ask(shared: Arc<Mutex<Shared>>) -> ExplainHandler {
    Box::new(move |called, offset, work| {
        let index = resolve_called(&shared, called)?;
        let (entry, engine, device) = {
            let table = &shared.lock().unwrap_or_else(PoisonError::into_inner).table;
            let entry = table.volumes[index].clone();
            let engine = served_by(&entry, &table.caches).map(|(engine, _)| engine);
            let cache = entry.cache.and_then(|cache| table.caches.get(cache));
            (entry, engine, cache.map(|cache| cache.device.clone()))
        };
        let name = entry.display_name().to_owned();
        let (VolumeState::Served(served), Some(engine)) = (&entry.state, engine) else {
            return Err(not_served(&entry));
        };
        let (send, receive) = mpsc::channel();
        let answer = move |told| {
            // The work counts as done only here, even if no client waits for it any more.
            let _done = work;
            drop(send.send(told));
        };
        engine.explain(served.id, offset / 512, Box::new(answer));
        let silent = || Failure { kind: Kind::TimeLimit, ..engine_error::silent(&name) };
        let (explained, now) = receive.recv_timeout(LIMIT).map_err(|_| silent())?;
        let explained = explained.map_err(|error| match error {
            Error::Range { volume_sectors, .. } => {
                Failure::new(Kind::Usage, format!("offset {offset} is beyond the end of {name}"))
                    .why(format!("its size is {}", exact(volume_sectors * 512)))
                    .next("give an offset below its size")
            }
            error => Failure::new(Kind::Io, format!("cannot look up offset {offset} of {name}"))
                .why(error.to_string())
                .next("`bcached status` shows which part of the index cannot be read"),
        })?;
        let within = offset % 512;
        let (state, place) = match explained.whereabouts {
            DataLocation::Uncached => ("uncached", None),
            DataLocation::OffGrid => ("off-grid", None),
            DataLocation::NotCached => ("not-cached", None),
            DataLocation::Parked(place) => ("parked", Some(place)),
            DataLocation::Clean(place) => ("clean", Some(place)),
            DataLocation::Dirty(place) => ("dirty", Some(place)),
        };
        let of = |get: fn(CacheLocation) -> u64| place.map(get);
        let is_hole = explained.whereabouts == DataLocation::NotCached;
        Ok(ExplainReport {
            volume: name,
            offset_bytes: offset,
            cached: place.is_some(),
            state: state.to_owned(),
            start_bytes: explained.start * 512,
            end_bytes: explained.end * 512,
            cache_device: device.filter(|_| place.is_some()),
            cache_offset_bytes: of(|place| place.sector * 512).map(|start| start + within),
            bucket: of(|place| place.bucket),
            generation: place.map(|place| place.generation),
            backing_offset_bytes: explained.backing_sector.map(|sector| sector * 512 + within),
            being_written: explained.claims.writing,
            being_written_back: explained.claims.writing_back,
            being_filled: explained.claims.missing || explained.claims.filling,
            why: now.filter(|_| is_hole).map_or_else(Vec::new, |now| why_not(&now, &explained)),
            backing: entry.backing,
        })
    })
}

/// Why data may not be in the cache: first what keeps everything out now, then the reasons that
/// have kept out most since the volume is served.
fn why_not(now: &VolumeInfo, explained: &Explanation) -> Vec<String> {
    if explained.backing_sector.is_none() {
        return Vec::new();
    }
    let mut why = Vec::new();
    if now.mode == CacheMode::None {
        why.push("cache_mode is none: nothing new is cached".to_owned());
    }
    if now.lifecycle.keeps_out() {
        why.push(
            "the volume is being attached, detached, removed or grown: nothing new is cached until that has ended"
                .to_owned(),
        );
    }
    let mut kept_out: Vec<(Traffic, BypassReason)> =
        BypassReason::ALL.iter().map(|reason| (now.stats.bypassed.of(*reason), *reason)).collect();
    kept_out.retain(|(traffic, _)| traffic.requests > 0);
    kept_out.sort_by_key(|(traffic, _)| Reverse(traffic.bytes));
    let rules = (now.mode, now.options.sequential_cutoff);
    why.extend(kept_out.into_iter().map(|(traffic, reason)| kept_out_by(traffic, reason, rules)));
    if why.is_empty() {
        why.push(
            "nothing keeps it out of the cache: it has not been requested yet, or was evicted".to_owned(),
        );
    }
    why
}

/// How much has bypassed the cache for this reason, and what the reason is.
fn kept_out_by(
    Traffic { requests, bytes }: Traffic,
    reason: BypassReason,
    (mode, cutoff): (CacheMode, u64),
) -> String {
    let (noun, they) = if requests == 1 { ("request", "it") } else { ("requests", "they") };
    let (were, them) = if requests == 1 { ("was", "it") } else { ("were", "them") };
    let rule = match reason {
        BypassReason::VolumeBusy => {
            format!("{they} came while the volume was being attached, detached or grown")
        }
        BypassReason::Failing => {
            format!("{they} came after the cache device had failed too often (io_error_limit)")
        }
        BypassReason::Full => format!("{they} came while too much of the cache was dirty"),
        BypassReason::Mode => format!("its cache_mode, {}, keeps {them} out", mode.name()),
        BypassReason::Sequential => {
            let cutoff = human(cutoff);
            format!("{they} {were} part of streams of {cutoff} or more (sequential_cutoff)")
        }
        BypassReason::Congested => format!(
            "{they} came while the cache device was slow (congested_read_threshold_us, congested_write_threshold_us)"
        ),
    };
    let bytes = human(bytes);
    format!("since the volume was put into service, {requests} {noun} ({bytes}) bypassed the cache: {rule}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the sentence was ungrammatical ("requests went past the cache: were of
    /// streams").
    #[test]
    fn what_has_gone_past_the_cache_is_told_in_sentences() {
        let told = |requests, reason| {
            let rules = (CacheMode::Writeback, 4 << 20);
            kept_out_by(Traffic { requests, bytes: 8192 }, reason, rules)
        };
        assert_eq!(
            told(2, BypassReason::Sequential),
            "since the volume was put into service, 2 requests (8 KiB) bypassed the cache: they were part of \
             streams of 4 MiB or more (sequential_cutoff)"
        );
        assert_eq!(
            told(1, BypassReason::Congested),
            "since the volume was put into service, 1 request (8 KiB) bypassed the cache: it came while the cache \
             device was slow (congested_read_threshold_us, congested_write_threshold_us)"
        );
    }
}
