//! Third-party programs over a volume that is a file: the kernel's loop device with a file system
//! on it, and an iSCSI target. No module of bcached is in the kernel.

use crate::common::{self, Daemon, Images, LoopDevice, bytes, done, has_fuse, pattern, requires, run, tool};
use rustix::fs::{FallocateFlags, fallocate};
use std::ffi::OsStr;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const CACHE_BYTES: u64 = 64 * MIB;
const BACKING_BYTES: u64 = 96 * MIB;

/// The time limit for a third-party program.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a program that must succeed, and returns its output.
#[track_caller]
fn does<A: AsRef<OsStr>>(name: &str, words: impl IntoIterator<Item = A>) -> String {
    let mut command = tool(name);
    command.args(words);
    let ran = run(&mut command);
    assert_eq!(ran.exit, 0, "{command:?}: {ran:?}");
    ran.out
}

fn volume_as_a_file() -> (Images, Daemon, PathBuf) {
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"fuse\"\n");
    let daemon = Daemon::configured(&images);
    let file = images.path("run/fuse/volumes/tank");
    (images, daemon, file)
}

/// A loop device over a file, with its file system mounted; both are removed at the end.
struct MountedLoop {
    place: PathBuf,
    // Dropped after the mount.
    device: LoopDevice,
}

impl MountedLoop {
    fn at(device: LoopDevice, place: PathBuf, options: &str) -> Self {
        std::fs::create_dir_all(&place).expect("a folder");
        let mounted = Self { place, device };
        does(
            "mount",
            ["-t", "ext4", "-o", options, &mounted.device.0, mounted.place.to_str().expect("text")],
        );
        mounted
    }

    /// Unmounts, checks the file system, and detaches the device, so that the file is unused.
    fn end(self, daemon: &Daemon) {
        does("umount", [&self.place]);
        does("e2fsck", ["-f", "-n", &self.device.0]);
        drop(self);
        daemon.wait_for("the loop device has let go", |status| status["clients"] == serde_json::json!([]));
    }
}

impl Drop for MountedLoop {
    fn drop(&mut self) {
        let _gone_already = tool("umount").arg("--lazy").arg(&self.place).stderr(Stdio::null()).status();
    }
}

/// Returns a loop device over `file`, with direct I/O or through the page cache.
fn attach(file: &Path, direct: bool) -> Option<LoopDevice> {
    let device = LoopDevice::over(file.to_str().expect("text"))?;
    does("losetup", [if direct { "--direct-io=on" } else { "--direct-io=off" }, &device.0]);
    Some(device)
}

/// Returns the bytes allocated to a sparse file.
fn taken(path: &str) -> u64 {
    let file = File::open(path).expect("it is there");
    file.sync_all().expect("a sound disk");
    file.metadata().expect("it is there").blocks() * 512
}

/// A regression: a hole in the file, or in a loop device over it, was written as zeroes to the
/// cache and the disk. Trimming a file system filled the disk that it was on.
#[test]
fn a_hole_frees_space_below_and_takes_none() {
    if !has_fuse() || !requires("blkdiscard") {
        return;
    }
    let images = Images::new();
    let through = "export = \"fuse\"\ncache_mode = \"writethrough\"\nsequential_cutoff = 0\n";
    let (_, below) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, through);
    let daemon = Daemon::configured(&images);
    // A busy machine must not make requests bypass the cache: the number of bypassed bytes is
    // checked below.
    for threshold in ["congested_read_threshold_us=0", "congested_write_threshold_us=0"] {
        done(&daemon, &["set", "fast", threshold]);
    }
    let place = images.path("run/fuse/volumes/tank");
    let file = File::options().read(true).write(true).open(&place).expect("it is served");
    let fill = || {
        file.write_all_at(&pattern(8 << 20, 1), 0).expect("there is room");
        file.sync_all().expect("sound disks");
        taken(&below)
    };
    let (hole, zero) = (FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
    let change =
        |how, at, length| fallocate(&file, how | FallocateFlags::KEEP_SIZE, at, length).expect("it is done");
    let mut content = vec![1; 8 << 20];

    let full = fill();
    assert!(full >= 8 * MIB, "what was written is there: {full}");
    change(hole, 0, 8 * MIB);
    assert!(taken(&below) <= full - 7 * MIB);
    file.read_exact_at(&mut content, 0).expect("it is read");
    assert!(content.iter().all(|byte| *byte == 0));

    let before = taken(&below);
    change(hole, 16 * MIB, 64 * MIB);
    assert!(taken(&below) < before + MIB / 2, "nothing was there");
    change(zero, 16 * MIB, 8 * MIB);
    assert!(taken(&below) >= before + 7 * MIB, "its space is kept, so it is taken");

    let full = fill();
    // One process at a time writes to a volume: with this file open a loop device would be
    // read-only.
    drop(file);
    if let Some(device) = attach(&place, true) {
        does("blkdiscard", ["--offset", "0", "--length", "8388608", &device.0]);
        assert!(taken(&below) <= full - 7 * MIB);
        let file = File::open(&place).expect("it is served");
        file.read_exact_at(&mut content, 0).expect("it is read");
        assert!(content.iter().all(|byte| *byte == 0));
    }
    let status = daemon.status();
    assert_eq!(status["volumes"][0]["bypassed_bytes"], 0, "{status}");
}

/// The content of file `n`; some have several extents and odd lengths.
fn content(n: u8) -> Vec<u8> {
    pattern(usize::from(n % 7) * 50_001 + 17, n)
}

fn file_of(folder: &Path, n: u8) -> PathBuf {
    folder.join(format!("folder-{}", n % 5)).join(format!("file-{n}"))
}

fn write_files(folder: &Path, numbers: impl Iterator<Item = u8>) {
    for n in numbers {
        let path = file_of(folder, n);
        std::fs::create_dir_all(path.parent().expect("in a folder")).expect("a folder");
        std::fs::write(path, content(n)).expect("it takes it");
    }
}

/// Exactly these files exist, with what was written to them.
fn assert_files(folder: &Path, is_there: impl Fn(u8) -> bool) {
    for n in 0..=120 {
        let path = file_of(folder, n);
        assert_eq!(path.exists(), is_there(n), "{}", path.display());
        if is_there(n) {
            assert!(bytes(&path) == content(n), "{} is another one", path.display());
        }
    }
}

/// ext4 over a loop device over the file, through the page cache and with direct I/O. Its data
/// survives a stop of the daemon, a kill right after `sync`, and discards of deleted files.
#[test]
fn a_file_system_over_a_loop_device_over_the_file() {
    let tools = ["losetup", "mkfs.ext4", "mount", "e2fsck", "fstrim"];
    if !has_fuse() || !tools.iter().all(|tool| requires(tool)) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root mounts a file system");
        return;
    }
    let (images, daemon, file) = volume_as_a_file();
    let Some(device) = attach(&file, false) else { return };
    does("mkfs.ext4", ["-q", &device.0]);
    let place = images.path("mnt");
    let mounted = MountedLoop::at(device, place.clone(), "discard");
    write_files(&place, 0..=60);
    does("sync", ["--file-system", place.to_str().expect("text")]);
    let users = daemon.status()["clients"].to_string();
    // Not the `losetup` process, which has ended.
    assert!(users.contains(&mounted.device.0) && users.contains(place.to_str().expect("text")), "{users}");
    mounted.end(&daemon);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");

    // With direct I/O: some files are deleted, and their blocks discarded.
    let daemon = Daemon::configured(&images);
    let mounted = MountedLoop::at(attach(&file, true).expect("as before"), place.clone(), "defaults");
    assert_files(&place, |n| n <= 60);
    (0..=60).filter(|n| n % 3 == 0).for_each(|n| std::fs::remove_file(file_of(&place, n)).expect("it goes"));
    does("sync", ["--file-system", place.to_str().expect("text")]);
    let trimmed = does("fstrim", ["--verbose", place.to_str().expect("text")]);
    assert!(!trimmed.contains(": 0 B"), "{trimmed}");
    write_files(&place, 61..=120);
    does("sync", ["--file-system", place.to_str().expect("text")]);
    daemon.kill();
    assert!(File::open(&file).is_err(), "its mount is dead");
    drop(mounted);

    // Its journal is replayed.
    let daemon = Daemon::configured(&images);
    let mounted = MountedLoop::at(attach(&file, false).expect("as before"), place.clone(), "defaults");
    assert_files(&place, |n| n > 60 || n % 3 != 0);
    mounted.end(&daemon);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// `tgtd` with one target, on a port of its own. Killed at the end: it ignores signals to end as
/// long as it has targets.
struct IscsiTarget {
    daemon: Child,
    port: u16,
    socket: PathBuf,
}

impl IscsiTarget {
    const NAME: &str = "iqn.2026-01.test.bcached:tank";

    /// Starts it over `file`. If another program takes the free port first, tries another one.
    fn over(file: &Path, images: &Images) -> Self {
        let socket = images.path("tgt");
        let target = (0..5).find_map(|_| Self::start(&socket)).expect("one of five ports is free");
        target.does(&["--op=new", "--mode=target", "--tid=1", "--targetname", Self::NAME]);
        let unit = ["--op=new", "--mode=logicalunit", "--tid=1", "--lun=1", "--backing-store"];
        target.does(&[&unit[..], &[file.to_str().expect("text")]].concat());
        target.does(&["--op=bind", "--mode=target", "--tid=1", "--initiator-address=127.0.0.1"]);
        target
    }

    fn start(socket: &Path) -> Option<Self> {
        let free = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        let portal = format!("portal=127.0.0.1:{port}");
        let mut command = tool("tgtd");
        command.env("TGT_IPC_SOCKET", socket).args([
            "--foreground",
            "--control-port",
            "1",
            "--iscsi",
            &portal,
        ]);
        let daemon = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut target = Self { daemon: daemon.expect("starts"), port, socket: socket.to_owned() };
        let started = Instant::now();
        loop {
            if target.daemon.try_wait().expect("waits").is_some() {
                return None;
            }
            if run(&mut target.admin(&["--op=show", "--mode=target"])).exit == 0 {
                return Some(target);
            }
            assert!(started.elapsed() < LIMIT, "tgtd does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn admin(&self, words: &[&str]) -> Command {
        let mut command = tool("tgtadm");
        command.env("TGT_IPC_SOCKET", &self.socket).args(["--control-port=1", "--lld=iscsi"]).args(words);
        command
    }

    #[track_caller]
    fn does(&self, words: &[&str]) {
        let ran = run(&mut self.admin(words));
        assert_eq!(ran.exit, 0, "tgtadm {words:?}: {ran:?}");
    }

    fn uri(&self) -> String {
        format!("iscsi://127.0.0.1:{}/{}/1", self.port, Self::NAME)
    }
}

impl Drop for IscsiTarget {
    fn drop(&mut self) {
        let _ended_already = self.daemon.kill();
        let _reaped_already = self.daemon.wait();
    }
}

/// Returns whether qemu's tools support iSCSI here; that is a separate package.
fn has_iscsi() -> bool {
    if !["tgtd", "tgtadm", "qemu-io", "qemu-img"].iter().all(|tool| requires(tool)) {
        return false;
    }
    let help = run(tool("qemu-img").arg("--help"));
    let formats = help.out.lines().find(|line| line.starts_with("Supported formats:")).unwrap_or_default();
    // The format is listed even if its module is missing; opening it tells.
    let asked = run(tool("qemu-img").args(["info", "iscsi://127.0.0.1:1/none/0"]));
    let is_there = formats.contains("iscsi") && !asked.err.contains("Unknown protocol");
    if !is_there {
        println!("skipped: qemu-img speaks no iSCSI; install qemu-block-extra");
    }
    is_there
}

/// An iSCSI target over the file: what its clients write is in the volume after a restart, and what
/// is written to the volume its clients read.
#[test]
fn an_iscsi_target_over_the_file() {
    if !has_fuse() || !has_iscsi() {
        return;
    }
    let (images, daemon, file) = volume_as_a_file();
    let image = images.path("image");
    let mut data = pattern(usize::try_from(24 * MIB).expect("small"), 9);
    std::fs::write(&image, &data).expect("a file");
    let image = image.to_str().expect("text");
    let target = IscsiTarget::over(&file, &images);
    let uri = target.uri();
    let size = std::fs::metadata(&file).expect("a file").len();
    let info = does("qemu-img", ["info", "--output=json", &uri]);
    let info = common::json(&info);
    // A target has blocks of 512 bytes, and so has a volume.
    assert_eq!(info["virtual-size"].as_u64(), Some(size), "{info}");
    does("qemu-img", ["convert", "-n", "-f", "raw", "-O", "raw", "-t", "none", image, &uri]);
    let written = [
        "write -P 0x5a 1000k 512",
        "write -f -P 0xa5 30M 1M",
        "write -z -u 2M 64k",
        "discard 3M 128k",
        "aio_write -P 7 40M 256k",
        "aio_write -P 8 41M 256k",
        "aio_flush",
        "flush",
        "read -P 0x5a 1000k 512",
        "read -P 7 40M 256k",
    ];
    let commands = written.iter().flat_map(|command| ["-c", command]);
    let said = does("qemu-io", ["-f", "raw", "-t", "none"].into_iter().chain(commands).chain([&*uri]));
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    drop(target);
    data[1000 << 10..][..512].fill(0x5a);
    data[2 << 20..][..64 << 10].fill(0);
    daemon.wait_for("the target has let go", |status| status["clients"] == serde_json::json!([]));
    daemon.kill();

    let daemon = Daemon::configured(&images);
    let found = bytes(&file);
    let all_are = |range: std::ops::Range<usize>, byte: u8| found[range].iter().all(|found| *found == byte);
    assert!(all_are(30 << 20..31 << 20, 0xa5) && all_are(31 << 20..40 << 20, 0));
    assert!(all_are(40 << 20..(40 << 20) + (256 << 10), 7) && all_are(41 << 20..(41 << 20) + (256 << 10), 8));
    // Discarded ranges read as zeroes here, but that is not guaranteed.
    let discarded = 3 << 20..(3 << 20) + (128 << 10);
    data[discarded.clone()].copy_from_slice(&found[discarded]);
    assert!(found[..data.len()] == data[..], "what was written is there");

    // The other direction: written to the volume, read from the target.
    let other = pattern(usize::try_from(size).expect("small"), 77);
    let open = File::options().write(true).open(&file).expect("it is there");
    open.write_all_at(&other, 0).expect("it takes it");
    drop(open);
    let target = IscsiTarget::over(&file, &images);
    let copy = images.path("copy");
    does("qemu-img", ["convert", "-f", "raw", "-O", "raw", &target.uri(), copy.to_str().expect("text")]);
    assert!(bytes(&copy) == other, "it reads what was written");
    drop(target);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}
