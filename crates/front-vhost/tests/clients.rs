//! VMMs that connect, leave, are killed and reconnect, the fate of their requests, and the start
//! and stop of a server.

mod support;

use bcached_front_vhost::{
    Limits, Options, ServeError, ShutdownTimeout, StartError, VhostServer, VolumeOptions, VolumeRings,
};
use bcached_port::ram::RamServer;
use bcached_port::socket::SocketError;
use bcached_port::{ExportTable, Route};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use support::guest::{OK, TestGuest};
use support::vmm::{EVENT_IDX, TestVmm, USUAL, region};
use support::{
    LIMIT, TANK, TANK_SECTORS, TestServer, holding, pattern, serve, tank, volume_options, wait_until, write,
};
use vhost::VhostBackend as _;
use vhost::vhost_user::{FrontendReqHandler, VhostUserFrontend as _, VhostUserFrontendReqHandlerMut};

/// Starts a guest with so many queues whose disk is the tank, and its VMM.
fn running(served: &TestServer, queues: u16) -> (TestGuest, TestVmm) {
    let mut guest = TestGuest::new(queues);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    (guest, vmm)
}

#[test]
fn a_guest_goes_on_however_often_its_vmm_connects_again() {
    let served = serve();
    let mut guest = TestGuest::new(2);
    for round in 0..60 {
        let mut vmm = TestVmm::connect_again(&served.socket("tank"));
        vmm.run(&mut guest, if round % 2 == 0 { USUAL } else { USUAL | EVENT_IDX });
        let content = pattern(4096, round);
        for queue in &mut guest.queues {
            queue.write(8 * round, &content);
            assert_eq!(queue.read(8 * round, 4096), content);
        }
        if round % 3 == 0 {
            // Like a VMM that stops its guest.
            for queue in &guest.queues {
                let base = vmm.frontend.get_vring_base(usize::from(queue.index)).expect("stops");
                assert_eq!(base, u32::from(queue.available));
            }
        }
        vmm.kill();
    }
    served.wait_for_clients(0);
}

/// If the socket's file is removed and recreated, the connected VMM stays connected, and the next
/// one connects through the new socket.
#[test]
fn a_socket_that_is_bound_again_is_for_the_next_vmm() {
    let served = serve();
    let (mut guest, vmm) = running(&served, 1);
    let socket = served.socket("tank");
    for round in 0..2 {
        fs::remove_file(&socket).expect("it is there");
        served.server().bind_again(&socket).expect("it is one").expect("nobody else has it");
        guest.queues[0].write(8 * round, &[5; 4096]);
    }
    drop(vmm);
    let mut vmm = TestVmm::connect_again(&socket);
    vmm.run(&mut guest, USUAL);
    assert_eq!(guest.queues[0].read(8, 4096), [5; 4096]);
    assert!(served.server().bind_again(&socket.with_file_name("none.sock")).is_none());
}

#[test]
fn a_second_vmm_is_turned_away_and_does_not_disturb_the_first() {
    let served = serve();
    let (mut guest, vmm) = running(&served, 1);
    for _ in 0..5 {
        let start = Instant::now();
        assert!(TestVmm::try_connect(&served.socket("tank")).is_err());
        assert!(start.elapsed() < LIMIT / 2, "closed at once");
        guest.queues[0].write(0, &[5; 512]);
    }
    drop(vmm);
    TestVmm::connect_again(&served.socket("tank"));
}

/// When a VMM stops a queue, every request taken is answered first, and no other is taken.
#[test]
fn a_queue_stops_when_its_requests_are_answered() {
    let (served, hold, seen) = holding(Limits::default());
    let (mut guest, mut vmm) = running(&served, 1);
    hold.store(true, Ordering::SeqCst);
    for n in 0..4 {
        guest.queues[0].send(&write(n, &[3; 512]));
    }
    wait_until("all requests", || seen.load(Ordering::SeqCst) == 4);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| vmm.frontend.get_vring_base(0).expect("stops"));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!stopping.is_finished(), "four are under way");
        served.ram.release();
        assert_eq!(stopping.join().expect("no panic"), 4);
    });
    assert_eq!(std::iter::from_fn(|| guest.queues[0].try_used()).count(), 4, "answered before");
    guest.queues[0].send(&write(9, &[3; 512]));
    assert_eq!(guest.queues[0].used_within(Duration::from_millis(100)), None, "it is stopped");
    hold.store(false, Ordering::SeqCst);
    vmm.start(&guest.queues[0], 4, true);
    guest.queues[0].used();
}

/// While a volume moves to another engine, new requests wait, but messages do not.
#[test]
fn a_held_route_keeps_requests_and_not_the_thread() {
    let served = serve();
    let route = served.exports.route("tank").expect("is served");
    let (mut guest, mut vmm) = running(&served, 2);
    let (idle, is_idle) = mpsc::channel();
    route.hold(move || idle.send(()).expect("somebody waits"));
    is_idle.recv_timeout(LIMIT).expect("nothing is under way");
    let content = pattern(4096, 9);
    for queue in &mut guest.queues {
        for n in 0..5 {
            queue.send(&write(8 * n, &content));
        }
        assert_eq!(queue.used_within(Duration::from_millis(50)), None, "it is held");
    }
    assert_eq!(vmm.capacity(), TANK_SECTORS, "messages are heard");
    // One queue is stopped meanwhile: the requests taken from it are waited for, like the others.
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| vmm.frontend.get_vring_base(1).expect("stops"));
        std::thread::sleep(Duration::from_millis(50));
        route.lead(TANK, &served.ram.connector());
        let base = stopping.join().expect("no panic");
        let answered = std::iter::from_fn(|| guest.queues[1].try_used()).count();
        assert_eq!(base, u32::try_from(answered).expect("few"), "what was taken is what was answered");
        assert!(answered >= 1, "one was taken and kept");
    });
    for _ in 0..5 {
        assert_eq!(guest.queues[0].answer().status, OK);
    }
    let base = guest.queues[1].used;
    vmm.start(&guest.queues[1], base, true);
    for _ in base..5 {
        assert_eq!(guest.queues[1].answer().status, OK);
    }
}

/// After a daemon is killed with requests in flight, answered out of order, the next one repeats
/// exactly the unanswered ones.
#[test]
fn requests_of_a_daemon_that_died_are_done_by_the_next() {
    let (served, hold, seen) = holding(Limits::default());
    let mut guest = TestGuest::new(2);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    let area = vmm.inflight(2);
    vmm.set_inflight(&area);
    vmm.run(&mut guest, USUAL);
    guest.queues[0].write(0, &[1; 512]);
    hold.store(true, Ordering::SeqCst);
    for n in 1..=6 {
        guest.queues[0].send(&write(n, &[u8::try_from(n).expect("small"); 512]));
    }
    wait_until("six of seven", || seen.load(Ordering::SeqCst) == 7);
    hold.store(false, Ordering::SeqCst);
    let quick: Vec<u16> = (0..2).map(|n| guest.queues[0].send(&write(100 + n, &[8; 512]))).collect();
    for _ in &quick {
        assert!(quick.contains(&guest.queues[0].answer().slot), "they pass those that are held");
    }
    vmm.kill();
    served.wait_for_clients(0);

    // Nothing about the guest has changed, except for one more request.
    guest.queues[0].submit(&write(200, &[9; 512]));
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.set_inflight(&area);
    let before = seen.load(Ordering::SeqCst);
    vmm.run(&mut guest, USUAL);
    for _ in 0..7 {
        assert_eq!(guest.queues[0].answer().status, OK);
    }
    assert_eq!(guest.queues[0].used_within(Duration::from_millis(50)), None, "each once");
    assert_eq!(seen.load(Ordering::SeqCst) - before, 7, "what was answered is not done again");
    for n in 1..=6 {
        let content = [u8::try_from(n).expect("small"); 512];
        assert_eq!(served.ram.content(TANK, n, 1), content, "sector {n}");
    }
    served.ram.release();
}

/// If the engine goes away under a VMM that records requests in flight, the guest sees no error,
/// and everything is done once there is an engine again.
#[test]
fn an_engine_that_is_gone_fails_nobody_who_can_come_again() {
    let (served, hold, seen) = holding(Limits::default());
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    let area = vmm.inflight(1);
    vmm.set_inflight(&area);
    vmm.run(&mut guest, USUAL);
    hold.store(true, Ordering::SeqCst);
    for n in 0..3 {
        guest.queues[0].send(&write(n, &[7; 512]));
    }
    wait_until("all requests", || seen.load(Ordering::SeqCst) == 3);
    let next = RamServer::start(&[(TANK, TANK_SECTORS)]);
    served.exports.insert(tank(&next));
    // The first engine answers the requests that it holds with `Gone` when it is dropped.
    drop_ram(served, |served| {
        served.wait_for_clients(0);
        assert_eq!(guest.queues[0].try_used(), None, "no answer is no error");
        let mut vmm = TestVmm::connect_again(&served.socket("tank"));
        vmm.set_inflight(&area);
        vmm.run(&mut guest, USUAL);
        for _ in 0..3 {
            assert_eq!(guest.queues[0].answer().status, OK);
        }
        assert_eq!(next.content(TANK, 0, 3), [7; 3 * 512]);
    });
}

/// Replaces the engine with another, and thereby ends the old one.
fn drop_ram(mut served: TestServer, then: impl FnOnce(&TestServer)) {
    drop(std::mem::replace(&mut served.ram, RamServer::start(&[])));
    then(&served);
}

struct ConfigChangeListener(mpsc::Sender<()>);

impl VhostUserFrontendReqHandlerMut for ConfigChangeListener {
    fn handle_config_change(&mut self) -> std::io::Result<u64> {
        self.0.send(()).expect("somebody waits");
        Ok(0)
    }
}

#[test]
fn a_vmm_is_told_that_its_disk_has_grown() {
    let served = serve();
    let (mut guest, mut vmm) = running(&served, 1);
    let (tells, told) = mpsc::channel();
    let listens = Arc::new(std::sync::Mutex::new(ConfigChangeListener(tells)));
    let mut handler = FrontendReqHandler::new(listens).expect("a channel");
    vmm.frontend.set_backend_request_fd(&RawDescriptor(handler.get_tx_raw_fd())).expect("is taken");
    let mut grown = tank(&served.ram);
    grown.sectors = 2 * TANK_SECTORS;
    served.exports.insert(grown);
    served.server().changed("tank");
    served.server().changed("nobody");
    handler.handle_request().expect("is told");
    told.recv_timeout(LIMIT).expect("is told");
    assert_eq!(vmm.capacity(), 2 * TANK_SECTORS);
    guest.queues[0].write(0, &[1; 512]);
}

struct RawDescriptor(std::os::fd::RawFd);

impl std::os::fd::AsRawFd for RawDescriptor {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0
    }
}

#[test]
fn memory_may_come_and_go_in_pieces() {
    let served = serve();
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    assert_eq!(vmm.frontend.get_max_mem_slots().expect("is answered"), 509);
    vmm.frontend.set_features(USUAL).expect("features");
    vmm.frontend.add_mem_region(&region(&guest)).expect("is taken");
    vmm.start(&guest.queues[0], 0, true);
    guest.queues[0].write(0, &[1; 512]);
    vmm.frontend.remove_mem_region(&region(&guest)).expect("is given back");
    guest.queues[0].send(&write(0, &[2; 512]));
    assert_eq!(guest.queues[0].used_within(Duration::from_millis(50)), None, "there is no ring any more");
    vmm.frontend.add_mem_region(&region(&guest)).expect("is taken");
    guest.queues[0].kick.write(1).expect("kicks");
    assert_eq!(guest.queues[0].answer().status, OK);
}

#[test]
fn a_server_that_stops_answers_what_it_has_taken_or_says_who_still_waits() {
    let (served, hold, seen) = holding(Limits::default());
    let (mut guest, vmm) = running(&served, 1);
    hold.store(true, Ordering::SeqCst);
    guest.queues[0].send(&write(0, &[1; 512]));
    wait_until("the request", || seen.load(Ordering::SeqCst) == 1);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| served.server().stop("tank", LIMIT));
        wait_until("the order", || !served.server().served().contains(&"tank".to_owned()));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!stopping.is_finished(), "the engine owes a reply");
        guest.queues[0].send(&write(1, &[2; 512]));
        served.ram.release();
        assert_eq!(stopping.join().expect("no panic"), Ok(()));
    });
    assert_eq!(guest.queues[0].answer().status, OK);
    assert_eq!(guest.queues[0].try_used(), None, "what came later stays in the ring");
    assert!(!served.socket("tank").exists());
    assert_eq!(served.server().stop("tank", LIMIT), Ok(()), "it is not served");

    served.server().serve("tank", volume_options()).expect("again");
    drop(vmm);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    wait_until("the other request", || seen.load(Ordering::SeqCst) == 2);
    let start = Instant::now();
    let busy = served.server().stop("tank", Duration::from_millis(100)).expect_err("the engine holds one");
    assert!(start.elapsed() < LIMIT / 2);
    assert_eq!(busy, ShutdownTimeout { volumes: vec![("tank".to_owned(), 1)] });
    assert_eq!(
        busy.to_string(),
        "volumes served by vhost-user still wait for the engine: \"tank\" (1 requests)"
    );
    served.ram.release();
}

/// A server that stops also waits for requests of former VMMs.
#[test]
fn a_server_that_stops_waits_for_what_those_left_who_are_gone() {
    let (served, hold, seen) = holding(Limits::default());
    let (mut guest, vmm) = running(&served, 1);
    hold.store(true, Ordering::SeqCst);
    guest.queues[0].send(&write(0, &[1; 512]));
    wait_until("the request", || seen.load(Ordering::SeqCst) == 1);
    vmm.kill();
    served.wait_for_clients(0);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| served.server().stop("tank", LIMIT));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!stopping.is_finished(), "the engine owes a reply");
        served.ram.release();
        assert_eq!(stopping.join().expect("no panic"), Ok(()));
    });
}

#[test]
fn a_silent_vmm_does_not_keep_a_server_from_stopping() {
    let served = serve();
    let mut half = UnixStream::connect(served.socket("tank")).expect("somebody listens");
    std::io::Write::write_all(&mut half, &[1, 0, 0, 0, 1]).expect("half a message");
    served.wait_for_clients(1);
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    assert_eq!(served.server().stop("tank", Duration::from_millis(100)), Ok(()));
    assert!(start.elapsed() < LIMIT / 2, "it is cut off");
}

#[test]
fn a_socket_is_for_user_and_group_and_replaced_only_if_nobody_answers() {
    let served = serve();
    let mode = fs::metadata(served.socket("tank")).expect("there").permissions().mode();
    assert_eq!(mode & 0o7777, 0o660);
    assert!(matches!(
        served.server().serve("tank", volume_options()),
        Err(ServeError::AlreadyServed(name)) if name == "tank"
    ));
    let other = support::start(&served.exports, served.directory.path().to_owned(), Default::default());
    let error = other.serve("tank", volume_options()).expect_err("another server answers");
    assert!(matches!(error, ServeError::Socket(SocketError::InUse(_))), "{error}");
    served.server().stop("tank", LIMIT).expect("stops");
    drop(UnixListener::bind(served.socket("tank")).expect("a socket that nobody listens on any more"));
    other.serve("tank", volume_options()).expect("replaced");
    other.shutdown(LIMIT).expect("stops");
}

#[test]
fn what_cannot_be_served_is_said_in_a_sentence() {
    let served = serve();
    let server = served.server();
    let told = |name: &str, options| server.serve(name, options).expect_err("cannot be").to_string();
    assert_eq!(told("nobody", volume_options()), "the volume \"nobody\" is not served at present");
    assert!(told("../tank", volume_options()).contains("cannot be the file name of its vhost-user socket"));
    assert!(told("", volume_options()).contains("cannot be the file name of its vhost-user socket"));
    let many = VolumeOptions { queues: 65, ..volume_options() };
    assert_eq!(told("tank", many), "a vhost-user disk can have 1 to 64 queues, not 65");
    let start = |directory, limits| {
        let options = Options { directory, group: None, limits, rings: VolumeRings::default() };
        VhostServer::start(options, ExportTable::new()).map(drop).expect_err("cannot be").to_string()
    };
    let missing = served.directory.path().join("no");
    let wanted =
        format!("the directory {} for vhost-user sockets does not exist; create it first", missing.display());
    assert_eq!(start(missing, Limits::default()), wanted);
    let wanted = "is not a directory, so it cannot hold vhost-user sockets";
    assert!(start(served.socket("tank"), Limits::default()).ends_with(wanted));
    let few = Limits { volume_bytes: 1, ..Limits::default() };
    assert!(start(served.directory.path().to_owned(), few).contains("32 MiB"));
    let none = Limits { requests: 0, ..Limits::default() };
    let directory = served.directory.path().to_owned();
    let options = Options { directory, group: None, limits: none, rings: VolumeRings::default() };
    assert!(matches!(VhostServer::start(options, ExportTable::new()).map(drop), Err(StartError::Limits(_))));
}

/// A volume that leaves the table is not served until it returns, even if another is labelled with
/// its name.
#[test]
fn a_volume_that_is_away_is_served_to_nobody() {
    let served = serve();
    let mut archive = (*served.exports.remove("archive").expect("there")).clone();
    served.exports.remove("tank");
    archive.label = "tank".to_owned();
    served.exports.insert(archive);
    assert!(TestVmm::try_connect(&served.socket("tank")).is_err());
    served.exports.insert(tank(&served.ram));
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    assert_eq!(vmm.capacity(), TANK_SECTORS);
    let mut away = tank(&served.ram);
    away.served = None::<Route>;
    served.exports.insert(away);
    drop(vmm);
    served.wait_for_clients(0);
    assert!(TestVmm::try_connect(&served.socket("tank")).is_err());
}
