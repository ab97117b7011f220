//! A guest may be gone, be reset, or change its memory while the engine still has its requests.
//! Nothing of it remains once they are done, and nothing is written to memory that is no longer
//! shared.

mod support;

use bcached_front_vhost::Limits;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::guest::{DATA, GuestQueue, GuestRequest, IN, OK, TestGuest};
use support::open_resources::{descriptors, eventfds, mappings};
use support::vmm::{EVENT_IDX, TestVmm, USUAL, region};
use support::{TANK, TANK_SECTORS, holding, pattern, wait_until, write};
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

fn read(sector: u64) -> GuestRequest<'static> {
    GuestRequest { kind: IN, sector, out: &[], into: 4096 }
}

/// The requests of a killed VMM are carried out. Its memory is released with the last of them,
/// everything else immediately, and no other client waits.
#[test]
fn a_killed_vmm_leaves_nothing_behind_and_the_next_is_served_at_once() {
    let (served, hold, seen) = holding(Limits::default());
    let mut guest = TestGuest::new(2);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    let area = vmm.inflight(2);
    vmm.set_inflight(&area);
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    let error = EventFd::new(0).expect("an eventfd");
    vmm.frontend.set_vring_err(0, &error).expect("is taken");
    hold.store(true, Ordering::SeqCst);
    let content = pattern(4096, 1);
    for n in 0..10 {
        guest.queues[0].send(&write(8 * n, &content));
        guest.queues[1].send(&read(8 * n));
    }
    wait_until("all requests", || seen.load(Ordering::SeqCst) == 20);
    let file = guest.file.try_clone().expect("a descriptor");
    let own = descriptors(&file) - 1;
    assert_eq!(mappings(&file), 2, "the guest's own, and the server's");
    let signals = |guest: &TestGuest| {
        let of = |queue: &GuestQueue| [eventfds(&queue.kick), eventfds(&queue.call)];
        guest.queues.iter().flat_map(of).chain([eventfds(&error)]).collect::<Vec<_>>()
    };
    assert_eq!(signals(&guest), [2; 5], "the guest's own, and the server's");
    let areas = descriptors(&area.1);
    hold.store(false, Ordering::SeqCst);
    vmm.kill();
    served.wait_for_clients(0);
    assert_eq!((mappings(&file), descriptors(&file)), (2, own + 1), "replies are due that go there");
    wait_until("the end of its descriptors", || signals(&guest) == [1; 5]);
    wait_until("the end of what was noted", || descriptors(&area.1) == areas - 1);

    let mut other = TestGuest::new(1);
    let mut vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.run(&mut other, USUAL);
    other.queues[0].write(800, &content);
    assert_eq!(served.server().clients()[0].requests, 20, "they are still under way");
    served.ram.release();
    wait_until("their end", || served.server().clients()[0].requests == 0);
    assert_eq!(served.ram.content(TANK, 0, 8), content, "carried out");
    wait_until("the mapping's end", || mappings(&file) == 1 && descriptors(&file) == own);
    let answered = guest.queues.iter_mut().any(|queue| queue.try_used().is_some());
    assert!(!answered, "nobody writes into memory of one that is gone");
    assert_eq!(other.queues[0].read(800, 4096), content);
}

/// If a guest is reset while its disk does not answer, its queue stops nevertheless, and late
/// answers are not written to its memory.
#[test]
fn a_guest_that_was_reset_gets_no_late_answers() {
    let (served, hold, seen) = holding(Limits { drain: Duration::from_millis(20), ..Limits::default() });
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    guest.queues[0].write(0, &pattern(4096, 2));
    hold.store(true, Ordering::SeqCst);
    for n in 0..5 {
        guest.queues[0].send(&read(8 * n));
        guest.queues[0].send(&write(100, &[3; 512]));
    }
    wait_until("all requests", || seen.load(Ordering::SeqCst) == 11);
    assert_eq!(vmm.frontend.get_vring_base(0).expect("stops"), 11);
    hold.store(false, Ordering::SeqCst);

    // The guest now uses this memory for other things.
    guest.queues[0].reset();
    let (from, to) = (DATA, DATA + (2 << 20));
    let own = pattern(usize::try_from(to - from).expect("fits"), 9);
    guest.memory.write_slice(&own, GuestAddress(from)).expect("memory");
    served.ram.release();
    wait_until("their end", || served.server().clients()[0].requests == 0);
    assert_eq!(vmm.capacity(), TANK_SECTORS, "replies have been looked at");
    let mut found = vec![0; own.len()];
    guest.memory.read_slice(&mut found, GuestAddress(from)).expect("memory");
    assert!(found == own, "nothing of it was written to");
    assert_eq!(guest.queues[0].try_used(), None);

    vmm.start(&guest.queues[0], 0, true);
    guest.queues[0].write(0, &[1; 512]);
    assert_eq!(guest.queues[0].flush(), OK);
    assert_eq!(mappings(&guest.file), 2);
}

/// If the VMM changes the memory table while requests are in flight, each request keeps the memory
/// with which it began.
#[test]
fn requests_keep_the_memory_they_began_with_and_no_longer() {
    let (served, hold, seen) = holding(Limits::default());
    let content = pattern(4096, 4);
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    guest.queues[0].write(0, &content);
    for is_replaced in [true, false] {
        let before = seen.load(Ordering::SeqCst);
        hold.store(true, Ordering::SeqCst);
        let slot = guest.queues[0].send(&read(0));
        guest.queues[0].send(&write(8, &content));
        wait_until("both", || seen.load(Ordering::SeqCst) == before + 2);
        let at = GuestAddress(guest.queues[0].slot(slot) + 4096);
        guest.memory.write_slice(&[0; 4096], at).expect("memory");
        let other = TestGuest::new(1);
        if is_replaced {
            vmm.frontend.set_mem_table(&[region(&other)]).expect("is taken");
        } else {
            vmm.frontend.remove_mem_region(&region(&guest)).expect("is given back");
        }
        assert_eq!(mappings(&guest.file), 2, "two are under way");
        hold.store(false, Ordering::SeqCst);
        served.ram.release();
        wait_until("the mapping's end", || mappings(&guest.file) == 1);
        let mut found = vec![0; 4096];
        guest.memory.read_slice(&mut found, at).expect("memory");
        assert_eq!(found, content, "it was there when the read began");
        assert_eq!(guest.queues[0].try_used(), None, "the ring was elsewhere, or nowhere, by then");

        // The VMM sets up everything again, as for a guest that starts.
        vmm.frontend.get_vring_base(0).expect("stops");
        guest.queues[0].reset();
        vmm.share_memory(&guest);
        assert_eq!(mappings(&other.file), 1, "what is not in the table is let go of");
        vmm.start(&guest.queues[0], 0, true);
        assert_eq!(guest.queues[0].read(8, 4096), content);
    }
}

/// If a call's counter is full because the VMM never reads it, the guest is not notified, and no
/// thread waits for it.
#[test]
fn a_vmm_that_never_reads_its_calls_holds_nobody_up() {
    let (served, ..) = holding(Limits::default());
    let mut guest = TestGuest::new(2);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL);
    // Writing to this eventfd blocks while it is full.
    let call = EventFd::new(0).expect("an eventfd");
    vmm.frontend.set_vring_call(0, &call).expect("is taken");
    call.read().expect("rung when it came");
    call.write(u64::MAX - 1).expect("room");
    let content = pattern(4096, 6);
    for n in 0..20 {
        guest.queues[0].send(&write(8 * n, &content));
    }
    let mut answers = 0;
    wait_until("the answers, without a call", || {
        answers += usize::from(guest.queues[0].try_used().is_some());
        answers == 20
    });
    assert_eq!(guest.queues[1].read(0, 4096), content, "the other queue is told");
    assert_eq!(vmm.capacity(), TANK_SECTORS);
}
