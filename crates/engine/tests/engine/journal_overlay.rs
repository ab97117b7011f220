//! A set is served while its journal's keys overlay the tree and are put into the leaves. No client
//! sees what they cover, they cover nothing newer, and no decision is made that depends on which
//! data is dirty.

use crate::background_tasks::{BackgroundTask, asking};
use crate::forged_set;
use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, ask, backing_superblock, bytes, open, run, write};
use crate::serve_before_walk::{EXTENTS, NodeReads, RESERVE, SIZES, byte_of, nodes, options, slow_down};
use bcached_engine::{
    BucketCount, CacheLocation, CacheSet, CancelToken, DataLocation, Error, ErrorContext, Options, Request,
    VolumeId,
};
use bcached_env::{Env, Op};
use bcached_format::jset::{self, JsetHeader};
use bcached_format::{BackingState, CacheMode, DeviceIndex, Gen, Key, Pointer, Pointers};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Number of changes that only the journal has, all over the volume.
const CHANGES: u64 = 600;

/// The contents of each sector that was ever written.
type Model = BTreeMap<u64, u8>;

fn beside() -> Options {
    Options { replay_beside: 1, ..options() }
}

/// The same for a set without a reserve, which is therefore walked first.
fn walked_first() -> Options {
    Options { reserve: Some(0), ..beside() }
}

/// Overwrites existing data, writes beside it, or discards; the model has what is acknowledged.
async fn change(set: &CacheSet, volume: VolumeId, number: u64, model: &mut Model) {
    let place = 2 * (number * 7919 % EXTENTS);
    let byte = u8::try_from(number % 250).expect("below 250") + 1;
    match number % 3 {
        0 => {
            ask(set, volume, write(place, 1, byte)).await;
            model.insert(place, byte);
        }
        1 => {
            ask(set, volume, write(place, 2, byte)).await;
            model.extend([(place, byte), (place + 1, byte)]);
        }
        _ => {
            ask(set, volume, Request::Discard { sector: place, sectors: 1 }).await;
            model.insert(place, 0);
        }
    }
}

/// The state of a set before the changes.
#[derive(Clone, Copy)]
struct InitialState {
    /// With a reserve, the set is served before it has been walked.
    reserve: u64,
    /// All data has been written back.
    clean: bool,
}

const UNWALKED: InitialState = InitialState { reserve: RESERVE, clean: false };
const WALKED: InitialState = InitialState { reserve: 0, clean: false };

/// Creates a set with many leaves, all of them written, and a journal with the effects of
/// `changes`; its process has died.
fn crashed<F: Future<Output = Model> + 'static>(
    seed: u64,
    InitialState { reserve, clean }: InitialState,
    changes: impl FnOnce(Env, CacheSet, VolumeId, Model) -> F + 'static,
) -> (Rig, Model) {
    let mut rig = Rig::new(SIZES, seed);
    let options = move || Options { reserve: Some(reserve), ..options() };
    let model = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let mut model = Model::new();
        for number in 0..EXTENTS {
            ask(&set, volume, write(2 * number, 1, byte_of(number))).await;
            model.insert(2 * number, byte_of(number));
        }
        if clean {
            set.write_back(volume, &CancelToken::default()).await.expect("it can be written");
            assert_eq!(set.status().dirty_sectors, 0);
        }
        set.stop().await.expect("it stops");
        model
    });
    let model = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens");
        set.walked().await.expect("it is walked");
        while set.status().buckets_reserved < reserve {
            env.sleep(Duration::from_millis(10)).await;
        }
        let model = changes(env, set.clone(), volume, model).await;
        ask(&set, volume, Request::Flush).await;
        model
    });
    (rig, model)
}

/// As `crashed`, with changes all over the volume.
fn scattered(seed: u64, before: InitialState) -> (Rig, Model) {
    crashed(seed, before, |_, set, volume, mut model| async move {
        for number in 0..CHANGES {
            change(&set, volume, number, &mut model).await;
        }
        model
    })
}

async fn check(set: &CacheSet, volume: VolumeId, model: &Model) {
    for (sector, byte) in model {
        assert_eq!(bytes(set, volume, *sector, 1).await, [*byte], "sector {sector}");
    }
}

/// Dirty sectors of each bucket; clean ones are not compared, because reads add to them.
fn counts(counted: &[BucketCount]) -> Vec<u32> {
    counted.iter().map(|bucket| bucket.dirty).collect()
}

/// Checks a set after everything has been counted, and that a restart that replays first agrees.
async fn check_end(env: &Env, (set, volume): (CacheSet, VolumeId), model: &Model) {
    set.walked().await.expect("it comes to its end");
    assert_eq!((set.status().walked_percent, set.status().replay_keys), (100, 0));
    check(&set, volume, model).await;
    set.assert_invariants();
    let counted = set.counted().expect("all has been counted");
    set.stop().await.expect("it stops");
    let again = Options { reserve: Some(0), replay_beside: usize::MAX, ..options() };
    let (again, volume) = open(env.clone(), again).await.expect("it opens");
    check(&again, volume, model).await;
    assert!(counts(&again.counted().expect("walked")) == counts(&counted), "it is counted as it is");
}

/// The journal's contents are served although no further leaf can be read.
#[test]
fn a_read_sees_what_the_journal_says() {
    // Proves invariant D44.
    let (mut rig, model) = scattered(1, UNWALKED);
    let pace = slow_down(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), beside()).await.expect("it opens");
        pace.set(NodeReads::Held);
        let pending = set.status().replay_keys;
        assert!(pending > CHANGES / 2, "{pending} keys");
        assert!(set.counted().is_none() && set.status().walked_percent < 100);
        let seen: Rc<Cell<u64>> = Rc::default();
        let (reader, count, wanted) = (set.clone(), Rc::clone(&seen), model.clone());
        env.spawn(async move {
            for number in 0..CHANGES {
                let place = 2 * (number * 7919 % EXTENTS);
                assert_eq!(bytes(&reader, volume, place, 1).await, [wanted[&place]], "change {number}");
                count.set(number + 1);
            }
        });
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(seen.get(), CHANGES, "a read waited for a leaf");
        assert!(set.status().replay_keys > CHANGES / 2);
        pace.set(NodeReads::Freely);
        check_end(&env, (set, volume), &model).await;
    });
}

/// Old and new keys meet in all leaves, before and behind the walk and the drain. The process dies
/// in the middle, twice.
#[test]
fn what_comes_meanwhile_stays_also_after_a_crash_in_the_middle() {
    // Proves invariant D44.
    for seed in 0..6 {
        let (mut rig, mut model) = scattered(10 + seed, if seed % 2 == 0 { UNWALKED } else { WALKED });
        let mut number = 10_000 * seed;
        for start in 0..3 {
            slow_down(&rig);
            let options = if seed % 2 == 0 { beside() } else { walked_first() };
            let mut known = model.clone();
            let begun = number;
            (model, number) = run(&mut rig, move |env| async move {
                let (set, volume) = open(env.clone(), options).await.expect("it opens");
                while set.status().replay_keys > 0 && (start == 2 || number < begun + 8) {
                    change(&set, volume, number, &mut known).await;
                    number += 1;
                }
                assert!(number > begun, "nothing was changed meanwhile");
                ask(&set, volume, Request::Flush).await;
                if start == 2 {
                    check_end(&env, (set, volume), &known).await;
                } else {
                    assert!(set.status().replay_keys > 0, "it was not in the middle");
                }
                (known, number)
            });
        }
    }
}

/// The journal has more keys for a few leaves than these have room for. The drain and the writers
/// split the leaves.
#[test]
fn more_keys_than_a_leaf_takes_find_room() {
    const MANY: u64 = 4000;
    let (mut rig, model) = crashed(3, UNWALKED, |_, set, volume, mut model| async move {
        // Without a flush after each write: otherwise the leaves would be written to free the
        // journal.
        for number in 0..MANY {
            ask(&set, volume, write(2 * number + 1, 1, byte_of(number + 7))).await;
            model.insert(2 * number + 1, byte_of(number + 7));
        }
        model
    });
    slow_down(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), beside()).await.expect("it opens");
        let mut model = model;
        let pending = set.status().replay_keys;
        assert!(pending > 400, "{pending} keys");
        let splits = set.status().stats.splits.count;
        for number in (0..MANY).rev().step_by(50) {
            ask(&set, volume, write(2 * number, 2, 9)).await;
            model.extend([(2 * number, 9), (2 * number + 1, 9)]);
        }
        ask(&set, volume, Request::Flush).await;
        set.walked().await.expect("it comes to its end");
        assert!(set.status().stats.splits.count > splits);
        check_end(&env, (set, volume), &model).await;
    });
}

/// With little room in the ring, clients wait for the oldest entries, and in total write more than
/// the ring can hold.
#[test]
fn clients_go_on_though_the_journal_is_nearly_full() {
    let (mut rig, model) = crashed(4, WALKED, |_, set, volume, mut model| async move {
        for number in 0..2 * CHANGES {
            change(&set, volume, number, &mut model).await;
            ask(&set, volume, Request::Flush).await;
        }
        model
    });
    slow_down(&rig);
    run(&mut rig, move |env| async move {
        let mut model = model;
        let (set, volume) = open(env.clone(), walked_first()).await.expect("it opens");
        let status = set.status();
        assert!(status.replay_keys > 100 && status.journal_active > 100, "{}", status.journal_active);
        for number in 0..CHANGES {
            change(&set, volume, 5 * number, &mut model).await;
            ask(&set, volume, Request::Flush).await;
        }
        check_end(&env, (set, volume), &model).await;
    });
}

/// Options under which nothing is put into the leaves until `goes_on` is called.
fn resting() -> Options {
    Options { replay_rest: Duration::from_secs(3600), ..walked_first() }
}

fn goes_on(set: &CacheSet) {
    set.change_options(|options| options.replay_rest = Duration::ZERO);
}

/// A write past the cache first puts the journal's keys for its range into the leaves. Otherwise
/// they would come back over the written data.
#[test]
fn what_goes_past_the_cache_stays() {
    // Proves invariant D44.
    let (mut rig, model) = scattered(9, WALKED);
    run(&mut rig, move |env| async move {
        let mut model = model;
        let (set, volume) = open(env.clone(), resting()).await.expect("it opens");
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("it can be written");
        let pending = set.status().replay_keys;
        assert!(pending > CHANGES / 2, "{pending} keys");
        for number in (0..CHANGES).step_by(2) {
            change(&set, volume, number + 7 * 3, &mut model).await;
        }
        // For these sectors the leaves have nothing, but the journal has keys.
        for number in (1..CHANGES).step_by(9) {
            let sector = 2 * (number * 7919 % EXTENTS) + 1;
            ask(&set, volume, write(sector, 1, 251)).await;
            model.insert(sector, 251);
        }
        assert!((1..pending).contains(&set.status().replay_keys), "only what was in the way has been put");
        check(&set, volume, &model).await;
        ask(&set, volume, Request::Flush).await;
        goes_on(&set);
        check_end(&env, (set, volume), &model).await;
    });
}

/// All data is clean in the leaves, but dirty in the journal. Proves invariant D15.
#[test]
fn nothing_is_said_to_be_clean_before_the_journal_is_in_its_leaves() {
    let (mut rig, model) =
        crashed(5, InitialState { clean: true, ..WALKED }, |_, set, volume, mut model| async move {
            // So few that no leaf is rewritten for them.
            for number in (0..30).step_by(3) {
                change(&set, volume, number, &mut model).await;
            }
            model
        });
    assert_eq!(backing_superblock(&rig).state(), BackingState::Dirty);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env: Env| async move {
        let (set, volume) = open(env.clone(), resting()).await.expect("it opens");
        let status = set.status();
        assert_eq!((status.replay_keys, status.dirty_sectors), (10, 0));
        let ended: Rc<Cell<u32>> = Rc::default();
        for detaches in [true, false] {
            let (waiting, told) = (set.clone(), Rc::clone(&ended));
            env.spawn(async move {
                let cancel = CancelToken::default();
                match detaches {
                    true => waiting.detach(volume, &cancel).await.expect("it can be detached"),
                    false => drop(waiting.write_back(volume, &cancel).await),
                }
                told.set(told.get() + 1);
            });
        }
        env.sleep(Duration::from_millis(300)).await;
        assert_eq!(ended.get(), 0, "both wait");
        assert_eq!(
            crate::rig::superblock_on(&world.borrow(), crate::rig::BACKING).state(),
            BackingState::Dirty
        );
        goes_on(&set);
        while ended.get() < 2 {
            env.sleep(Duration::from_millis(100)).await;
        }
        for (sector, byte) in model {
            let mut found = [0; 512];
            world.borrow().look(1, crate::rig::DATA_OFFSET + sector, &mut found);
            assert_eq!(found[0], byte, "sector {sector} is on the backing device");
        }
    });
}

/// Makes the reads of every third node that is not in memory fail while the returned flag is set.
fn some_fail(rig: &Rig) -> Rc<Cell<bool>> {
    let all = nodes(&rig.world.borrow());
    let bad: Vec<u64> = all.into_iter().skip(3).step_by(3).collect();
    let fails = Rc::new(Cell::new(false));
    let told = Rc::clone(&fails);
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, op: &Op| match op {
        Op::Read { sector, .. } if disk == CACHE && bad.contains(sector) && told.get() => {
            Some(OpFault::Fails)
        }
        _ => None,
    }));
    fails
}

/// A leaf that cannot be read keeps its keys in the journal. Requests that need the leaf fail,
/// others are served. Once it is readable again, nothing is different from before.
#[test]
fn a_leaf_that_cannot_be_read_keeps_its_keys_only() {
    let (mut rig, model) = scattered(6, UNWALKED);
    let fails = some_fail(&rig);
    run(&mut rig, move |env| async move {
        // A long `leaf_delay`, so that nodes read at the opening are not among those that fail
        // later.
        let (set, volume) = open(env.clone(), Options { leaf_delay: Duration::from_secs(3600), ..beside() })
            .await
            .expect("it opens");
        fails.set(true);
        assert!(matches!(set.walked().await, Err(Error::Io { doing: ErrorContext::Node, .. })));
        env.sleep(Duration::from_secs(10)).await;
        let left = set.status().replay_keys;
        assert!(left > 0 && left < CHANGES, "{left} keys are left");
        let mut served = 0;
        for (sector, byte) in model.iter().step_by(7) {
            let buffer = bcached_env::Buffer::zeroed(512);
            let reply = set.serve(volume, Request::Read { sector: *sector, buffer }).await;
            if reply.result.is_ok() {
                served += 1;
                assert_eq!(reply.buffer.expect("its memory").as_slice()[0], *byte, "sector {sector}");
            }
        }
        assert!(served > 1000, "{served} reads were served");
        assert!(set.failure().is_none() && set.counted().is_none());
        fails.set(false);
        env.sleep(Duration::from_secs(5)).await;
        check_end(&env, (set, volume), &model).await;
    });
}

/// Writes continue until the journal is full; then the set fails and reports the cause.
#[test]
fn keys_that_can_never_be_put_end_the_set_when_the_journal_is_full() {
    let (mut rig, _) = scattered(7, UNWALKED);
    let fails = some_fail(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), beside()).await.expect("it opens");
        fails.set(true);
        let mut served = 0;
        for number in 0..20_000 {
            if set.failure().is_some() {
                break;
            }
            let place = 2 * (number % EXTENTS);
            let changed = set.serve(volume, write(place, 1, 9)).await.result;
            let flushed = set.serve(volume, Request::Flush).await.result;
            served += u32::from(changed.and(flushed).is_ok());
        }
        assert!(
            matches!(set.failure(), Some(Error::Io { doing: ErrorContext::Node, .. })),
            "{:?}",
            set.failure()
        );
        assert!(served > 50, "{served} writes");
        let _ = set.stop().await;
    });
}

/// A stop first puts the journal's keys into the leaves; if it cannot, it leaves the journal as it
/// is.
#[test]
fn a_stop_comes_to_its_end() {
    for readable in [true, false] {
        let (mut rig, model) = scattered(8, UNWALKED);
        let fails = some_fail(&rig);
        run(&mut rig, move |env| async move {
            let (set, _) = open(env.clone(), beside()).await.expect("it opens");
            fails.set(!readable);
            assert!(set.status().replay_keys > 0);
            set.stop().await.expect("it stops");
            assert_eq!(set.status().replay_keys == 0, readable);
            assert_eq!(set.status().journal_active <= 2, readable);
        });
        rig.world.borrow_mut().fate = None;
        run(&mut rig, move |env| async move {
            let opened = open(env.clone(), beside()).await.expect("it opens again");
            check_end(&env, opened, &model).await;
        });
    }
}

/// A contradiction with the tree is found only when the set is already served: all waiters get the
/// error.
#[test]
fn a_contradiction_that_is_met_late_leaves_nobody_waiting() {
    let found: Rc<Cell<Option<CacheLocation>>> = Rc::default();
    let tells = Rc::clone(&found);
    let (mut rig, _) = crashed(6, WALKED, |_, set, volume, mut model| async move {
        for number in 0..CHANGES {
            change(&set, volume, number, &mut model).await;
        }
        if let DataLocation::Dirty(found) = set.explain(volume, 2 * 10_000).await.expect("sound").whereabouts
        {
            tells.set(Some(found));
        }
        model
    });
    // Another range of the volume claims all of that bucket.
    let found = found.get().expect("all of it is dirty");
    let sector = found.bucket * u64::from(SIZES.bucket);
    let pointers = Pointers::one(Pointer::new(DeviceIndex(0), sector, Gen(found.generation)));
    let key = Key { pointers, ..forged_set::key(0, sector, 14, 150_000) };
    let geometry = forged_set::geometry(&rig.world.borrow());
    let (header, end) = forged_set::newest_entry(&rig.world.borrow(), &geometry);
    let header = JsetHeader { seq: header.seq + 1, ..header };
    let mut entry = jset::seal(geometry.magic, &header, &[key]);
    entry.resize(geometry.whole_blocks(entry.len()), 0);
    let bucket = u64::from(SIZES.bucket);
    let index = (end - 1) / bucket - geometry.first_bucket;
    let next = geometry.sector_of(geometry.journal_bucket((index + 1) % geometry.journal_buckets));
    let is_full = (end - 1) % bucket + 1 + entry.len().div_ceil(512) as u64 > bucket;
    rig.world.borrow_mut().place(0, if is_full { next } else { end }, &entry);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), resting()).await.expect("it opens");
        assert_eq!(set.failure(), None);
        let (waiting, leaving) = (set.clone(), set.clone());
        let walked = BackgroundTask::start(&env, async move { waiting.walked().await });
        let detached =
            BackgroundTask::start(&env, async move { leaving.detach(volume, &CancelToken::default()).await });
        goes_on(&set);
        let mut requests = Vec::new();
        while set.failure().is_none() {
            assert!(requests.len() < 10_000, "nothing is wrong: {} keys are left", set.status().replay_keys);
            requests.push(asking(&env, &set, volume, write(2001, 1, 1)));
            requests.push(asking(&env, &set, volume, Request::Flush));
            env.sleep(Duration::from_micros(50)).await;
        }
        assert!(matches!(set.failure(), Some(Error::Inconsistent(_))), "{:?}", set.failure());
        for request in requests {
            let _ended = request.result(&env).await;
        }
        let (_, left) = (walked.result(&env).await, detached.result(&env).await);
        assert!(matches!(left, Err(Error::Failed(_))), "{left:?}");
        let _stopped = set.stop().await;
    });
}
