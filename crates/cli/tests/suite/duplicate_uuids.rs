//! `UUID=` if several devices carry that UUID. Needs root and loop devices; without them it is
//! skipped, with the reason.

use crate::common::{Daemon, Images, LoopDevice, bcached, bytes, done, json, run};

/// Makes a cache image, and returns its path and its name by UUID.
fn cache(images: &Images) -> (String, String) {
    let cache = images.blank("cache", 36 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
    let shown = json(&bcached(&["show", "--json", &cache]).out);
    (cache, format!("UUID={}", shown["uuid"].as_str().expect("a uuid")))
}

/// A regression: a snapshot that became visible was taken for the disk, if the kernel had found it
/// first.
#[test]
fn a_uuid_that_two_devices_carry_names_neither() {
    let images = Images::new();
    let (cache, name) = cache(&images);
    let copy = images.path("copy");
    std::fs::copy(&cache, &copy).expect("a copy");
    let copy = copy.to_str().expect("text");
    let Some(original) = LoopDevice::over(&cache) else { return };
    let Some(snapshot) = LoopDevice::over(copy) else { return };
    let ran = run(&mut Daemon::command(&images, "run", &["--cache", &name]));
    assert_eq!(ran.exit, 3, "{ran:?}");
    assert!(ran.err.contains(&original.0) && ran.err.contains(&snapshot.0), "both are named: {ran:?}");
    assert!(ran.err.contains("name the right one by its path"), "{ran:?}");
    assert!(bytes(&cache) == bytes(copy), "nothing was written");

    drop(snapshot);
    let (exit, log) = Daemon::start(&images, &["--cache", &name]).stop();
    assert_eq!(exit, 0, "{log}");
}

/// A component has the superblock of the device above it (multipath, mirrors, loop devices over
/// disks): the name means the upper device.
#[test]
fn of_a_device_and_its_component_the_upper_one_is_meant() {
    let images = Images::new();
    let (cache, name) = cache(&images);
    let Some(lower) = LoopDevice::over(&cache) else { return };
    let Some(upper) = LoopDevice::over(&lower.0) else { return };
    let daemon = Daemon::start(&images, &["--cache", &name]);
    let busy = bcached(&["check", &upper.0]);
    assert!(busy.err.contains("(bcached)"), "{} is served: {busy:?}", upper.0);
    // It is also known by a path that is not configured.
    done(&daemon, &["get", &upper.0, "congested_read_threshold_us"]);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    drop(upper);
}

/// A regression: the message was that another daemon serves the set.
#[test]
fn a_copy_of_a_cache_is_named_beside_its_original() {
    let images = Images::new();
    let (original, _) = cache(&images);
    let copy = images.path("copy");
    std::fs::copy(&original, &copy).expect("a copy");
    let copy = copy.to_str().expect("text");
    images.configure(&format!(
        "version = 1\n[cache.one]\ndevice = {original:?}\n[cache.two]\ndevice = {copy:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    let status = daemon.status();
    let [one, two] = [&status["caches"][0], &status["caches"][1]];
    assert_eq!((one["state"].as_str(), two["state"].as_str()), (Some("open"), Some("failed")), "{status}");
    let why = two["reason"].as_str().unwrap_or_default();
    let are_named =
        why.contains(&original) && why.contains(copy) && why.contains("two devices have the same UUID");
    assert!(are_named && !why.contains("daemon"), "{why}");
    assert_eq!(daemon.stop().0, 0);
}
