//! Which clients get memory, which wait, and behind which.

use super::*;
use std::sync::mpsc::{self, Receiver};
use std::thread;

const LIMIT: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

fn clients<const N: usize>(pool: &Arc<BudgetPool>, bytes_max: u64) -> [Arc<Budget>; N] {
    [(); N].map(|()| Arc::new(Budget::new(bytes_max, Arc::clone(pool))))
}

/// Takes all that is given without waiting, in requests of this many bytes.
fn fill(client: &Arc<Budget>, bytes: u64) -> Vec<Permit> {
    std::iter::from_fn(|| client.try_acquire(bytes)).collect()
}

fn total(permits: &[Permit]) -> u64 {
    permits.iter().map(|permit| permit.bytes).sum()
}

/// Asks on its own thread; returns when it waits.
fn wait_for(client: &Arc<Budget>, bytes: u64) -> Receiver<Permit> {
    let (sender, arrived) = mpsc::channel();
    let waiting = client.pool.lock().arriving;
    let asks = Arc::clone(client);
    thread::spawn(move || sender.send(asks.acquire(bytes)).expect("somebody waits for it"));
    let started = Instant::now();
    while client.pool.lock().arriving == waiting {
        assert!(started.elapsed() < LIMIT, "it does not wait");
        thread::yield_now();
    }
    arrived
}

fn assert_empty(pool: &BudgetPool) {
    let state = pool.lock();
    assert_eq!((state.used, state.shares, state.waiting.len(), state.given.len()), (0, 0, 0, 0));
    assert!(state.clients.iter().all(|(_, client)| client.share + client.common == 0));
}

#[test]
fn a_small_one_waits_behind_a_large_one() {
    let pool = Arc::new(BudgetPool::new(10 * MIB));
    let [holder, large, small] = clients(&pool, 10 * MIB);
    let held = holder.acquire(6 * MIB);
    let large = wait_for(&large, 8 * MIB);
    let small = wait_for(&small, 3 * MIB);
    assert!(small.try_recv().is_err(), "four MiB are free, but the large one came first");
    drop(held);
    drop(large.recv_timeout(LIMIT).expect("all is free"));
    drop(small.recv_timeout(LIMIT).expect("it is the next"));
    assert_empty(&pool);
}

/// Returned bytes are kept for the first in line although others would fit: a later waiter, and an
/// earlier one that holds some.
#[test]
fn nobody_passes_the_first_who_holds_none() {
    let pool = Arc::new(BudgetPool::new(10 * MIB));
    let [holder, first, some, late] = clients(&pool, 10 * MIB);
    let (most, rest, little) = (holder.acquire(4 * MIB), holder.acquire(3 * MIB), some.acquire(MIB));
    let some = wait_for(&some, 3 * MIB);
    let first = wait_for(&first, 8 * MIB);
    let late = wait_for(&late, 3 * MIB);
    drop(rest);
    assert!([&first, &some, &late].iter().all(|waits| waits.try_recv().is_err()), "five MiB are free");
    drop(most);
    drop(first.recv_timeout(LIMIT).expect("nine MiB are free"));
    let both = [late, some].map(|waits| waits.recv_timeout(LIMIT).expect("there is room for both"));
    drop((both, little));
    assert_empty(&pool);
}

/// Regression: eight connections that read no replies held all there was for clients that hold
/// little, a MiB each, and each still counted as one.
#[test]
fn who_keeps_all_it_gets_leaves_something_for_who_comes() {
    for bytes in [4096, 64 << 10, MIB] {
        let pool = Arc::new(BudgetPool::new(64 * MIB).leaving(4));
        let stuck: [_; 8] = clients(&pool, 32 * MIB);
        // One after the other, and again.
        let held: Vec<_> = stuck.iter().chain(&stuck).map(|client| fill(client, bytes)).collect();
        assert!(held.iter().all(|held| total(held) <= 13 * MIB), "a fifth, and a share");
        let [other] = clients(&pool, 32 * MIB);
        let its = other.try_acquire(8 * MIB).expect("more is left, whoever holds the others");
        assert_eq!(its.kind, GrantKind::Common);
        drop((its, held));
        assert_empty(&pool);
    }
}

/// Two requests of the largest size take everything, and small ones still proceed.
#[test]
fn a_small_request_passes_those_who_hold_everything() {
    let pool = Arc::new(BudgetPool::new(64 * MIB));
    let [one, other, third] = clients(&pool, 32 * MIB);
    let held = [one.acquire(32 * MIB), other.acquire(32 * MIB)];
    let waits = wait_for(&third, MIB);
    let small: [_; 100] = clients(&pool, 32 * MIB);
    for client in &small {
        let permit = client.try_acquire(SHARE_BYTES).expect("its share is its own");
        assert!(client.try_acquire(4096).is_none(), "more than that is as any");
        drop(permit);
        drop(client.try_acquire(4096).expect("it is back"));
    }
    drop(held);
    drop(waits.recv_timeout(LIMIT).expect("memory is free"));
    assert_empty(&pool);
}

/// It waits for common bytes, and can proceed with its own share.
#[test]
fn who_waits_goes_on_with_its_own_share() {
    let pool = Arc::new(BudgetPool::new(32 * MIB));
    let [holder, client] = clients(&pool, 32 * MIB);
    let held = holder.acquire(32 * MIB);
    let first = client.acquire(SHARE_BYTES);
    let second = wait_for(&client, 4096);
    drop(first);
    let second = second.recv_timeout(LIMIT).expect("the share is free");
    assert_eq!(second.kind, GrantKind::Share);
    drop((second, held));
    assert_empty(&pool);
}

#[test]
fn who_holds_none_goes_before_who_holds_some() {
    let pool = Arc::new(BudgetPool::new(30 * MIB).leaving(1));
    let [holder, greedy, late] = clients(&pool, 30 * MIB);
    let held = holder.acquire(24 * MIB);
    let some = greedy.acquire(2 * MIB);
    let more = wait_for(&greedy, 2 * MIB);
    let first = wait_for(&late, 10 * MIB);
    drop(held);
    let first = first.recv_timeout(LIMIT).expect("it fits");
    let more = more.recv_timeout(LIMIT).expect("as much is left after that");
    let again = wait_for(&greedy, 12 * MIB);
    drop(first);
    assert!(again.try_recv().is_err(), "less would be left than it held");
    drop((some, more));
    drop(again.recv_timeout(LIMIT).expect("it holds nothing"));
    assert_empty(&pool);
}

#[test]
fn shares_are_bounded_too() {
    let pool = Arc::new(BudgetPool::new(4 * MIB));
    let small: [_; 10] = clients(&pool, 4 * MIB);
    let held: Vec<_> = small.iter().filter_map(|client| client.try_acquire(4096)).collect();
    let shares = held.iter().filter(|permit| permit.kind == GrantKind::Share).count();
    assert_eq!((held.len(), shares), (10, 8), "half a MiB is eight shares");
    drop(held);
    assert_empty(&pool);
}

/// A client that holds some is told how long another has waited; a client that waits because of
/// what it holds itself does not count.
#[test]
fn who_holds_some_learns_that_others_wait() {
    let pool = Arc::new(BudgetPool::new(8 * MIB));
    let [holder, other, small] = clients(&pool, 8 * MIB);
    let held = holder.acquire(8 * MIB);
    let more = wait_for(&holder, MIB);
    assert_eq!(holder.keeps_waiting(), None, "it waits for itself");
    let waits = wait_for(&other, MIB);
    assert!(holder.keeps_waiting().is_some());
    let share = small.acquire(4096);
    assert_eq!(small.keeps_waiting(), None, "a share is in nobody's way");
    drop((held, share));
    let got = [more, waits].map(|arrived| arrived.recv_timeout(LIMIT).expect("memory is free"));
    assert_eq!(holder.keeps_waiting(), None);
    drop(got);
    assert_empty(&pool);
}

#[test]
fn what_does_not_want_to_wait_is_told_so_and_holds_nothing() {
    let pool = Arc::new(BudgetPool::new(4 * MIB));
    let [one, other] = clients(&pool, 4 * MIB);
    let held = one.try_acquire(3 * MIB).expect("there is room");
    assert!(one.try_acquire(2 * MIB).is_none(), "its own bound");
    assert!(other.try_acquire(2 * MIB).is_none(), "the bound of all");
    assert!(other.try_acquire(SHARE_BYTES).is_some_and(|permit| permit.kind == GrantKind::Share));
    drop(held);
    drop(other.try_acquire(4 * MIB).expect("all is free"));
    assert_empty(&pool);
}
