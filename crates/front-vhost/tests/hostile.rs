//! Guests and VMMs that misbehave: each is answered, skipped or cut off, and the next one is
//! served.

mod support;

use bcached_front_vhost::Limits;
use bcached_port::ram::Verdict;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, ftruncate, memfd_create};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::guest::{
    DATA, DISCARD, FLUSH, GET_ID, GuestQueue, IN, INDIRECT, IOERR, NEXT, OK, OUT, SIZE, TestGuest, WRITE,
    WRITE_ZEROES,
};
use support::vmm::{EVENT_IDX, TestVmm, USER, USUAL, places, region};
use support::{LIMIT, TANK_SECTORS, TestServer, pattern, serve, serve_with, wait_until, write};
use vhost::vhost_user::VhostUserFrontend as _;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::{VhostBackend as _, VringConfigData};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// Addresses used by the tests: header, status, a table, data.
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 32;
const TABLE: u64 = DATA + 4096;
const CONTENT: u64 = DATA + 65536;
/// Address, length in bytes, flags, next.
type Descriptor = (u64, u32, u16, u16);

const HEAD: Descriptor = (HEADER, 16, NEXT, 1);
const TAIL: Descriptor = (STATUS, 1, WRITE, 0);
/// An address without memory.
const NOWHERE: u64 = 0xffff_ffff_ff00;
/// The status before anything is written to it.
const UNTOUCHED: u8 = 0xaa;

/// Checks that a well-behaved guest is served.
fn assert_serves(socket: &Path) {
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect_again(socket);
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    let content = pattern(4096, 5);
    guest.queues[0].write(TANK_SECTORS - 8, &content);
    assert_eq!(guest.queues[0].read(TANK_SECTORS - 8, 4096), content);
}

fn tank(served: &TestServer) -> (TestVmm, TestGuest) {
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    (vmm, guest)
}

/// Submits the chain at 0. Returns the number of bytes written according to the used ring, and the
/// status.
fn outcome(queue: &mut GuestQueue, kind: u32, descriptors: &[Descriptor]) -> (u32, u8) {
    queue.put(HEADER, kind);
    queue.put(HEADER + 8, 0_u64);
    queue.put(STATUS, UNTOUCHED);
    for (index, descriptor) in (0..).zip(descriptors) {
        queue.describe(queue.descriptors(), index, *descriptor);
    }
    let since = queue.available;
    queue.publish(0);
    queue.kick(since);
    let (head, written) = queue.used();
    assert_eq!(head, 0);
    (written, queue.get(STATUS))
}

#[test]
fn malformed_chains_are_answered() {
    let served = serve();
    let (_vmm, mut guest) = tank(&served);
    let queue = &mut guest.queues[0];
    let data = |at, bytes, flags| (at, bytes, NEXT | flags, 2);
    let refused: &[(&str, u32, &[Descriptor])] = &[
        ("data for a read that cannot be written", IN, &[HEAD, data(CONTENT, 512, 0), TAIL]),
        ("data for a write that can only be written", OUT, &[HEAD, data(CONTENT, 512, WRITE), TAIL]),
        (
            "data in both directions",
            IN,
            &[HEAD, data(CONTENT, 512, 0), (CONTENT, 512, NEXT | WRITE, 3), (STATUS, 1, WRITE, 0)],
        ),
        ("no data", IN, &[HEAD, TAIL]),
        ("no data to write", OUT, &[HEAD, TAIL]),
        ("an identity of no bytes", GET_ID, &[HEAD, TAIL]),
        ("a descriptor of no bytes", IN, &[HEAD, data(CONTENT, 0, WRITE), TAIL]),
        ("half a sector", IN, &[HEAD, data(CONTENT, 256, WRITE), TAIL]),
        ("a sector and a byte", OUT, &[HEAD, data(CONTENT, 513, 0), TAIL]),
        ("outside of memory", IN, &[HEAD, data(NOWHERE, 512, WRITE), TAIL]),
        ("over the end of memory", OUT, &[HEAD, data((64 << 20) - 256, 512, 0), TAIL]),
        ("over the last address", IN, &[HEAD, data(u64::MAX - 255, 512, WRITE), TAIL]),
        ("four GiB", IN, &[HEAD, data(CONTENT, !511, WRITE), TAIL]),
        ("half a header", IN, &[(HEADER, 8, NEXT, 1), data(CONTENT, 512, WRITE), TAIL]),
        ("a header outside of memory", IN, &[(NOWHERE, 16, NEXT, 1), data(CONTENT, 512, WRITE), TAIL]),
        (
            "to be read behind what is to be written",
            IN,
            &[(CONTENT, 512, NEXT | WRITE, 1), (HEADER, 16, NEXT, 2), TAIL],
        ),
        ("half a range", DISCARD, &[HEAD, data(CONTENT, 8, 0), TAIL]),
        ("two ranges", WRITE_ZEROES, &[HEAD, data(CONTENT, 32, 0), TAIL]),
        ("no sectors", DISCARD, &[HEAD, data(CONTENT, 16, 0), TAIL]),
    ];
    for (what, kind, descriptors) in refused {
        assert_eq!(outcome(queue, *kind, descriptors), (1, IOERR), "{what}");
    }
    queue.write(0, &[1; 512]);
}

#[test]
fn chains_without_a_place_for_an_answer_are_skipped() {
    let served = serve();
    let (_vmm, mut guest) = tank(&served);
    let queue = &mut guest.queues[0];
    let skipped: &[(&str, &[Descriptor])] = &[
        ("no status", &[(HEADER, 16, 0, 0)]),
        ("a status outside of memory", &[HEAD, (NOWHERE, 1, WRITE, 0)]),
        ("a status of no bytes", &[HEAD, (STATUS, 0, WRITE, 0)]),
        ("a loop", &[HEAD, (CONTENT, 512, NEXT | WRITE, 0)]),
        ("a loop of one", &[(HEADER, 16, NEXT, 0)]),
        ("a next one that there is not", &[(HEADER, 16, NEXT, SIZE)]),
        ("an empty table", &[(TABLE, 0, INDIRECT, 0)]),
        ("half a descriptor in a table", &[(TABLE, 24, INDIRECT, 0)]),
        ("a table outside of memory", &[(NOWHERE, 64, INDIRECT, 0)]),
        ("a table and a next one", &[(TABLE, 64, INDIRECT | NEXT, 1), TAIL]),
        ("a status that begins at the last address", &[HEAD, (u64::MAX, 2, WRITE, 0)]),
    ];
    for (what, descriptors) in skipped {
        assert_eq!(outcome(queue, IN, descriptors), (0, UNTOUCHED), "{what}");
    }
    // A table in a table, and one that is a loop of the maximum size.
    queue.describe(TABLE, 0, (TABLE, 16, INDIRECT, 0));
    assert_eq!(outcome(queue, IN, &[(TABLE, 16, INDIRECT, 0)]), (0, UNTOUCHED));
    queue.describe(TABLE, 0, (CONTENT, 512, NEXT | WRITE, 0));
    assert_eq!(outcome(queue, IN, &[(TABLE, 0xffff_fff0, INDIRECT, 0)]), (0, UNTOUCHED));
    // Valid, if unusual: plain descriptors before a table, header and status in pieces.
    queue.describe(TABLE, 0, (HEADER + 4, 12, NEXT, 1));
    queue.describe(TABLE, 1, (CONTENT, 513, WRITE, 0));
    let pieces = [(HEADER, 4, NEXT, 1), (TABLE, 32, INDIRECT, 0)];
    assert_eq!(outcome(queue, IN, &pieces).0, 513);
    assert_eq!(queue.get::<u8>(CONTENT + 512), OK);
    queue.write(0, &[1; 512]);
}

#[test]
fn available_entries_that_cannot_be_stop_nobody() {
    let served = serve();
    for garbage in [1000_u16, SIZE + 1, u16::MAX] {
        let (vmm, mut guest) = tank(&served);
        let queue = &mut guest.queues[0];
        queue.write(0, &[1; 512]);
        let index = GuestAddress(queue.available_ring() + 2);
        queue.memory.store(queue.available.wrapping_add(garbage), index, Ordering::Release).expect("memory");
        queue.kick.write(1).expect("kicks");
        assert_eq!(queue.used_within(Duration::from_millis(20)), None);
        // An invalid head is skipped.
        queue.publish(SIZE);
        queue.kick.write(1).expect("kicks");
        assert_eq!(queue.used_within(Duration::from_millis(20)), None);
        queue.write(0, &[1; 512]);
        drop(vmm);
    }
    assert_serves(&served.socket("tank"));
}

/// Each VMM sends an invalid message, and is refused or cut off.
#[test]
fn messages_that_make_no_sense_hurt_only_who_sends_them() {
    let served = serve();
    let socket = served.socket("tank");
    let guest = TestGuest::new(1);
    let set_up = |index: usize, change: fn(&mut VringConfigData)| {
        let mut vmm = TestVmm::connect_again(&socket);
        vmm.frontend.set_features(USUAL).expect("features");
        vmm.share_memory(&guest);
        let queue = &guest.queues[0];
        let mut config = places(queue);
        change(&mut config);
        let refused = vmm.frontend.set_vring_addr(index, &config).is_err();
        refused || vmm.frontend.set_vring_kick(index, &queue.kick).is_err()
    };
    assert!(!set_up(0, |_| {}));
    assert!(set_up(60, |_| {}), "a queue that there is not");
    assert!(set_up(0, |config| config.desc_table_addr = 1 << 60), "outside of memory");
    assert!(set_up(0, |config| config.used_ring_addr = USER + (64 << 20) - 8), "over its end");
    assert!(set_up(0, |config| config.avail_ring_addr = u64::MAX - 1), "over the last address");
    let try_one = |what: &str, act: &dyn Fn(&mut TestVmm) -> bool| {
        let mut vmm = TestVmm::connect_again(&socket);
        assert!(!act(&mut vmm), "{what} was taken");
        drop(vmm);
        assert_serves(&socket);
    };
    try_one("a feature that was not offered", &|vmm| vmm.frontend.set_features(1 << 40).is_ok());
    for entries in [0, 3, 2048, u16::MAX] {
        try_one("a size of a ring", &|vmm| vmm.frontend.set_vring_num(0, entries).is_ok());
    }
    try_one("a base of a queue that there is not", &|vmm| vmm.frontend.get_vring_base(7).is_ok());
    try_one("twice the same memory", &|vmm| {
        vmm.frontend.set_mem_table(&[region(&guest), region(&guest)]).is_ok()
    });
    try_one("memory at the last address", &|vmm| {
        let mut far = region(&guest);
        far.guest_phys_addr = u64::MAX - far.memory_size + 1;
        vmm.frontend.set_mem_table(&[far]).is_ok()
    });
    try_one("memory that its file does not have", &|vmm| {
        let file = File::from(memfd_create("short", MemfdFlags::CLOEXEC).expect("a file"));
        ftruncate(&file, 4096).expect("ours");
        let short = vhost::VhostUserMemoryRegionInfo { mmap_handle: file.as_raw_fd(), ..region(&guest) };
        vmm.frontend.set_mem_table(&[short]).is_ok()
    });
    try_one("a setting of the configuration", &|vmm| {
        let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
        vmm.frontend.set_config(32, flags, &[0]).is_ok()
    });
    try_one("more queues to be noted than there are", &|vmm| {
        let wanted = vhost::vhost_user::message::VhostUserInflight::new(0, 0, 500, SIZE);
        vmm.frontend.get_inflight_fd(&wanted).is_ok()
    });
    try_one("an area that its file does not have", &|vmm| {
        let (area, _) = vmm.inflight(4);
        let file = File::from(memfd_create("short", MemfdFlags::CLOEXEC).expect("a file"));
        vmm.frontend.set_inflight_fd(&area, file.as_raw_fd()).is_ok()
    });
}

/// A kick that is one end of a pipe, and a call that is a full pipe, block no thread.
#[test]
fn kicks_and_calls_that_are_no_eventfds_hold_nobody_up() {
    let served = serve();
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.frontend.set_features(USUAL).expect("features");
    vmm.share_memory(&guest);
    vmm.set_up(&guest.queues[0], 0);
    let (reads, mut writes) = std::io::pipe().expect("a pipe");
    writes.write_all(&[0; 3]).expect("room");
    let (_keeps, mut full) = std::io::pipe().expect("a pipe");
    let room = rustix::pipe::fcntl_getpipe_size(&full).expect("a pipe");
    full.write_all(&vec![0; room]).expect("room");
    vmm.frontend.set_vring_kick(0, &ForeignDescriptor::of(reads.into()).0).expect("is taken");
    vmm.frontend.set_vring_call(0, &ForeignDescriptor::of(full.into()).0).expect("is taken");
    vmm.frontend.set_vring_enable(0, true).expect("enabled");
    guest.queues[0].submit(&support::guest::GuestRequest { kind: FLUSH, sector: 0, out: &[], into: 0 });
    assert_eq!(vmm.capacity(), TANK_SECTORS, "the thread goes on");
    drop(vmm);
    assert_serves(&served.socket("tank"));
}

/// A call whose counter is full, and which the VMM has made blocking again, and a blocking kick
/// block no thread.
#[test]
fn calls_and_kicks_that_would_be_waited_for_hold_nobody_up() {
    let served = serve();
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    // Without the event index, each answer is signalled.
    vmm.run(&mut guest, USUAL);
    let call = EventFd::new(0).expect("an eventfd");
    vmm.frontend.set_vring_call(0, &call).expect("is taken");
    let queue = &mut guest.queues[0];
    for _ in 0..3 {
        queue.send(&write(0, &[1; 512]));
        wait_until("an answer", || queue.try_used().is_some());
        wait_until("a call", || call.read().is_ok());
    }
    let counter = fd_of(&call);
    rustix::io::write(counter, &(u64::MAX - 1).to_ne_bytes()).expect("room");
    fcntl_setfl(counter, OFlags::empty()).expect("ours");
    fcntl_setfl(fd_of(&queue.kick), OFlags::empty()).expect("ours");
    for n in 0..20 {
        queue.send(&write(8 * n, &pattern(4096, n)));
    }
    let mut answers = 0;
    wait_until("the answers", || {
        answers += usize::from(queue.try_used().is_some());
        answers == 20
    });
    assert_eq!(vmm.capacity(), TANK_SECTORS, "its thread is not held up either");
    // Another volume of the same engine.
    let mut other = TestGuest::new(1);
    let mut archive = TestVmm::connect(&served.socket("archive"));
    archive.run(&mut other, USUAL);
    assert_eq!(other.queues[0].read(0, 512), [0; 512]);
}

fn fd_of(event: &EventFd) -> BorrowedFd<'_> {
    use std::os::fd::AsRawFd as _;
    #[expect(unsafe_code, reason = "the crate's eventfd lends no descriptor safely")]
    // SAFETY: it is open for as long as `event`.
    unsafe {
        BorrowedFd::borrow_raw(event.as_raw_fd())
    }
}

/// Another descriptor in the type of an eventfd.
struct ForeignDescriptor(EventFd);

impl ForeignDescriptor {
    fn of(fd: OwnedFd) -> Self {
        use std::os::fd::{FromRawFd as _, IntoRawFd as _};
        #[expect(unsafe_code, reason = "the crate's eventfd cannot be made of anything else safely")]
        // SAFETY: the descriptor is owned, and ownership is passed on.
        Self(unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) })
    }
}

#[test]
fn bytes_that_are_no_messages_end_the_connection() {
    let served = serve();
    for garbage in [
        &[0_u8; 64][..],
        &[0xff; 64],
        b"GET / HTTP/1.1\r\n\r\n",
        &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
    ] {
        let mut stream = UnixStream::connect(served.socket("tank")).expect("somebody listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        stream.write_all(garbage).expect("is sent");
        let mut answer = Vec::new();
        let ended = stream.read_to_end(&mut answer);
        let reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(ended.as_ref().is_ok() || ended.as_ref().is_err_and(reset), "{ended:?}");
        assert!(answer.is_empty());
        assert_serves(&served.socket("tank"));
    }
}

/// Addresses that are in memory, close to it, and far outside.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..200_u64).prop_map(|n| DATA + 512 * n),
        1 => Just(HEADER),
        1 => 0..0x2_0000_u64,
        1 => (64 << 20) - 600..(64 << 20) + 600_u64,
        1 => any::<u64>(),
        1 => u64::MAX - 600..=u64::MAX,
    ]
}

fn length() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => prop::sample::select(vec![1, 16, 512, 1024, 4096]),
        1 => Just(0),
        1 => 0..9000_u32,
        1 => any::<u32>(),
        1 => Just(u32::MAX),
    ]
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let next = prop_oneof![4 => 0..SIZE, 1 => any::<u16>()];
    (address(), length(), prop_oneof![8 => 0..4_u16, 1 => 0..16_u16], next)
}

fn head() -> impl Strategy<Value = u16> {
    prop_oneof![8 => 0..SIZE, 1 => any::<u16>()]
}

/// A ring of garbage: descriptors, headers, entries, and how many of these are marked as available.
#[derive(Debug)]
struct GarbageRing {
    descriptors: Vec<Descriptor>,
    headers: Vec<(u32, u64)>,
    heads: Vec<u16>,
    available: u16,
    features: u64,
    inflight: Option<Vec<u8>>,
}

fn garbage() -> impl Strategy<Value = GarbageRing> {
    let kind = prop::sample::select(vec![IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES, 99]);
    let sector = prop_oneof![4 => 0..TANK_SECTORS, 1 => any::<u64>()];
    (
        prop::collection::vec(descriptor(), usize::from(SIZE)),
        prop::collection::vec((kind, sector), 200),
        prop::collection::vec(head(), usize::from(SIZE)),
        prop_oneof![4 => 0..=SIZE, 1 => any::<u16>()],
        prop::sample::select(vec![USUAL, USUAL | EVENT_IDX]),
        prop::option::of(prop::collection::vec(any::<u8>(), 0..2000)),
    )
        .prop_map(|(descriptors, headers, heads, available, features, inflight)| GarbageRing {
            descriptors,
            headers,
            heads,
            available,
            features,
            inflight,
        })
}

fn play(socket: &Path, garbage: &GarbageRing) {
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect_again(socket);
    let queue = &mut guest.queues[0];
    for (index, (kind, sector)) in (0..).zip(&garbage.headers) {
        queue.put(DATA + 512 * index, *kind);
        queue.put(DATA + 512 * index + 8, *sector);
    }
    for (index, descriptor) in (0..).zip(&garbage.descriptors) {
        queue.describe(queue.descriptors(), index, *descriptor);
    }
    for (index, head) in (0..).zip(&garbage.heads) {
        queue.put(queue.available_ring() + 4 + 2 * index, *head);
    }
    queue.put(queue.available_ring() + 2, garbage.available);
    if let Some(bytes) = &garbage.inflight {
        let area = vmm.inflight(1);
        let mut file = area.1.try_clone().expect("a descriptor");
        file.write_all(&bytes[..bytes.len().min(usize::from(SIZE) * 16)]).expect("is written");
        vmm.set_inflight(&area);
    }
    vmm.run(&mut guest, garbage.features);
    guest.queues[0].kick.write(1).expect("kicks");
    // The ring was checked by the time the next message is answered, and is not stopped before its
    // requests are complete.
    assert_eq!(vmm.capacity(), TANK_SECTORS);
    vmm.frontend.get_vring_base(0).expect("stops");
}

/// Runs the test with drawn values against a single server: one guest must not affect the next.
fn drawn<S: Strategy>(strategy: &S, test: impl Fn(S::Value)) {
    let config = ProptestConfig { cases: 200, ..ProptestConfig::with_source_file(file!()) };
    let ran = TestRunner::new(config).run(strategy, |value| {
        test(value);
        Ok(())
    });
    ran.expect("no case fails");
}

#[test]
fn garbage_in_a_ring_hurts_nobody() {
    let served = serve();
    let socket = served.socket("tank");
    drawn(&garbage(), |garbage| {
        play(&socket, &garbage);
        assert_serves(&socket);
    });
}

#[test]
fn messages_in_any_order_hurt_nobody() {
    let (served, is_slow) = slow();
    let socket = served.socket("tank");
    drawn(&prop::collection::vec(step(), 1..40), |steps| {
        is_slow.store(true, Ordering::SeqCst);
        talk(&served, &steps);
        is_slow.store(false, Ordering::SeqCst);
        served.ram.release();
        assert_serves(&socket);
    });
}

/// An action of a VMM or its guest.
#[derive(Clone, Copy, Debug)]
enum VmmAction {
    Features(u64),
    /// Replaces all memory.
    Memory(bool),
    Add(bool),
    Remove(bool),
    Size(u16),
    Base(u16),
    Place(u64),
    Kick,
    Call,
    Enable(bool),
    Stop,
    Note(u16),
    Forget,
    Configuration(u32, u32),
    /// The engine answers the requests that it has kept.
    Answer,
    /// The guest submits a request.
    Ask(u32, u64),
}

fn step() -> impl Strategy<Value = VmmAction> {
    let features = prop::sample::select(vec![USUAL, USUAL | EVENT_IDX, 1 << 32, 0]);
    let place = prop_oneof![4 => Just(0), 1 => (0..64_u64).prop_map(|n| n << 20), 1 => any::<u64>()];
    let size = prop_oneof![4 => Just(SIZE), 1 => prop::sample::select(vec![2, 64, 1024]), 1 => any::<u16>()];
    let kind = prop::sample::select(vec![IN, OUT, FLUSH, DISCARD]);
    prop_oneof![
        1 => features.prop_map(VmmAction::Features),
        1 => any::<bool>().prop_map(VmmAction::Memory),
        1 => any::<bool>().prop_map(VmmAction::Add),
        1 => any::<bool>().prop_map(VmmAction::Remove),
        1 => size.prop_map(VmmAction::Size),
        1 => prop_oneof![2 => Just(0), 1 => any::<u16>()].prop_map(VmmAction::Base),
        1 => place.prop_map(VmmAction::Place),
        3 => Just(VmmAction::Kick),
        2 => Just(VmmAction::Call),
        2 => any::<bool>().prop_map(VmmAction::Enable),
        1 => Just(VmmAction::Stop),
        1 => (1..5_u16).prop_map(VmmAction::Note),
        1 => Just(VmmAction::Forget),
        1 => Just(VmmAction::Answer),
        1 => (0..100_u32, 0..300_u32).prop_map(|(offset, size)| VmmAction::Configuration(offset, size)),
        4 => (kind, 0..64_u64).prop_map(|(kind, sector)| VmmAction::Ask(kind, sector)),
    ]
}

/// A server whose engine holds every third request while it is to be slow, and which waits for none
/// of them.
fn slow() -> (TestServer, Arc<AtomicBool>) {
    let (count, is_slow) = (AtomicU64::new(0), Arc::new(AtomicBool::new(false)));
    let is = Arc::clone(&is_slow);
    let hook = move |_, _: &bcached_port::Operation| {
        let keeps = count.fetch_add(1, Ordering::Relaxed) % 3 == 2 && is.load(Ordering::SeqCst);
        if keeps { Verdict::Hold } else { Verdict::Serve }
    };
    let limits = Limits { drain: Duration::from_millis(2), ..Limits::default() };
    (serve_with(limits, Box::new(hook)), is_slow)
}

/// Starts like a well-behaved VMM, then carries out the steps, whatever the answers. If a step ends
/// the connection, a new one follows.
fn talk(served: &TestServer, steps: &[VmmAction]) {
    let socket = &served.socket("tank");
    let (mut guest, other) = (TestGuest::new(1), TestGuest::new(1));
    let mut vmm = TestVmm::connect_again(socket);
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    for step in steps {
        let memory = |is_other: bool| region(if is_other { &other } else { &guest });
        let went = match *step {
            VmmAction::Features(features) => vmm.frontend.set_features(features).is_ok(),
            VmmAction::Memory(is_other) => vmm.frontend.set_mem_table(&[memory(is_other)]).is_ok(),
            VmmAction::Add(is_other) => vmm.frontend.add_mem_region(&memory(is_other)).is_ok(),
            VmmAction::Remove(is_other) => vmm.frontend.remove_mem_region(&memory(is_other)).is_ok(),
            VmmAction::Size(size) => vmm.frontend.set_vring_num(0, size).is_ok(),
            VmmAction::Base(base) => vmm.frontend.set_vring_base(0, base).is_ok(),
            VmmAction::Place(by) => {
                let usual = places(&guest.queues[0]);
                let used_ring_addr = usual.used_ring_addr.wrapping_add(by);
                vmm.frontend.set_vring_addr(0, &VringConfigData { used_ring_addr, ..usual }).is_ok()
            }
            VmmAction::Kick => vmm.frontend.set_vring_kick(0, &guest.queues[0].kick).is_ok(),
            VmmAction::Call => vmm.frontend.set_vring_call(0, &guest.queues[0].call).is_ok(),
            VmmAction::Enable(is_enabled) => vmm.frontend.set_vring_enable(0, is_enabled).is_ok(),
            VmmAction::Stop => vmm.frontend.get_vring_base(0).is_ok(),
            VmmAction::Note(queues) => {
                let area = vmm.frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, queues, SIZE));
                area.is_ok_and(|(area, file)| vmm.frontend.set_inflight_fd(&area, file.as_raw_fd()).is_ok())
            }
            VmmAction::Forget => {
                guest.queues[0].reset();
                true
            }
            VmmAction::Answer => {
                served.ram.release();
                true
            }
            VmmAction::Configuration(offset, size) => {
                let (flags, wanted) = (VhostUserConfigFlags::empty(), vec![0; size as usize]);
                // The crate itself sends nothing that is outside of the configuration space it
                // knows.
                let _told = vmm.frontend.get_config(offset, size, flags, &wanted);
                true
            }
            VmmAction::Ask(kind, sector) => {
                ask(&mut guest.queues[0], kind, sector);
                true
            }
        };
        if !went && vmm.frontend.get_queue_num().is_err() {
            drop(vmm);
            vmm = TestVmm::connect_again(socket);
        }
    }
}

fn ask(queue: &mut GuestQueue, kind: u32, sector: u64) {
    if !queue.has_room() {
        queue.reset();
    }
    let content = pattern(512, sector);
    let (out, into) = match kind {
        OUT => (content.as_slice(), 0),
        IN => (&[][..], 512),
        DISCARD => (&content[..16], 0),
        _ => (&[][..], 0),
    };
    queue.submit(&support::guest::GuestRequest { kind, sector, out, into });
    queue.kick.write(1).expect("kicks");
}
