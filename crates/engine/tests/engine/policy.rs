//! What is added to the cache and what is not, shown by requests: each rule takes effect, is
//! counted under its reason, and stops taking effect.

use crate::memory::{OpFault, World};
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open_as_told, run, write};
use bcached_engine::{
    BypassReason, BypassStats, CacheSet, ClientId, Options, ReadStats, Request, Traffic, VolumeId,
    VolumeOptions, VolumeStats, WriteCause,
};
use bcached_env::{Buffer, Env, Op};
use bcached_format::CacheMode;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A cache of 37 MiB in front of 150 MiB.
const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 300_000 };

/// Sectors of a request of a stream: 64 KiB.
const PART: u64 = 128;

/// Sectors of a small request: 4 KiB.
const SMALL: u64 = 8;

/// The default options, but with write-back off.
fn options() -> Options {
    let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
    Options { volume, parked_delay: Duration::from_millis(2), ..Options::default() }
}

/// Runs `script` on a new set in writeback mode, with the volume cached in front of zeroes.
fn on_new_set<F: Future<Output = ()> + 'static>(
    options: Options,
    script: impl FnOnce(Env, Rc<RefCell<World>>, CacheSet, VolumeId) -> F + 'static,
) {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open_as_told(env.clone(), options).await.expect("sound");
        script(env, world, set, volume).await;
    });
}

fn read(sector: u64, sectors: u64) -> Request {
    Request::Read { sector, buffer: Buffer::zeroed(usize::try_from(sectors * 512).expect("small")) }
}

fn put(sector: u64, sectors: u64) -> Request {
    write(sector, usize::try_from(sectors).expect("small"), 1)
}

async fn ask_for(set: &CacheSet, volume: VolumeId, client: ClientId, request: Request) {
    assert_eq!(set.serve_for(client, volume, request).await.result, Ok(()));
}

/// The counters of the only volume, which are those of the set.
fn stats(set: &CacheSet) -> VolumeStats {
    let status = set.status();
    let stats = status.volumes[0].stats;
    assert_eq!((stats.reads, stats.bypassed), (status.stats.reads, status.stats.bypassed));
    assert_eq!(stats.miss_collisions, status.stats.fill_races);
    stats
}

fn bypassed(set: &CacheSet, reason: BypassReason) -> Traffic {
    stats(set).bypassed.of(reason)
}

/// Waits until fills have ended.
async fn rest(env: &Env) {
    env.sleep(Duration::from_millis(20)).await;
}

/// Returns true if a read finds all of the range in the cache.
async fn is_cached(set: &CacheSet, volume: VolumeId, sector: u64, sectors: u64) -> bool {
    let before = set.status().stats.miss_bytes;
    ask(set, volume, read(sector, sectors)).await;
    set.status().stats.miss_bytes == before
}

#[test]
fn a_stream_is_bypassed_from_the_cutoff_on_and_counted() {
    on_new_set(options(), |_, _, set, volume| async move {
        for part in 0..100 {
            ask(&set, volume, put(part * PART, PART)).await;
        }
        assert_eq!(set.status().dirty_sectors, 63 * PART);
        let sequential = bypassed(&set, BypassReason::Sequential);
        assert_eq!(sequential, Traffic { requests: 37, bytes: 37 * 512 * PART });
        assert_eq!(stats(&set).bypassed.total(), sequential, "and for no other reason");
        // A single request can be a stream too. Over dirty data it goes into the cache all the
        // same.
        ask(&set, volume, write(0, 8192, 2)).await;
        assert_eq!(bypassed(&set, BypassReason::Sequential).requests, 38);
        assert_eq!(set.status().dirty_sectors, 8192);
        ask(&set, volume, write(100_000, 8184, 3)).await;
        assert_eq!(set.status().dirty_sectors, 8192 + 8184, "4092 KiB are none");
        assert_eq!(bytes(&set, volume, 8191, 2).await, [2, 1]);
    });
}

#[test]
fn a_stream_that_is_read_fills_nothing() {
    on_new_set(options(), |env, _, set, volume| async move {
        for part in 0..100 {
            ask(&set, volume, read(part * PART, PART)).await;
        }
        rest(&env).await;
        assert_eq!(set.written().of(WriteCause::Fill), 63 * 512 * PART);
        let reads = ReadStats { misses: 63, bypass_misses: 37, ..ReadStats::default() };
        assert_eq!(stats(&set).reads, reads);
        // A streaming client still gets what the cache has.
        for part in 0..100 {
            ask(&set, volume, read(part * PART, PART)).await;
        }
        assert_eq!(stats(&set).reads, ReadStats { hits: 63, bypass_misses: 74, ..reads });
    });
}

/// After a stream its client stays bypassed until six random requests have lowered the average. The
/// kernel identifies the client by the task, which is one task for all clients of a server: random
/// requests of one client used to bypass the cache because another had streamed.
#[test]
fn only_who_has_streamed_is_bypassed_for_a_while_after_it() {
    on_new_set(options(), |_, _, set, volume| async move {
        let random = |number: u64| put(200_000 + 1000 * number, SMALL);
        for part in 0..1024 {
            ask_for(&set, volume, ClientId(1), put(part * PART, PART)).await;
        }
        let after_stream = bypassed(&set, BypassReason::Sequential).requests;
        assert_eq!(after_stream, 1024 - 63);
        for number in 0..20 {
            ask_for(&set, volume, ClientId(2), random(number)).await;
        }
        assert_eq!(bypassed(&set, BypassReason::Sequential).requests, after_stream);
        for number in 20..40 {
            ask_for(&set, volume, ClientId(1), random(number)).await;
        }
        assert_eq!(bypassed(&set, BypassReason::Sequential).requests, after_stream + 6);
        assert_eq!(set.status().dirty_sectors, 63 * PART + (20 + 14) * SMALL);
    });
}

#[test]
fn a_cutoff_that_is_changed_acts_at_once() {
    on_new_set(options(), |_, _, set, volume| async move {
        ask(&set, volume, put(0, PART)).await;
        set.change_volume_options(volume, |options| options.sequential_cutoff = 2 * PART * 512)
            .expect("served");
        ask(&set, volume, put(PART, PART)).await;
        assert_eq!(bypassed(&set, BypassReason::Sequential).requests, 1);
        set.change_volume_options(volume, |options| options.sequential_cutoff = 0).expect("served");
        for part in 2..100 {
            ask(&set, volume, put(part * PART, PART)).await;
        }
        assert_eq!(bypassed(&set, BypassReason::Sequential).requests, 1);
    });
}

#[test]
fn each_mode_adds_what_it_says_and_a_change_acts_at_once() {
    on_new_set(options(), |env, _, set, volume| async move {
        let to = async |mode| set.set_cache_mode(volume, mode).await.expect("set");
        ask(&set, volume, put(0, SMALL)).await;
        assert_eq!(set.status().dirty_sectors, SMALL);

        to(CacheMode::None).await;
        ask(&set, volume, put(1000, SMALL)).await;
        ask(&set, volume, read(2000, SMALL)).await;
        rest(&env).await;
        assert!(!is_cached(&set, volume, 1000, SMALL).await && !is_cached(&set, volume, 2000, SMALL).await);
        assert!(is_cached(&set, volume, 0, SMALL).await, "what is there is found in every mode");
        assert_eq!(stats(&set).reads, ReadStats { bypass_hits: 1, bypass_misses: 3, ..ReadStats::default() });
        assert_eq!(bypassed(&set, BypassReason::Mode), Traffic { requests: 5, bytes: 5 * 4096 });
        ask(&set, volume, put(0, SMALL)).await;
        assert_eq!(set.status().dirty_sectors, SMALL, "dirty data is written over where it is");

        to(CacheMode::Writearound).await;
        ask(&set, volume, put(3000, SMALL)).await;
        assert_eq!(bypassed(&set, BypassReason::Mode).requests, 7);
        ask(&set, volume, read(3000, SMALL)).await;
        rest(&env).await;
        assert!(is_cached(&set, volume, 3000, SMALL).await, "reads are cached");
        assert_eq!(bypassed(&set, BypassReason::Mode).requests, 7);

        to(CacheMode::Writethrough).await;
        ask(&set, volume, put(4000, SMALL)).await;
        assert!(is_cached(&set, volume, 4000, SMALL).await);
        assert_eq!(set.status().dirty_sectors, SMALL);

        to(CacheMode::Writeback).await;
        ask(&set, volume, put(5000, SMALL)).await;
        assert_eq!(set.status().dirty_sectors, 2 * SMALL);
        assert_eq!(bypassed(&set, BypassReason::Mode).requests, 7);
    });
}

/// Discards and zeroing requests are neither reads nor writes. Trimming a disk image used to show
/// gigabytes of bypassed data, and the client's next writes were taken for the rest of a stream.
#[test]
fn discards_and_zeroings_are_not_bypassed_and_no_stream() {
    on_new_set(options(), |_, _, set, volume| async move {
        for mode in [CacheMode::None, CacheMode::Writeback] {
            set.set_cache_mode(volume, mode).await.expect("set");
            for part in 0..10 {
                let (sector, sectors) = (part * 2048, 2048);
                ask(&set, volume, Request::Discard { sector, sectors }).await;
                for may_unmap in [false, true] {
                    let zeroes = Request::WriteZeroes { sector, sectors, fua: false, may_unmap };
                    ask(&set, volume, zeroes).await;
                }
            }
            ask(
                &set,
                volume,
                Request::WriteZeroes { sector: 0, sectors: 20_480, fua: false, may_unmap: true },
            )
            .await;
        }
        assert_eq!(stats(&set).bypassed, BypassStats::default());
        assert_eq!(set.status().stats.write_bytes, 0);
        ask(&set, volume, put(20_480, SMALL)).await;
        assert_eq!(set.status().dirty_sectors, SMALL, "where the last one ended, and no part of it");
        assert_eq!(stats(&set).bypassed, BypassStats::default());
    });
}

/// Writes four sectors into the cache, a write that takes `time`.
async fn slow_write(env: &Env, world: &Rc<RefCell<World>>, set: &CacheSet, volume: VolumeId, time: Duration) {
    let is_held = Rc::new(Cell::new(true));
    let held = Rc::clone(&is_held);
    world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
        Op::Write { payload, .. } if disk == CACHE && payload.len() == 4096 => {
            held.get().then_some(OpFault::Waits)
        }
        _ => None,
    }));
    let (writer, ended) = (set.clone(), Rc::new(Cell::new(false)));
    let has_ended = Rc::clone(&ended);
    env.spawn(async move {
        ask(&writer, volume, put(0, SMALL)).await;
        has_ended.set(true);
    });
    env.sleep(Duration::from_millis(1)).await;
    world.borrow_mut().pass(time);
    is_held.set(false);
    while !ended.get() {
        env.sleep(Duration::from_micros(1)).await;
    }
    world.borrow_mut().fate = None;
}

#[test]
fn what_is_large_goes_past_a_slow_cache_device() {
    on_new_set(options(), |env, world, set, volume| async move {
        slow_write(&env, &world, &set, volume, Duration::from_millis(19)).await;
        ask(&set, volume, put(10_000, PART)).await;
        assert_eq!(stats(&set).bypassed, BypassStats::default(), "it is not called slow");
        // The limit is then 113 sectors, less up to 32.
        slow_write(&env, &world, &set, volume, Duration::from_millis(630)).await;
        assert!((100..128).contains(&set.status().congested_sectors), "{}", set.status().congested_sectors);
        let dirty = set.status().dirty_sectors;
        ask(&set, volume, put(20_000, PART)).await;
        assert_eq!(bypassed(&set, BypassReason::Congested), Traffic { requests: 1, bytes: PART * 512 });
        ask(&set, volume, put(30_000, SMALL)).await;
        assert_eq!(bypassed(&set, BypassReason::Congested).requests, 1);
        assert_eq!(set.status().dirty_sectors, dirty + SMALL);
        // Data on the cache device is read from there, even though it is slow.
        ask(&set, volume, read(10_000, PART)).await;
        assert_eq!(stats(&set).reads, ReadStats { bypass_hits: 1, ..ReadStats::default() });
        // Once disabled, slowness of the device is ignored; and congestion ends by itself after
        // about a second.
        set.change_options(|options| options.congested_read_threshold = Duration::ZERO);
        ask(&set, volume, put(40_000, PART)).await;
        assert_eq!(bypassed(&set, BypassReason::Congested).requests, 3, "writes are still looked at");
        set.change_options(|options| options.congested_write_threshold = Duration::ZERO);
        ask(&set, volume, put(40_000, PART)).await;
        assert_eq!(bypassed(&set, BypassReason::Congested).requests, 3);
        set.change_options(|options| options.congested_write_threshold = Duration::from_millis(20));
        world.borrow_mut().pass(Duration::from_millis(700));
        // Time stands still for a running task.
        env.yield_now().await;
        ask(&set, volume, put(50_000, PART)).await;
        assert_eq!(bypassed(&set, BypassReason::Congested).requests, 3);
        assert_eq!(set.status().congested_sectors, 0);
    });
}

/// The kernel gives up the whole set at that point, with the dirty data in it.
#[test]
fn a_cache_device_that_fails_often_takes_nothing_more_and_is_emptied() {
    let options = Options { volume: VolumeOptions::default(), ..options() };
    on_new_set(options, |env, world, set, volume| async move {
        ask(&set, volume, put(0, SMALL)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| match op {
            Op::Write { payload, fua: false, .. } if disk == CACHE && payload.len() == 4096 => {
                Some(OpFault::Fails)
            }
            _ => None,
        }));
        for error in 1..=8 {
            assert!(!set.status().is_failing, "{error}");
            ask(&set, volume, put(1000 * error, SMALL)).await;
            assert_eq!(set.status().io_errors, error);
        }
        assert!(set.status().is_failing && set.status().failed.is_none());
        world.borrow_mut().fate = None;
        ask(&set, volume, put(20_000, SMALL)).await;
        assert_eq!(bypassed(&set, BypassReason::Failing), Traffic { requests: 1, bytes: SMALL * 512 });
        // It is so little that it would stay dirty as long as clients are active.
        for _ in 0..1000 {
            if set.status().dirty_sectors == 0 {
                break;
            }
            ask(&set, volume, read(0, SMALL)).await;
            env.sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(set.status().dirty_sectors, 0, "it has left");
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        assert_eq!(bytes(&set, volume, 20_000, 8).await, [1; 8]);
        set.change_options(|options| options.io_error_limit = 9);
        assert!(!set.status().is_failing);
        let before = bypassed(&set, BypassReason::Failing);
        ask(&set, volume, put(30_000, SMALL)).await;
        assert_eq!(bypassed(&set, BypassReason::Failing), before);
        assert_eq!(set.status().dirty_sectors, SMALL);
        // Decay of the error count also ends the bypass.
        set.change_options(|options| (options.io_error_limit, options.io_error_halflife) = (8, 88));
        assert!(set.status().is_failing);
        for sector in 0..4 {
            ask(&set, volume, put(40_000 + SMALL * sector, SMALL)).await;
        }
        assert!(!set.status().is_failing, "{}", set.status().io_errors);
    });
}

/// A kernel's cache that had been filled stayed bypassed although all of it was clean. Its decision
/// used a count that only GC renewed, and GC only ran for added data (incident F17).
#[test]
fn a_clean_cache_is_never_bypassed_however_full() {
    let streams = VolumeOptions { sequential_cutoff: 0, ..options().volume };
    on_new_set(Options { volume: streams, ..options() }, |env, _, set, volume| async move {
        for round in 0..3 {
            for part in 0..2000 {
                ask(&set, volume, read(part * PART, PART)).await;
                if part >= 1900 {
                    // No faster than from a device: reads that outrun the allocator do not fill.
                    env.sleep(Duration::from_micros(100)).await;
                }
            }
            rest(&env).await;
            assert!(is_cached(&set, volume, 1999 * PART, PART).await, "round {round}: the newest is there");
        }
        let status = set.status();
        assert!(
            status.buckets_free < 60 && status.buckets_available > 540,
            "it is full of what can be dropped"
        );
        ask(&set, volume, put(0, PART)).await;
        assert_eq!(set.status().dirty_sectors, PART);
        assert_eq!(stats(&set).bypassed, BypassStats::default());
    });
}

/// A write that is durable when it is acknowledged.
fn put_durably(sector: u64, sectors: u64) -> Request {
    match put(sector, sectors) {
        Request::Write { sector, payload, .. } => Request::Write { sector, payload, fua: true },
        other => other,
    }
}

#[test]
fn a_cache_full_of_dirty_data_is_bypassed_until_that_is_written_back() {
    let eager = VolumeOptions {
        sequential_cutoff: 0,
        writeback_percent: 0,
        writeback_delay: Duration::from_millis(10),
        ..options().volume
    };
    on_new_set(Options { volume: eager, ..options() }, |env, _, set, volume| async move {
        let dirty_percent = || set.status().dirty_sectors * 100 / (600 * PART);
        for part in 0..600 {
            ask(&set, volume, put(part * PART, PART)).await;
        }
        assert!((80..=90).contains(&dirty_percent()), "{}", dirty_percent());
        assert_eq!(
            stats(&set).bypassed,
            BypassStats::default(),
            "what is not kept dirty goes to both devices"
        );
        let kept = dirty_percent();
        for part in 600..700 {
            ask(&set, volume, put_durably(part * PART, PART)).await;
        }
        assert!(dirty_percent() > kept, "durable writes stay longer");
        let full = bypassed(&set, BypassReason::Full);
        assert!((10..100).contains(&full.requests) && full.bytes == full.requests * PART * 512, "{full:?}");
        ask(&set, volume, read(1000 * PART, PART)).await;
        assert_eq!(stats(&set).reads, ReadStats { bypass_misses: 1, ..ReadStats::default() });

        set.change_options(|options| options.volume.writeback_running = true);
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("served");
        env.sleep(Duration::from_secs(20)).await;
        let before = stats(&set).bypassed;
        ask(&set, volume, read(1000 * PART, PART)).await;
        rest(&env).await;
        assert!(is_cached(&set, volume, 1000 * PART, PART).await);
        ask(&set, volume, put(1100 * PART, PART)).await;
        assert!(is_cached(&set, volume, 1100 * PART, PART).await);
        assert_eq!(stats(&set).bypassed, before);
    });
}

/// Reads that the engine issues to complete a partial block count as no client's request.
#[test]
fn reads_of_the_engines_own_are_not_counted_and_fill_nothing() {
    on_new_set(options(), |env, _, set, volume| async move {
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        for number in 0..20 {
            ask(&set, volume, put(1000 * number + 3, 2)).await;
        }
        rest(&env).await;
        let counted = set.status().stats;
        assert_eq!((counted.hit_bytes, counted.miss_bytes, counted.written.data()), (0, 0, 0));
        assert_eq!(stats(&set).reads, ReadStats::default());
        assert_eq!(bypassed(&set, BypassReason::Mode), Traffic { requests: 20, bytes: 20 * 1024 });
    });
}

/// The kernel fills only the first hole, so its next read misses as well.
#[test]
fn a_miss_fills_all_holes_of_a_request() {
    on_new_set(options(), |env, _, set, volume| async move {
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        for piece in [0, 2, 4] {
            ask(&set, volume, put(piece * SMALL, SMALL)).await;
        }
        rest(&env).await;
        for (hits, misses) in [(0, 1), (1, 1)] {
            ask(&set, volume, read(0, 6 * SMALL)).await;
            rest(&env).await;
            let reads = stats(&set).reads;
            assert_eq!((reads.hits, reads.misses), (hits, misses));
        }
    });
}
