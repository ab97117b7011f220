//! How many requests a second pass through here, to a volume in memory: what the front end and the port cost, with a
//! driver that sleeps when it waits: `cargo bench -p bcached-front-vhost --bench rates`. Figures for people; no time is asserted.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};
use support::guest::{Ask, Guest, IN, OK, OUT, Queue};
use support::serve;
use support::vmm::{EVENT_IDX, USUAL, Vmm};

const TIME: Duration = Duration::from_secs(2);

/// Requests a second with so many at a time.
fn rate(queue: &mut Queue, kind: u32, depth: usize) -> u128 {
    let content = vec![7; 4096];
    let (out, into) = if kind == OUT { (content.as_slice(), 0) } else { (&[][..], 4096) };
    let start = Instant::now();
    let (mut under_way, mut done) = (0, 0_u64);
    while start.elapsed() < TIME || under_way > 0 {
        let since = queue.available;
        while under_way < depth && start.elapsed() < TIME {
            queue.submit(&Ask { kind, sector: done * 8 % 65536, out, into });
            under_way += 1;
        }
        queue.kick(since);
        let first = queue.answer();
        assert_eq!(first.status, OK);
        (under_way, done) = (under_way - 1, done + 1);
        while let Some((head, written)) = queue.try_used() {
            assert_eq!(queue.finish(head, written).status, OK);
            (under_way, done) = (under_way - 1, done + 1);
        }
    }
    u128::from(done) * 1_000_000 / start.elapsed().as_micros()
}

fn main() {
    let served = serve();
    let mut guest = Guest::new(1);
    let mut vmm = Vmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    for (what, kind) in [("reads", IN), ("writes", OUT)] {
        for depth in [1, 32] {
            let rate = rate(&mut guest.queues[0], kind, depth);
            println!("4 KiB {what}, {depth} at a time: {rate} a second");
        }
    }
}
