//! Volumes that move between real engines, which stand for "no cache": a failed flush that was not
//! reported yet moves along, and an engine that comes too late changes nothing.

use crate::engine_thread::EngineEvent;
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::jobs::JobEvent;
use crate::supervisor::jobs::attach_detach::VolumeMove;
use crate::supervisor::table::{CacheEntry, CacheState, VolumeState};
use crate::supervisor::tests::supervisor;
use crate::supervisor::volumes::VolumeEvent;
use crate::supervisor::{Event, Supervisor};
use bcached_config::NO_CACHE;
use bcached_format::{BackingFormat, BackingSuperblock, CacheMode, SUPERBLOCK_SECTOR, Uuid};
use bcached_offline::devices::open_backing;
use bcached_port::{ErrorKind, Operation};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const SECTORS: u64 = 4096;

/// A backing device without a cache.
pub fn backing(path: &Path) -> String {
    let superblock = BackingSuperblock::format(BackingFormat {
        uuid: Uuid([3; 16]),
        set_uuid: Uuid([0; 16]),
        block_sectors: 8,
        bucket_sectors: 128,
        data_offset: None,
        cache_mode: CacheMode::Writeback,
        device_sectors: SECTORS,
    });
    let bytes = superblock.expect("sizes that can be run").seal();
    let file = File::create(path).expect("a file");
    file.set_len(SECTORS * 512).expect("a size");
    file.write_all_at(&bytes[..], SUPERBLOCK_SECTOR * 512).expect("room");
    path.to_str().expect("text").to_owned()
}

/// Takes every step and handles every event until the condition holds.
pub fn go_on(supervisor: &mut Supervisor, is_so: impl Fn(&Supervisor) -> bool) {
    let deadline = Instant::now() + LIMIT;
    loop {
        supervisor.try_volume(0);
        if is_so(supervisor) {
            return;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match supervisor.events.recv_timeout(left).expect("it comes in time") {
            Event::Cache(index, CacheEvent::Engine(EngineEvent::Opened(result))) => {
                supervisor.cache_opened(index, result);
            }
            Event::Volume(volume, VolumeEvent::Added(result)) => supervisor.volume_added(volume, *result),
            Event::Job(number, event @ (JobEvent::Released(..) | JobEvent::Moved(..))) => {
                supervisor.job_event(number, event);
            }
            _ => panic!("nothing else is asked for"),
        }
    }
}

fn is_open(supervisor: &Supervisor, cache: usize) -> bool {
    matches!(supervisor.shared().table.caches[cache].state, CacheState::Open { .. })
}

pub fn serves(supervisor: &Supervisor, cache: usize) -> bool {
    let shared = supervisor.shared();
    let entry = &shared.table.volumes[0];
    entry.cache == Some(cache) && matches!(entry.state, VolumeState::Served(_))
}

/// Moves the volume to this cache, and waits until it is served there.
fn go_to(supervisor: &mut Supervisor, cache: usize) {
    let (engine, id) = {
        let shared = supervisor.shared();
        let entry = &shared.table.volumes[0];
        let at = entry.cache.and_then(|cache| shared.table.caches.get(cache));
        let (Some(engine), VolumeState::Served(info)) = (at.and_then(CacheEntry::engine), &entry.state)
        else {
            panic!("it is not served")
        };
        (engine, info.id)
    };
    supervisor.begin_move(1, VolumeMove { volume: 0, cache }, &engine, id);
    go_on(supervisor, |supervisor| serves(supervisor, cache));
}

/// The result of a client's flush.
fn flush(supervisor: &Supervisor) -> Result<(), ErrorKind> {
    let route = supervisor.exports.route("one").expect("it is served");
    let (requests, mut replies) = route.connect::<()>(1);
    requests.submit_by((), &route, Operation::Flush);
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(((), reply)) = replies.try_next() {
            return reply.result;
        }
        assert!(Instant::now() < deadline, "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Regression: a flush had failed when the volume left its engine, and the volume moved on before a
/// client had flushed. The second engine did not know of the failure, and a flush at the third
/// succeeded.
#[test]
fn what_a_flush_is_owed_outlives_two_moves_in_succession() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut supervisor = supervisor(&["one"]);
    {
        let entry = &mut supervisor.shared().table.volumes[0];
        (entry.backing, entry.wanted_cache) =
            (Some(backing(&folder.path().join("one"))), Some(NO_CACHE.to_owned()));
        entry.owes = true;
    }
    go_on(&mut supervisor, |supervisor| serves(supervisor, 1));
    assert!(supervisor.engine_of_none(1).is_err(), "it opens");
    go_on(&mut supervisor, |supervisor| is_open(supervisor, 2));
    go_to(&mut supervisor, 2);
    go_to(&mut supervisor, 1);
    assert_eq!((flush(&supervisor), flush(&supervisor)), (Err(ErrorKind::Io), Ok(())));
    go_to(&mut supervisor, 2);
    assert_eq!(flush(&supervisor), Ok(()), "it has been said");
    supervisor.stop_engines().expect("they stop");
}

/// Regression: a cache was released, or judged to be dead and replaced, while its engine was
/// opening it. That ended the daemon.
#[test]
fn an_engine_that_has_opened_what_nobody_wants_is_stopped() {
    let mut supervisor = supervisor(&[]);
    assert!(supervisor.engine_of_none(8).is_err(), "it opens");
    let Ok(Event::Cache(1, CacheEvent::Engine(EngineEvent::Opened(opened)))) =
        supervisor.events.recv_timeout(LIMIT)
    else {
        panic!("it has opened")
    };
    let opening = {
        let state = &mut supervisor.shared().table.caches[1].state;
        std::mem::replace(state, CacheState::Released)
    };
    let CacheState::Opening { thread, .. } = opening else { panic!("nobody has looked at it") };
    supervisor.cache_opened(1, opened);
    assert!(matches!(supervisor.shared().table.caches[1].state, CacheState::Released));
    assert!(supervisor.shared().table.open_engines().is_empty());
    let deadline = Instant::now() + LIMIT;
    while !thread.is_finished() {
        assert!(Instant::now() < deadline, "it goes on, with the device in its hands");
        std::thread::sleep(Duration::from_millis(1));
    }
    thread.join().expect("in order");
}

/// Regression: a device that had hung while it was opened stayed claimed until the process ended,
/// although its volume had been removed.
#[test]
fn a_device_whose_volume_was_removed_meanwhile_is_let_go_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut supervisor, path) = (supervisor(&["one"]), backing(&folder.path().join("one")));
    supervisor.shared().table.volumes[0].backing = Some(path.clone());
    let opened = open_backing(&path).expect("nobody has it");
    supervisor.slow_backings.keep(&path, opened);
    supervisor.look_after_all();
    assert!(open_backing(&path).is_err(), "its volume waits for it");
    supervisor.shared().table.volumes[0].state = VolumeState::Removed;
    supervisor.look_after_all();
    open_backing(&path).expect("nobody has it any more");
}
