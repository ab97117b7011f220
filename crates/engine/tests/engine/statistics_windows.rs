//! Statistics of recent time windows, by the engine's clock, for a set and for its volumes alike.

use crate::rig::{Rig, Sizes, ask, open, run, write};
use bcached_engine::{Options, Request, RequestCounts, Window};
use bcached_env::Buffer;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 256, buckets: 1024, backing: 1 << 16 };

/// A tick is 300 s / 22.
fn ticks(count: u64) -> Duration {
    Duration::from_nanos((count * 300_000_000_000).div_ceil(22))
}

/// One read misses and 300 hit; then only time passes.
#[test]
fn windows_forget_what_the_total_keeps() {
    // Proves invariant N2.
    run(&mut Rig::new(SIZES, 1), |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a new set opens");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Read { sector: 800, buffer: Buffer::zeroed(4096) }).await;
        for _ in 0..300 {
            ask(&set, volume, Request::Read { sector: 0, buffer: Buffer::zeroed(4096) }).await;
        }
        let look = |window| {
            let status = set.status();
            let of_volume = status.volumes[0].stats.of_late(window);
            assert_eq!(of_volume, status.stats.of_late(window), "one volume is all there is");
            of_volume
        };
        let now = RequestCounts { hits: 300, misses: 1, ..RequestCounts::default() };
        assert_eq!(Window::ALL.map(look), [now; 3], "before the first tick ends");
        assert_eq!(look(Window::Hour).hit_percent(), Some(99));
        let mut seen = Vec::new();
        for _ in 0..4 {
            env.sleep(ticks(1)).await;
            seen.push(look(Window::FiveMinutes).hits);
        }
        assert_eq!(seen, [290, 281, 272, 264], "as on a kernel");
        assert_eq!((look(Window::Hour).hits, look(Window::Day).hits), (300, 300));
        env.sleep(ticks(288)).await;
        assert_eq!(look(Window::FiveMinutes), RequestCounts::default());
        // 292 ticks are 24 times 12: (31/32)^24.
        assert_eq!((look(Window::Hour).hits, look(Window::Day).hits), (140, 290));
        assert_eq!(look(Window::FiveMinutes).hit_percent(), None, "nobody has read anything");
        assert_eq!(set.status().stats.totals(), now);
    });
}
