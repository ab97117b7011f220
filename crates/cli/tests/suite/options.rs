//! `bcached get`, `set` and `unset` as processes: what is set takes effect at once and persists,
//! what is refused changes nothing, and the origin of each value is shown.

use crate::common::{Daemon, Images, ask, bcached, done, json, refused, run};
use bcached_config::options::OPTIONS;
use rustix::process::Signal;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

/// A cache and two backing devices, labelled `tank` and `pond`, with a configuration that gives
/// them other names.
struct OptionsFixture {
    images: Images,
    cache: String,
    tank: String,
    pond: String,
}

impl OptionsFixture {
    fn new() -> Self {
        let images = Images::new();
        let cache = images.blank("cache", CACHE_BYTES);
        let [tank, pond] = ["tank", "pond"].map(|name| images.blank(name, BACKING_BYTES));
        assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
        for (device, label) in [(&tank, "tank"), (&pond, "pond")] {
            assert_eq!(bcached(&["make", "--label", label, "-B", device]).exit, 0);
        }
        Self { images, cache, tank, pond }
    }

    fn config(&self) -> PathBuf {
        self.images.path("config.toml")
    }

    fn set_file(&self) -> PathBuf {
        self.images.path("config.d/99-set.toml")
    }

    /// Returns the content of the file that `set` writes, if it exists.
    fn kept(&self) -> Option<String> {
        std::fs::read_to_string(self.set_file()).ok()
    }

    /// Writes the configuration, with these lines in the section of `media`.
    fn configure(&self, lines: &str) {
        let Self { cache, tank, pond, .. } = self;
        let text = format!(
            "version = 1\n[cache.fast]\ndevice = {cache:?}\n[volume.media]\nbacking = {tank:?}\n{lines}\
             [volume.scratch]\nbacking = {pond:?}\n"
        );
        std::fs::write(self.config(), text).expect("a file");
    }

    fn start(&self) -> Daemon {
        let config = self.config();
        Daemon::start(&self.images, &["--config", config.to_str().expect("text")])
    }
}

/// Returns the value in force, and its origin.
#[track_caller]
fn value(daemon: &Daemon, volume: &str, option: &str) -> (String, String) {
    let shown = json(&done(daemon, &["get", "--json", volume, option]));
    assert_eq!(
        (shown["schema"].as_str(), shown["schema_version"].as_u64()),
        (Some("bcached.options"), Some(1))
    );
    let text = |key: &str| shown["options"][0][key].as_str().unwrap_or_default().to_owned();
    assert_eq!(done(daemon, &["get", volume, option]), format!("{}\n", text("value")), "text and JSON");
    (text("value"), text("origin"))
}

fn pair(value: &str, origin: &str) -> (String, String) {
    (value.to_owned(), origin.to_owned())
}

/// Option, value before, new value, that as printed, refused value, and why.
const EACH: &[(&str, &str, &str, &str, &str, &str)] = &[
    ("cache_mode", "writethrough", "writeback", "writeback", "fast", "is not one of writethrough"),
    ("sequential_cutoff", "4M", "1024k", "1M", "1MB", "decimal units are not used"),
    ("writeback_running", "1", "0", "0", "off", "is neither 1 nor 0"),
    ("writeback_percent", "10", "20", "20", "20%", "is not a whole number"),
    ("writeback_delay", "30s", "90", "90s", "soon", "is not a time"),
    ("writeback_rate_update_seconds", "5s", "1m", "1m", "1 m", "is not a time"),
    ("writeback_rate_p_term_inverse", "40", "50", "50", "-1", "is not a whole number"),
    ("writeback_rate_i_term_inverse", "10000", "20000", "20000", "x", "is not a whole number"),
    ("writeback_rate_fp_term_low", "1", "2", "2", "10", "must be below writeback_rate_fp_term_mid"),
    ("writeback_rate_fp_term_mid", "10", "20", "20", "1000", "must be below writeback_rate_fp_term_high"),
    (
        "writeback_rate_fp_term_high",
        "1000",
        "2000",
        "2000",
        "20",
        "must be below writeback_rate_fp_term_high",
    ),
    ("writeback_consider_fragment", "1", "0", "0", "", "is neither 1 nor 0"),
    ("writeback_rate_minimum", "4k", "16", "8k", "none", "starts with a whole number"),
    ("writeback_rate_maximum", "none", "20M", "20M", "1k", "must not be above writeback_rate_maximum"),
    ("max_dirty_age", "none", "12h", "12h", "0", "below the minimum, 1s"),
    ("quiet_hours", "none", "23:00-7:00", "23:00-07:00", "23-7", "as 23:00-07:00"),
    ("writeback_latency", "none", "50ms", "50ms", "2h", "above the maximum, 1m"),
    ("spindown_after", "none", "600", "10m", "1ms", "below the minimum, 1s"),
    ("stripe_size", "none", "192k", "4224k", "1MB", "decimal units are not used"),
    ("partial_stripes_expensive", "none", "1", "1", "raid5", "is neither 1 nor 0"),
    ("on_cache_error", "freeze", "read-only", "read-only", "detach", "is not one of freeze, read-only, fail"),
    ("on_backing_error", "freeze", "fail", "fail", "wait", "is not one of freeze, read-only, fail"),
    ("freeze_timeout", "2m", "30", "30s", "none", "is not a time"),
];

#[test]
fn every_option_is_set_stays_and_is_unset() {
    let tried: Vec<_> = EACH.iter().map(|each| each.0).collect();
    let all: Vec<_> = OPTIONS.iter().map(|option| option.name).collect();
    let all: Vec<_> = all.into_iter().filter(|name| !["label", "writeback_rate"].contains(name)).collect();
    assert_eq!(tried, all, "none is left out");
    let site = OptionsFixture::new();
    site.configure("");
    let of_person = std::fs::read(site.config()).expect("a file");
    let daemon = site.start();
    for (option, before, typed, printed, bad, why) in EACH {
        let origin = if *option == "cache_mode" { "superblock" } else { "default" };
        assert_eq!(value(&daemon, "media", option), pair(before, origin), "{option}");
        let said = done(&daemon, &["set", "media", &format!("{option}={typed}")]);
        assert_eq!(said, format!("media: {option} is {printed} (set)\n"));
        assert_eq!(value(&daemon, "media", option), pair(printed, "set"), "{option}");
        let kept = site.kept();
        let again = done(&daemon, &["set", "media", &format!("{option}={printed}")]);
        assert_eq!(again, format!("media: {option} is {printed} already (set)\n"));
        refused(&daemon, &["set", "media", &format!("{option}={bad}")], 2, why);
        assert_eq!((value(&daemon, "media", option).0.as_str(), site.kept()), (*printed, kept), "{option}");
        assert_eq!(value(&daemon, "scratch", option).0, *before, "the other volume's");
    }
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    for (option, _, _, printed, ..) in EACH {
        assert_eq!(value(&daemon, "media", option), pair(printed, "set"), "{option} after a restart");
    }
    for (option, before, _, printed, ..) in EACH.iter().rev() {
        // The superblock stores the mode, as with the kernel.
        let (after, origin) =
            if *option == "cache_mode" { (*printed, "superblock") } else { (*before, "default") };
        let said = done(&daemon, &["unset", "media", option]);
        assert_eq!(said, format!("media: {option} is {after} ({origin})\n"));
        assert_eq!(value(&daemon, "media", option), pair(after, origin), "{option}");
        assert!(done(&daemon, &["unset", "media", option]).contains(" already "), "{option}");
    }
    assert!(!site.kept().expect("the file").contains("media"), "nothing is left in it");
    assert_eq!(std::fs::read(site.config()).expect("a file"), of_person, "a person's file is a person's");
}

#[test]
fn what_is_set_for_now_ends_with_the_daemon() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    let options =
        ["cache_mode=writeback", "sequential_cutoff=0", "writeback_delay=1m", "quiet_hours=01:00-02:00"];
    let said = done(&daemon, &[&["set", "media"], &options[..], &["--runtime"]].concat());
    assert!(said.contains("media: cache_mode is writeback (runtime)\n"), "{said}");
    assert_eq!(site.kept(), None, "nothing is kept");
    assert_eq!(value(&daemon, "media", "cache_mode"), pair("writeback", "runtime"));
    assert_eq!(daemon.status()["volumes"][0]["cache_mode"], "writeback");
    assert_eq!(value(&daemon, "media", "sequential_cutoff"), pair("0", "runtime"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("the reload", |_| daemon.log().contains("event=reloaded"));
    assert_eq!(value(&daemon, "media", "writeback_delay"), pair("1m", "runtime"), "also over a reload");
    // A permanent value replaces a runtime value.
    done(&daemon, &["set", "media", "writeback_delay=2m"]);
    assert_eq!(value(&daemon, "media", "writeback_delay"), pair("2m", "set"));
    done(&daemon, &["set", "media", "writeback_delay=3m", "--runtime"]);
    assert_eq!(value(&daemon, "media", "writeback_delay"), pair("3m", "runtime"));
    done(&daemon, &["unset", "media", "sequential_cutoff"]);
    assert_eq!(value(&daemon, "media", "sequential_cutoff"), pair("4M", "default"));
    assert_eq!(json(&bcached(&["show", "--json", &site.tank]).out)["backing"]["cache_mode"], "writethrough");
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    assert_eq!(value(&daemon, "media", "cache_mode"), pair("writethrough", "superblock"));
    assert_eq!(value(&daemon, "media", "writeback_delay"), pair("2m", "set"));
    assert_eq!(value(&daemon, "media", "quiet_hours"), pair("none", "default"));

    // The mode is written where it belongs, even if it is in force already.
    done(&daemon, &["set", "media", "cache_mode=writeback", "--runtime"]);
    done(&daemon, &["set", "media", "cache_mode=writeback"]);
    assert_eq!(daemon.stop().0, 0);
    assert_eq!(json(&bcached(&["show", "--json", &site.tank]).out)["backing"]["cache_mode"], "writeback");
}

#[test]
fn set_wins_over_the_file_and_a_reload_applies_what_changed() {
    let site = OptionsFixture::new();
    site.configure("writeback_percent = 15\nsequential_cutoff = \"2M\"\n");
    let daemon = site.start();
    let line = |option: &str| {
        let text = done(&daemon, &["get", "media"]);
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(option)).expect("a line");
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let config = site.config();
    let config = config.display();
    assert_eq!(line("writeback_percent"), format!("writeback_percent 15 % config {config}:6"));
    assert_eq!(line("sequential_cutoff"), format!("sequential_cutoff 2M bytes config {config}:7"));
    assert_eq!(line("label"), "label tank superblock");
    done(&daemon, &["set", "media", "writeback_percent=20"]);
    assert_eq!(line("writeback_percent"), "writeback_percent 20 % set");

    // A reload applies what is new in the file, and values from `set` still take precedence.
    site.configure("writeback_percent = 30\nsequential_cutoff = \"3M\"\ncache_mode = \"writearound\"\n");
    daemon.signal(Signal::HUP);
    daemon.wait_for("the new mode", |status| status["volumes"][0]["cache_mode"] == "writearound");
    assert_eq!(value(&daemon, "media", "writeback_percent"), pair("20", "set"));
    assert_eq!(value(&daemon, "media", "sequential_cutoff"), pair("3M", "config"));
    // An invalid file changes nothing at all.
    site.configure("sequential_cutoff = \"5M\"\nwriteback_percent = 41\n");
    daemon.signal(Signal::HUP);
    daemon.wait_for("the refusal", |_| daemon.log().contains("event=reload-refused"));
    let log = daemon.log();
    assert!(log.contains("config.toml:7: cannot set `writeback_percent`: `41` is above"), "{log}");
    assert_eq!(value(&daemon, "media", "sequential_cutoff"), pair("3M", "config"));
    // Nor is anything stored that the next start would refuse.
    refused(
        &daemon,
        &["set", "media", "writeback_delay=1m"],
        2,
        "config.toml:7: cannot set `writeback_percent`",
    );
    assert_eq!(value(&daemon, "media", "writeback_delay"), pair("30s", "default"));
    site.configure("sequential_cutoff = \"5M\"\n");
    // Other changes in the file wait for the reload.
    done(&daemon, &["unset", "media", "writeback_percent"]);
    assert_eq!(value(&daemon, "media", "writeback_percent"), pair("10", "default"));
    assert_eq!(value(&daemon, "media", "sequential_cutoff"), pair("3M", "config"));
}

#[test]
fn what_is_refused_has_changed_nothing() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    done(&daemon, &["set", "media", "writeback_percent=20"]);
    let (kept, before) = (site.kept().expect("kept"), done(&daemon, &["get", "media"]));
    let set = |words: &[&str], exit, sentence| refused(&daemon, &[&["set"], words].concat(), exit, sentence);
    // All values are checked before the first is changed.
    set(
        &["media", "writeback_delay=1m", "sequential_cutoff=1MB"],
        2,
        "cannot set sequential_cutoff: `1MB` is not",
    );
    set(&["media", "writeback_delay=1m", "writeback_percnt=5"], 2, "perhaps writeback_percent is meant");
    set(&["media", "colour=red"], 2, "there is no option `colour`; `bcached get VOLUME` lists the options");
    set(&["media", "writeback_percent"], 2, "`writeback_percent` is not OPTION=VALUE");
    set(&["media", "writeback_percent=1", "writeback_percent=2"], 2, "writeback_percent is named twice");
    set(&["madia", "writeback_percent=1"], 2, "nothing is called `madia`; there are: media, scratch");
    set(&["media", "writeback_rate_fp_term_low=50"], 2, "but they would be 50 and 10");
    refused(&daemon, &["unset", "media", "colour"], 2, "there is no option `colour`");
    refused(&daemon, &["unset", "media", "label"], 2, "cannot unset label: only the device keeps it");
    refused(&daemon, &["get", "media", "colour"], 2, "there is no option `colour`");
    refused(&daemon, &["get", "madia"], 2, "nothing is called `madia`");
    let object = json(&ask(&daemon, &["set", "--json", "media", "sequential_cutoff=1MB"]).err);
    assert_eq!(
        (object["error"]["exit"].as_u64(), object["error"]["option"].as_str()),
        (Some(2), Some("sequential_cutoff"))
    );

    // If nothing can be stored, nothing is changed.
    std::fs::create_dir(site.images.path(&format!("config.d/99-set.toml.{}.new", daemon.id())))
        .expect("in the way");
    set(&["media", "writeback_delay=1m"], 4, "nothing was changed; `--runtime`");
    assert_eq!(
        (site.kept().as_deref(), done(&daemon, &["get", "media"])),
        (Some(kept.as_str()), before.clone())
    );
    done(&daemon, &["set", "media", "writeback_delay=1m", "--runtime"]);
    done(&daemon, &["unset", "media", "writeback_delay"]);
    std::fs::remove_dir(site.images.path(&format!("config.d/99-set.toml.{}.new", daemon.id())))
        .expect("out of the way");

    // A user's own file of that name is read, and not rewritten.
    let of_person = "version = 1\n[volume.media]\nwriteback_percent = 25\n";
    std::fs::write(site.set_file(), of_person).expect("written");
    let not_ours = "99-set.toml: it was not made by `bcached set`, or has settings";
    set(&["media", "writeback_delay=1m"], 2, not_ours);
    assert_eq!((site.kept().as_deref(), done(&daemon, &["get", "media"])), (Some(of_person), before));
    let log = daemon.log();
    let uid = rustix::process::getuid().as_raw();
    assert!(
        log.contains(&format!("set media writeback_percent=20 [event=options-changed uid={uid}]")),
        "{log}"
    );
    assert!(log.contains(": set media colour=red: there is no option `colour`"), "{log}");
}

/// A number outside its range is clamped as the kernel does it, with a warning.
#[test]
fn the_end_of_a_range_is_taken_with_a_word() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    let ran = ask(&daemon, &["set", "media", "writeback_percent=100"]);
    assert_eq!((ran.exit, ran.out.as_str()), (0, "media: writeback_percent is 40 (set)\n"), "{ran:?}");
    let warning = "bcached: warning: writeback_percent: `100` is above the maximum, 40, which is used\n";
    assert_eq!(ran.err, warning);
    let told =
        json(&done(&daemon, &["set", "--json", "media", "writeback_percent=0", "writeback_rate_minimum=0"]));
    assert_eq!(told["schema"], "bcached.change");
    assert_eq!(told["changes"][0]["before"], "40");
    assert_eq!(told["changes"][1]["value"], "1");
    assert_eq!(told["notes"][0], "writeback_rate_minimum: `0` is below the minimum, 1, which is used");
    assert!(told["kept_in"].as_str().is_some_and(|path| path.ends_with("config.d/99-set.toml")), "{told}");
}

#[test]
fn a_dry_run_says_what_would_be() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    done(&daemon, &["set", "media", "writeback_percent=20"]);
    let (kept, before) = (site.kept(), done(&daemon, &["get", "media"]));
    let said = done(&daemon, &["set", "media", "cache_mode=writeback", "writeback_percent=20", "--dry-run"]);
    let wanted = "media: cache_mode would be writeback (set)\nmedia: writeback_percent is 20 already (set)\n";
    assert_eq!(said, wanted);
    let said = done(&daemon, &["set", "media", "writeback_delay=1m", "--runtime", "--dry-run"]);
    assert_eq!(said, "media: writeback_delay would be 1m (runtime)\n");
    let said = done(&daemon, &["unset", "media", "writeback_percent", "--dry-run"]);
    assert_eq!(said, "media: writeback_percent would be 10 (default)\n");
    refused(&daemon, &["set", "media", "cache_mode=fast", "--dry-run"], 2, "is not one of");
    assert_eq!((site.kept(), done(&daemon, &["get", "media"])), (kept, before), "nothing is changed");
    assert_eq!(daemon.status()["volumes"][0]["cache_mode"], "writethrough");
}

#[test]
fn without_a_configuration_values_hold_until_the_daemon_stops() {
    let site = OptionsFixture::new();
    let daemon = Daemon::start(&site.images, &["--cache", &site.cache, "--backing", &site.tank]);
    let sentence = "devices of its command line, without a configuration; add --runtime";
    refused(&daemon, &["set", "tank", "writeback_percent=20"], 2, sentence);
    refused(&daemon, &["set", "tank", "writeback_percent=20", "--dry-run"], 2, sentence);
    assert_eq!(value(&daemon, "tank", "writeback_percent"), pair("10", "default"));
    done(&daemon, &["set", "tank", "writeback_percent=20", "--runtime"]);
    assert_eq!(value(&daemon, "tank", "writeback_percent"), pair("20", "runtime"));
    done(&daemon, &["unset", "tank", "writeback_percent"]);
    assert_eq!(value(&daemon, "tank", "writeback_percent"), pair("10", "default"));
    assert!(!site.images.path("config.d").exists());
}

#[test]
fn each_daemon_is_asked_for_its_own() {
    let (here, there) = (OptionsFixture::new(), OptionsFixture::new());
    here.configure("");
    there.configure("");
    let (one, other) = (here.start(), there.start());
    done(&one, &["set", "media", "writeback_percent=20"]);
    assert_eq!(value(&other, "media", "writeback_percent"), pair("10", "default"));
    assert_eq!(there.kept(), None);
    let control = one.control().to_owned();
    assert_eq!(one.stop().0, 0);
    for words in
        [&["get", "media"][..], &["set", "media", "writeback_percent=1"], &["unset", "media", "label"]]
    {
        let ran = bcached(&[words, &["--control", &control]].concat());
        assert_eq!((ran.exit, ran.err.contains("no daemon answers")), (5, true), "{ran:?}");
    }
    assert_eq!(value(&other, "media", "writeback_percent"), pair("10", "default"));
}

#[test]
fn a_volume_is_called_by_name_label_uuid_or_path() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    let uuid = daemon.status()["volumes"][1]["uuid"].as_str().expect("a UUID").to_owned();
    let device = format!("UUID={uuid}");
    for typed in ["scratch", "pond", &uuid, &uuid[..8], &device, &site.pond] {
        done(&daemon, &["set", typed, "writeback_percent=11", "--runtime"]);
        assert_eq!(value(&daemon, "scratch", "writeback_percent"), pair("11", "runtime"), "{typed}");
        done(&daemon, &["unset", typed, "writeback_percent"]);
    }
    refused(&daemon, &["get", &uuid[..7]], 2, "nothing is called");
    assert_eq!(daemon.stop().0, 0);

    // Two volumes have the same label, and neither is named so.
    let again = bcached(&["make", "--label", "tank", "-B", &site.pond, "--wipe-bcache"]);
    assert_eq!(again.exit, 0, "{again:?}");
    let daemon = site.start();
    for words in
        [&["get", "tank"][..], &["set", "tank", "writeback_percent=1"], &["unset", "tank", "quiet_hours"]]
    {
        refused(&daemon, words, 2, "`tank` matches several volumes; name one of: media, scratch");
    }
    assert_eq!(site.kept(), None);
}

/// Options set before the device appears apply when it does.
#[test]
fn a_volume_that_waits_has_options_too() {
    let site = OptionsFixture::new();
    site.configure("wait = \"1s\"\nwriteback_percent = 15\n");
    let away = site.images.path("away");
    std::fs::rename(&site.tank, &away).expect("out of sight");
    let daemon = site.start();
    let all = done(&daemon, &["get", "media"]);
    let of = |option: &str| all.lines().find(|line| line.starts_with(option)).expect("a line").to_owned();
    assert!(of("label").contains("unknown") && of("cache_mode").contains("unknown"), "{all}");
    refused(
        &daemon,
        &["get", "media", "label"],
        4,
        "label of media is unknown: it is stored on its device, which could not be read yet",
    );
    assert_eq!(value(&daemon, "media", "writeback_percent"), pair("15", "config"));
    done(&daemon, &["set", "media", "cache_mode=writeback", "writeback_delay=1m"]);
    done(&daemon, &["set", "media", "cache_mode=writearound", "sequential_cutoff=0", "--runtime"]);
    assert_eq!(value(&daemon, "media", "cache_mode"), pair("writearound", "runtime"));
    std::fs::rename(&away, &site.tank).expect("back");
    daemon.wait_for("it is served", |status| status["volumes"][0]["state"] == "served");
    daemon.wait_for("the mode", |status| status["volumes"][0]["cache_mode"] == "writearound");
    assert_eq!(value(&daemon, "media", "writeback_percent"), pair("15", "config"));
    assert_eq!(value(&daemon, "media", "writeback_delay"), pair("1m", "set"));
    assert_eq!(value(&daemon, "media", "sequential_cutoff"), pair("0", "runtime"));
    let kept = json(&bcached(&["show", "--json", &site.tank]).out)["backing"]["cache_mode"].clone();
    assert_eq!(kept, "writeback", "what was said for now is not in the superblock");
}

/// A regression: for a configuration named without a directory, the directory beside it could not
/// be made.
#[test]
fn a_configuration_in_the_working_directory_is_one_like_others() {
    let site = OptionsFixture::new();
    site.configure("writeback_delay = 60\n");
    let mut command = Daemon::command(&site.images, "run", &["--config", "config.toml"]);
    command.current_dir(site.config().parent().expect("a folder"));
    let daemon = Daemon::start_command(&site.images, command);
    done(&daemon, &["set", "media", "writeback_percent=20", "--dry-run"]);
    assert_eq!(site.kept(), None);
    done(&daemon, &["set", "media", "writeback_percent=20"]);
    assert!(site.kept().is_some_and(|text| text.contains("writeback_percent = 20")));
    let all = done(&daemon, &["get", "media"]);
    let place = format!("config {}:6", site.config().display());
    assert!(all.contains(&place), "as somebody elsewhere finds it: {all}");
}

/// A volume whose section a user removes would otherwise reappear as a section without a device.
#[test]
fn what_was_set_of_a_volume_that_is_gone_stops_no_start() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    done(&daemon, &["set", "scratch", "writeback_percent=20"]);
    assert_eq!(daemon.stop().0, 0);
    let whole = std::fs::read_to_string(site.config()).expect("a file");
    let (without, _) = whole.split_once("[volume.scratch]").expect("a section");
    std::fs::write(site.config(), without).expect("a file");
    let daemon = site.start();
    assert!(daemon.log().contains("99-set.toml has options of volume scratch"), "{}", daemon.log());
    done(&daemon, &["set", "media", "writeback_percent=30"]);
    assert_eq!(daemon.stop().0, 0);
    // A regression: for a file that is not text the advice was to name another configuration.
    let kept = site.kept().expect("a file");
    std::fs::write(site.set_file(), b"version = 1\n# \xff\n").expect("a file");
    let ran =
        run(&mut Daemon::command(&site.images, "run", &["--config", site.config().to_str().expect("text")]));
    assert!(
        ran.exit == 2 && ran.err.contains("99-set.toml") && ran.err.contains("restore it, or delete it"),
        "{ran:?}"
    );
    std::fs::write(site.set_file(), kept).expect("a file");
    std::fs::write(site.config(), whole).expect("a file");
    let daemon = site.start();
    assert_eq!(value(&daemon, "scratch", "writeback_percent"), pair("20", "set"), "it was not forgotten");
}

/// Quiet hours are in local time, which the engine does not know.
#[test]
fn quiet_hours_are_of_the_local_time() {
    let site = OptionsFixture::new();
    site.configure("");
    let config = site.config();
    let start = |zone: &str| {
        let mut command = Daemon::command(&site.images, "run", &["--config", config.to_str().expect("text")]);
        command.env("TZ", zone);
        Daemon::start_command(&site.images, command)
    };
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    let minute = since.as_secs() / 60 % (24 * 60);
    // In a zone five hours ahead of UTC: from half an hour ago until in an hour.
    let there = |after: u64| {
        let minute = (minute + 5 * 60 + 24 * 60 + after - 30) % (24 * 60);
        format!("{:02}:{:02}", minute / 60, minute % 60)
    };
    let hours = format!("quiet_hours={}-{}", there(0), there(90));
    for (zone, quiet) in [("UTC0", false), ("<+05>-5", true)] {
        let daemon = start(zone);
        done(&daemon, &["set", "media", &hours, "--runtime"]);
        assert_eq!(daemon.log().contains("media: quiet hours begin"), quiet, "{zone}: {}", daemon.log());
        done(&daemon, &["unset", "media", "quiet_hours"]);
        assert_eq!(daemon.log().contains("media: quiet hours are over"), quiet, "{zone}: {}", daemon.log());
    }
}

/// The controller sets the rate again at its next step.
#[test]
fn a_rate_of_write_back_is_so_until_the_next_step() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    let rate = || value(&daemon, "media", "writeback_rate").0;
    assert_eq!(rate(), "512k", "as with the kernel");
    // The controller takes no step meanwhile.
    done(&daemon, &["set", "media", "writeback_rate_update_seconds=1m", "--runtime"]);
    let hint = "add --runtime: it holds until the next update";
    refused(&daemon, &["set", "media", "writeback_rate=1000"], 2, hint);
    let planned = done(&daemon, &["set", "media", "writeback_rate=1000", "--runtime", "--dry-run"]);
    assert_eq!(
        (planned.as_str(), rate().as_str()),
        ("media: writeback_rate would be 500k (runtime)\n", "512k")
    );
    let said = done(&daemon, &["set", "media", "writeback_rate=1000", "--runtime"]);
    assert_eq!((said.as_str(), rate().as_str()), ("media: writeback_rate is 500k (runtime)\n", "500k"));
    assert_eq!(daemon.status()["volumes"][0]["writeback_rate_bytes"], 1000 * 512);
    let again = json(&done(&daemon, &["set", "media", "writeback_rate=2000", "--runtime", "--json"]));
    let change = &again["changes"][0];
    assert_eq!((&change["before"], &change["value"]), (&"500k".into(), &"1000k".into()), "{again}");
    assert_eq!(site.kept(), None, "nothing is kept");
}

/// Programs use the socket directly.
#[test]
fn the_socket_answers_with_statuses_and_objects() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    let http = |method: &str, path: &str, body: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(daemon.control()).expect("connects");
        let length = body.len();
        write!(stream, "{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}").expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status").parse::<u16>().expect("a number");
        (status, serde_json::from_str(body).unwrap_or(serde_json::Value::Null))
    };
    let (media, none) = ("/v1/volumes/media/options", "/v1/volumes/none/options");
    let (status, shown) = http("GET", media, "");
    assert_eq!((status, shown["volume"].as_str()), (200, Some("media")));
    let of = |name: &str| {
        let all = shown["options"].as_array().expect("a list").iter();
        all.clone().find(|shown| shown["name"] == name).expect("an option").clone()
    };
    assert_eq!(of("sequential_cutoff")["bytes"], 4 << 20);
    assert_eq!(of("writeback_rate_minimum")["bytes_per_second"], 4096);
    assert_eq!(of("writeback_delay")["milliseconds"], 30_000);
    assert_eq!(
        (of("writeback_delay")["default"].as_str(), of("label")["default"].as_str()),
        (Some("30s"), None)
    );
    let (status, changed) = http(
        "PATCH",
        media,
        "{\"set\": {\"writeback_percent\": 12, \"writeback_running\": false}, \"runtime\": true}",
    );
    assert_eq!((status, changed["changes"][1]["value"].as_str()), (200, Some("0")), "{changed}");
    assert_eq!(value(&daemon, "media", "writeback_percent"), pair("12", "runtime"));
    let both = "{\"set\": {\"quiet_hours\": \"none\"}, \"unset\": [\"quiet_hours\"]}";
    for (method, path, body, expected, kind) in [
        ("GET", none, "", 404, "unknown-name"),
        ("PATCH", none, "{\"unset\": [\"label\"]}", 404, "unknown-name"),
        ("PATCH", media, "{\"set\"", 400, "usage"),
        ("PATCH", media, "{\"sets\": {}}", 400, "usage"),
        ("PATCH", media, "{}", 400, "usage"),
        ("PATCH", media, "{\"set\": {\"writeback_percent\": 1.5}}", 400, "usage"),
        ("PATCH", media, both, 400, "usage"),
        ("PATCH", media, &" ".repeat(65 << 10), 400, "usage"),
        ("PATCH", media, "{\"unset\": [\"label\"]}", 400, "usage"),
    ] {
        let (status, answer) = http(method, path, body);
        assert_eq!((status, answer["error"]["kind"].as_str()), (expected, Some(kind)), "{body}: {answer}");
    }
}

/// `get` shows what was set. The values that result from it, or from the device, are in the status.
#[test]
fn stripes_in_force_are_in_the_status() {
    let site = OptionsFixture::new();
    site.configure("");
    let daemon = site.start();
    let in_force = || {
        let volume = &daemon.status()["volumes"][0];
        (volume["stripe_bytes"].as_u64(), volume["partial_stripes_expensive"].as_bool())
    };
    assert_eq!(in_force(), (None, None), "a file says nothing of what lies under it");
    done(&daemon, &["set", "media", "stripe_size=192k", "partial_stripes_expensive=1"]);
    assert_eq!(in_force(), (Some(4224 << 10), Some(true)));
    done(&daemon, &["set", "media", "stripe_size=0"]);
    assert_eq!(in_force(), (None, Some(true)));
}
