//! `bcached list`: prints caches and volumes, one line each.

use crate::failure::Failure;
use crate::flags;
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::jobs::JobReport;
use bcached_control::sizes::human;
use bcached_control::status::{CacheStatus, DirtyData, ExportStatus, Status, VolumeStatus};
use serde::Serialize;

/// Asks the daemon and reports.
pub fn run(flags: &flags::ListArgs) -> Result<Report, Failure> {
    let status: Status = client::understood(&client::get(&flags.control.socket(), "/v1/status")?)?;
    let caches = status.caches.iter().map(ListEntry::of_cache);
    let volumes = status.volumes.iter().map(ListEntry::of_volume);
    let mut entries: Vec<ListEntry> = caches.chain(volumes).collect();
    for entry in &mut entries {
        let jobs = status.jobs.iter().filter(|job| job.volume == entry.name);
        let work: Vec<_> = jobs.map(JobReport::progress_text).collect();
        entry.work = (!work.is_empty()).then(|| work.join("; "));
    }
    Report::of(&ListReport { entries })
}

#[derive(Serialize)]
struct ListReport {
    entries: Vec<ListEntry>,
}

#[derive(Serialize)]
struct ListEntry {
    /// `cache` or `volume`.
    kind: &'static str,
    name: String,
    state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    size_bytes: Option<u64>,
    #[serde(flatten)]
    dirty: DirtyData,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_mode: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
    /// It lives in its cache alone, without a backing device.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    flash_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    /// The volume's exports.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    exports: Vec<ExportStatus>,
    /// Jobs running on it, their progress, and what blocks them.
    #[serde(skip_serializing_if = "Option::is_none")]
    work: Option<String>,
}

impl ListEntry {
    fn of_cache(cache: &CacheStatus) -> Self {
        let counts = cache.counts.as_ref();
        Self {
            kind: "cache",
            name: cache.name.clone(),
            state: cache.state.clone(),
            size_bytes: counts.map(|counts| counts.buckets * counts.bucket_bytes),
            dirty: counts.map_or_else(unknown, |counts| counts.dirty.clone()),
            cache_mode: None,
            cache: None,
            flash_only: false,
            device: Some(cache.device.clone()),
            uuid: counts.map(|counts| counts.set_uuid.clone()),
            exports: Vec::new(),
            work: None,
        }
    }

    fn of_volume(volume: &VolumeStatus) -> Self {
        let facts = volume.facts.as_ref();
        Self {
            kind: "volume",
            name: volume.name.clone(),
            state: volume.state.clone(),
            size_bytes: facts.map(|facts| facts.size_bytes),
            dirty: facts.map_or_else(unknown, |facts| facts.dirty.clone()),
            cache_mode: facts.map(|facts| facts.cache_mode.clone()),
            cache: volume.cache.clone(),
            flash_only: facts.is_some_and(|facts| facts.flash_only),
            device: volume.backing.clone(),
            uuid: facts.map(|facts| facts.uuid.clone()),
            exports: volume.exports.clone(),
            work: None,
        }
    }

    /// Returns the volume's exports; block devices by their names.
    fn exported(&self) -> String {
        let way = |export: &ExportStatus| match (export.device(), &export.place) {
            (Some(device), _) => device,
            (None, Some(_)) => export.way.clone(),
            (None, None) => format!("{} (unavailable)", export.way),
        };
        let ways: Vec<_> = self.exports.iter().map(way).collect();
        if ways.is_empty() { "-".to_owned() } else { ways.join(", ") }
    }

    fn cells(&self) -> [String; 9] {
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), human);
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        [
            self.kind.to_owned(),
            self.name.clone(),
            self.state.clone(),
            size(self.size_bytes),
            dirty_cell(&self.dirty),
            text(&self.cache_mode),
            text(&self.cache),
            if self.flash_only { "flash-only".to_owned() } else { text(&self.device) },
            self.exported(),
        ]
    }
}

/// The dirty data of a cache or volume that is not open: unknown.
fn unknown() -> DirtyData {
    DirtyData::of(0, false)
}

fn dirty_cell(dirty: &DirtyData) -> String {
    match (dirty.dirty_bytes, dirty.dirty_bytes_at_least) {
        (Some(all), _) => human(all),
        (None, Some(least)) => format!(">= {}", human(least)),
        (None, None) => "unknown".to_owned(),
    }
}

impl Printable for ListReport {
    const SCHEMA: &'static str = "bcached.list";

    fn text(&self) -> String {
        let head = ["KIND", "NAME", "STATE", "SIZE", "DIRTY", "MODE", "CACHE", "DEVICE", "EXPORT"]
            .map(str::to_owned);
        let rows: Vec<_> = std::iter::once(head).chain(self.entries.iter().map(ListEntry::cells)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..9).map(width).collect();
        let line = |row: &[String; 9]| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
        };
        let work = self.entries.iter().filter_map(|entry| Some(format!("{}\n", entry.work.as_ref()?)));
        rows.iter().map(line).chain(work).collect()
    }
}
