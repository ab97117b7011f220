//! What keeps a job from going on, as far as its engine knows. The user who waits for it must learn
//! what to look at.

use crate::supervisor::jobs::JobTarget;
use crate::supervisor::report::health;
use crate::supervisor::report::volume_names::name_of;
use crate::supervisor::table::Table;
use bcached_control::jobs::JobKind;
use bcached_engine::{Error, Status, UnreadableNode, VolumeInfo};

/// What an engine has reported of the job's volumes and of their set.
#[derive(Default)]
struct EngineReport<'a> {
    /// Why the set has stopped writing.
    failed: Option<&'a Error>,
    /// How much of its index has been read, in percent.
    walked_percent: u64,
    volumes: Vec<&'a VolumeInfo>,
    /// Devices that do not answer, and nodes that cannot be read, in sentences.
    devices: Vec<String>,
    nodes: Vec<String>,
}

/// Returns what blocks a job, in one sentence or several. `None`: nothing does.
pub fn of(table: &Table, (verb, target): (JobKind, &JobTarget), status: &Status) -> Option<String> {
    let is_concerned = |info: &&VolumeInfo| match target {
        JobTarget::Volume(_, served) => info.id == served.id,
        JobTarget::Unserved(_) | JobTarget::Arrivals(_) => false,
        JobTarget::Cache(_) => true,
    };
    let volumes: Vec<_> = status.volumes.iter().filter(is_concerned).collect();
    let entry = |info: &VolumeInfo| table.volumes.iter().find(|entry| entry.uuid == Some(info.uuid));
    let silent =
        |info: &&VolumeInfo| health::stuck(entry(info)?.backing.as_deref()?, info.backing_health.as_ref()?);
    let is_in_the_way = |node: &&UnreadableNode| {
        let is_of = |volume| volumes.iter().any(|info| info.id == volume);
        !matches!(target, JobTarget::Volume(..)) || node.covers.iter().any(|part| is_of(part.volume))
    };
    let cache = volumes.first().and_then(|info| entry(info)?.cache).unwrap_or_default();
    let name = |volume| name_of(&table.volumes, cache, volume, &status.volumes);
    let nodes = status.unreadable.iter().filter(is_in_the_way);
    sentence(
        verb,
        &EngineReport {
            failed: status.failed.as_ref(),
            walked_percent: status.walked_percent,
            devices: volumes.iter().filter_map(silent).collect(),
            nodes: nodes.filter_map(|node| health::unreadable(std::slice::from_ref(node), name)).collect(),
            volumes,
        },
    )
}

fn sentence(verb: JobKind, report: &EngineReport<'_>) -> Option<String> {
    let failed = report.failed.map(|error| format!("the cache has stopped writing ({error})"));
    let walked = (waits_for_walk(verb) && report.walked_percent < 100)
        .then(|| format!("the index of the cache is still being read ({}%)", report.walked_percent));
    let trouble = report.volumes.iter().find_map(|info| info.writeback_trouble.as_ref());
    let trouble =
        trouble.map(|trouble| format!("write-back fails at {}: {}", health::range(trouble), trouble.error));
    let others = report.devices.iter().chain(report.nodes.first()).cloned();
    let told: Vec<_> = failed.into_iter().chain(walked).chain(trouble).chain(others).collect();
    (!told.is_empty()).then(|| told.join("; "))
}

/// Checks whether a job cannot end before the index was read, which tells which data is dirty, and
/// where.
const fn waits_for_walk(verb: JobKind) -> bool {
    matches!(verb, JobKind::Flush | JobKind::Detach | JobKind::Forget | JobKind::Shrink | JobKind::Replace)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flush that waits for the index, or for a cache that failed, says so.
    #[test]
    fn what_is_in_the_way_is_named() {
        let all_read = || EngineReport { walked_percent: 100, ..EngineReport::default() };
        assert_eq!(sentence(JobKind::Flush, &all_read()), None);
        let reads = EngineReport { walked_percent: 41, ..EngineReport::default() };
        let told = sentence(JobKind::Flush, &reads);
        assert_eq!(told.as_deref(), Some("the index of the cache is still being read (41%)"));
        assert_eq!(sentence(JobKind::Grow, &reads), None, "it does not wait for that");
        let failed = EngineReport { failed: Some(&Error::LostWrites), ..all_read() };
        let told = sentence(JobKind::Attach, &failed).unwrap_or_default();
        assert!(told.starts_with("the cache has stopped writing ("), "{told}");
        let (devices, nodes) =
            (vec!["sdb has not answered for 9 s".to_owned()], vec!["a node".to_owned(); 3]);
        let told = sentence(JobKind::Detach, &EngineReport { devices, nodes, ..reads });
        let wanted = "the index of the cache is still being read (41%); sdb has not answered for 9 s; a node";
        assert_eq!(told.as_deref(), Some(wanted));
    }
}
