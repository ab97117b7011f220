//! Backing devices of several disks with parity, on which writes should fill whole stripes.

use crate::rig::{BACKING, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{
    BypassReason, CacheSet, CancelToken, Options, Request, VolumeId, VolumeInfo, VolumeOptions,
};
use bcached_env::{Env, Op};
use bcached_format::CacheMode;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 200_000 };

/// Sectors of a stripe.
const STRIPE: u64 = 128;
/// First sector of data on the backing device. Stripe boundaries are therefore this many sectors
/// earlier in the volume.
const DATA: u64 = 16;

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions {
            stripe_size: Some(STRIPE * 512),
            partial_stripes_expensive: Some(true),
            writeback_running: false,
            writeback_delay: Duration::from_secs(1),
            ..VolumeOptions::default()
        },
        ..Options::default()
    }
}

/// The first sector of the volume in stripe `number`, which is not its first.
const fn stripe(number: u64) -> u64 {
    number * STRIPE - DATA
}

fn info(set: &CacheSet) -> VolumeInfo {
    set.volumes().into_iter().next().expect("it is served")
}

async fn opened(env: &Env, options: Options) -> (CacheSet, VolumeId) {
    let (set, volume) = open(env.clone(), options).await.expect("sound");
    settle(env).await;
    (set, volume)
}

/// Waits until a change of options has taken effect.
async fn settle(env: &Env) {
    env.sleep(Duration::from_millis(100)).await;
}

/// Every fourth stripe has dirty data, and some stripes are completely dirty. Those are written
/// back first, each in one piece, and the rest in address order.
#[test]
fn full_stripes_are_written_back_first() {
    for is_expensive in [true, false] {
        let mut rig = Rig::new(SIZES, 1);
        let written = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&written);
        rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            if let (BACKING, Op::Write { sector, payload, .. }) = (disk, op)
                && *sector >= DATA
            {
                seen.borrow_mut().push((*sector, payload.len() as u64 / 512));
            }
            None
        }));
        run(&mut rig, move |env| async move {
            let mut options = options();
            options.volume.partial_stripes_expensive = Some(is_expensive);
            let (set, volume) = opened(&env, options).await;
            for number in (4..80).step_by(4) {
                ask(&set, volume, write(stripe(number) + 8, 8, 1)).await;
            }
            for number in [50, 30, 70] {
                // In parts, so that there are several keys.
                for part in 0..4 {
                    ask(&set, volume, write(stripe(number) + part * 32, 32, 2)).await;
                }
            }
            assert_eq!(info(&set).full_stripes, is_expensive.then_some(3));
            set.change_volume_options(volume, |options| options.writeback_running = true).expect("served");
            env.sleep(Duration::from_secs(1800)).await;
            assert_eq!(info(&set).dirty_sectors, 0);
            assert_eq!(info(&set).full_stripes, is_expensive.then_some(0));
            set.assert_invariants();
            assert_eq!(bytes(&set, volume, stripe(50), 128).await, [2; 128]);
        });
        let written = written.borrow();
        let at = |sector: u64| written.iter().position(|(start, _)| *start / STRIPE * STRIPE == sector);
        let full: Vec<_> = [30, 50, 70].map(|number| at(number * STRIPE).expect("written")).into();
        let first_part = at(4 * STRIPE).expect("written");
        assert_eq!(full.iter().all(|place| *place < first_part), is_expensive, "{written:?}");
        if is_expensive {
            assert!(full.is_sorted(), "{written:?}");
        }
    }
}

/// A stream bypasses the cache except where it completes a stripe with dirty data.
#[test]
fn what_completes_a_stripe_is_cached_though_it_streams() {
    for (is_expensive, mode, expected) in [
        (true, CacheMode::Writeback, STRIPE),
        (false, CacheMode::Writeback, 8),
        (true, CacheMode::Writearound, 8),
    ] {
        let mut rig = Rig::new(SIZES, 2);
        run(&mut rig, move |env| async move {
            let mut options = options();
            options.volume.partial_stripes_expensive = Some(is_expensive);
            let (set, volume) = opened(&env, options).await;
            ask(&set, volume, write(stripe(9) + 40, 8, 1)).await;
            set.set_cache_mode(volume, mode).await.expect("set");
            set.change_volume_options(volume, |options| options.sequential_cutoff = 4096).expect("served");
            for part in 0..STRIPE * 8 / 64 {
                let sector = stripe(5) + part * 64;
                if !(stripe(9) + 40 - 63..stripe(9) + 48).contains(&sector) {
                    ask(&set, volume, write(sector, 64, 2)).await;
                }
            }
            // The blocks next to the dirty one.
            ask(&set, volume, write(stripe(9), 40, 2)).await;
            ask(&set, volume, write(stripe(9) + 48, 80, 2)).await;
            let now = info(&set);
            assert_eq!(now.dirty_sectors, expected, "{mode:?}, expensive: {is_expensive}");
            assert!(now.stats.bypassed.total().requests > 8, "{:?}", now.stats.bypassed);
            let reason =
                if mode == CacheMode::Writeback { BypassReason::Sequential } else { BypassReason::Mode };
            assert!(
                now.stats.bypassed.of(reason).requests > 8,
                "as many as before: the kernel counts them so"
            );
            let found = bytes(&set, volume, stripe(9), 128).await;
            assert_eq!((found[39], found[40], found[47], found[48]), (2, 1, 1, 2));
            set.assert_invariants();
        });
    }
}

/// The counts are always exact, even if counting starts when data is already dirty in a reopened
/// set, and runs beside writes, discards and write-back.
#[test]
fn dirty_sectors_are_counted_by_stripe_from_any_moment_on() {
    for seed in 0..6 {
        let mut rig = Rig::new(Sizes { block: 1, ..SIZES }, seed);
        let part = |number: u64| number * 7919 % 150_000;
        run(&mut rig, move |env| async move {
            let mut without = options();
            without.volume.partial_stripes_expensive = Some(false);
            let (set, volume) = opened(&env, without).await;
            for number in 0..3000 {
                ask(&set, volume, write(part(number), 3, 1)).await;
            }
            assert_eq!(info(&set).full_stripes, None, "nobody asks");
            set.stop().await.expect("it stops");
        });
        run(&mut rig, move |env| async move {
            let mut running = options();
            running.volume.writeback_running = true;
            running.volume.writeback_percent = 0;
            let (set, volume) = open(env.clone(), running).await.expect("sound");
            let (changing, is_over) = (set.clone(), Rc::new(Cell::new(false)));
            let over = Rc::clone(&is_over);
            env.spawn(async move {
                for number in 0..1500 {
                    ask(&changing, volume, write(part(number) + 2, 5, 2)).await;
                    if number % 16 == 0 {
                        let sector = part(number * 3);
                        ask(&changing, volume, Request::Discard { sector, sectors: 900 }).await;
                    }
                    if number % 400 == 399 {
                        let longer = Some((number % 3 + 1) * 64 * 512);
                        let change = |options: &mut VolumeOptions| options.stripe_size = longer;
                        changing.change_volume_options(volume, change).expect("served");
                    }
                }
                over.set(true);
            });
            while !is_over.get() {
                env.sleep(Duration::from_millis(1)).await;
                set.assert_invariants();
            }
            settle(&env).await;
            set.assert_invariants();
            assert!(info(&set).full_stripes.is_some(), "they are counted");
            set.change_volume_options(volume, |options| options.writeback_running = false).expect("served");
            set.write_back(volume, &CancelToken::default()).await.expect("written");
            set.assert_invariants();
            assert_eq!((info(&set).dirty_sectors, info(&set).full_stripes), (0, Some(0)));
            set.detach(volume, &CancelToken::default()).await.expect("it leaves");
            set.attach(volume, &CancelToken::default()).await.expect("it comes back");
            let change = |options: &mut VolumeOptions| options.stripe_size = Some(STRIPE * 512);
            set.change_volume_options(volume, change).expect("served");
            settle(&env).await;
            ask(&set, volume, write(stripe(3), 128, 3)).await;
            assert_eq!(info(&set).full_stripes, Some(1), "of its new number");
            set.change_volume_options(volume, |options| options.stripe_size = Some(0)).expect("served");
            settle(&env).await;
            assert_eq!((info(&set).full_stripes, info(&set).stripe_sectors), (None, None));
        });
    }
}
