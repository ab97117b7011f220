//! One of the two devices of a volume is an older copy of itself, such as a restored backup: the
//! program says so, exits with 3, and writes to neither.

use crate::common::{Daemon, Images, bytes, content, done, fill, pattern, requires, run};

const SIZE: usize = 4 << 20;
const CACHE: &str = "the cache is an older copy of itself";
const BACKING: &str = "the backing device is an older copy of itself";

/// The devices, with their directory.
struct OlderCopyFixture {
    images: Images,
    cache: String,
    backing: String,
}

impl OlderCopyFixture {
    fn new() -> Self {
        let images = Images::new();
        let (cache, backing) = images.pair(64 << 20, SIZE as u64 + (1 << 20));
        Self { images, cache, backing }
    }

    fn words(&self) -> [&str; 4] {
        ["--cache", &self.cache, "--backing", &self.backing]
    }

    /// Starts a daemon that fills the volume, and writes nothing back until told to.
    fn filled(&self, seed: u8) -> Daemon {
        let daemon = Daemon::start(&self.images, &self.words());
        done(&daemon, &["set", "tank", "--runtime", "writeback_running=0"]);
        fill(&self.images, &daemon, "tank", &pattern(SIZE, seed));
        daemon
    }

    fn save(&self, device: &str) -> Vec<u8> {
        bytes(if device == "cache" { &self.cache } else { &self.backing })
    }

    fn put(&self, device: &str, content: &[u8]) {
        std::fs::write(if device == "cache" { &self.cache } else { &self.backing }, content)
            .expect("writable");
    }

    /// With `copy` in the place of a device nothing is served. Afterwards the newest version is in
    /// its place again.
    #[track_caller]
    fn is_refused_with(&self, device: &str, copy: &[u8], sentence: &str) {
        let newest = self.save(device);
        self.put(device, copy);
        let before = self.save("backing");
        let ran = run(&mut Daemon::command(&self.images, "run", &self.words()));
        assert_eq!(ran.exit, 3, "{device}: {ran:?}");
        assert!(ran.err.contains(sentence) && ran.err.contains("bcached forget"), "{device}: {}", ran.err);
        assert!(self.save("backing") == before, "{device}: the backing device was written to");
        self.put(device, &newest);
    }
}

#[test]
fn an_older_copy_of_either_device_ends_a_start_with_3() {
    if !requires("nbdcopy") {
        return;
    }
    let site = OlderCopyFixture::new();
    assert_eq!(site.filled(1).stop().0, 0);
    let copies =
        [("cache", CACHE), ("backing", BACKING)].map(|(device, told)| (device, told, site.save(device)));
    assert_eq!(site.filled(2).stop().0, 0);
    for (device, told, copy) in copies {
        site.is_refused_with(device, &copy, told);
    }
    let daemon = Daemon::start(&site.images, &site.words());
    assert!(content(&site.images, &daemon, "tank")[..SIZE] == pattern(SIZE, 2));
    assert_eq!(daemon.stop().0, 0);
}

/// The disk is imaged while everything is clean. Later there is dirty data, and the daemon is
/// killed.
#[test]
fn a_clean_disk_that_was_copied_while_it_was_served_ends_a_start_with_3() {
    if !requires("nbdcopy") {
        return;
    }
    let site = OlderCopyFixture::new();
    let daemon = site.filled(1);
    done(&daemon, &["flush", "tank"]);
    let copy = site.save("backing");
    fill(&site.images, &daemon, "tank", &pattern(SIZE, 2));
    daemon.kill();
    site.is_refused_with("backing", &copy, BACKING);
    let daemon = Daemon::start(&site.images, &site.words());
    assert!(content(&site.images, &daemon, "tank")[..SIZE] == pattern(SIZE, 2));
    assert_eq!(daemon.stop().0, 0);
}
