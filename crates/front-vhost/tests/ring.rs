//! Disks on the ring of an engine: which ones are served there, and that no VMM can block that
//! thread, which serves others too.

mod support;

use rustix::fs::ftruncate;
use std::fs;
use support::guest::{GuestQueue, MEMORY_BYTES, TestGuest};
use support::vmm::{EVENT_IDX, TestVmm, USUAL};
use support::{TANK, TestServer, pattern, serve, write};
use vhost::VhostBackend as _;
use vmm_sys_util::eventfd::EventFd;

fn on_a_ring() -> Option<TestServer> {
    let served = serve();
    if served.ring.is_none() {
        eprintln!("SKIPPED: no io_uring here");
        return None;
    }
    Some(served)
}

fn run(served: &TestServer, guest: &mut TestGuest) -> TestVmm {
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.run(guest, USUAL | EVENT_IDX);
    vmm
}

/// How often threads of that name have gone to sleep.
fn sleeps(name: &str) -> u64 {
    let tasks = fs::read_dir("/proc/self/task").expect("there is a /proc").flatten();
    let of = |text: String, field: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(field).map(str::trim).map(str::to_owned));
        line.expect("a field of /proc")
    };
    let status = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let its = status.filter(|status| of(status.clone(), "Name:") == name);
    its.map(|status| of(status, "voluntary_ctxt_switches:").parse::<u64>().expect("a number")).sum()
}

const WRITES: u64 = 300;

/// How often the volume's own thread was woken for [`WRITES`] writes.
fn wakes(queue: &mut GuestQueue) -> u64 {
    // The first write is not handled on the ring, because the write claim is registered.
    queue.write(0, &[1; 512]);
    std::thread::sleep(std::time::Duration::from_millis(20));
    let before = sleeps("vhost-archive-2");
    for n in 0..WRITES {
        queue.write(8 * n, &pattern(4096, n));
    }
    sleeps("vhost-archive-2") - before
}

/// Anything that may block is left to the volume's own thread; everything else does not wake it.
#[test]
fn the_ring_serves_what_nobody_has_to_wait_for() {
    let Some(served) = on_a_ring() else { return };
    // A name that no other test uses.
    let export = bcached_port::Export { name: "archive-2".to_owned(), ..support::tank(&served.ram) };
    served.exports.insert(export);
    served.server().serve("archive-2", support::volume_options()).expect("a socket");
    let connect = || TestVmm::connect_again(&served.socket("archive-2"));

    let mut guest = TestGuest::new(2);
    let mut vmm = connect();
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    assert!(wakes(&mut guest.queues[0]) < WRITES / 10);
    // Large requests go to the thread; afterwards small ones are handled on the ring again.
    let large = pattern(100 << 10, 1);
    guest.queues[0].write(0, &large);
    assert_eq!(guest.queues[1].read(0, 100 << 10), large);
    assert!(wakes(&mut guest.queues[1]) < WRITES / 10);
    drop(vmm);

    // A call that is not an eventfd.
    let mut guest = TestGuest::new(1);
    let mut vmm = connect();
    vmm.run(&mut guest, USUAL);
    vmm.frontend.set_vring_call(0, &pipe()).expect("is taken");
    let queue = &mut guest.queues[0];
    queue.send(&write(0, &[1; 512]));
    support::wait_until("an answer without a call", || queue.try_used().is_some_and(|used| used.1 == 1));
    let before = sleeps("vhost-archive-2");
    queue.send(&write(0, &[1; 512]));
    support::wait_until("an answer without a call", || queue.try_used().is_some_and(|used| used.1 == 1));
    assert!(sleeps("vhost-archive-2") > before);
    drop(vmm);

    // Memory that is a file on a disk.
    let file = tempfile::tempfile().expect("a file");
    ftruncate(&file, MEMORY_BYTES).expect("space");
    let is_on_disk = rustix::fs::fstatfs(&file).expect("open").f_type != 0x0102_1994;
    let mut guest = TestGuest::with_memory(file, 1);
    let mut vmm = connect();
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    let woken = wakes(&mut guest.queues[0]);
    assert!(!is_on_disk || woken >= WRITES / 2, "{woken}");
}

/// The write end of a pipe.
fn pipe() -> EventFd {
    use std::os::fd::{FromRawFd as _, IntoRawFd as _};
    let (reads, writes) = std::io::pipe().expect("a pipe");
    // Kept open for the lifetime of the process, so that writing succeeds.
    let _kept = reads.into_raw_fd();
    #[expect(unsafe_code, reason = "the crate's eventfd cannot be made of anything else safely")]
    // SAFETY: the descriptor is owned, and ownership is passed on.
    unsafe {
        EventFd::from_raw_fd(writes.into_raw_fd())
    }
}

/// If an engine and its ring go away, the disks continue, perhaps with another engine.
#[test]
fn without_the_ring_the_threads_go_on() {
    let Some(mut served) = on_a_ring() else { return };
    let (mut guest, mut idle) = (TestGuest::new(2), TestGuest::new(1));
    let mut vmm = run(&served, &mut guest);
    let mut archive = TestVmm::connect(&served.socket("archive"));
    archive.run(&mut idle, USUAL);
    guest.queues[0].write(0, &[7; 4096]);
    served.ring.take();
    assert_eq!(guest.queues[1].read(0, 4096), [7; 4096]);
    assert_eq!(idle.queues[0].read(0, 512), [0; 512]);
    assert_eq!(vmm.capacity(), support::TANK_SECTORS);
    guest.queues[0].write(8, &[8; 4096]);
    drop(vmm);
    let mut vmm = run(&served, &mut guest);
    guest.queues[0].write(16, &[9; 4096]);
    assert_eq!(served.ram.content(TANK, 16, 8), [9; 4096]);
    assert_eq!(vmm.capacity(), support::TANK_SECTORS);
}

/// The ring may go away at any moment, even while the disk is being lent to it.
#[test]
fn a_disk_is_not_lent_to_a_ring_that_goes() {
    for round in 0..60 {
        let Some(mut served) = on_a_ring() else { return };
        let mut guest = TestGuest::new(1);
        let mut vmm = TestVmm::connect(&served.socket("archive"));
        vmm.run(&mut guest, USUAL);
        std::thread::sleep(std::time::Duration::from_micros(5 * round));
        served.ring.take();
        assert_eq!(guest.queues[0].read(0, 512), [0; 512]);
    }
}

/// A queue that always has more requests starves neither another queue of the same disk nor
/// messages.
#[test]
fn a_flood_in_one_queue_leaves_room_for_others() {
    let Some(served) = on_a_ring() else { return };
    let mut guest = TestGuest::new(2);
    let mut vmm = run(&served, &mut guest);
    let ends = std::sync::atomic::AtomicBool::new(false);
    let [mut flooding, mut other] = <[GuestQueue; 2]>::try_from(guest.queues).ok().expect("two");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A chain of a single readable descriptor is skipped immediately, so all of the ring is
            // always available.
            flooding.describe(flooding.descriptors(), 0, (support::guest::DATA, 16, 0, 0));
            while !ends.load(std::sync::atomic::Ordering::SeqCst) {
                while flooding.available.wrapping_sub(flooding.used) < support::guest::SIZE {
                    flooding.publish(0);
                }
                let _kicks = flooding.kick.write(1);
                while flooding.try_used().is_some() {}
            }
        });
        for n in 0..200 {
            other.write(8 * n, &pattern(4096, n));
        }
        assert_eq!(vmm.capacity(), support::TANK_SECTORS);
        ends.store(true, std::sync::atomic::Ordering::SeqCst);
    });
}
