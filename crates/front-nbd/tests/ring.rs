//! Connections on a ring. Small requests that have arrived completely are started there; everything
//! else goes to the connection's threads and returns. A client cannot tell the two apart.

mod support;

use bcached_front_nbd::Limits;
use bcached_front_nbd::proto::wire::command;
use bcached_port::ram::Verdict;
use std::time::Duration;
use support::{TestClient, request, serve_on_a_ring, serve_with};

/// Deterministic pseudo-random numbers.
struct TestRng(u64);

impl TestRng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }
}

/// Sends in pieces that end anywhere, with short pauses after some of them.
fn send_in_pieces(client: &mut TestClient, bytes: &[u8], dice: &mut TestRng) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let end = match dice.below(4) {
            0 => 1 + dice.below(40),
            1 => 1 + dice.below(5000),
            _ => rest.len(),
        };
        let (piece, behind) = rest.split_at(end.min(rest.len()));
        client.send(piece);
        rest = behind;
        if dice.below(8) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Many requests at once, of all sizes and split anywhere: each is carried out once, with its own
/// bytes.
#[test]
fn sizes_and_cuts_make_no_difference() {
    let Some(served) = serve_on_a_ring() else { return };
    for seed in 1..=6 {
        let (mut dice, mut client) = (TestRng(seed), served.unix());
        client.enter_plainly("tank");
        let mut model = vec![0; 4 << 20];
        client.write(0, 1, 0, &model);
        assert_eq!(client.simple(), (0, 1));
        for round in 0..12 {
            // The ranges are disjoint, because overlapping requests may be carried out in any
            // order.
            let (mut sent, mut at, mut due) = (Vec::new(), 0, Vec::new());
            while at + (256 << 10) < model.len() {
                let sizes = [512, 4096, 4096, 4096, 16 << 10, 32 << 10, 60 << 10, 200 << 10];
                let bytes = sizes[dice.below(sizes.len())];
                let (cookie, range) = (at as u64, at..at + bytes);
                let length = u32::try_from(bytes).expect("small");
                if dice.below(2) == 0 {
                    model[range.clone()].fill(u8::try_from(dice.below(255) + 1).expect("a byte"));
                    sent.extend(request(command::WRITE, 0, cookie, at as u64, length));
                    sent.extend_from_slice(&model[range]);
                    due.push((cookie, None));
                } else {
                    sent.extend(request(command::READ, 0, cookie, at as u64, length));
                    due.push((cookie, Some(range)));
                }
                at += bytes + 512 * dice.below(200);
            }
            // Requests are answered while more are sent: neither side must block the other.
            std::thread::scope(|scope| {
                let mut sender = client.also();
                let sender = scope.spawn(move || {
                    send_in_pieces(&mut sender, &sent, &mut TestRng(seed * 1000 + round));
                });
                while !due.is_empty() {
                    let (error, cookie) = client.simple();
                    let found = due.iter().position(|(due, _)| *due == cookie).expect("it is due, once");
                    assert_eq!(error, 0);
                    if let (_, Some(range)) = due.swap_remove(found) {
                        assert!(client.receive(range.len()) == model[range], "seed {seed}, round {round}");
                    }
                }
                sender.join().expect("it sends");
            });
        }
        assert!(client.read(0, 4 << 20) == model, "seed {seed}");
    }
}

/// Fewer than the limit of a connection.
const REQUESTS: u64 = 120;

/// If the socket takes only part of a reply, the rest is sent from there on.
#[test]
fn replies_that_nobody_takes_for_a_while_are_whole() {
    let Some(served) = serve_on_a_ring() else { return };
    let mut client = served.unix();
    client.enter_plainly("tank");
    let content: Vec<u8> =
        (0..8 << 20).map(|at: u32| (at / 4096).to_le_bytes()[0] ^ at.to_le_bytes()[0]).collect();
    client.write(0, 1, 0, &content);
    assert_eq!(client.simple(), (0, 1));
    for bytes in [4096_u32, 20 << 10, 64 << 10] {
        // All in one piece, and more than the ring starts at a time.
        let ask = |cookie| request(command::READ, 0, cookie, cookie * u64::from(bytes), bytes);
        client.send(&(0..REQUESTS).flat_map(ask).collect::<Vec<_>>());
        std::thread::sleep(Duration::from_millis(50));
        for _ in 0..REQUESTS {
            let (error, cookie) = client.simple();
            let start = usize::try_from(cookie * u64::from(bytes)).expect("small");
            assert_eq!(error, 0);
            assert!(client.receive(bytes as usize) == content[start..start + bytes as usize]);
        }
    }
}

/// The ring has no clock: the connection's thread asks for its half.
#[test]
fn a_part_of_a_request_and_then_nothing_ends_the_connection() {
    let limits = Limits { stall: Duration::from_millis(60), ..Limits::default() };
    let served = serve_with(limits, Box::new(|_, _| Verdict::Serve));
    let mut idle = served.unix();
    idle.enter_plainly("tank");
    let whole = [&request(command::WRITE, 0, 1, 0, 4096)[..], &[7; 4096]].concat();
    for part in [1, 27, 28, 29, whole.len() - 1] {
        let mut client = served.unix();
        client.enter_plainly("tank");
        client.send(&whole[..part]);
        client.assert_closed();
    }
    assert_eq!(idle.read(0, 4096), [0; 4096], "who only waits stays, and no part was written");
}

/// If an engine and its ring go away, connections continue, perhaps on another engine.
#[test]
fn without_the_ring_the_threads_go_on() {
    let Some(mut served) = serve_on_a_ring() else { return };
    let mut clients = [served.unix(), served.unix()];
    for client in &mut clients {
        client.enter_plainly("tank");
    }
    let [used, idle] = &mut clients;
    used.write(0, 1, 0, &[7; 4096]);
    assert_eq!(used.simple(), (0, 1));
    served.ring.take();
    for client in [used, idle] {
        assert_eq!(client.read(0, 4096), [7; 4096]);
    }
    let mut later = served.unix();
    later.enter_plainly("tank");
    assert_eq!(later.read(0, 4096), [7; 4096]);
}
