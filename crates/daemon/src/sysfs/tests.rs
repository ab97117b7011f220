//! What the tree shows while an engine does not answer, and how things are named.

use super::layout::{Node, TreeSnapshot};
use super::*;
use bcached_control::failure::{Failure, Kind as FailureKind};
use bcached_control::hardware::DeviceName;
use bcached_control::statistics::CacheStatistics;
use bcached_control::statistics::RequestWindows;
use bcached_control::status::{CacheCounts, CacheStatus, VolumeProperties, VolumeStatus};
use std::sync::atomic::{AtomicU64, Ordering};

const SET: &str = "11111111-1111-4111-8111-111111111111";

/// As in the status: everything that has a default in JSON has it here.
fn counts(journal_entries: u64) -> CacheCounts {
    let zeroes = [
        "block_bytes",
        "bucket_bytes",
        "buckets",
        "buckets_available",
        "buckets_free",
        "buckets_metadata",
        "dirty_bytes",
        "tree_depth",
        "nodes",
        "node_bytes",
        "node_bytes_max",
        "node_budget_bytes",
        "bucket_table_bytes",
        "journal_sequence",
        "hits",
        "misses",
        "hit_bytes",
        "miss_bytes",
        "bypassed_bytes",
        "write_bytes",
        "data_written_bytes",
        "moved_bytes",
        "btree_written_bytes",
        "journal_written_bytes",
        "prio_written_bytes",
        "journal_entries",
        "journal_waits",
        "btree_rewrites",
        "gc_passes",
        "written_back_bytes",
        "fill_races",
        "read_retries",
    ];
    let mut object: serde_json::Map<_, _> =
        zeroes.into_iter().map(|name| (name.to_owned(), serde_json::Value::from(0))).collect();
    object.insert("set_uuid".to_owned(), SET.into());
    let mut counts: CacheCounts = serde_json::from_value(object.into()).expect("all that has no default");
    let numbers = CacheStatistics { active_journal_entries: journal_entries, ..CacheStatistics::default() };
    counts.numbers = Some(numbers);
    counts
}

fn hardware(name: &str) -> DeviceName {
    DeviceName { name: name.to_owned(), number: None }
}

/// A status with one open set and the counters that its engine returned, if it answers.
fn status(device: &str, counts: Option<CacheCounts>) -> Status {
    Status {
        state: "ready".to_owned(),
        pid: 1,
        uptime_seconds: 0,
        nbd: Vec::new(),
        caches: vec![CacheStatus {
            name: "fast".to_owned(),
            device: format!("/dev/{device}"),
            state: "open".to_owned(),
            reason: None,
            io: None,
            opening: None,
            unserved: Vec::new(),
            unreadable: Vec::new(),
            counts,
            hardware: Some(hardware(device)),
        }],
        released: Vec::new(),
        volumes: Vec::new(),
        clients: Vec::new(),
        jobs: Vec::new(),
        log: None,
        warnings: Vec::new(),
    }
}

fn no<T>() -> Result<T, Failure> {
    Err(Failure::new(FailureKind::Io, "nobody asks"))
}

fn handlers() -> Arc<Handlers> {
    Arc::new(Handlers {
        status: Box::new(|_| unreachable!("nobody asks")),
        options: Box::new(|_, _| no()),
        change: Box::new(|_, _, _, _| no()),
        begin: Box::new(|_, _| no()),
        jobs: Box::new(no),
        job: Box::new(|_| no()),
        cancel: Box::new(|_, _, _| no()),
        explain: Box::new(|_, _, _| no()),
        differences: Box::new(no),
        events: Box::new(|_, _| no()),
        stop: Box::new(|_, _| no()),
        stopped: Box::new(no),
        take_over: Box::new(|_, _| no()),
        taken_over: Box::new(no),
    })
}

/// An engine that does not answer is not asked by each reader. Each of its files once made its
/// reader wait for two seconds, and a monitor reads sixty.
#[test]
fn an_engine_that_keeps_silent_is_not_asked_by_each_reader() {
    let asked = Arc::new(AtomicU64::new(0));
    let asks = Arc::clone(&asked);
    let look = move |_| {
        let before = asks.fetch_add(1, Ordering::SeqCst);
        // It answers twice, and then no more.
        status("nvme0n1", (before < 2).then(|| counts(before + 5)))
    };
    let sysfs = Sysfs::new(Box::new(look), handlers());
    let path = format!("fs/bcache/{SET}/internal/active_journal_entries");
    let read = || sysfs.read(&path).map(|text| String::from_utf8(text).expect("a text"));
    assert_eq!([read(), read()], ["5\n", "6\n"].map(|text| Ok(text.to_owned())), "as it is each time");
    for _ in 0..100 {
        assert_eq!(read(), Ok("6\n".to_owned()), "as it was seen last");
        assert!(sysfs.entry(&path).is_some());
    }
    assert_eq!(asked.load(Ordering::SeqCst), 3);
}

/// Each name appears once, whatever the devices are called.
#[test]
fn devices_of_one_name_lie_apart() {
    let mut status = status("bcache0", Some(counts(0)));
    let volume = |place: usize| {
        let facts = serde_json::json!({
            "uuid": "u", "label": "", "size_bytes": 8192, "block_bytes": 512, "cache_mode": "writeback", "dirty_bytes": 0,
            "hits": 0, "misses": 0, "miss_collisions": 0, "bypassed_bytes": 0, "bypass_hits": 0, "bypass_misses": 0,
            "bypassed_requests": 0, "bypassed": {}, "windows": serde_json::to_value(RequestWindows::default()).expect("JSON"),
            "latency": {}, "writeback_proportional_bytes": 0, "writeback_integral_bytes": 0, "writeback_change_bytes": 0,
        });
        let mut facts: VolumeProperties = serde_json::from_value(facts).expect("all that has no default");
        facts.numbers.as_mut().expect("numbers").slot = u32::try_from(place).ok();
        VolumeStatus {
            superblock_state: None,
            name: format!("v{place}"),
            kernel_name: format!("bcache{place}"),
            state: "served".to_owned(),
            reason: None,
            backing: Some("/x/disk".to_owned()),
            cache: Some("fast".to_owned()),
            exports: Vec::new(),
            facts: Some(facts),
            hardware: Some((hardware("disk"), 16)),
        }
    };
    status.volumes = vec![volume(0), volume(1)];
    let seen = TreeSnapshot::new(status);
    let Some(Node::Directory(block)) = seen.find("block") else { unreachable!("it is there") };
    let mut names: Vec<_> = seen.list(block).into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, ["bcache0", "bcache0-2", "bcache1", "disk", "disk-2"]);
    for (link, to) in [("cache0", "bcache0-2"), ("bdev0", "disk"), ("bdev1", "disk-2")] {
        let found = seen.find(&format!("fs/bcache/{SET}/{link}"));
        let Some(Node::Link(target)) = found else { unreachable!("{link}: {found:?}") };
        assert_eq!(target, format!("../../../block/{to}/bcache"));
    }
}
