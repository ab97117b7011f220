//! The kernel's control files beside the volumes of a FUSE mount: every file that the kernel has,
//! reads and writes of them, and the programs that use them.

#![allow(clippy::panic, reason = "helpers of tests fail like tests")]

mod formats;
mod readers;
mod tables;
mod walk;

use crate::common::{Daemon, Images, ask, done, json, pattern, requires};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 16 << 20;

const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

/// Returns whether volumes can be mounted here; if not, the test is skipped.
fn has_fuse() -> bool {
    match OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        Ok(_) if rustix::process::geteuid().is_root() => true,
        Ok(_) => requires("fusermount3"),
        Err(error) => {
            println!("skipped: /dev/fuse cannot be opened: {error}");
            false
        }
    }
}

/// A set with the volume `tank` on a backing device, and control files.
struct ControlFilesFixture {
    daemon: Daemon,
    images: Images,
    set: String,
}

impl ControlFilesFixture {
    fn start() -> Self {
        let images = Images::new();
        images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = [\"fuse\", \"nbd\"]\n");
        let daemon = Daemon::configured(&images);
        let status = daemon.status();
        let set = status["caches"][0]["set_uuid"].as_str().expect("an open set").to_owned();
        Self { daemon, images, set }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.images.path("run/fuse/sys").join(path.replace("SET", &self.set))
    }

    #[track_caller]
    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Writes as `echo TEXT > PATH` does; returns 0 or the error number.
    #[track_caller]
    fn write(&self, path: &str, text: &str) -> i32 {
        let written = fs::write(self.path(path), text);
        written.map_or_else(|error| error.raw_os_error().unwrap_or_else(|| panic!("{path}: {error}")), |()| 0)
    }

    /// Waits until a path is gone: directories are refreshed only a few times a second.
    #[track_caller]
    fn wait_until_gone(&self, path: &str) {
        let started = Instant::now();
        while fs::symlink_metadata(self.path(path)).is_ok() {
            assert!(started.elapsed() < Duration::from_secs(60), "{path} is still there");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns an option's value and origin, as `bcached get` reports them.
    #[track_caller]
    fn option(&self, of: &str, name: &str) -> (String, String) {
        let shown = json(&done(&self.daemon, &["get", of, name, "--json"]));
        let option = &shown["options"][0];
        let text = |key: &str| option[key].as_str().unwrap_or_default().to_owned();
        (text("value"), text("origin"))
    }

    /// Writes a MiB of the volume and reads it back, through the mount.
    fn use_it(&self) {
        let tank = self.images.path("run/fuse/volumes/tank");
        let file = OpenOptions::new().read(true).write(true).open(tank).expect("it is there");
        for part in 0..16 {
            let data = pattern(64 << 10, u8::try_from(part).expect("small"));
            file.write_all_at(&data, part * (256 << 10)).expect("it takes it");
        }
        file.sync_all().expect("it is durable");
        let mut back = vec![0; 64 << 10];
        for part in 0..16 {
            file.read_exact_at(&mut back, part * (256 << 10)).expect("it gives it back");
            file.read_exact_at(&mut back, part * (256 << 10) + (128 << 10)).expect("the rest is there");
        }
    }

    fn end(self) {
        let (exit, log) = self.daemon.stop();
        assert_eq!(exit, 0, "{log}");
    }
}

/// Control files have the same numbers as `status`, in the kernel's form.
#[test]
fn control_files_say_what_the_status_says() {
    if !has_fuse() {
        return;
    }
    let served = ControlFilesFixture::start();
    assert_eq!(served.write("block/bcache0/bcache/writeback_running", "0\n"), 0);
    served.use_it();
    let status = served.daemon.status();
    let (cache, volume) = (&status["caches"][0], &status["volumes"][0]);
    let number = |value: &Value| format!("{}\n", value.as_u64().expect("a number"));
    assert_eq!(volume["kernel_name"], "bcache0");
    assert_eq!(served.option("bcache0", "label").0, "tank", "it is a name for commands, too");
    assert_eq!(served.read("block/bcache0/bcache/dirty_data"), "1.0M\n");
    assert_eq!(served.read("block/bcache0/bcache/backing_dev_uuid").trim_end(), volume["uuid"]);
    for (of, whose) in [("fs/bcache/SET", cache), ("block/bcache0/bcache", volume)] {
        let total = &whose["windows"]["total"];
        for (file, key) in [
            ("cache_hits", "hits"),
            ("cache_misses", "misses"),
            ("cache_bypass_hits", "bypass_hits"),
            ("cache_hit_ratio", "hit_percent"),
        ] {
            assert_eq!(served.read(&format!("{of}/stats_total/{file}")), number(&total[key]), "{of} {file}");
        }
        assert_ne!(served.read(&format!("{of}/stats_total/cache_hits")), "0\n", "{of}");
    }
    for (file, key) in [
        ("cache_available_percent", "cache_available_percent"),
        ("tree_depth", "tree_depth"),
        ("internal/btree_nodes", "btree_nodes"),
        ("internal/active_journal_entries", "active_journal_entries"),
        ("cache0/nbuckets", "buckets"),
    ] {
        assert_eq!(served.read(&format!("fs/bcache/SET/{file}")), number(&cache[key]), "{file}");
    }
    // Clearing statistics affects these files only.
    let hits = volume["hits"].as_u64().expect("a number");
    for of in ["block/bcache0/bcache", "fs/bcache/SET", "fs/bcache/SET/cache0"] {
        assert_eq!(served.write(&format!("{of}/clear_stats"), "1\n"), 0);
    }
    assert_eq!(served.read("block/bcache0/bcache/stats_total/cache_hits"), "0\n");
    assert_eq!(served.read("fs/bcache/SET/stats_total/cache_hits"), "0\n");
    assert_eq!(served.read("fs/bcache/SET/cache0/written"), "0.0k\n");
    assert_ne!(served.read("block/bcache0/bcache/stats_day/cache_hits"), "0\n");
    served.use_it();
    let now = served.daemon.status()["volumes"][0]["hits"].as_u64().expect("a number");
    assert!(now > hits);
    assert_eq!(served.read("block/bcache0/bcache/stats_total/cache_hits"), format!("{}\n", now - hits));
    served.end();
}

#[test]
fn what_is_written_to_a_control_file_holds_until_the_daemon_stops() {
    if !has_fuse() {
        return;
    }
    let served = ControlFilesFixture::start();
    let bdev = "fs/bcache/SET/bdev0";
    for (path, written, read, of, value) in [
        ("bdev0/sequential_cutoff", "1048576\n", "1.0M", "tank", "1M"),
        ("bdev0/sequential_cutoff", "2M", "2.0M", "tank", "2M"),
        (
            "bdev0/cache_mode",
            "writearound\n",
            "writethrough writeback [writearound] none",
            "tank",
            "writearound",
        ),
        ("bdev0/writeback_percent", "100\n", "40", "tank", "40"),
        ("bdev0/writeback_running", "0\n", "0", "tank", "0"),
        ("bdev0/writeback_running", "17\n", "1", "tank", "1"),
        ("bdev0/writeback_delay", "7", "7", "tank", "7s"),
        ("bdev0/writeback_rate_update_seconds", "99\n", "60", "tank", "1m"),
        ("bdev0/writeback_rate_fp_term_low", "50\n", "9", "tank", "9"),
        ("bdev0/writeback_rate_fp_term_high", "3\n", "11", "tank", "11"),
        ("bdev0/writeback_rate_minimum", "16\n", "16", "tank", "8k"),
        ("cache0/cache_replacement_policy", "fifo\n", "lru [fifo] random", "fast", "fifo"),
        ("congested_read_threshold_us", "0\n", "0", "fast", "0"),
        ("journal_delay_ms", "99999999999999999999\n", "65535", "fast", "65535"),
        ("internal/idle_max_writeback_rate", "0\n", "0", "fast", "0"),
    ] {
        let path = format!("fs/bcache/SET/{path}");
        assert_eq!(served.write(&path, written), 0, "{path}: {}", served.daemon.log());
        assert_eq!(served.read(&path), format!("{read}\n"), "{path}");
        let name = path.rsplit('/').next().expect("a name");
        assert_eq!(served.option(of, name), (value.to_owned(), "runtime".to_owned()), "{path}");
    }
    assert_eq!(served.write(&format!("{bdev}/label"), "new name\n"), 0);
    assert_eq!(served.read(&format!("{bdev}/label")), "new name\n");
    let user = rustix::process::geteuid().as_raw();
    let log = served.daemon.log();
    let line = log.lines().find(|line| line.contains("set tank cache_mode=writearound --runtime"));
    assert!(line.is_some_and(|line| line.contains(&format!("uid={user}"))), "{log}");
    assert_eq!(served.images.kept(), "", "nothing is kept");

    let ControlFilesFixture { daemon, images, set } = served;
    assert_eq!(daemon.stop().0, 0);
    let served = ControlFilesFixture { daemon: Daemon::configured(&images), images, set };
    assert_eq!(served.read(&format!("{bdev}/sequential_cutoff")), "4.0M\n");
    assert_eq!(served.read(&format!("{bdev}/cache_mode")), "writethrough [writeback] writearound none\n");
    assert_eq!(served.read("fs/bcache/SET/cache0/cache_replacement_policy"), "[lru] fifo random\n");
    assert_eq!(served.read(&format!("{bdev}/label")), "new name\n", "its device keeps it");
    served.end();
}

#[test]
fn what_the_kernel_would_not_take_is_refused_and_changes_nothing() {
    if !has_fuse() {
        return;
    }
    let served = ControlFilesFixture::start();
    let long = "x".repeat(33);
    for (path, written) in [
        ("bdev0/sequential_cutoff", "1.5M\n"),
        ("bdev0/sequential_cutoff", " 1\n"),
        ("bdev0/sequential_cutoff", "-1\n"),
        ("bdev0/cache_mode", "write\n"),
        ("bdev0/cache_mode", "Writeback\n"),
        ("bdev0/cache_mode", "writeback \n"),
        ("bdev0/writeback_percent", "ten\n"),
        ("bdev0/writeback_percent", "0x10\n"),
        ("bdev0/writeback_delay", "5m\n"),
        ("bdev0/writeback_running", "yes\n"),
        ("bdev0/writeback_rate", "4M\n"),
        ("bdev0/label", long.as_str()),
        ("bdev0/running", "on\n"),
        ("bdev0/attach", "nvme\n"),
        ("errors", "ignore\n"),
        ("synchronous", "off\n"),
        ("flash_vol_create", "1.5G\n"),
        ("flash_vol_create", "0\n"),
        ("cache0/discard", "true\n"),
        ("cache0/cache_replacement_policy", "mru\n"),
    ] {
        let path = format!("fs/bcache/SET/{path}");
        let before = fs::read_to_string(served.path(&path)).unwrap_or_default();
        assert_eq!(served.write(&path, written), EINVAL, "{path} {written:?}");
        assert_eq!(fs::read_to_string(served.path(&path)).unwrap_or_default(), before, "{path} {written:?}");
    }
    // Options that are fixed here accept their present value.
    for (path, as_it_is, otherwise) in [
        ("bdev0/readahead_cache_policy", "all\n", "meta-only\n"),
        ("bdev0/stop_when_cache_set_failed", "auto\n", "always\n"),
        ("bdev0/io_disable", "0\n", "1\n"),
        ("errors", "unregister\n", "panic\n"),
        ("synchronous", "1\n", "0\n"),
        ("internal/gc_after_writeback", "0\n", "1\n"),
    ] {
        let path = format!("fs/bcache/SET/{path}");
        assert_eq!(served.write(&path, as_it_is), 0, "{path}");
        assert_eq!(served.write(&path, otherwise), EOPNOTSUPP, "{path}");
    }
    for path in [
        "register",
        "register_quiet",
        "pendings_cleanup",
        "SET/stop",
        "SET/unregister",
        "SET/internal/trigger_gc",
    ] {
        assert_eq!(served.write(&format!("fs/bcache/{path}"), "1\n"), EOPNOTSUPP, "{path}");
    }
    let log = served.daemon.log();
    let told = |path: &str, why: &str| {
        log.lines().any(|line| {
            line.contains("event=control-file-refused") && line.contains(path) && line.contains(why)
        })
    };
    assert!(told("cache_replacement_policy", "the file takes one of lru, fifo, random"), "{log}");
    assert!(told("writeback_running", "the file takes 0 or 1"), "{log}");
    assert!(told("internal/trigger_gc", "free buckets are known without a pass"), "{log}");
    assert!(told("fs/bcache/register:", "bcached add NAME --backing DEV"), "{log}");
    assert_eq!(served.daemon.status()["volumes"][0]["state"], "served");
    served.end();
}

#[test]
fn control_files_attach_detach_stop_and_make_volumes() {
    if !has_fuse() {
        return;
    }
    let served = ControlFilesFixture::start();
    served.use_it();
    let bcache = "block/bcache0/bcache";
    let (attach, running) = (format!("{bcache}/attach"), format!("{bcache}/running"));
    let set = format!("{}\n", served.set);
    assert_eq!(served.write(&attach, &set), EINVAL, "it is attached");
    assert_eq!([served.write(&running, "1\n"), served.write(&running, "0\n")], [EBUSY, 0]);
    assert_eq!(served.write(&format!("{bcache}/detach"), "1\n"), 0);
    done(&served.daemon, &["wait", "tank", "--for", "detached"]);
    assert_eq!(served.read(&format!("{bcache}/state")), "no cache\n");
    served.wait_until_gone("fs/bcache/SET/bdev0");
    served.wait_until_gone("block/bcache0/bcache/cache");
    assert_eq!(served.read(&format!("{bcache}/dirty_data")), "0.0k\n");
    assert_eq!(served.write(&format!("{bcache}/detach"), "1\n"), 0, "as in the kernel it is ignored");
    assert_eq!(served.write(&attach, "00000000-0000-4000-8000-000000000000\n"), ENOENT);
    assert_eq!(served.write(&attach, &set), 0, "{}", served.daemon.log());
    served.daemon.wait_for("it is attached", |status| status["volumes"][0]["attached"] == true);
    assert_eq!(served.read("block/tank/bcache/cache/block_size"), "4.0k\n");

    assert_eq!(served.write("fs/bcache/SET/flash_vol_create", "1T\n"), ENOSPC, "no more than can be stored");
    assert_eq!(served.write("fs/bcache/SET/flash_vol_create", "1m\n"), 0, "{}", served.daemon.log());
    let size = "block/bcache1/bcache/size";
    assert_eq!(served.read(size), "1.0M\n");
    assert_eq!(served.write(size, "2M\n"), 0, "{}", served.daemon.log());
    served.daemon.wait_for("it grows", |status| status["volumes"][1]["size_bytes"] == 2 << 20);
    assert_eq!(served.read(size), "2.0M\n");
    assert_eq!(served.write(size, "1536k\n"), 0, "{}", served.daemon.log());
    served.daemon.wait_for("it shrinks", |status| status["volumes"][1]["size_bytes"] == 1536 << 10);
    assert_eq!(served.read(size), "1.5M\n");
    assert_eq!(served.write("block/bcache1/bcache/unregister", "1\n"), EOPNOTSUPP, "it would be deleted");

    let tank = fs::File::open(served.images.path("run/fuse/volumes/tank")).expect("it is there");
    assert_eq!(served.write(&format!("{bcache}/stop"), "1\n"), EBUSY, "it is in use");
    drop(tank);
    served
        .daemon
        .wait_for("nobody uses it", |status| status["clients"].as_array().is_some_and(Vec::is_empty));
    assert_eq!(served.write(&format!("{bcache}/stop"), "1\n"), 0, "{}", served.daemon.log());
    served.daemon.wait_for("it is stopped", |status| status["volumes"][0]["state"] == "stopped");
    served.wait_until_gone("block/bcache0");
    let _again = ask(&served.daemon, &["add", "tank"]);
    served.daemon.wait_for("it is served", |status| status["volumes"][0]["state"] == "served");
    assert!(served.path(bcache).is_dir());
    served.end();
}
