//! A cache whose index takes time to read reserves buckets for the next start, which serves while
//! it reads.

use crate::common::{Daemon, Images, bcached, content, fill, pattern, requires};

/// Buckets of 32 KiB: one in 256 of them is enough to start from.
const BUCKETS: u64 = 24_000;
const DATA: usize = 3 << 20;

#[test]
fn a_large_cache_is_served_after_each_kill_with_all_that_it_held() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", BUCKETS * (32 << 10)), images.blank("tank", 4 << 20));
    let made =
        bcached(&["make", "-b", "32k", "--writeback", "--label", "tank", "-C", &cache, "-B", &backing]);
    assert_eq!(made.exit, 0, "{}", made.err);
    let reserve = |daemon: &Daemon| daemon.status()["caches"][0]["buckets_reserved"].as_u64();
    for start in 0..4 {
        let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
        if start > 0 {
            let data = content(&images, &daemon, "tank");
            assert!(
                data[..DATA] == pattern(DATA, start - 1),
                "what the one before it has written, start {start}"
            );
        }
        fill(&images, &daemon, "tank", &pattern(DATA, start));
        // The reserve is soon full again, whatever this start has used of it.
        daemon.wait_for("a full reserve", |_| reserve(&daemon) == Some(BUCKETS / 256));
        assert_eq!(daemon.status()["caches"][0]["walked_percent"], 100);
        daemon.kill();
    }
}
