//! A way out that a message names must work: each message here once led the wrong way, or nowhere.

use crate::common::{self, Daemon, Images, ask, bcached, done, refused, run};

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

/// Makes a cache `fast` and its volume `tank`.
fn configured() -> (Images, Daemon) {
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "");
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

/// A regression: the user was told to configure a cache, which was configured, and nothing
/// mentioned it.
#[test]
fn a_released_set_is_not_forgotten() {
    let (_images, daemon) = configured();
    done(&daemon, &["release", "fast"]);
    refused(&daemon, &["add", "tank"], 2, "`bcached import fast` serves it again");
    let status = done(&daemon, &["status"]);
    assert!(
        status.contains("cache fast: released (served = false); `bcached import fast` serves it again"),
        "{status}"
    );
    assert_eq!(done(&daemon, &["status", "fast"]).lines().count(), 2);
    assert_eq!(daemon.status()["released"], serde_json::json!(["fast"]));
    done(&daemon, &["import", "fast"]);
    assert!(!done(&daemon, &["status"]).contains("released"));
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the message advised to remove what was removed already, by a name that no shell
/// accepts.
#[test]
fn what_keeps_a_cache_from_being_replaced_is_forgotten_as_it_is_said() {
    let (images, daemon) = configured();
    let new = images.blank("new", CACHE_BYTES);
    let replace = ["replace", "fast", "--with", &new];
    done(&daemon, &["add", "swap", "--size", "1M"]);
    refused(&daemon, &replace, 3, "then `bcached remove swap` and `bcached forget swap`");
    done(&daemon, &["remove", "swap"]);
    let ran = ask(&daemon, &replace);
    assert!(ran.exit == 3 && !ran.err.contains("bcached remove"), "{ran:?}");
    let command = ran.err.rsplit('`').nth(1).expect("one is named").to_owned();
    let words: Vec<_> = command.split(' ').skip(1).collect();
    assert_eq!(words.first(), Some(&"forget"), "{ran:?}");
    done(&daemon, &words);
    done(&daemon, &[&replace[..], &["--dry-run"]].concat());
    assert_eq!(daemon.stop().0, 0);
}

/// A client that asks on another socket than the daemon's cannot reach it, so the log names the
/// socket.
#[test]
fn a_start_says_where_it_is_asked() {
    let (_images, daemon) = configured();
    let log = daemon.log();
    assert!(
        log.contains(&format!("commands on {}", daemon.control()))
            && log.contains("[event=control-listening]"),
        "{log}"
    );
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: an option set until the daemon stops was silently lost when the volume was added
/// again.
#[test]
fn an_option_for_now_outlives_a_removal() {
    let (images, daemon) = configured();
    done(&daemon, &["set", "tank", "writeback_percent=7", "--runtime"]);
    done(&daemon, &["remove", "tank"]);
    done(&daemon, &["add", "tank"]);
    assert_eq!(done(&daemon, &["get", "tank", "writeback_percent"]), "7\n");
    // The same for a volume that lives in the cache alone.
    done(&daemon, &["add", "swap", "--size", "1M"]);
    done(&daemon, &["set", "swap", "on_cache_error=fail", "--runtime"]);
    done(&daemon, &["remove", "swap"]);
    done(&daemon, &["add", "swap"]);
    assert_eq!(done(&daemon, &["get", "swap", "on_cache_error"]), "fail\n");
    // Another device of that name is another volume.
    done(&daemon, &["remove", "tank"]);
    let other = images.blank("other", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &other]).exit, 0);
    done(&daemon, &["add", "tank", "--backing", &other]);
    assert_eq!(done(&daemon, &["get", "tank", "writeback_percent"]), "10\n");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the message named a line of a file that the user had not written.
#[test]
fn options_that_must_fit_together_are_set_together() {
    let (images, daemon) = configured();
    let low = "writeback_rate_fp_term_low=5000";
    let ran = ask(&daemon, &["set", "tank", low]);
    assert_eq!((ran.exit, ran.err.contains("99-set.toml")), (2, false), "{ran:?}");
    assert!(ran.err.contains("must be below") && ran.err.contains("set them together"), "{ran:?}");
    assert_eq!(images.kept(), "");
    done(
        &daemon,
        &["set", "tank", low, "writeback_rate_fp_term_mid=6000", "writeback_rate_fp_term_high=7000"],
    );
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the message said that the volume waits for something.
#[test]
fn the_label_of_a_volume_that_was_stopped_is_set_when_it_is_served_again() {
    let (_images, daemon) = configured();
    done(&daemon, &["stop", "tank"]);
    refused(&daemon, &["set", "tank", "label=foo"], 4, "`bcached add tank` serves it again");
    assert_eq!(daemon.stop().0, 0);
}

/// The cache is dead, nothing on it is needed, and the way out is described only in the
/// documentation.
#[test]
fn who_serves_a_clean_device_with_a_new_cache_is_told_how() {
    let images = Images::new();
    let (_fast, tank) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, "");
    assert_eq!(Daemon::configured(&images).stop().0, 0);
    let new = images.blank("new", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &new]).exit, 0);
    let serve = || run(&mut Daemon::command(&images, "run", &["--cache", &new, "--backing", &tank]));
    let ran = serve();
    let last = ran.err.lines().last().unwrap_or_default();
    assert!(ran.exit == 3 && last.contains("docs/failures.md"), "{ran:?}");
    // With dirty data there is none.
    common::reseal(&tank, common::STATE, common::DIRTY | 1);
    let ran = serve();
    let last = ran.err.lines().last().unwrap_or_default();
    assert!(ran.exit == 3 && !last.contains("docs/failures.md"), "{ran:?}");
}

/// A regression: a device that is no bcache device kept all others from being reported, and a
/// second such device was not named.
#[test]
fn a_device_that_is_none_keeps_no_other_from_being_found() {
    let images = Images::new();
    let (fast, _tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let (blank, missing) = (images.blank("blank", 1 << 20), images.path("missing"));
    let all = [fast.as_str(), &blank, missing.to_str().expect("text")];
    for words in [&["scan"][..], &["config", "scan"]] {
        let ran = bcached(&[words, &all].concat());
        assert_eq!((ran.exit, ran.err.lines().count()), (2, 2), "{words:?}: {ran:?}");
        assert!(ran.err.contains(&blank) && ran.err.contains(all[2]) && ran.out.contains(&fast), "{ran:?}");
    }
    let ran = bcached(&["config", "scan", &blank, all[2]]);
    assert_eq!((ran.exit, ran.err.lines().count(), ran.out.as_str()), (2, 2, ""), "{ran:?}");
}

#[test]
fn half_a_second_is_a_time() {
    let (_images, daemon) = configured();
    done(&daemon, &["wait", "tank", "--for", "served", "--timeout", "500ms"]);
    refused(
        &daemon,
        &["wait", "tank", "--for", "served", "--timeout", "50us"],
        2,
        "write 500ms, 30s, 5m or 2h",
    );
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the log said of commands that took effect that there was nothing to do.
#[test]
fn what_was_added_is_no_nothing() {
    let (_images, daemon) = configured();
    done(&daemon, &["remove", "tank"]);
    done(&daemon, &["add", "tank"]);
    done(&daemon, &["release", "fast"]);
    done(&daemon, &["import", "fast"]);
    assert!(!daemon.log().contains("job-nothing"), "{}", daemon.log());
    done(&daemon, &["add", "tank"]);
    assert!(daemon.log().contains("it is there already [event=job-nothing"), "{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
}

/// The guide promises this, but it was true only for named devices.
#[test]
fn doctor_names_what_a_killed_daemon_has_left() {
    let (images, daemon) = configured();
    let notes = images.path("run");
    let doctor = || run(common::program().arg("doctor").env("BCACHED_NOTES", &notes));
    let line = |out: &str| out.lines().find(|line| line.starts_with("notes ")).expect("a line").to_owned();
    let ours = |out: &str| line(out).contains(notes.to_str().expect("text"));
    let set = daemon.status()["caches"][0]["set_uuid"].as_str().expect("open").to_owned();
    let running = doctor();
    assert!(running.exit == 0 && !ours(&running.out), "{running:?}");
    daemon.kill();
    let left = doctor();
    assert!(left.exit == 0 && ours(&left.out) && line(&left.out).contains(&set), "{left:?}");
}

#[test]
fn doctor_says_once_what_is_wrong_with_a_device() {
    let images = Images::new();
    let blank = images.blank("blank", 1 << 20);
    let ran = bcached(&["doctor", &blank]);
    assert_eq!((ran.exit, ran.err.as_str()), (2, ""), "{ran:?}");
    assert!(
        ran.out.contains("is not a bcache device") && ran.out.contains("`bcached make` formats it"),
        "{ran:?}"
    );
    // A regression: it gave the same advice for a device that is not empty.
    let file = std::fs::OpenOptions::new().write(true).open(&blank).expect("made above");
    std::os::unix::fs::FileExt::write_all_at(&file, &[0x53, 0xef], 1024 + 56).expect("room");
    let ran = bcached(&["doctor", &blank]);
    assert_eq!((ran.exit, ran.err.as_str()), (2, ""), "{ran:?}");
    assert!(ran.out.contains("the signature of ext") && !ran.out.contains("formats it"), "{ran:?}");
}

#[test]
fn make_says_what_a_volume_is_called_and_its_mode() {
    let images = Images::new();
    let tank = images.blank("tank", BACKING_BYTES);
    let ran = bcached(&["make", "--writeback", "--label", "media", "-B", &tank]);
    assert!(ran.exit == 0 && ran.out.contains("label:\t\t\tmedia\ncache_mode:\t\twriteback\n"), "{ran:?}");
}
