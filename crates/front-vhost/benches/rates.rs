//! Measures how many requests a second pass through the front end and the port to a volume in
//! memory, with a driver that sleeps when it waits: `cargo bench -p bcached-front-vhost --bench
//! rates`. The figures are for people; no time is asserted.
//!
//! With `--socket PATH read|write DEPTH SECONDS QUEUES` it is the client of any vhost-user-blk
//! server, with a thread for each queue. It prints requests per second and the number of requests,
//! for `cargo xtask bench`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::time::{Duration, Instant};
use support::guest::{GuestQueue, GuestRequest, IN, OK, OUT, TestGuest};
use support::serve;
use support::vmm::{EVENT_IDX, TestVmm, USUAL};

/// Keeps `depth` requests in flight at random places in the first `sectors`. Returns requests per
/// second and their number.
fn rate(queue: &mut GuestQueue, kind: u32, depth: usize, (sectors, time): (u64, Duration)) -> (u128, u64) {
    let content = vec![7; 4096];
    let (out, into) = if kind == OUT { (content.as_slice(), 0) } else { (&[][..], 4096) };
    let (mut place, mut under_way, mut done) = (1_u64, 0, 0_u64);
    let start = Instant::now();
    while start.elapsed() < time || under_way > 0 {
        let since = queue.available;
        while under_way < depth && start.elapsed() < time {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            queue.submit(&GuestRequest { kind, sector: (place >> 32) % (sectors / 8) * 8, out, into });
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
    (u128::from(done) * 1_000_000 / start.elapsed().as_micros(), done)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--socket", socket, kind, depth, seconds, queues] => {
            let kind = if *kind == "write" { OUT } else { IN };
            let time = Duration::from_secs(seconds.parse().expect("seconds"));
            let mut guest = TestGuest::new(queues.parse().expect("queues"));
            let mut vmm = TestVmm::connect(Path::new(socket));
            let sectors = vmm.capacity();
            vmm.run(&mut guest, USUAL | EVENT_IDX);
            let depth = depth.parse().expect("a depth");
            let each = std::thread::scope(|scope| {
                let run = |queue| scope.spawn(move || rate(queue, kind, depth, (sectors, time)));
                let runs: Vec<_> = guest.queues.iter_mut().map(run).collect();
                runs.into_iter().map(|run| run.join().expect("no panic")).collect::<Vec<_>>()
            });
            let (rate, done) = each.iter().fold((0, 0), |sum, (rate, done)| (sum.0 + rate, sum.1 + done));
            println!("{rate} {done}");
        }
        _ => by_the_front_end_alone(),
    }
}

fn by_the_front_end_alone() {
    let served = serve();
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    for (what, kind) in [("reads", IN), ("writes", OUT)] {
        for depth in [1, 32] {
            let (rate, _) = rate(&mut guest.queues[0], kind, depth, (65536, Duration::from_secs(2)));
            println!("4 KiB {what}, {depth} at a time: {rate} a second");
        }
    }
}
