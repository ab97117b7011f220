//! Tests of the supervisor with engines that misbehave: threads of the test take their place.

mod arrivals;
mod leaving;
mod moves;
mod numbering;
mod pending_settings;

use crate::control_server::{ControlServer, Signal};
use crate::engine_thread::{self, Engine};
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::caches::OpeningReports;
use crate::supervisor::report;
use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use crate::supervisor::{Event, Supervisor, SupervisorParameters};
use bcached_config::options::layers::ConfiguredOptions;
use bcached_config::{Cache, CommandLine, Config, FrontendConfig, Volume};
use bcached_control::status::{DirtyData, OpeningProgress, VolumeProperties, VolumeStatus};
use bcached_engine::{Error, UnreadableNode, VolumeId, ZeroingInfo};
use bcached_format::{BackingFormat, BackingSuperblock, CacheMode, Label, Uuid};
use bcached_port::{ExportError, FrontendSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A configuration with one cache and volumes of these names; none of the devices exists.
pub fn config(volumes: &[&str]) -> Config {
    let volume = |(place, name): (usize, &&str)| Volume {
        name: Some((*name).to_owned()),
        number: place,
        is_numbered: false,
        backing: format!("/nonexistent/{name}"),
        cache: Some("fast".to_owned()),
        options: ConfiguredOptions::new(),
        read_only: false,
        shared: false,
        ways: FrontendSet::default(),
        size: None,
        wait: Duration::ZERO,
    };
    Config {
        control: PathBuf::from("/nonexistent/control.sock"),
        memory_bytes: 256 << 20,
        memory_is_said: true,
        stop_timeout: Duration::ZERO,
        places: FrontendConfig { listen: Vec::new(), ..FrontendConfig::beside(Path::new("/run/x")) },
        ways: FrontendSet::default(),
        metrics: None,
        caches: vec![Cache {
            former: None,
            is_awaited: false,
            name: Some("fast".to_owned()),
            device: "/nonexistent/fast".to_owned(),
            options: Default::default(),
        }],
        volumes: volumes.iter().enumerate().map(volume).collect(),
        main_file: None,
        set_file: None,
        flash: Vec::new(),
        places_of_volumes: volumes.len(),
        numbers_asked: Default::default(),
        released: Vec::new(),
        replaced: Vec::new(),
        not_served: Vec::new(),
        set_and_gone: Vec::new(),
    }
}

fn supervisor(volumes: &[&str]) -> Supervisor {
    Supervisor::new(CommandLine::default(), SupervisorParameters::of(config(volumes)))
}

const SET: Uuid = Uuid([7; 16]);

fn opening(thread: JoinHandle<()>) -> CacheState {
    CacheState::Opening { set: SET, progress: Arc::default(), thread }
}

/// Regression: a recovery that panicked left its cache "opening" permanently, and its volumes
/// waiting for it.
#[test]
fn a_recovery_that_ends_without_a_word_is_a_failure() {
    let mut supervisor = supervisor(&["slow"]);
    let sender = supervisor.sender.clone();
    let news = move |news| drop(sender.send(Event::Cache(0, CacheEvent::Engine(news))));
    let thread = engine_thread::spawn("test", news, |_| panic!("recovery fails")).expect("a thread");
    assert!(thread.join().is_err());
    let thread = std::thread::spawn(|| {});
    supervisor.shared().table.set_cache(0, opening(thread));
    supervisor.sender.send(Event::Signal(Signal::Stop)).expect("open");

    let folder = tempfile::tempdir().expect("a folder");
    let bound = ControlServer::bind(&folder.path().join("control.sock"), None, None);
    let Ok(mut control) = bound else { panic!("nobody listens there") };
    supervisor.serve_events(&mut control).expect("one cache that cannot be opened is no reason to end");
    let shared = supervisor.shared();
    let CacheState::Failed(failure) = &shared.table.caches[0].state else { panic!("not failed") };
    assert!(failure.to_string().contains("ended unexpectedly"), "{failure}");
    let VolumeState::Failed(failure) = &shared.table.volumes[0].state else { panic!("not failed") };
    assert!(failure.to_string().contains("its cache is not served"), "{failure}");
}

/// Regression: an engine that does not stop was waited for half a minute, however often a stop was
/// requested.
#[test]
fn another_signal_ends_the_wait_for_an_engine() {
    let mut supervisor = supervisor(&[]);
    let (engine, _ears) = Engine::deaf();
    let thread = std::thread::spawn(|| {});
    let open = CacheState::Open { set: SET, engine, io: String::new(), thread };
    supervisor.shared().table.set_cache(0, open);
    supervisor.sender.send(Event::Signal(Signal::Stop)).expect("open");
    let failure = supervisor.stop_engines().expect_err("it did not stop");
    let said = failure.to_string();
    assert!(
        said.contains("the cache on /nonexistent/fast could not be stopped in order: no answer"),
        "{said}"
    );
    assert!(said.contains("and another signal arrived"), "{said}");
    assert_eq!(failure.kind.exit(), 4);
}

/// Regression: a set that was still opening was cut off in the middle of its recovery, and that was
/// reported as an orderly stop.
#[test]
fn a_cache_that_is_still_opening_was_not_stopped() {
    let mut supervisor = supervisor(&[]);
    let thread = std::thread::spawn(|| {});
    supervisor.shared().table.set_cache(0, opening(thread));
    supervisor.sender.send(Event::Signal(Signal::Stop)).expect("open");
    let failure = supervisor.stop_engines().expect_err("it did not stop");
    assert!(failure.to_string().contains("could not be stopped in order while it was opening"), "{failure}");
}

/// Regression: the meaning of the empty name depended on which device came first.
#[test]
fn volumes_are_known_before_they_are_served() {
    let supervisor = supervisor(&["one", "two"]);
    supervisor.name_exports();
    let asked = |name| supervisor.exports.find(name).expect_err("nothing is served");
    assert_eq!(asked("one"), ExportError::NotServed("one".to_owned()));
    assert_eq!(asked(""), ExportError::NameNeeded(2));
    assert_eq!(asked("three"), ExportError::Unknown("three".to_owned()));
}

/// Regression: with a command line whose recovery took more than half a minute, the daemon
/// announced `ready` and served nothing.
#[test]
fn a_command_line_is_not_ready_before_all_is_served() {
    let started_with = |caches: &[&str]| {
        let line = CommandLine {
            caches: caches.iter().map(|name| (*name).to_owned()).collect(),
            ..CommandLine::default()
        };
        let supervisor = Supervisor::new(line, SupervisorParameters::of(config(&[])));
        supervisor.shared().table.set_cache(0, opening(std::thread::spawn(|| {})));
        supervisor
    };
    let (hour, minute) = (Duration::from_secs(3600), Duration::from_secs(60));
    let of_configuration = started_with(&[]);
    assert!(of_configuration.shared().table.is_settled(hour), "others are not stopped by one");
    let mut of_line = started_with(&["/nonexistent/fast"]);
    assert!(!of_line.shared().table.is_settled(hour));
    assert!(!of_line.tell_waits(Duration::from_secs(29)) && of_line.tell_waits(minute));
    assert!(!of_line.tell_waits(minute + Duration::from_secs(29)) && of_line.tell_waits(minute * 2));
}

/// Regression: an opening that takes minutes was reported only as "opening", in `status` and in the
/// log.
#[test]
fn an_opening_says_how_far_it_is() {
    let supervisor = supervisor(&[]);
    supervisor.shared().table.set_cache(0, opening(std::thread::spawn(|| {})));
    let (shared, fronts) = (Arc::clone(&supervisor.shared), supervisor.fronts.clone());
    let mut status = report::status_of(shared, fronts, supervisor.started)(None);
    let begun = "cache fast on /nonexistent/fast: opening: reading the journal and";
    assert!(status.text().contains(begun), "{}", status.text());
    status.caches[0].opening = Some(OpeningProgress { nodes_read: 1234, tree_percent: 61 });
    let later = "opening: 1234 btree nodes read, about 61% of the tree\n";
    assert!(status.text().contains(later), "{}", status.text());
    let json = serde_json::to_value(&status).expect("plain values");
    assert_eq!(json["caches"][0]["opening"]["nodes_read"], 1234, "{json}");
}

/// An opening is logged every ten seconds from its start; the next opening of the same cache starts
/// anew.
#[test]
fn the_log_hears_of_an_opening_every_ten_seconds() {
    let mut told = OpeningReports::default();
    let cache = |name: &str| vec![(name.to_owned(), Arc::default())];
    let mut heard = |seconds, openings| told.due(Duration::from_secs(seconds), openings).len();
    assert_eq!((heard(3, cache("fast")), heard(12, cache("fast"))), (0, 0));
    assert_eq!((heard(13, cache("fast")), heard(14, cache("fast"))), (1, 0));
    assert_eq!((heard(22, cache("fast")), heard(24, cache("fast"))), (0, 1));
    assert_eq!((heard(25, Vec::new()), heard(90, cache("fast"))), (0, 0));
}

/// Regression: a damaged node that was met while a set was served was not reported anywhere.
#[test]
fn a_node_that_cannot_be_read_is_told_once() {
    let supervisor = supervisor(&[]);
    let node = |sector| UnreadableNode {
        bucket: sector / 128,
        sector,
        level: 0,
        covers: Vec::new(),
        error: Error::NoVolume,
    };
    let told = |nodes: &[UnreadableNode]| supervisor.shared().table.note_unreadable(0, nodes, &[]);
    let first = told(&[node(128)]);
    assert!(first[0].contains("(btree node in bucket 1, sector 128, level 0: "), "{first:?}");
    assert_eq!((first.len(), told(&[node(128)]).len()), (1, 0));
    assert_eq!(told(&[node(128), node(256)]).len(), 1, "the other one");
    assert_eq!((told(&[]).len(), told(&[node(128)]).len()), (0, 1), "it could be read meanwhile");
}

/// A long zeroing is logged after five seconds, and now and then from then on.
#[test]
fn a_long_zeroing_is_told_of_now_and_then() {
    let supervisor = supervisor(&[]);
    let told = |seconds: &[u64]| {
        let zeroing = |seconds: &u64| {
            let since = Duration::from_secs(*seconds);
            (VolumeId(0), ZeroingInfo { since, sectors: 8 << 21, done: 1 << 21 })
        };
        let zeroings: Vec<_> = seconds.iter().map(zeroing).collect();
        supervisor.shared().table.note_zeroings(0, &zeroings, &[])
    };
    assert_eq!(told(&[4]), [""; 0]);
    assert_eq!(told(&[5]), ["volume : 1 GiB of 8 GiB zeroed after 5 s"]);
    assert_eq!((told(&[6]).len(), told(&[34]).len(), told(&[35]).len(), told(&[36]).len()), (0, 0, 1, 0));
    assert_eq!((told(&[]).len(), told(&[36]).len()), (0, 1), "another one");
    assert_eq!(told(&[7]).len(), 1, "and another, that began when that had ended");
}

/// Regression: of two volumes with one label, the one whose cache opened first got the name.
#[test]
fn a_label_goes_to_the_first_that_was_named() {
    let supervisor = supervisor(&["one", "two"]);
    let mut shared = supervisor.shared();
    let mut superblock = BackingSuperblock::format(BackingFormat {
        uuid: Uuid([0xab; 16]),
        set_uuid: SET,
        block_sectors: 8,
        bucket_sectors: 128,
        data_offset: None,
        cache_mode: CacheMode::Writeback,
        device_sectors: 8192,
    })
    .expect("usual sizes");
    let label = Label::from_text("tank").expect("short");
    superblock.set_label(label);
    for volume in &mut shared.table.volumes {
        (volume.name, volume.label) = (None, Some(label));
    }
    shared.table.name_volume(1, &superblock, 0);
    shared.table.name_volume(0, &superblock, 0);
    let names: Vec<_> = shared.table.volumes.iter().map(VolumeEntry::display_name).collect();
    assert_eq!(names, ["tank", "bcache-abababab"]);
}

/// The status says why a cache takes nothing. A status of an earlier version, which lacks that, is
/// still read.
#[test]
fn a_volume_says_what_was_bypassed_and_why() {
    let facts = |counts: &str| {
        let known =
            r#""uuid":"1f5a","label":"","size_bytes":0,"block_bytes":0,"cache_mode":"none","dirty_bytes":0"#;
        let volume = format!(r#"{{"name":"one","state":"served",{known}{counts}}}"#);
        serde_json::from_str::<VolumeStatus>(&volume).expect("a volume of a status")
    };
    let before = facts("").facts.expect("they are known");
    assert!(before.counts.is_none());
    let counts = r#","hits":1,"misses":2,"miss_collisions":3,"bypassed_bytes":5120,"bypass_hits":4,"bypass_misses":5,
        "bypassed_requests":3,"bypassed":{"full":{"requests":0,"bytes":0},"mode":{"requests":2,"bytes":1024},
        "sequential":{"requests":1,"bytes":4096}}"#;
    let volume = facts(counts);
    assert_eq!(volume.line(), "served, 0 B, none, 0 B dirty, 5 KiB bypassed (sequential 4 KiB, mode 1 KiB)");
    let again = serde_json::to_value(&volume).expect("a status");
    assert_eq!(again["bypassed"]["sequential"]["bytes"], 4096);
}

#[test]
fn a_volume_is_found_by_the_beginning_of_its_uuid() {
    let supervisor = supervisor(&["one", "two", "three"]);
    let (shared, fronts) = (Arc::clone(&supervisor.shared), supervisor.fronts.clone());
    let mut status = report::status_of(shared, fronts, supervisor.started)(None);
    assert!(status.text().starts_with(&format!("daemon {}, starting\n", status.pid)), "{}", status.text());
    let uuids = ["1f5a0c22-2a53-4ae5", "1f5a0c22-9999-4ae5", "77777777-2a53-4ae5"];
    for (volume, uuid) in status.volumes.iter_mut().zip(uuids) {
        volume.facts = Some(VolumeProperties {
            flash_only: false,
            uuid: uuid.to_owned(),
            label: "same".to_owned(),
            outdated: false,
            attached: None,
            size_bytes: 0,
            block_bytes: 0,
            cache_mode: "none".to_owned(),
            backing_state: None,
            dirty: DirtyData::of(0, true),
            writeback: None,
            counts: None,
            numbers: None,
        });
    }
    let only = |name: &str| status.clone().only(name).map(|found| found.volumes[0].name.clone());
    assert_eq!(only("77777777"), Ok("three".to_owned()));
    assert_eq!(only("1F5A0C22-99"), Ok("two".to_owned()));
    assert_eq!(only("1f5a0c22"), Err(vec!["one".to_owned(), "two".to_owned()]));
    assert_eq!(only("same").map_err(|all| all.len()), Err(3));
    assert_eq!((only("7777777"), only("one")), (Err(Vec::new()), Ok("one".to_owned())));
}

/// Regression: a device that came while its cache was judged to be dead was taken from the engine
/// that was opening it, which ended the daemon.
#[test]
fn a_cache_that_comes_back_is_not_what_was_judged() {
    let supervisor = supervisor(&["one"]);
    let judged = |is_dead| supervisor.shared().table.is_as_judged(0, is_dead);
    assert_eq!((judged(true), judged(false)), (true, false), "it waits");
    supervisor.shared().table.set_cache(0, opening(std::thread::spawn(|| {})));
    assert_eq!((judged(true), judged(false)), (false, false), "it opens");
    let (engine, _ears) = Engine::deaf();
    let thread = std::thread::spawn(|| {});
    let open = CacheState::Open { set: SET, engine, io: String::new(), thread };
    supervisor.shared().table.set_cache(0, open);
    assert_eq!((judged(true), judged(false)), (false, true), "it is open");
}

/// Regression: work that no client waited for any more was not counted, and the next work was begun
/// beside it.
#[test]
fn an_engine_that_has_not_answered_keeps_what_it_was_given_for_that() {
    let (engine, ears) = Engine::deaf();
    let kept = Arc::new(());
    let ages = Engine::ages_of_all(&[Some(engine)], &kept);
    assert!(ages[0].is_none());
    assert_eq!(Arc::strong_count(&kept), 2);
    drop(ears);
    assert_eq!(Arc::strong_count(&kept), 1, "it never will");
}
