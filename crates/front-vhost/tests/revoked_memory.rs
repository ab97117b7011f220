//! If the memory of a guest is taken away while in use, its VMM is cut off, and no other client is
//! affected.

mod support;

use rustix::fs::ftruncate;
use std::fs::File;
use std::time::Duration;
use support::guest::{DATA, GuestQueue, IN, MEMORY_BYTES, NEXT, OK, OUT, SIZE, TestGuest, WRITE};
use support::vmm::{EVENT_IDX, TestVmm, USUAL};
use support::{TANK, TestServer, pattern, serve, wait_until};
use vhost::VhostBackend as _;

/// Header and status, which stay in memory, and content, which is cut off.
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 32;
const CONTENT: u64 = MEMORY_BYTES / 2;

/// Memory that cannot be sealed, as used by VMMs without memfd.
fn memory() -> File {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    ftruncate(&file, MEMORY_BYTES).expect("memory");
    file
}

fn run(served: &TestServer, file: &File) -> (TestVmm, TestGuest) {
    let mut guest = TestGuest::with_memory(file.try_clone().expect("a descriptor"), 2);
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    guest.queues[0].write(0, &pattern(4096, 1));
    assert_eq!(guest.queues[1].read(0, 4096), pattern(4096, 1));
    (vmm, guest)
}

/// Requests 4 KiB at sector 0 with their content in `CONTENT`, without accessing it.
fn ask(queue: &mut GuestQueue, kind: u32) {
    queue.put(HEADER, kind);
    queue.put(HEADER + 8, 0_u64);
    let flags = if kind == IN { NEXT | WRITE } else { NEXT };
    let chain = [(HEADER, 16, NEXT, 1), (CONTENT, 4096, flags, 2), (STATUS, 1, WRITE, 0)];
    for (index, descriptor) in (0..).zip(chain) {
        queue.describe(queue.descriptors(), index, descriptor);
    }
    let since = queue.available;
    queue.publish(0);
    queue.kick(since);
}

fn is_cut_off(vmm: &TestVmm) -> bool {
    vmm.frontend.get_features().is_err()
}

#[test]
fn a_vmm_that_cuts_its_memory_is_cut_off_and_nobody_else() {
    let served = serve();
    let mut other = TestGuest::new(1);
    let mut archive = TestVmm::connect(&served.socket("archive"));
    archive.run(&mut other, USUAL);
    for kind in [OUT, IN] {
        let file = memory();
        let (vmm, mut guest) = run(&served, &file);
        ftruncate(&file, CONTENT).expect("is cut");
        ask(&mut guest.queues[0], kind);
        wait_until("the end of the connection", || is_cut_off(&vmm));
        // The write whose content is not in memory was not carried out.
        assert!(served.ram.content(TANK, 0, 8) == pattern(4096, 1));
        assert_eq!(other.queues[0].read(0, 512), [0; 512]);
    }
    // All of the memory, including the rings, while many requests are in flight.
    for round in 0..10 {
        let file = memory();
        let (vmm, mut guest) = run(&served, &file);
        let kicks = guest.queues[0].kick.try_clone().expect("a descriptor");
        for n in 0..SIZE.into() {
            if guest.queues[0].has_room() {
                guest.queues[0].send(&support::write(8 * n, &pattern(4096, n)));
            }
        }
        std::thread::sleep(Duration::from_micros(20 * round));
        ftruncate(&file, 0).expect("is cut");
        wait_until("the end of the connection", || {
            kicks.write(1).expect("rings");
            is_cut_off(&vmm)
        });
        for n in 0..32 {
            let content = served.ram.content(TANK, 8 * n, 8);
            assert!(content == pattern(4096, n) || n == 0 || content == [0; 4096], "round {round}, {n}");
        }
        assert_eq!(other.queues[0].read(0, 512), [0; 512]);
    }
    assert_eq!(archive.capacity(), 2048);
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    assert_eq!(guest.queues[0].flush(), OK);
}
