//! A cache device that stalls for a while: requests that do not need it proceed meanwhile, and all
//! do when it recovers.

use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, Sizes, ask, open, run};
use bcached_engine::{Options, REQUESTS_MAX, Request};
use bcached_env::sync::Semaphore;
use bcached_env::{Buffer, Op};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const READS: u64 = 12_000;
/// Every other sector is read, so that no two reads are one extent.
const STRIDE: u64 = 2;
const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 6000, backing: 40_000 };

/// Reads that miss while the cache device is stalled are all answered, and the fills complete when
/// it recovers. Each miss used to leave a fill behind that waited for the device, and each fill was
/// a task. When the task limit was reached, no request was answered any more. When the device
/// recovered, the fills filled a leaf and waited for its rewrite, for which there was no free task
/// either, forever. `before` reads fill the leaf to a different level each time.
fn reads_beside_a_silent_cache(before: u64) {
    let mut rig = Rig::new(SIZES, 1);
    // Otherwise the fills would wait for a flush and not in a task.
    rig.world.borrow_mut().volatile = false;
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("sound");
        set.change_volume_options(volume, |options| options.sequential_cutoff = 0).expect("served");
        let is_silent = Rc::new(Cell::new(false));
        let silent = Rc::clone(&is_silent);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_data =
                matches!(op, Op::Write { payload, .. } if payload.as_slice().iter().all(|byte| *byte == 0));
            (disk == CACHE && is_data && silent.get()).then_some(OpFault::Waits)
        }));
        let read = |n: u64| Request::Read { sector: STRIDE * n, buffer: Buffer::zeroed(512) };
        for n in 0..before {
            ask(&set, volume, read(n)).await;
        }
        env.sleep(Duration::from_millis(20)).await;
        is_silent.set(true);
        let answered = Rc::new(Cell::new(0));
        let (asking, sets, room) = (env.clone(), set.clone(), Rc::new(Semaphore::new(REQUESTS_MAX)));
        let answers = Rc::clone(&answered);
        env.spawn(async move {
            for n in before..before + READS {
                let permit = room.acquire(1).await;
                let (set, answers) = (sets.clone(), Rc::clone(&answers));
                asking.spawn(async move {
                    ask(&set, volume, read(n)).await;
                    answers.set(answers.get() + 1);
                    drop(permit);
                });
            }
        });
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(answered.get(), READS, "{before}: the cache is not needed for these");
        is_silent.set(false);
        env.sleep(Duration::from_secs(1)).await;
        ask(&set, volume, read(before + READS)).await;
        set.stop().await.expect("it has taken everything");
    });
}

#[test]
fn who_needs_nothing_of_a_silent_cache_device_goes_on_and_all_do_when_it_does() {
    for before in [1000, 1800, 2400, 3200, 4000] {
        reads_beside_a_silent_cache(before);
    }
}
