//! Every export has the same logical block size: the one in the superblock of the backing device,
//! as with the kernel's bcache. A file system made through one export is found through any other.

use crate::common::{self, Daemon, Images, bcached, has_fuse, json, requires, run, tool};
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const FILE: &[u8] = b"made by one way in, read by another";

/// Makes a cache with blocks of 512 bytes and a backing device with blocks of `block`: its volume
/// has the larger of the two.
fn made(images: &Images, block: &str) {
    let (fast, tank) = (images.blank("fast", 36 * MIB), images.blank("tank", 330 * MIB));
    assert_eq!(bcached(&["make", "-b", "64k", "--block", "512", "-C", &fast]).exit, 0);
    let made = bcached(&["make", "--block", block, "-B", &tank, "--for", &fast, "--label", "tank"]);
    assert_eq!(made.exit, 0, "{made:?}");
}

fn serve(images: &Images, ways: &str) -> Daemon {
    images.configure(&format!(
        "version = 1\n[defaults]\nexport = {ways}\n[cache.fast]\ndevice = {:?}\n[volume.tank]\nbacking = {:?}\n",
        images.path("fast"),
        images.path("tank")
    ));
    Daemon::configured(images)
}

fn block_of(device: &Path) -> String {
    let name = device.file_name().expect("a device").to_str().expect("text");
    let limit = format!("/sys/block/{name}/queue/logical_block_size");
    std::fs::read_to_string(limit).expect("a block device").trim().to_owned()
}

/// Returns the place of the volume's export of that kind, if this machine has it.
fn place(daemon: &Daemon, way: &str) -> Option<PathBuf> {
    let status = daemon.status();
    let exports = status["volumes"][0]["exports"].as_array().expect("ways").iter();
    let mut found =
        exports.filter(|export| export["way"] == way).filter_map(|export| export["place"].as_str());
    found.next().map(PathBuf::from)
}

#[test]
fn status_and_nbd_say_the_block_of_the_backing_device() {
    if !requires("nbdinfo") {
        return;
    }
    for (block, bytes) in [("512", 512), ("2k", 2048), ("4k", 4096)] {
        let images = Images::new();
        made(&images, block);
        let daemon = serve(&images, "\"nbd\"");
        let status = daemon.status();
        assert_eq!(status["volumes"][0]["block_bytes"], bytes, "{status}");
        assert_eq!(status["caches"][0]["block_bytes"], 512, "{status}");
        let text = common::ask(&daemon, &["status"]).out;
        let said = if bytes == 512 {
            "blocks of 512 B".to_owned()
        } else {
            format!("blocks of {} KiB", bytes / 1024)
        };
        assert!(text.contains(&said), "{text}");
        let told = run(tool("nbdinfo").args(["--json", &daemon.uri("tank")]));
        let told = json(&told.out);
        let export = &told["exports"][0];
        assert_eq!(
            (&export["block_size_minimum"], &export["block_size_preferred"]),
            (&512.into(), &4096.into())
        );
        let (exit, log) = daemon.stop();
        assert_eq!(exit, 0, "{log}");
    }
}

/// A kernel does not mount an XFS on a device with larger blocks than those it was made with, and
/// the place of partition tables depends on the block size.
#[test]
fn xfs_that_is_made_by_one_way_in_is_found_by_another() {
    if !requires("mkfs.xfs") || !requires("losetup") || !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let images = Images::new();
    made(&images, "4k");
    let mnt = images.path("mnt");
    std::fs::create_dir(&mnt).expect("a folder");
    let mounted = |device: &Path| run(tool("mount").args(["-t", "xfs"]).arg(device).arg(&mnt));
    let unmounted = || assert_eq!(run(tool("umount").arg(&mnt)).exit, 0);

    let daemon = serve(&images, "[\"dev\", \"fuse\"]");
    let Some(device) = place(&daemon, "dev") else { return println!("skipped: no block device here") };
    assert_eq!(block_of(&device), "4096");
    let mkfs = run(tool("mkfs.xfs").arg("-q").arg(&device));
    assert_eq!(mkfs.exit, 0, "{mkfs:?}");
    let mount = mounted(&device);
    if mount.exit != 0 && mount.err.contains("unknown filesystem") {
        return println!("skipped: this kernel has no XFS");
    }
    assert_eq!(mount.exit, 0, "{mount:?}");
    std::fs::write(mnt.join("file"), FILE).expect("there is room");
    unmounted();

    // As the guide describes it.
    let file = place(&daemon, "fuse").expect("a file");
    let arguments = ["--find", "--show", "--direct-io=on", "--sector-size", "4096"];
    let attached = run(tool("losetup").args(arguments).arg(&file));
    assert_eq!(attached.exit, 0, "{attached:?}");
    let other = PathBuf::from(attached.out.trim());
    let mount = mounted(&other);
    assert_eq!(mount.exit, 0, "{mount:?}");
    assert_eq!(std::fs::read(mnt.join("file")).expect("it is there"), FILE);
    unmounted();
    assert_eq!(run(tool("losetup").arg("--detach").arg(&other)).exit, 0);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}
