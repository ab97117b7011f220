//! The troubles of devices, in sentences. A user must learn from the log and from `status` which
//! device fails or hangs.

use crate::engine_error;
use crate::supervisor::table::Table;
use bcached_config::options::value::Value;
use bcached_control::sizes::{human, human_range};
use bcached_engine::{
    DiskHealth, Error, ErrorContext, ErrorPolicy, Status, TimedOutVolume, UnreadableNode, UnwritableData,
    VolumeId, VolumeInfo, VolumeRange, WritebackError,
};
use bcached_env::IoErrorKind;
use std::time::Duration;

/// A device that has not answered for so long is reported.
pub const SLOW: Duration = Duration::from_secs(5);

/// A device that has had no error for so long is trusted again, if enough operations have succeeded
/// meanwhile: as many as had failed, or [`TRUSTED_SUCCESSES`] if those were more.
const TRUSTED_AFTER: Duration = Duration::from_secs(60);
const TRUSTED_SUCCESSES: u64 = 16;

/// What was logged of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoggedHealth {
    /// The number of failed operations when that was logged.
    errors: u64,
    is_stuck: bool,
    is_bad: bool,
}

/// A change of a device's health, for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HealthChange {
    /// Operations failed, or the device does not answer.
    Bad(String),
    /// The device answers again.
    Good(String),
}

/// Checks whether the device's last error is long ago, and enough operations have succeeded since.
fn is_trusted(health: &DiskHealth) -> bool {
    let enough = health.errors.min(TRUSTED_SUCCESSES);
    health.since_error >= TRUSTED_AFTER && health.successes_since >= enough
}

/// Returns what is wrong with `device` now, or `None` if nothing is, or no longer.
pub fn sentence(device: &str, health: &DiskHealth) -> Option<String> {
    if let Some(told) = stuck(device, health) {
        return Some(told);
    }
    // This holds however long ago it was: nothing has been read from the device or written to it
    // since.
    if let Some(IoErrorKind::Shrunk { expected, found }) = health.last_error.map(|last| last.kind) {
        return Some(format!(
            "{device} has become shorter: {found} instead of {expected} sectors; it is no longer read or written; \
             restore its size, then start the daemon again"
        ));
    }
    let last = health.last_error.filter(|_| !is_trusted(health))?;
    let (errors, sector, kind) = (health.errors, last.sector, last.kind);
    let next = if is_full(health) { MAKE_ROOM } else { "check the device for errors" };
    Some(match errors {
        1 => format!("1 operation on {device} failed, at sector {sector} ({kind}); {next}"),
        _ => format!("{errors} operations on {device} failed, the last at sector {sector} ({kind}); {next}"),
    })
}

/// The advice for a device that is well but has no room for a write.
const MAKE_ROOM: &str = "free space on the file system or in the pool below it";

/// Checks whether the last failure was a lack of room below a file or a volume.
fn is_full(health: &DiskHealth) -> bool {
    health.last_error.is_some_and(|last| last.kind == IoErrorKind::NoSpace)
}

/// Returns for how long `device` has not answered, if it does not.
pub fn stuck(device: &str, health: &DiskHealth) -> Option<String> {
    silent(device, health, SLOW)
}

/// Returns the same as [`stuck`], with the limit `least`.
fn silent(device: &str, health: &DiskHealth, least: Duration) -> Option<String> {
    let (seconds, waiting) = (health.longest_wait.as_secs(), health.waiting);
    (health.longest_wait >= least)
        .then(|| format!("{device} has not answered for {seconds} s; operations in flight: {waiting}"))
}

/// Returns which devices of a cache have not answered for `least`, its own first.
pub fn silent_of(table: &Table, cache: usize, status: &Status, least: Duration) -> Vec<String> {
    let devices = table.devices_of(cache, status);
    devices.iter().filter_map(|(device, found)| silent(device, found, least)).collect()
}

/// Returns which devices of a cache do not answer, with the limit of [`stuck`].
pub fn stuck_of(table: &Table, cache: usize, status: &Status) -> Vec<String> {
    silent_of(table, cache, status, SLOW)
}

/// Returns why a set has stopped writing, and what that means. `given_up` names the data that is
/// void because the device may have lost it.
pub fn stopped(error: &Error, given_up: &str) -> String {
    let mend = if engine_error::is_full(error) {
        "free space on the file system below the device"
    } else {
        "repair the device"
    };
    let without = |nothing: &str| match given_up {
        "" => nothing.to_owned(),
        given_up => {
            format!(
                " as after a power cut, without writes that were acknowledged and not flushed: {given_up}"
            )
        }
    };
    let then = match error {
        // Whatever failed: the device only has to be connected again.
        Error::Io { source, .. } if source.kind == IoErrorKind::Gone => {
            format!("the cache is reopened when the device is back{}", without(""))
        }
        Error::Io { doing: ErrorContext::CacheFlush, .. } => {
            let nothing = " as after a power cut, without writes that were acknowledged and not flushed: \
                           there are none";
            format!("start the daemon again: the next start recovers the set{}", without(nothing))
        }
        error if error.may_pass() => "the cache is reopened when the device works".to_owned(),
        _ => "start the daemon again".to_owned(),
    };
    format!(
        "it has stopped writing ({error}): volumes with dirty data delay or refuse writes (on_cache_error), the \
         others continue without it; {mend}; {then}"
    )
}

/// Reports index nodes that cannot be read, and the data that this affects. `name` names a volume.
pub fn unreadable(nodes: &[UnreadableNode], name: impl Fn(VolumeId) -> String) -> Option<String> {
    let what = damaged(nodes)?;
    let parts: Vec<_> = nodes
        .iter()
        .flat_map(|node| &node.covers)
        .map(|part| format!("{} {}", name(part.volume), in_bytes(part)))
        .collect();
    Some(match parts.as_slice() {
        [] => format!("{what}; it belongs to no volume that is served"),
        [one] => format!("{what}; {one} is unreadable from the cache"),
        several => format!("{what}; {} are unreadable from the cache", several.join(", ")),
    })
}

/// Returns where a node is and what its error was, for the log and for a detailed status.
pub fn in_detail(node: &UnreadableNode) -> String {
    let UnreadableNode { bucket, sector, level, error, .. } = node;
    format!("btree node in bucket {bucket}, sector {sector}, level {level}: {error}")
}

/// Returns what has happened to the nodes, or `None` if there are none.
fn damaged(nodes: &[UnreadableNode]) -> Option<String> {
    let is_damaged = nodes.iter().any(|node| matches!(node.error, Error::Node { .. }));
    let state = if is_damaged { "damaged" } else { "unreadable" };
    match nodes.len() {
        0 => None,
        1 => Some(format!("index node {state}")),
        several => Some(format!("{several} index nodes {state}")),
    }
}

fn in_bytes(part: &VolumeRange) -> String {
    human_range(part.start * 512, part.end * 512)
}

/// Returns which data of the volume cannot be found in the cache because `nodes` cannot be read.
fn without_index(info: &VolumeInfo, nodes: &[UnreadableNode]) -> Option<String> {
    let covers = |node: &UnreadableNode| node.covers.iter().any(|part| part.volume == info.id);
    let nodes: Vec<_> = nodes.iter().filter(|node| covers(node)).cloned().collect();
    let what = damaged(&nodes)?;
    let parts = nodes.iter().flat_map(|node| &node.covers).filter(|part| part.volume == info.id);
    let parts: Vec<_> = parts.map(in_bytes).collect();
    let are = if parts.len() == 1 { "is" } else { "are" };
    Some(format!("{what}; {} of the volume {are} unreadable from the cache", parts.join(", ")))
}

/// Returns what happens to a volume whose cache has stopped writing because of `error`.
fn without_cache(info: &VolumeInfo, error: &Error, is_over: bool) -> String {
    let is_needed = info.flash_only || info.may_be_dirty();
    let what = match info.options.on_cache_error {
        _ if !is_needed => "the volume continues without it, at the speed of its backing device".to_owned(),
        ErrorPolicy::Freeze if is_over => {
            let limit = Value::Time(info.options.freeze_timeout);
            format!("reads continue, writes fail: it has not worked again within freeze_timeout ({limit})")
        }
        ErrorPolicy::Freeze if error.may_be_awaited() => {
            let limit = Value::Time(info.options.freeze_timeout);
            format!("reads continue, writes wait until it works again, for at most {limit}")
        }
        ErrorPolicy::ReadOnly => "reads continue, writes are not permitted".to_owned(),
        _ => "reads continue, writes are refused".to_owned(),
    };
    format!("its cache has stopped writing: {what}")
}

/// Returns the first place where write-back fails.
pub fn range(trouble: &WritebackError) -> String {
    format!("sectors {} to {}", trouble.sector, trouble.sector + trouble.sectors)
}

/// Returns what else is on the list of ranges that cannot be written back.
fn others(unwritable: &UnwritableData) -> String {
    match unwritable.ranges {
        0 | 1 => String::new(),
        2 => format!(" and in 1 other range, {} in all,", human(unwritable.sectors * 512)),
        ranges => format!(" and in {} other ranges, {} in all,", ranges - 1, human(unwritable.sectors * 512)),
    }
}

/// Returns what happens to requests that need a volume's backing device, which is gone.
fn without_backing(info: &VolumeInfo, is_over: bool) -> Option<String> {
    info.backing_health?.last_error.filter(|last| last.kind.is_final())?;
    Some(match info.options.on_backing_error {
        ErrorPolicy::Freeze if is_over => {
            let limit = Value::Time(info.options.freeze_timeout);
            format!(
                "requests that need the backing device fail: it has not come back within freeze_timeout ({limit})"
            )
        }
        ErrorPolicy::Freeze => {
            let limit = Value::Time(info.options.freeze_timeout);
            format!("requests that need the backing device wait until it is back, for at most {limit}")
        }
        ErrorPolicy::ReadOnly => {
            "reads that need the backing device fail, writes that need it are not permitted".to_owned()
        }
        ErrorPolicy::Fail => "requests that need the backing device fail".to_owned(),
    })
}

/// Reports a cache whose device has failed so often that nothing is added to it.
pub fn failing(errors: u64, health: &DiskHealth) -> String {
    let next = if is_full(health) { MAKE_ROOM } else { "replace the device" };
    let operations =
        if errors == 1 { "operation on its device has" } else { "operations on its device have" };
    format!(
        "{errors} {operations} failed (io_error_limit): no new data is cached, and dirty data is written back; {next}, \
         or raise the limit"
    )
}

/// What is wrong with the set of a volume.
#[derive(Clone, Copy, Default)]
pub struct SetFaults<'a> {
    /// Why it has stopped writing.
    pub failed: Option<&'a Error>,
    /// Its device has failed so often that nothing is added to it.
    pub failing: Option<(u64, &'a DiskHealth)>,
    /// Nodes that cannot be read.
    pub nodes: &'a [UnreadableNode],
    /// Volumes whose requests have waited in vain.
    pub waited_out: &'a [TimedOutVolume],
}

/// Returns why a served volume is degraded, and what still works. `backing` is its backing device
/// as configured.
pub fn degraded(info: &VolumeInfo, set: SetFaults<'_>, backing: Option<&str>) -> Option<String> {
    let SetFaults { failed, failing, nodes, waited_out } = set;
    let over = waited_out.iter().find(|over| over.volume == info.id);
    let worn =
        || failing.map(|(errors, health)| format!("its cache is failing: {}", self::failing(errors, health)));
    let cache =
        failed.map(|error| without_cache(info, error, over.is_some_and(|over| over.cache))).or_else(worn);
    let device = backing.zip(info.backing_health).and_then(|(device, health)| sentence(device, &health));
    let writeback = info.writeback_trouble.as_ref().map(|trouble| {
        let others = others(&info.unwritable);
        format!("dirty data in {}{others} cannot be written back ({})", range(trouble), trouble.error)
    });
    let marking = info
        .marking_trouble
        .as_ref()
        .map(|error| format!("nothing is dirty, but its superblock cannot be marked clean ({error})"));
    let index = without_index(info, nodes);
    let told = cache.into_iter().chain(index).chain(writeback).chain(marking).chain(device);
    let told: Vec<_> = told.chain(without_backing(info, over.is_some_and(|over| over.backing))).collect();
    (!told.is_empty()).then(|| told.join("; "))
}

/// Returns what is new since the last look.
pub fn news(device: &str, health: &DiskHealth, said: &mut LoggedHealth) -> Option<HealthChange> {
    let is_stuck = health.longest_wait >= SLOW;
    let is_bad = health.errors > 0 && !is_trusted(health);
    let before = std::mem::replace(said, LoggedHealth { is_stuck, is_bad, ..*said });
    // Retries fail again and again. That a device is bad is therefore logged once, and then each
    // time the number of failures has doubled.
    let worth_saying = if before.is_bad { 2 * before.errors } else { before.errors + 1 };
    if is_stuck && !before.is_stuck || health.errors >= worth_saying.max(1) {
        said.errors = health.errors;
        return sentence(device, health).map(HealthChange::Bad);
    }
    if before.is_bad && !is_bad {
        let (seconds, done) = (health.since_error.as_secs(), health.successes_since);
        return Some(HealthChange::Good(format!(
            "{device}: no error for {seconds} s, {done} operations succeeded"
        )));
    }
    (before.is_stuck && !is_stuck).then(|| HealthChange::Good(format!("{device} answers again")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_engine::{RateInfo, VolumeOptions, VolumeStats, WritebackError};
    use bcached_env::{DiskId, IoError};
    use bcached_format::{BackingState, CacheMode, Label, Uuid};

    /// A volume whose device fails, or whose cache writes nothing, is reported as degraded.
    #[test]
    fn a_degraded_volume_says_what_works() {
        let mut info = VolumeInfo {
            id: VolumeId(0),
            inode: None,
            uuid: Uuid([1; 16]),
            label: Label::default(),
            sectors: 8,
            block_sectors: 8,
            backing_block_sectors: None,
            flash_only: false,
            attached: true,
            lifecycle: bcached_engine::Lifecycle::Steady,
            mode: CacheMode::Writeback,
            options: VolumeOptions::default(),
            state: Some(BackingState::Clean),
            dirty_sectors: 0,
            is_counted: true,
            dirty_target_sectors: 0,
            stripe_sectors: None,
            partial_stripes_expensive: false,
            full_stripes: None,
            oldest_dirty: None,
            writeback_rate: RateInfo::default(),
            stats: VolumeStats::default(),
            writeback_trouble: None,
            unwritable: UnwritableData::default(),
            marking_trouble: None,
            backing_health: Some(DiskHealth::default()),
            zeroing: None,
        };
        let source = IoError { kind: IoErrorKind::Io, disk: DiskId(0), sector: 8 };
        let error = Error::Io { doing: bcached_engine::ErrorContext::Journal, source };
        let told = |info: &VolumeInfo, stopped: bool| {
            let set = SetFaults { failed: stopped.then_some(&error), ..SetFaults::default() };
            degraded(info, set, Some("sdb")).unwrap_or_default()
        };
        assert_eq!(degraded(&info, SetFaults::default(), Some("sdb")), None);
        let health = DiskHealth::default();
        let worn = SetFaults { failing: Some((8, &health)), ..SetFaults::default() };
        let told_of_worn = degraded(&info, worn, None).unwrap_or_default();
        assert!(told_of_worn.starts_with("its cache is failing: 8 operations"), "{told_of_worn}");
        assert!(told_of_worn.ends_with("replace the device, or raise the limit"), "{told_of_worn}");
        assert!(told(&info, true).contains("the volume continues without it"), "{}", told(&info, true));
        info.dirty_sectors = 8;
        assert!(
            told(&info, true).contains("writes wait until it works again, for at most 2m"),
            "{}",
            told(&info, true)
        );
        told_by_policy(&info, &error);
        info.backing_health =
            Some(DiskHealth { longest_wait: Duration::from_secs(9), ..DiskHealth::default() });
        assert!(told(&info, false).starts_with("sdb has not answered for 9 s"), "{}", told(&info, false));
        assert!(told(&info, true).contains("for at most 2m; sdb has not"), "{}", told(&info, true));
        info.backing_health = None;
        told_of_places(&mut info);
        (info.writeback_trouble, info.marking_trouble) = (None, Some(Box::new(Error::LostWrites)));
        assert!(told(&info, false).starts_with("nothing is dirty, but its"), "{}", told(&info, false));
        info.marking_trouble = None;
        told_of_nodes(&info);
    }

    /// Index nodes that cannot be read are reported.
    fn told_of_nodes(info: &VolumeInfo) {
        let part = |volume, start| VolumeRange { volume: VolumeId(volume), start, end: start + 8 };
        let covers = vec![part(0, 64), part(1, 0)];
        let node = UnreadableNode { bucket: 7, sector: 896, level: 0, covers, error: Error::LostWrites };
        let shown = unreadable(std::slice::from_ref(&node), |volume| format!("v{}", volume.0));
        let wanted = "index node unreadable; v0 32-36 KiB, v1 0-4 KiB are unreadable from the cache";
        assert_eq!(shown.as_deref(), Some(wanted));
        let detail = in_detail(&node);
        assert!(detail.starts_with("btree node in bucket 7, sector 896, level 0: "), "{detail}");
        let told = degraded(info, SetFaults { nodes: &[node], ..SetFaults::default() }, None);
        assert_eq!(
            told.as_deref(),
            Some("index node unreadable; 32-36 KiB of the volume is unreadable from the cache")
        );
    }

    /// Dirty data that cannot be written back is reported.
    fn told_of_places(info: &mut VolumeInfo) {
        let told = |info: &VolumeInfo| degraded(info, SetFaults::default(), None).unwrap_or_default();
        info.writeback_trouble = Some(WritebackError { sector: 16, sectors: 8, error: Error::LostWrites });
        let one = told(info);
        assert!(
            one.starts_with("dirty data in sectors 16 to 24 cannot be written back (an earlier"),
            "{one}"
        );
        info.unwritable = UnwritableData { ranges: 3, sectors: 24, ..UnwritableData::default() };
        let several = told(info);
        assert!(several.contains("16 to 24 and in 2 other ranges, 12 KiB in all, cannot"), "{several}");
    }

    /// The other policies for a volume with dirty data are reported.
    fn told_by_policy(info: &VolumeInfo, error: &Error) {
        // After the limit no request waits any more, and `status` must not say that one does.
        let waited_out = [TimedOutVolume { volume: info.id, cache: true, backing: false }];
        let set = SetFaults { failed: Some(error), waited_out: &waited_out, ..SetFaults::default() };
        let over = degraded(info, set, None).unwrap_or_default();
        assert!(
            over.ends_with("reads continue, writes fail: it has not worked again within freeze_timeout (2m)"),
            "{over}"
        );
        let told = |policy, error| {
            let options = VolumeOptions { on_cache_error: policy, ..info.options };
            let set = SetFaults { failed: Some(error), ..SetFaults::default() };
            degraded(&VolumeInfo { options, ..info.clone() }, set, None).unwrap_or_default()
        };
        let not_permitted = told(ErrorPolicy::ReadOnly, error);
        assert!(not_permitted.ends_with("reads continue, writes are not permitted"), "{not_permitted}");
        assert!(told(ErrorPolicy::Fail, error).ends_with("writes are refused"));
        // Data that was not flushed may be lost: the set does not come back by itself.
        let source = IoError { kind: IoErrorKind::Io, disk: DiskId(0), sector: 0 };
        let flush = Error::Io { doing: bcached_engine::ErrorContext::CacheFlush, source };
        assert!(told(ErrorPolicy::Freeze, &flush).ends_with("writes are refused"));
        let opened_again =
            [error, &flush].map(|error| stopped(error, "").ends_with("reopened when the device works"));
        assert_eq!(opened_again, [true, false]);
        let told = stopped(&flush, "up to 4 KiB of tank");
        let wanted = "start the daemon again: the next start recovers the set as after a power cut, without \
                      writes that were acknowledged and not flushed: up to 4 KiB of tank";
        assert!(told.ends_with(wanted), "{told}");
        let source = IoError { kind: IoErrorKind::Gone, ..source };
        // Nothing has to be started for a device that was pulled, either, no matter whether a flush
        // or another operation failed.
        for doing in [bcached_engine::ErrorContext::Journal, bcached_engine::ErrorContext::CacheFlush] {
            let gone = |given_up| stopped(&Error::Io { doing, source }, given_up);
            assert!(
                gone("").ends_with("repair the device; the cache is reopened when the device is back"),
                "{}",
                gone("")
            );
            assert!(
                gone("8 KiB of tank").ends_with("not flushed: 8 KiB of tank"),
                "{}",
                gone("8 KiB of tank")
            );
        }
    }

    /// A full file system below a file leads to the advice to make room, not to replace the device.
    #[test]
    fn who_lacks_room_is_told_to_make_some() {
        let last_error = Some(IoError { kind: IoErrorKind::NoSpace, disk: DiskId(1), sector: 77 });
        let full = DiskHealth { errors: 9, last_error, ..DiskHealth::default() };
        let one = DiskHealth { errors: 1, ..full };
        for told in [sentence("ssd", &full), sentence("ssd", &one), Some(failing(9, &full))] {
            let told = told.unwrap();
            assert!(told.contains("; free space on the file system or in the pool below it"), "{told}");
            assert!(!told.contains("check the") && !told.contains("replace"), "{told}");
        }
    }

    #[test]
    fn each_trouble_is_told_when_it_comes_and_when_it_goes() {
        let mut said = LoggedHealth::default();
        let mut health = DiskHealth::default();
        assert_eq!((sentence("sdb", &health), news("sdb", &health, &mut said)), (None, None));

        health.errors = 1;
        health.last_error = Some(IoError { kind: IoErrorKind::Io, disk: DiskId(1), sector: 77 });
        let told = sentence("sdb", &health).unwrap();
        assert!(told.starts_with("1 operation on sdb failed, at sector 77"), "{told}");
        health.errors = 3;
        health.last_error = Some(IoError { kind: IoErrorKind::Io, disk: DiskId(1), sector: 77 });
        let Some(HealthChange::Bad(told)) = news("sdb", &health, &mut said) else { panic!("three errors") };
        assert!(told.starts_with("3 operations on sdb failed, the last at sector 77"), "{told}");
        assert_eq!(news("sdb", &health, &mut said), None, "told once");
        assert_eq!(sentence("sdb", &health), Some(told), "status goes on saying it");

        let kind = IoErrorKind::Shrunk { expected: 98304, found: 32768 };
        health.last_error = Some(IoError { kind, disk: DiskId(1), sector: 77 });
        let told = sentence("sdb", &health).unwrap();
        assert!(
            told.starts_with("sdb has become shorter: 32768 instead of 98304 sectors; it is no longer read"),
            "{told}"
        );

        (health.waiting, health.longest_wait) = (16, Duration::from_secs(12));
        let Some(HealthChange::Bad(told)) = news("sdb", &health, &mut said) else { panic!("it hangs") };
        assert_eq!(told, "sdb has not answered for 12 s; operations in flight: 16");
        assert_eq!(news("sdb", &health, &mut said), None);
        (health.waiting, health.longest_wait) = (0, Duration::ZERO);
        assert_eq!(news("sdb", &health, &mut said), Some(HealthChange::Good("sdb answers again".to_owned())));
    }

    /// An error must not make a volume degraded until the next start.
    #[test]
    fn a_device_that_does_well_for_long_enough_is_trusted_again() {
        let last_error = Some(IoError { kind: IoErrorKind::Io, disk: DiskId(1), sector: 77 });
        let failed = |errors, seconds, successes_since| DiskHealth {
            errors,
            last_error,
            since_error: Duration::from_secs(seconds),
            successes_since,
            ..DiskHealth::default()
        };
        for bad in [failed(1, 59, 1000), failed(1, 600, 0), failed(3, 600, 2), failed(1000, 600, 15)] {
            assert!(sentence("sdb", &bad).is_some(), "{bad:?}");
        }
        let kind = IoErrorKind::Shrunk { expected: 98304, found: 32768 };
        let shorter = Some(IoError { kind, disk: DiskId(1), sector: 77 });
        assert!(sentence("sdb", &DiskHealth { last_error: shorter, ..failed(1, 600, 100) }).is_some());
        for good in [failed(1, 60, 1), failed(3, 60, 3), failed(1000, 60, 16)] {
            assert_eq!(sentence("sdb", &good), None, "{good:?}");
        }
        let mut said = LoggedHealth::default();
        assert!(matches!(news("sdb", &failed(1, 0, 0), &mut said), Some(HealthChange::Bad(_))));
        assert_eq!(news("sdb", &failed(1, 30, 9), &mut said), None);
        let told = "sdb: no error for 61 s, 12 operations succeeded".to_owned();
        assert_eq!(news("sdb", &failed(1, 61, 12), &mut said), Some(HealthChange::Good(told)));
        assert_eq!(news("sdb", &failed(1, 70, 30), &mut said), None, "told once");
        assert!(
            matches!(news("sdb", &failed(2, 0, 0), &mut said), Some(HealthChange::Bad(_))),
            "and it failed again"
        );
    }
}
