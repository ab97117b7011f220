//! Request latencies: each request is counted once, by its path, on the engine's clock.

use crate::rig::{Rig, Sizes, ask, open, run, write};
use bcached_engine::{CacheSet, ClientId, Options, Reply, Request, RequestPath, Requester, VolumeId};
use bcached_env::sync::OneShot;
use bcached_env::{Buffer, Env, Time};
use bcached_format::CacheMode;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 256, buckets: 1024, backing: 1 << 16 };

fn read(sector: u64) -> Request {
    Request::Read { sector, buffer: Buffer::zeroed(4096) }
}

/// The paths that requests took since `before`, one entry for each request.
fn paths(set: &CacheSet, volume: VolumeId, before: &mut Vec<u64>) -> Vec<RequestPath> {
    let latencies = set.latencies(volume).expect("it is served");
    let now: Vec<u64> = RequestPath::ALL.iter().map(|path| latencies.of(*path).requests()).collect();
    let counted = now.iter().zip(before.iter()).map(|(now, before)| now - before);
    let went =
        RequestPath::ALL.into_iter().zip(counted).flat_map(|(path, count)| (0..count).map(move |_| path));
    let went = went.collect();
    *before = now;
    went
}

#[test]
fn each_request_is_counted_by_the_way_it_went() {
    // Proves invariant N3.
    run(&mut Rig::new(SIZES, 1), |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a new set opens");
        let mut before = vec![0; RequestPath::ALL.len()];
        let mut went = async |request| {
            ask(&set, volume, request).await;
            paths(&set, volume, &mut before)
        };
        assert_eq!(went(write(0, 8, 1)).await, [RequestPath::WriteBack]);
        assert_eq!(
            went(write(3, 2, 1)).await,
            [RequestPath::WriteBack],
            "what is read around it is no request"
        );
        assert_eq!(went(read(0)).await, [RequestPath::ReadHit]);
        assert_eq!(went(read(4)).await, [RequestPath::ReadMiss], "half of it");
        assert_eq!(went(Request::Flush).await, [RequestPath::Flush]);
        assert_eq!(went(Request::Discard { sector: 64, sectors: 8 }).await, [RequestPath::Discard]);
        assert_eq!(
            went(Request::WriteZeroes { sector: 0, sectors: 8, fua: false, may_unmap: false }).await,
            [RequestPath::WriteZeroes],
            "over dirty data"
        );
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        assert_eq!(went(write(800, 8, 1)).await, [RequestPath::WriteThrough]);
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        assert_eq!(went(write(1600, 8, 1)).await, [RequestPath::WriteAround]);
        assert_eq!(
            went(write(0, 8, 1)).await,
            [RequestPath::WriteBack],
            "dirty data is written over in the cache"
        );
        set.set_cache_mode(volume, CacheMode::None).await.expect("set");
        assert_eq!(went(read(0)).await, [RequestPath::ReadBypassHit]);
        assert_eq!(went(read(2400)).await, [RequestPath::ReadBypassMiss]);
        set.detach(volume, &bcached_engine::CancelToken::default()).await.expect("it is written back");
        assert_eq!(went(write(0, 8, 1)).await, [RequestPath::WriteUncached]);
        assert_eq!(went(read(0)).await, [RequestPath::ReadUncached]);
    });
}

/// A failed request is not counted: its duration says nothing about the path.
#[test]
fn what_is_refused_is_not_counted() {
    // Proves invariant N3.
    run(&mut Rig::new(SIZES, 1), |env| async move {
        let (set, volume) = open(env, Options::default()).await.expect("a new set opens");
        let mut before = vec![0; RequestPath::ALL.len()];
        assert!(set.serve(volume, read(1 << 20)).await.result.is_err(), "behind the end");
        assert_eq!(paths(&set, volume, &mut before), []);
    });
}

/// Reads the clock when it is answered.
struct Stopwatch {
    env: Env,
    stopped: OneShot<Time>,
}

impl Requester for Stopwatch {
    fn answered(self: Rc<Self>, _number: usize, reply: Reply) {
        assert_eq!(reply.result, Ok(()));
        self.stopped.bring(self.env.now());
    }
}

/// Measures how long `request` takes until its requester is told of the completion. A task that
/// awaits the request may also have to wait for other tasks.
async fn time(env: &Env, set: &CacheSet, volume: VolumeId, request: Request) -> Duration {
    let watch = Rc::new(Stopwatch { env: env.clone(), stopped: OneShot::default() });
    let begun = env.now();
    set.ask_and_serve(ClientId::default(), volume, request, Rc::<Stopwatch>::clone(&watch)).await;
    watch.stopped.comes().await.since(begun)
}

/// All waits of the devices take virtual time here, and the engine has no other clock.
#[test]
fn a_latency_is_what_the_clock_says() {
    run(&mut Rig::new(SIZES, 1), |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a new set opens");
        let (mut total, mut longest) = (Duration::ZERO, Duration::ZERO);
        for number in 0..100 {
            let taken = time(&env, &set, volume, write(8 * number, 8, 1)).await;
            (total, longest) = (total + taken, longest.max(taken));
        }
        let latencies = set.latencies(volume).expect("it is served");
        let written = latencies.of(RequestPath::WriteBack);
        assert_eq!(written.requests(), 100);
        assert!(longest > Duration::ZERO);
        assert_eq!((written.total_ns(), written.longest()), (total.as_nanos(), Some(longest)));
        assert_eq!(set.status().latencies, [latencies]);
    });
}
