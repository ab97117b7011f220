//! A cache's superblock is damaged, while a backing device says that its newest data is in that
//! set. No message suggests `make`, nothing overwrites the device, and the loss without it is
//! reported.

use crate::common::{
    CommandResult, Daemon, Images, ask, bcached, bytes, content, done, fill, json, patch, pattern, refused,
    requires, run, tool,
};
use rustix::fs::{CWD, FileType, Mode};

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;
const SUPERBLOCK: usize = 4096;

/// A cache, and a volume with dirty data in it.
struct LostCacheFixture {
    images: Images,
    fast: String,
    tank: String,
    set: String,
}

impl LostCacheFixture {
    /// Returns `None` if a tool is missing.
    fn new() -> Option<Self> {
        if !requires("nbdcopy") {
            return None;
        }
        let images = Images::new();
        let (fast, tank) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, "writeback_running = false\n");
        let daemon = Daemon::configured(&images);
        // A busy machine makes the cache look congested, and data that must be dirty in it would
        // bypass it.
        done(&daemon, &["set", "fast", "congested_write_threshold_us=0"]);
        fill(&images, &daemon, "tank", &pattern(DATA_BYTES, 1));
        assert_eq!(daemon.stop().0, 0);
        let set =
            json(&bcached(&["show", "--json", &fast]).out)["set_uuid"].as_str().expect("text").to_owned();
        Some(Self { images, fast, tank, set })
    }

    fn lose_superblock(&self) {
        patch(&self.fast, SUPERBLOCK as u64, &[0; 4096]);
    }

    fn config(&self) -> String {
        self.images.path("config.toml").to_str().expect("text").to_owned()
    }

    /// The command is refused for safety, with the set's UUID and what to do, and nothing is
    /// written.
    #[track_caller]
    fn refuses(&self, words: &[&str], why: &str) {
        let before = bytes(&self.fast);
        let ran = bcached(words);
        let said = told(&ran);
        assert_eq!(ran.exit, 3, "{words:?}: {ran:?}");
        for part in [why, &self.set, "tank", "amount unknown", "image it first", "docs/failures.md"] {
            assert!(said.contains(part), "{words:?}: no {part:?} in {said}");
        }
        assert!(!said.contains("`bcached make") && !said.contains("wipe"), "{words:?}: {said}");
        assert!(bytes(&self.fast) == before, "{words:?}: it was written");
    }
}

fn told(ran: &CommandResult) -> String {
    format!("{}{}", ran.out, ran.err)
}

#[test]
fn a_cache_whose_superblock_is_gone_is_not_made_anew() {
    let Some(site) = LostCacheFixture::new() else { return };
    site.lose_superblock();
    let (fast, tank, config) = (site.fast.as_str(), site.tank.as_str(), site.config());
    let config = config.as_str();
    let new = site.images.blank("new", BACKING_BYTES);
    let remains = format!("remains of the cache set {}", site.set);
    site.refuses(&["make", "--cache", fast, "--for", tank], &remains);
    site.refuses(&["make", "--cache", fast, "--backing", tank], &remains);
    site.refuses(&["make", "--dry-run", "--cache", fast, "--config", config], &remains);
    site.refuses(&["make", "--cache", fast, "--backing", &new, "--config", config], &remains);
    site.refuses(&["make", "--backing", fast, "--config", config], &remains);
    site.refuses(&["doctor", "--config", config, fast], &remains);
    site.refuses(&["doctor", fast, tank], &remains);
    // Another device is no way out, as long as that set is missing.
    let ran = bcached(&["doctor", &new, "--config", config]);
    assert!(
        ran.exit == 2 && ran.out.contains("which is missing") && !ran.out.contains("`bcached make"),
        "{ran:?}"
    );
    let ran = bcached(&["scan", fast, tank]);
    assert!(
        ran.exit == 3 && ran.err.contains("image it first") && ran.out.contains("do not format a device"),
        "{ran:?}"
    );
    let ran = run(&mut Daemon::command(&site.images, "run", &["--cache", fast, "--backing", tank]));
    assert!(ran.exit == 2 && ran.err.contains("`bcached doctor"), "{ran:?}");
    assert!(!told(&ran).contains("`bcached make"), "{ran:?}");
    // Here no dirty data is known of, but the device is not empty.
    let ran = bcached(&["make", "--dry-run", "-b", "64k", "--cache", fast]);
    assert!(ran.exit == 0 && ran.err.contains("holds data of no known kind"), "{ran:?}");
}

/// The superblock still says which set it belonged to.
#[test]
fn a_cache_whose_superblock_is_damaged_is_not_made_anew() {
    let Some(site) = LostCacheFixture::new() else { return };
    let (fast, tank) = (site.fast.as_str(), site.tank.as_str());
    for (offset, byte) in [(200, 9), (24, 0xc7)] {
        let sound = bytes(fast);
        patch(fast, SUPERBLOCK as u64 + offset, &[byte]);
        let why = "its damaged superblock is that of the cache set";
        site.refuses(&["make", "--cache", fast, "--for", tank], why);
        site.refuses(&["make", "--cache", fast, "--for", tank, "--wipe-bcache"], why);
        site.refuses(&["doctor", fast, tank], why);
        let ran = bcached(&["scan", fast, tank]);
        assert!(ran.out.contains(why) && !ran.out.contains("`bcached make"), "{ran:?}");
        std::fs::write(fast, sound).expect("a file");
    }
    // If no dirty data in it is known of, the message says how to remove it, and what to do before
    // that.
    patch(fast, SUPERBLOCK as u64 + 200, &[9]);
    let ran = bcached(&["make", "--cache", fast]);
    assert!(ran.exit == 3 && ran.err.contains("if it was a cache, image it first"), "{ran:?}");
}

/// The device was made anew, and the new set was not used yet: the old set can be recovered.
#[test]
fn what_was_made_over_a_lost_cache_is_not_made_again() {
    let Some(site) = LostCacheFixture::new() else { return };
    site.lose_superblock();
    let (fast, tank) = (site.fast.as_str(), site.tank.as_str());
    assert_eq!(bcached(&["make", "-b", "64k", "--cache", fast]).exit, 0);
    site.refuses(&["make", "--cache", fast, "--for", tank, "--wipe-bcache"], "remains of the cache set");
    // Another daemon would take it for a new cache.
    let (other, slow) = (site.images.blank("other", BACKING_BYTES), site.images.blank("slow", CACHE_BYTES));
    assert_eq!(bcached(&["make", "-b", "64k", "--cache", &slow, "--backing", &other]).exit, 0);
    site.images.configure(&format!(
        "version = 1\n[cache.slow]\ndevice = {slow:?}\n[volume.other]\nbacking = {other:?}\n\
         [volume.tank]\nbacking = {tank:?}\n"
    ));
    let daemon = Daemon::configured(&site.images);
    daemon.wait_for("the volume", |status| status["volumes"][0]["state"] == "served");
    let before = bytes(fast);
    for words in
        [&["replace", "slow", "--with", fast][..], &["replace", "slow", "--with", fast, "--wipe-bcache"]]
    {
        refused(&daemon, words, 3, &format!("remains of the cache set {}", site.set));
    }
    assert!(bytes(fast) == before, "it was written");
    assert_eq!(daemon.stop().0, 0);
}

/// An empty device in the place of the cache: it may be the wrong device, or one that has lost
/// everything.
#[test]
fn the_configured_cache_of_a_dirty_volume_is_not_made_until_that_is_given_up() {
    let Some(site) = LostCacheFixture::new() else { return };
    std::fs::remove_file(&site.fast).expect("ours");
    site.images.blank("fast", CACHE_BYTES);
    let (fast, config) = (site.fast.as_str(), site.config());
    let make = ["make", "-b", "64k", "--cache", fast, "--config", &config];
    site.refuses(&make, "it is configured as the cache");
    site.refuses(&["doctor", fast, "--config", &config], "it is configured as the cache");
    // The devices by other names than those in the configuration.
    let linked = |name: &str, device: &str| {
        let link = site.images.path(name);
        std::os::unix::fs::symlink(device, &link).expect("ours");
        link.to_str().expect("text").to_owned()
    };
    let (other_fast, other_tank) = (linked("by-id-fast", fast), linked("by-id-tank", &site.tank));
    let named = ["make", "-b", "64k", "--cache", &other_fast, "--for", &other_tank, "--config", &config];
    site.refuses(&named, "it is configured as the cache");
    assert_eq!(bcached(&["make", "--cache", fast, "--config", "/nowhere"]).exit, 2, "no such configuration");
    patch(&site.tank, SUPERBLOCK as u64, &[0; 4096]);
    assert_eq!(bcached(&make).exit, 0, "its superblock is gone, so it is given up");
}

#[test]
fn what_is_lost_with_a_cache_is_told_by_remove_and_replace() {
    let Some(site) = LostCacheFixture::new() else { return };
    site.lose_superblock();
    let new = site.images.blank("new", CACHE_BYTES);
    let daemon = Daemon::configured(&site.images);
    let lost = format!("is in the cache set {}, which is missing: amount unknown", site.set);
    let replace = ["replace", "fast", "--with", &new];
    refused(&daemon, &replace, 3, &lost);
    let status = ask(&daemon, &["status"]);
    assert!(
        status.out.contains("which is missing") && status.out.contains("do not run `make` on that device"),
        "{status:?}"
    );
    assert!(
        !told(&status).contains("`bcached make") && !daemon.log().contains("`bcached make"),
        "{status:?}"
    );
    let planned = json(&done(&daemon, &["remove", "tank", "--dry-run", "--json"]));
    assert_eq!(planned["dirty_unknown"], true, "{planned}");
    let planned = done(&daemon, &["remove", "tank", "--dry-run"]);
    assert!(planned.contains(&lost) && planned.contains("an unknown amount of dirty data"), "{planned}");
    let removed = done(&daemon, &["remove", "tank"]);
    assert!(
        removed.contains(&lost)
            && removed.contains("the amount of its dirty data in a cache is unknown")
            && !removed.contains("0 B"),
        "{removed}"
    );
    // Nothing else knows about the lost data any more.
    let planned = done(&daemon, &["replace", "fast", "--with", &new, "--dry-run"]);
    assert!(planned.contains(&lost) && planned.contains("tank"), "{planned}");
    let replaced = done(&daemon, &replace);
    assert!(replaced.contains(&lost) && !replaced.contains("nothing"), "{replaced}");
    assert_eq!(daemon.stop().0, 0);
}

/// Only the magic number is gone. A regression: `show -f` printed nothing, though the help promises
/// it, and `make` called it data of no known kind.
#[test]
fn a_superblock_without_its_magic_number_is_shown_and_told_of() {
    let Some(site) = LostCacheFixture::new() else { return };
    patch(&site.fast, SUPERBLOCK as u64 + 24, &[0; 16]);
    let ran = bcached(&["show", &site.fast]);
    assert!(ran.exit == 2 && ran.err.contains("bad magic: its superblock was erased; -f shows"), "{ran:?}");
    let ran = bcached(&["show", "-f", &site.fast]);
    assert!(ran.exit == 0 && ran.out.contains(&site.set), "{ran:?}");
    // No backing device is named that would show that its set is missing.
    let ran = bcached(&["make", "--dry-run", "-b", "64k", "--cache", &site.fast]);
    let holds = format!("holds a bcache superblock whose magic number was erased, of cache set {}", site.set);
    assert!(ran.exit == 0 && ran.err.contains(&holds), "{ran:?}");
}

/// A regression: a new cache with the UUID of a set whose daemon was killed took the note, and with
/// it writes that only the note held.
#[test]
fn a_new_cache_with_the_uuid_of_a_killed_set_leaves_the_note_alone() {
    let Some(site) = LostCacheFixture::new() else { return };
    let daemon = Daemon::start(&site.images, &["--cache", &site.fast, "--backing", &site.tank]);
    done(&daemon, &["set", &site.fast, "journal_delay_ms=60000", "--runtime"]);
    let data = site.images.path("last");
    std::fs::write(&data, pattern(4096, 7)).expect("a file");
    // Without a flush only the note has its key.
    assert_eq!(run(tool("nbdcopy").arg(&data).arg(daemon.uri("tank"))).exit, 0);
    daemon.kill();
    let scratch = site.images.blank("scratch", CACHE_BYTES);
    assert_eq!(bcached(&["make", "--cache", &scratch, "--cset-uuid", &site.set, "--bucket", "64k"]).exit, 0);
    let refuses = || {
        let ran = run(&mut Daemon::command(&site.images, "run", &["--cache", &scratch]));
        assert_eq!(ran.exit, 3, "{ran:?}");
        assert!(ran.err.contains("may hold writes that a killed bcached acknowledged"), "{ran:?}");
    };
    refuses();
    // The refusal does not open the note: a damaged one would be repaired, and then hold nothing.
    let files = std::fs::read_dir(site.images.path("run")).expect("a folder").flatten();
    let is_note = |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "note");
    let note = files.map(|entry| entry.path()).find(is_note).expect("a note");
    let whole = bytes(&note);
    patch(&note, 0, b"damaged!");
    refuses();
    refuses();
    // Nor does it take the note for empty, or block on it.
    patch(&note, 0, &[0; 8]);
    refuses();
    let aside = note.with_extension("aside");
    std::fs::rename(&note, &aside).expect("one folder");
    std::fs::write(&note, []).expect("a file");
    refuses();
    std::fs::remove_file(&note).expect("it is there");
    rustix::fs::mknodat(CWD, &note, FileType::Fifo, Mode::RWXU, 0).expect("a FIFO");
    refuses();
    std::fs::remove_file(&note).expect("it is there");
    std::fs::rename(&aside, &note).expect("one folder");
    patch(&note, 0, &whole[..8]);
    let daemon = Daemon::start(&site.images, &["--cache", &site.fast, "--backing", &site.tank]);
    assert!(daemon.log().contains("they are replayed"), "{}", daemon.log());
    assert!(content(&site.images, &daemon, "tank")[..4096] == pattern(4096, 7), "all is there");
    assert_eq!(daemon.stop().0, 0);
}

/// The recovery works as the documentation describes it.
#[test]
fn a_superblock_is_written_back_into_an_image() {
    let Some(site) = LostCacheFixture::new() else { return };
    site.lose_superblock();
    let image = site.images.path("image").to_str().expect("text").to_owned();
    std::fs::copy(&site.fast, &image).expect("a copy");
    let scratch = site.images.blank("scratch", CACHE_BYTES);
    assert_eq!(bcached(&["make", "--cache", &scratch, "--cset-uuid", &site.set, "--bucket", "64k"]).exit, 0);
    assert_eq!(Daemon::start(&site.images, &["--cache", &scratch]).stop().0, 0);
    patch(&image, SUPERBLOCK as u64, &bytes(&scratch)[SUPERBLOCK..][..4096]);
    let ran = bcached(&["check", &image, "--backing", &site.tank]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    let daemon = Daemon::start(&site.images, &["--cache", &image, "--backing", &site.tank]);
    assert!(content(&site.images, &daemon, "tank")[..DATA_BYTES] == pattern(DATA_BYTES, 1), "all is there");
    assert_eq!(daemon.stop().0, 0);
}
