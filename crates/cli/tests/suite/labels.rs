//! Labels changed while volumes are served: they are on the device when the command ends, and names
//! do not change.

use crate::common::{self, Daemon, Images, bcached, done, json, refused, requires, tool};

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

/// Makes a cache and two volumes, labelled `tank` and `pond`.
fn set(images: &Images) -> (String, [String; 2]) {
    let fast = images.blank("fast", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
    let backings = ["tank", "pond"].map(|label| {
        let device = images.blank(label, BACKING_BYTES);
        assert_eq!(bcached(&["make", "--label", label, "-B", &device]).exit, 0);
        device
    });
    (fast, backings)
}

fn label_on(device: &str) -> String {
    json(&bcached(&["show", "--json", device]).out)["label"].as_str().unwrap_or_default().to_owned()
}

fn names(daemon: &Daemon) -> Vec<String> {
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes").iter();
    volumes.map(|volume| volume["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn a_label_is_on_the_device_at_once_and_a_name_at_the_next_start() {
    let images = Images::new();
    let (fast, [tank, pond]) = set(&images);
    let words = ["--cache", &fast, "--backing", &tank, "--backing", &pond];
    let daemon = Daemon::start(&images, &words);
    assert_eq!(
        done(&daemon, &["set", "tank", "label=media", "--dry-run"]),
        "tank: label would be media (superblock)\n"
    );
    assert_eq!(label_on(&tank), "tank");
    let set = common::ask(&daemon, &["set", "tank", "label=media"]);
    assert_eq!((set.exit, set.out.as_str()), (0, "tank: label is media (superblock)\n"), "{set:?}");
    assert!(set.err.contains("tank keeps this name until the next start"), "{set:?}");
    assert_eq!(label_on(&tank), "media", "while it is served");
    assert_eq!(done(&daemon, &["set", "tank", "label=media"]), "tank: label is media already (superblock)\n");
    assert_eq!(done(&daemon, &["get", "media", "label"]), "media\n", "it is called by its label");
    assert_eq!(names(&daemon), ["tank", "pond"], "a name stays");
    if requires("nbdinfo") {
        for name in ["tank", "media"] {
            let sized = common::run(tool("nbdinfo").args(["--size", &daemon.uri(name)]));
            assert_eq!(sized.exit, 0, "the export {name}: {sized:?}");
        }
    }
    let shared = common::ask(&daemon, &["set", "pond", "label=media"]);
    assert!(shared.exit == 0 && shared.err.contains("tank has that name or label, too"), "{shared:?}");
    refused(&daemon, &["get", "media"], 2, "name one of: tank, pond");
    done(&daemon, &["set", "pond", "label="]);
    assert_eq!(label_on(&pond), "");
    daemon.kill();
    let daemon = Daemon::start(&images, &words);
    let found = names(&daemon);
    assert!(found[0] == "media" && found[1].starts_with("bcache-"), "{found:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: two devices that had exchanged their paths, as at a boot, were each served as the
/// other one, silently.
#[test]
fn who_is_served_under_the_label_of_another_is_told_of() {
    let images = Images::new();
    let (fast, [tank, pond]) = set(&images);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.tank]\nbacking = {tank:?}\n[volume.pond]\nbacking = {pond:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    assert!(!daemon.log().contains("event=label-of-another"), "{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
    let between = images.path("between");
    for (from, to) in
        [(&tank, between.to_str().expect("text")), (&pond, &tank), (&between.display().to_string(), &pond)]
    {
        std::fs::rename(from, to).expect("it is there");
    }
    let daemon = Daemon::configured(&images);
    for (name, label) in [("tank", "pond"), ("pond", "tank")] {
        let told = format!("{name}: its label \"{label}\" is also the name or the label of volume {label}.");
        assert!(daemon.log().contains(&told), "{}", daemon.log());
    }
    assert_eq!(daemon.stop().0, 0);
}

/// A volume in the cache alone has its label in the cache's UUID table.
#[test]
fn a_volume_in_the_cache_alone_has_a_label_of_its_own() {
    let images = Images::new();
    let (fast, [tank, _]) = set(&images);
    let config = images.path("config.toml");
    let text = format!("version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\n");
    std::fs::write(&config, text).expect("a file");
    let words = ["--config", config.to_str().expect("text")];
    let daemon = Daemon::start(&images, &words);
    done(&daemon, &["add", "scratch", "--size", "1M"]);
    done(&daemon, &["set", "scratch", "label=swap"]);
    // A volume named by its section keeps that name whatever its label.
    let set = common::ask(&daemon, &["set", "media", "label=films", "writeback_percent=20"]);
    assert_eq!((set.exit, set.err.as_str()), (0, ""), "{set:?}");
    assert_eq!(done(&daemon, &["get", "media", "writeback_percent"]), "20\n");
    assert_eq!(daemon.stop().0, 0);
    let daemon = Daemon::start(&images, &words);
    assert_eq!(names(&daemon), ["media", "swap"]);
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn a_label_that_cannot_be_is_refused_and_nothing_is_changed() {
    let images = Images::new();
    let (fast, [tank, pond]) = set(&images);
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[defaults]\nwait = \"1s\"\n[volume.media]\nbacking = {tank:?}\n\
         [volume.gone]\nbacking = {:?}\n[volume.other]\nbacking = {pond:?}\n",
        images.path("nowhere")
    );
    std::fs::write(&config, text).expect("a file");
    let daemon = Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    let long = format!("label={}", "x".repeat(33));
    refused(&daemon, &["set", "media", &long, "writeback_percent=20"], 2, "it is longer than 32 bytes");
    assert_eq!(done(&daemon, &["get", "media", "writeback_percent"]), "10\n", "all or nothing");
    refused(&daemon, &["set", "media", "label=a\nb"], 2, "it contains a control character");
    refused(
        &daemon,
        &["set", "media", "label=x", "--runtime"],
        2,
        "the label is stored on the device, so it cannot be set for this run only; leave",
    );
    refused(&daemon, &["unset", "media", "label"], 2, "`bcached set media label=` removes it");
    refused(
        &daemon,
        &["set", "gone", "label=x"],
        4,
        "cannot set the label of gone: the label is written to its device",
    );
    assert_eq!(label_on(&tank), "tank");
    // The superblock cannot be written.
    daemon.fail_writes_beyond(4096);
    refused(&daemon, &["set", "media", "label=films"], 4, "cannot write the label of media: ");
    assert_eq!(done(&daemon, &["get", "media", "label"]), "tank\n");
    // A regression: the other options took effect and were stored although the label failed.
    let both = ["set", "media", "label=films", "writeback_percent=20"];
    refused(&daemon, &both, 4, "cannot write the label of media: ");
    assert_eq!(done(&daemon, &["get", "media", "writeback_percent"]), "10\n", "all or nothing");
    assert_eq!(images.kept(), "");
    daemon.writes_succeed();
    assert!(done(&daemon, &both).contains("writeback_percent is 20"));
    let said = |option| done(&daemon, &["get", "media", option]);
    assert_eq!((said("label"), said("writeback_percent")), ("films\n".to_owned(), "20\n".to_owned()));
}
