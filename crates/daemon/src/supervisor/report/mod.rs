//! The status, put together from the table and from what the engines report at this moment.

pub mod health;
pub mod log_dedup;
pub mod reasons;
pub mod statistics;
pub mod volume_names;

use crate::control_server::StatusHandler;
use crate::control_server::WorkPermit;
use crate::engine_thread::Engine;
use crate::log;
use crate::supervisor::fronts::{FrontendManager, VolumeClient};
use crate::supervisor::jobs;
use crate::supervisor::table::{CacheEntry, CacheState, VolumeEntry, VolumeState};
use crate::supervisor::{Phase, Shared};
use bcached_config::NO_CACHE;
use bcached_control::hardware::DeviceName;
use bcached_control::status::{
    self, BypassCounts, CacheCounts, CacheStatus, ClientStatus, DirtyData, ExportStatus, OpeningProgress,
    Status, UnreadableNode, UnservedVolume, VolumeCounts, VolumeProperties, VolumeRange, VolumeStatus,
    WritebackStatus,
};
use bcached_engine::{
    BypassReason, BypassStats, DirtyAge, DiscardState, Latencies, OpenProgress, PriorityStats, ReadStats,
    Status as EngineStatus, Traffic, UnwritableData, VolumeInfo, WriteCause,
};
use bcached_format::BackingState;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Returns how far the opening of a set is at this moment.
pub fn progress_of(opening: &OpenProgress) -> OpeningProgress {
    OpeningProgress { nodes_read: opening.nodes_read(), tree_percent: opening.tree_percent() }
}

/// Returns the control thread's function for the status. It holds no lock while it waits for an
/// engine.
pub fn status_of(shared: Arc<Mutex<Shared>>, fronts: FrontendManager, started: Instant) -> StatusHandler {
    Box::new(move |work| look(&shared, Some(&fronts), started, work))
}

/// Returns the same function without what front ends and jobs add. The system must be asked for the
/// users of volumes, which takes a while, and control files do not show them.
pub fn numbers_of(shared: Arc<Mutex<Shared>>, started: Instant) -> StatusHandler {
    Box::new(move |work| look(&shared, None, started, work))
}

fn look(
    shared: &Mutex<Shared>,
    fronts: Option<&FrontendManager>,
    started: Instant,
    work: Option<WorkPermit>,
) -> Status {
    let (phase, mut caches, engines, entries, are_some, (released, warnings)) = {
        let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let table = &shared.table;
        let caches: Vec<_> = table.caches.iter().map(cache).collect();
        let engines: Vec<_> = table.caches.iter().map(CacheEntry::engine).collect();
        let are_some: Vec<_> = table.caches.iter().map(CacheEntry::is_real).collect();
        let released = shared.config.released.iter().map(|released| released.name.clone()).collect();
        let known = (released, shared.warnings.clone());
        (shared.phase, caches, engines, table.volumes.clone(), are_some, known)
    };
    let counts = Engine::status_of_all(&engines);
    let ages = match work {
        Some(work) => Engine::ages_of_all(&engines, &work),
        None => vec![None; engines.len()],
    };
    let asked = caches.iter_mut().zip(&engines).zip(&counts).zip(ages);
    for (index, (((cache, engine), status), ages)) in asked.enumerate() {
        if let Some(status) = status {
            cache.counts = Some(counts_of(status, ages));
            cache.unreadable = unreadable(&entries, index, status);
            let left = status.unserved.iter();
            let may_be_dirty =
                |left: &&bcached_engine::UnservedInfo| left.dirty_sectors > 0 || !left.is_counted;
            let left = left.filter(|left| may_be_dirty(left) || left.flash_sectors.is_some());
            cache.unserved = left.map(unserved).collect();
            let given_up = volume_names::given_up(&entries, &status.given_up);
            let failed = status.failed.as_ref().map(|error| health::stopped(error, &given_up));
            let device = health::sentence(&cache.device, &status.cache_health);
            let name = |volume| volume_names::name_of(&entries, index, volume, &status.volumes);
            let nodes = health::unreadable(&status.unreadable, name);
            let absent = cache.reason.take();
            let told: Vec<_> = absent.into_iter().chain(failed.or(device)).chain(nodes).collect();
            cache.reason = (!told.is_empty()).then(|| told.join("; "));
        } else if engine.is_some() {
            cache.reason = Some("its engine does not answer".to_owned());
        }
    }
    let exported = |entry| fronts.map_or_else(Vec::new, |fronts| exported(fronts, entry));
    let volumes = entries
        .iter()
        .filter(|entry| !entry.is_removed())
        .map(|entry| volume(entry, &caches, &counts, exported(entry)))
        .collect();
    let mut are_some = are_some.into_iter();
    caches.retain(|_| are_some.next().unwrap_or(true));
    Status {
        state: phase.name().to_owned(),
        pid: std::process::id(),
        uptime_seconds: started.elapsed().as_secs(),
        nbd: fronts.map_or_else(Vec::new, FrontendManager::nbd_places),
        caches,
        released,
        volumes,
        clients: fronts.map_or_else(Vec::new, clients),
        jobs: if fronts.is_some() { jobs::api::running(shared) } else { Vec::new() },
        log: Some(log_now()),
        warnings,
    }
}

fn log_now() -> status::LogStatus {
    let log::Condition { lost, stuck } = log::condition();
    status::LogStatus { lines_lost: lost, stuck_seconds: stuck.map(|lasts| lasts.as_secs()) }
}

fn clients(fronts: &FrontendManager) -> Vec<ClientStatus> {
    let client = |user: VolumeClient| ClientStatus {
        peer: user.peer,
        volume: user.volume,
        writing: user.writing,
        read_only: user.read_only,
        tls: user.tls,
        way: Some(user.way.to_string()),
    };
    fronts.users().into_iter().map(client).collect()
}

/// Returns where the volume is available, and why it is not by some way.
fn exported(fronts: &FrontendManager, entry: &VolumeEntry) -> Vec<ExportStatus> {
    let places = fronts.places_of(entry.display_name(), entry.ways).into_iter();
    let exported = places.map(|status| {
        let (place, reason) = status.place.map_or_else(|why| (None, Some(why)), |place| (Some(place), None));
        let by = status.by.map(|by| by.word().to_owned());
        let transfer = status.transfer.map(|transfer| transfer.word().to_owned());
        let (link, no_link) = status.link.map_or((None, None), |link| match link {
            Ok(link) => (Some(link), None),
            Err(why) => (None, Some(why)),
        });
        ExportStatus { way: status.way.to_string(), by, transfer, link, no_link, place, reason }
    });
    exported.collect()
}

fn cache(entry: &CacheEntry) -> CacheStatus {
    let (state, reason, io) = match &entry.state {
        CacheState::Waiting(failure) => ("waiting", Some(failure.to_string()), None),
        CacheState::Opening { .. } => ("opening", None, None),
        CacheState::Open { io, .. } => ("open", entry.absent.as_deref().map(str::to_owned), Some(io.clone())),
        CacheState::Ending { .. } | CacheState::Stopped | CacheState::Released => ("stopped", None, None),
        CacheState::Failed(failure) => ("failed", Some(failure.to_string()), None),
    };
    CacheStatus {
        name: entry.name.clone().unwrap_or_else(|| entry.device.clone()),
        device: entry.device.clone(),
        state: state.to_owned(),
        reason,
        io,
        opening: match &entry.state {
            CacheState::Opening { progress, .. } => Some(progress_of(progress)),
            _ => None,
        },
        unserved: Vec::new(),
        unreadable: Vec::new(),
        counts: None,
        hardware: entry.opened.as_ref().map(|opened| DeviceName::of(opened, &entry.device)),
    }
}

/// Describes a volume that is not served, with its dirty data.
pub fn unserved(left: &bcached_engine::UnservedInfo) -> UnservedVolume {
    UnservedVolume {
        uuid: left.uuid.to_string(),
        label: left.label.to_string(),
        dirty: DirtyData::of(left.dirty_sectors, left.is_counted),
        flash_size_bytes: left.flash_sectors.map(|sectors| sectors * 512),
    }
}

fn unreadable(volumes: &[VolumeEntry], cache: usize, status: &EngineStatus) -> Vec<UnreadableNode> {
    let name = |volume| volume_names::name_of(volumes, cache, volume, &status.volumes);
    let described = status.unreadable.iter().map(|node| UnreadableNode {
        bucket: node.bucket,
        sector: node.sector,
        level: node.level,
        reason: format!(
            "{} ({})",
            health::unreadable(std::slice::from_ref(node), name).unwrap_or_default(),
            health::in_detail(node)
        ),
        covers: node
            .covers
            .iter()
            .map(|part| VolumeRange {
                volume: name(part.volume),
                start_bytes: part.start * 512,
                length_bytes: (part.end - part.start) * 512,
            })
            .collect(),
    });
    described.collect()
}

fn volume(
    entry: &VolumeEntry,
    caches: &[CacheStatus],
    counts: &[Option<EngineStatus>],
    exports: Vec<ExportStatus>,
) -> VolumeStatus {
    let (state, reason, facts) = match &entry.state {
        VolumeState::Waiting(failure) => ("waiting", Some(failure.to_string()), None),
        VolumeState::Attaching => ("attaching", None, None),
        VolumeState::Releasing => ("releasing", Some("it is being released with its cache".to_owned()), None),
        VolumeState::Removed => ("removed", None, None),
        VolumeState::Stopped => {
            let name = entry.display_name();
            ("stopped", Some(format!("until the next start, or `bcached add {name}`")), None)
        }
        VolumeState::Failed(failure) => ("failed", Some(failure.to_string()), None),
        VolumeState::Served(info) => {
            // The present report of the engine counts; the one from when the volume came is only a
            // fallback.
            let status = entry.cache.and_then(|index| counts.get(index)?.as_ref());
            let place = status
                .and_then(|status| Some((status, status.volumes.iter().position(|now| now.id == info.id)?)));
            let now = place.map_or(&**info, |(status, place)| &status.volumes[place]);
            let latencies = place.and_then(|(status, place)| status.latencies.get(place));
            let set = status.map(|status| health::SetFaults {
                failed: status.failed.as_ref(),
                failing: status.is_failing.then_some((status.io_errors, &status.cache_health)),
                nodes: &status.unreadable,
                waited_out: &status.waited_out,
            });
            let trouble = health::degraded(now, set.unwrap_or_default(), entry.backing.as_deref());
            let absent = entry.absent.as_deref().map(str::to_owned);
            let without = entry.without_cache().filter(|_| !now.attached);
            let missing = exports.iter().filter_map(ExportStatus::trouble);
            let told: Vec<_> = absent.into_iter().chain(without).chain(trouble).chain(missing).collect();
            let trouble = (!told.is_empty()).then(|| told.join("; "));
            (
                if trouble.is_some() { "degraded" } else { "served" },
                trouble,
                Some(VolumeProperties { outdated: place.is_none(), ..facts(now, latencies) }),
            )
        }
    };
    let backing = entry.backing.clone();
    let is_detached = facts.as_ref().is_some_and(|facts| facts.attached == Some(false));
    let cache = entry.cache.filter(|_| !is_detached).and_then(|index| caches.get(index));
    let cache = cache.filter(|cache| cache.name != NO_CACHE);
    let hardware =
        entry.opened.as_ref().zip(backing.as_ref()).map(|(opened, path)| DeviceName::of(opened, path));
    let is_served = facts.is_some();
    VolumeStatus {
        superblock_state: entry.kept_state.filter(|_| !is_served).map(|state| state_word(state).to_owned()),
        name: entry.name.clone().or_else(|| backing.clone()).unwrap_or_default(),
        kernel_name: bcached_control::names::in_control_files(entry.number),
        state: state.to_owned(),
        reason,
        backing,
        cache: cache.map(|cache| cache.name.clone()),
        exports,
        facts,
        hardware: hardware.map(|device| (device, entry.data_offset.unwrap_or_default())),
    }
}

fn facts(info: &VolumeInfo, latencies: Option<&Latencies>) -> VolumeProperties {
    VolumeProperties {
        uuid: info.uuid.to_string(),
        label: info.label.to_string(),
        outdated: false,
        attached: Some(info.attached),
        flash_only: info.flash_only,
        size_bytes: info.sectors * 512,
        block_bytes: info.logical_block_sectors() * 512,
        cache_mode: info.mode.name().to_owned(),
        backing_state: info.state.map(|state| state_word(state).to_owned()),
        dirty: DirtyData::of(info.dirty_sectors, info.is_dirty_known()),
        writeback: (info.attached && !info.flash_only).then(|| WritebackStatus {
            dirty_target_bytes: info.dirty_target_sectors * 512,
            oldest_dirty_seconds: info.oldest_dirty.and_then(DirtyAge::known).map(|age| age.as_secs()),
            dirty_age_unknown: info.dirty_sectors > 0 && info.oldest_dirty == Some(DirtyAge::Unknown),
            unwritable: unwritable(info),
            writeback_running: Some(info.options.writeback_running),
            writeback_rate_bytes: info.writeback_rate.rate.map(|sectors| sectors.saturating_mul(512)),
            stripe_bytes: info.stripe_sectors.map(|sectors| sectors * 512),
            partial_stripes_expensive: info.partial_stripes_expensive,
        }),
        counts: Some(VolumeCounts {
            hits: info.stats.reads.hits,
            misses: info.stats.reads.misses,
            miss_collisions: info.stats.miss_collisions,
            bypassed_bytes: info.stats.bypassed.total().bytes,
            bypass: bypass(&info.stats.reads, &info.stats.bypassed),
        }),
        numbers: Some(statistics::of_volume(info, latencies)),
    }
}

/// Returns the kernel's word for a state.
const fn state_word(state: BackingState) -> &'static str {
    match state {
        BackingState::None => "no cache",
        BackingState::Clean => "clean",
        BackingState::Dirty => "dirty",
        BackingState::Stale => "inconsistent",
    }
}

/// Returns `None` if all dirty data can be written back, as far as it was tried.
fn unwritable(info: &VolumeInfo) -> Option<status::FailedWriteback> {
    let UnwritableData { ranges, sectors, tries, retry_in } = info.unwritable;
    let first = info.writeback_trouble.as_ref().filter(|_| ranges > 0)?;
    Some(status::FailedWriteback {
        ranges,
        bytes: sectors * 512,
        start_bytes: first.sector * 512,
        length_bytes: first.sectors * 512,
        error: first.error.to_string(),
        tries,
        retry_seconds: retry_in.as_secs(),
    })
}

fn bypass(reads: &ReadStats, bypassed: &BypassStats) -> BypassCounts {
    let by_reason = BypassReason::ALL.map(|reason| {
        let Traffic { requests, bytes } = bypassed.of(reason);
        (reason.name().to_owned(), status::BypassReasonCounts { requests, bytes })
    });
    BypassCounts {
        bypass_hits: reads.bypass_hits,
        bypass_misses: reads.bypass_misses,
        bypassed_requests: bypassed.total().requests,
        bypassed: by_reason.into(),
    }
}

const fn discard_name(state: DiscardState) -> &'static str {
    match state {
        DiscardState::Off => "off",
        DiscardState::On => "on",
        DiscardState::Unsupported => "unsupported",
        DiscardState::Failed(_) => "failed",
    }
}

fn counts_of(status: &EngineStatus, ages: Option<PriorityStats>) -> CacheCounts {
    let (stats, written) = (&status.stats, &status.stats.written);
    CacheCounts {
        set_uuid: status.set_uuid.to_string(),
        block_bytes: status.block_sectors * 512,
        bucket_bytes: status.bucket_sectors * 512,
        cache_replacement_policy: status.replacement.name().to_owned(),
        buckets: status.buckets,
        buckets_available: status.buckets_available,
        cached_bytes: (status.walked_percent == 100).then_some(
            (status.buckets_clean + status.buckets_dirty + status.buckets_open) * status.bucket_sectors * 512,
        ),
        buckets_free: status.buckets_free,
        buckets_metadata: status.buckets_metadata,
        buckets_reserved: Some(status.buckets_reserved),
        walked_percent: Some(status.walked_percent),
        dirty: DirtyData::of(status.dirty_sectors, status.is_counted),
        ownerless_dirty_bytes: status.is_counted.then_some(status.ownerless_dirty_sectors * 512),
        tree_depth: status.tree_depth.into(),
        nodes: status.nodes,
        node_bytes: status.node_bytes,
        node_bytes_max: status.node_bytes_max,
        node_budget_bytes: status.node_budget_bytes,
        bucket_table_bytes: Some(status.bucket_table_bytes),
        journal_sequence: status.journal_sequence,
        hits: stats.reads.hits,
        misses: stats.reads.misses,
        hit_bytes: stats.hit_bytes,
        miss_bytes: stats.miss_bytes,
        bypassed_bytes: stats.bypassed.total().bytes,
        write_bytes: stats.write_bytes,
        data_written_bytes: written.of(WriteCause::Data) + written.of(WriteCause::Fill),
        moved_bytes: stats.moved_bytes,
        btree_written_bytes: written.of(WriteCause::Btree),
        journal_written_bytes: written.of(WriteCause::Journal),
        prio_written_bytes: written.of(WriteCause::Priorities),
        journal_entries: stats.journal_entries,
        journal_waits: stats.journal_waits,
        btree_rewrites: stats.btree_rewrites,
        gc_passes: stats.gc_passes,
        written_back_bytes: stats.written_back_bytes,
        fill_races: stats.fill_races,
        read_retries: stats.read_retries,
        node_read_failures: stats.node_read_failures,
        bypass: Some(bypass(&stats.reads, &stats.bypassed)),
        congested_bytes: Some(status.congested_sectors * 512),
        failing: Some(status.is_failing),
        discard: Some(discard_name(status.discard).to_owned()),
        discarded_bytes: Some(status.discards.bytes),
        numbers: Some(statistics::of_cache(status, ages)),
    }
}

impl Phase {
    const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Stopping => "stopping",
        }
    }
}
