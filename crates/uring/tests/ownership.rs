//! Devices among other processes and the kernel: loop devices, mounts, another daemon. Needs root
//! and loop devices; tests without their prerequisites are skipped with the reason.
//!
//! The tests of this file run one after another: a child between fork and exec keeps its parent's
//! claims for a moment.

mod common;

use bcached_env::{Buffer, IoErrorKind};
use bcached_uring::{Access, Device, DeviceErrorKind, DeviceKind, Holder};
use common::{image, on_each, own, skip};
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{BufRead as _, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// The same in memory.
const MEBIBYTE: usize = 1 << 20;

fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A loop device over a file of its own; detached when dropped.
struct LoopDevice {
    device: PathBuf,
    file: tempfile::NamedTempFile,
}

impl LoopDevice {
    /// Returns `None`, with a printed reason, if loop devices are unavailable.
    fn new(bytes: u64, options: &[&str]) -> Option<Self> {
        let file = image(bytes);
        let over = file.path().to_owned();
        Self::over(&over, file, options)
    }

    /// Makes one over a path, which must exist as long as `file` does.
    fn over(path: &std::path::Path, file: tempfile::NamedTempFile, options: &[&str]) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).args(options).arg(path).output();
        match output {
            Ok(output) if output.status.success() => {
                let device = String::from_utf8(output.stdout).expect("a path").trim().into();
                Some(Self { device, file })
            }
            Ok(output) => {
                skip(&format!("no loop device: {}", String::from_utf8_lossy(&output.stderr).trim()));
                None
            }
            Err(error) => {
                skip(&format!("losetup cannot be run: {error}"));
                None
            }
        }
    }

    fn name(&self) -> String {
        self.device.file_name().expect("/dev/loopN").to_string_lossy().into_owned()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

#[test]
fn a_block_device_does_all_operations() {
    let _turn = one_at_a_time();
    on_each(|env, parts| async move {
        let Some(under) = LoopDevice::new(4 * MIB, &[]) else { return };
        let device = own(&under.device);
        assert_eq!(device.kind(), DeviceKind::Block);
        assert!(device.is_direct());
        let disk = env.disk(parts.disks.add(device));
        let info = disk.info();
        assert_eq!(info.sectors, 8192);
        assert!(info.discard, "a loop device over a file that can be punched");
        let mut data = Buffer::zeroed(MEBIBYTE);
        data.as_mut_slice().fill(0xA5);
        let payload = data.freeze();
        disk.write(0, payload.clone()).await.unwrap();
        disk.write_fua(2048, payload.clone()).await.unwrap();
        disk.flush().await.unwrap();
        assert!(info.unmap && info.write_zeroes);
        disk.zero(8, 16, false).await.unwrap();
        let before = taken(&under);
        disk.zero(1024, 256, true).await.unwrap();
        assert!(taken(&under) <= before - 128, "it gave its space back");
        disk.discard(2048, 1024).await.unwrap();
        let mut odd = Buffer::zeroed(2 * MEBIBYTE + 4);
        let _ = odd.split_to(4);
        let (result, found) = disk.read(0, odd).await;
        result.unwrap();
        let mut expected = vec![0xA5; 2 * MEBIBYTE];
        expected[8 * 512..24 * 512].fill(0);
        expected[1024 * 512..1280 * 512].fill(0);
        expected[2048 * 512..3072 * 512].fill(0);
        assert!(found.as_slice() == expected, "the loop device reads punched and zeroed ranges as zero");
        let error = disk.write(8192, payload).await.unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Invalid);
    });
}

/// KiB that the file under a loop device occupies.
fn taken(under: &LoopDevice) -> u64 {
    under.file.as_file().sync_all().expect("a file");
    std::os::unix::fs::MetadataExt::blocks(&under.file.as_file().metadata().expect("a file")) / 2
}

/// Flushes that the loop device received: the sixteenth number of its statistics.
fn flushes(under: &LoopDevice) -> u64 {
    let path = format!("/sys/block/{}/stat", under.name());
    let text = std::fs::read_to_string(path).expect("block devices have statistics");
    text.split_whitespace().nth(15).and_then(|number| number.parse().ok()).expect("Linux counts flushes")
}

/// A loop device has a volatile cache and no FUA of its own, so the kernel turns a forced write
/// into a write and a flush. Its statistics show whether durability was really requested.
#[test]
fn forced_writes_and_flushes_reach_the_device_and_plain_writes_do_not_flush() {
    let _turn = one_at_a_time();
    on_each(|env, parts| async move {
        let Some(under) = LoopDevice::new(4 * MIB, &[]) else { return };
        let disk = env.disk(parts.disks.add(own(&under.device)));
        assert!(disk.info().volatile_cache);
        let payload = Buffer::zeroed(4096).freeze();
        let at_first = flushes(&under);
        disk.write(0, payload.clone()).await.unwrap();
        assert_eq!(flushes(&under), at_first);
        disk.write_fua(8, payload).await.unwrap();
        let forced = flushes(&under);
        assert!(forced > at_first);
        disk.flush().await.unwrap();
        assert!(flushes(&under) > forced);
    });
}

/// A file system fills up in the middle of a write: the first part succeeds, the rest fails with
/// the reason, and what was there before stays readable.
#[test]
fn a_full_file_system_is_no_space() {
    let _turn = one_at_a_time();
    on_each(|env, parts| async move {
        let place = tempfile::tempdir().unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(place.path()).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            return skip("cannot mount a tmpfs");
        }
        let unmount = || Command::new("umount").arg("--lazy").arg(place.path()).status();
        let path = place.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(4 * MIB).unwrap();
        let disk = env.disk(parts.disks.add(own(&path)));
        let mut data = Buffer::zeroed(2 * MEBIBYTE);
        data.as_mut_slice().fill(0x5A);
        let plain = disk.write(0, data.freeze()).await;
        let first = disk.read(0, Buffer::zeroed(512)).await;
        // tmpfs cannot zero a range and keep its space, and writing zeroes is not the driver's
        // task. It can punch holes.
        let (zeroed, punched) = (disk.zero(0, 1024, false).await, disk.zero(0, 1024, true).await);
        let holed = disk.read(0, Buffer::zeroed(512)).await;
        assert!(unmount().unwrap().success());
        assert_eq!(plain.unwrap_err().kind, IoErrorKind::NoSpace);
        assert_eq!(parts.disks.counts().continued, 1);
        first.0.unwrap();
        assert_eq!(first.1.as_slice(), [0x5A; 512]);
        assert_eq!(zeroed.unwrap_err().kind, IoErrorKind::Unsupported);
        assert!(!disk.info().write_zeroes && disk.info().unmap);
        punched.unwrap();
        holed.0.unwrap();
        assert_eq!(holed.1.as_slice(), [0; 512]);
    });
}

#[test]
fn a_device_with_large_blocks_takes_whole_ones_only() {
    let _turn = one_at_a_time();
    on_each(|env, parts| async move {
        let Some(under) = LoopDevice::new(4 * MIB, &["--sector-size", "4096"]) else { return };
        let device = own(&under.device);
        assert_eq!(device.info().logical_block_sectors, 8);
        let error = device.require_blocks(1).unwrap_err();
        assert_eq!(error.why(), "it works in blocks of 4096 bytes, but the format needs blocks of 512 bytes");
        device.require_blocks(8).unwrap();
        // Offline reads are not affected.
        device.write_at(8, &[7; 4096]).unwrap();
        let mut sector = [0; 512];
        device.read_at(9, &mut sector).unwrap();
        assert_eq!(sector, [7; 512]);
        assert!(matches!(device.write_at(9, &sector).unwrap_err().kind, DeviceErrorKind::Unaligned { .. }));
        let disk = env.disk(parts.disks.add(device));
        assert_eq!(disk.read(9, Buffer::zeroed(512)).await.0.unwrap_err().kind, IoErrorKind::Invalid);
        assert_eq!(disk.zero(9, 8, false).await.unwrap_err().kind, IoErrorKind::Invalid);
        disk.read(8, Buffer::zeroed(4096)).await.0.unwrap();
    });
}

#[test]
fn a_claimed_block_device_is_refused_and_grows() {
    let _turn = one_at_a_time();
    let Some(under) = LoopDevice::new(4 * MIB, &[]) else { return };
    let owner = own(&under.device);
    let _quiet = owner.quiet_udev().unwrap();
    for access in [Access::Own, Access::Check] {
        let error = Device::open(&under.device, access).unwrap_err();
        assert!(matches!(error.kind, DeviceErrorKind::Twice), "{error}");
    }
    Device::open(&under.device, Access::Look).unwrap();
    under.file.as_file().set_len(8 * MIB).unwrap();
    assert!(Command::new("losetup").arg("--set-capacity").arg(&under.device).status().unwrap().success());
    assert_eq!(owner.refresh().unwrap(), 16384);
}

#[test]
fn a_file_under_a_loop_device_belongs_to_it() {
    let _turn = one_at_a_time();
    let Some(under) = LoopDevice::new(4 * MIB, &[]) else { return };
    let error = Device::open(under.file.path(), Access::Own).unwrap_err();
    assert_eq!(error.holders(), [Holder::Device(under.name())]);
    assert_eq!(error.next(), format!("detach it with losetup -d {}", under.device.display()));
    Device::open(under.file.path(), Access::Look).unwrap();
}

/// Two daemons, one on the file and one on the loop device over it, would overwrite each other's
/// data.
#[test]
fn a_loop_device_over_a_file_that_is_served_belongs_to_the_file_s_owner() {
    let _turn = one_at_a_time();
    let Some(over) = LoopDevice::new(4 * MIB, &[]) else { return };
    for access in [Access::Own, Access::Check] {
        // A traditional POSIX lock conflicts with ours, whichever process holds it. It ends when
        // the process closes any descriptor of the file, including those of the refused open.
        let file = std::fs::File::options().read(true).write(true).open(over.file.path()).unwrap();
        rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        let error = Device::open(&over.device, access).unwrap_err();
        assert!(matches!(error.kind, DeviceErrorKind::Busy(_) | DeviceErrorKind::Twice), "{error}");
    }
    Device::open(&over.device, Access::Look).unwrap();
    Device::open(&over.device, Access::Own).unwrap();
}

/// The same for a loop device over a block device, and over the file under that.
#[test]
fn a_loop_device_over_a_block_device_that_is_served_belongs_to_its_owner() {
    let _turn = one_at_a_time();
    let Some(under) = LoopDevice::new(4 * MIB, &[]) else { return };
    let Some(over) = LoopDevice::over(&under.device, image(0), &[]) else { return };
    for (served, other) in [(&under, &over), (&over, &under)] {
        let owner = own(&served.device);
        for access in [Access::Own, Access::Check] {
            let error = Device::open(&other.device, access).unwrap_err();
            assert!(matches!(error.kind, DeviceErrorKind::Busy(_) | DeviceErrorKind::Twice), "{error}");
        }
        Device::open(&other.device, Access::Look).unwrap();
        drop(owner);
    }
    let file = std::fs::File::options().read(true).write(true).open(under.file.path()).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let error = Device::open(&over.device, Access::Own).unwrap_err();
    assert!(matches!(error.kind, DeviceErrorKind::Busy(_) | DeviceErrorKind::Twice), "{error}");
}

#[test]
fn a_read_only_device_is_told_from_a_missing_permission() {
    let _turn = one_at_a_time();
    let Some(under) = LoopDevice::new(4 * MIB, &["--read-only"]) else { return };
    let error = Device::open(&under.device, Access::Own).unwrap_err();
    assert!(matches!(error.kind, DeviceErrorKind::ReadOnly), "{error}");
    Device::open(&under.device, Access::Check).unwrap();
}

#[test]
fn a_mounted_device_is_refused_and_the_mount_named() {
    let _turn = one_at_a_time();
    let Some(under) = LoopDevice::new(16 * MIB, &[]) else { return };
    let made = Command::new("mkfs.ext4").arg("-q").arg(&under.device).status();
    if !made.is_ok_and(|status| status.success()) {
        return skip("mkfs.ext4 cannot be run");
    }
    let place = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").arg(&under.device).arg(place.path()).output().unwrap();
    if !mounted.status.success() {
        return skip(&format!("cannot mount: {}", String::from_utf8_lossy(&mounted.stderr).trim()));
    }
    let error = Device::open(&under.device, Access::Own).map(drop);
    assert!(Command::new("umount").arg(place.path()).status().unwrap().success());
    let error = error.unwrap_err();
    assert_eq!(error.holders(), [Holder::Mount(place.path().to_owned())]);
    assert_eq!(error.next(), format!("unmount {}", place.path().display()));
    own(&under.device);
}

/// The device that the child of the next test takes.
const CHILD: &str = "BCACHED_TEST_OWNER_CHILD";

#[test]
fn another_process_is_named_and_its_death_frees_the_device() {
    if let Some(path) = std::env::var_os(CHILD) {
        let _owned = own(Path::new(&path));
        println!("\nowned");
        // Until killed; or until the parent is gone, which closes this end.
        let _ = std::io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    }
    let _turn = one_at_a_time();
    let file = image(MIB);
    let under = LoopDevice::new(4 * MIB, &[]);
    let devices = [Some(file.path().to_owned()), under.as_ref().map(|under| under.device.clone())];
    for path in devices.into_iter().flatten() {
        let mut child = owner_of(&path);
        for access in [Access::Own, Access::Check] {
            let error = Device::open(&path, access).unwrap_err();
            let [Holder::Process { id, .. }] = error.holders() else { panic!("{error}") };
            assert_eq!(*id, child.id());
            assert!(error.to_string().contains(&format!("in use by process {id} (")), "{error}");
        }
        Device::open(&path, Access::Look).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        own(&path);
    }
}

/// Starts another process that owns `path`.
fn owner_of(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "another_process_is_named_and_its_death_frees_the_device", "--nocapture"])
        .env(CHILD, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this test can be started again");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    assert!(output.lines().map_while(Result::ok).any(|line| line == "owned"), "the child ended early");
    child
}

/// A killed process keeps its devices until its last operations have ended, when it is in no list
/// any more. Regression: an open right after the kill was refused. A claim in a message that has
/// not been received has no visible holder, either.
#[test]
fn a_claim_that_nobody_seems_to_hold_is_waited_for() {
    let _turn = one_at_a_time();
    let Some(under) = LoopDevice::new(4 * MIB, &[]) else { return };
    for access in [Access::Own, Access::Check] {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        {
            let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
            let claim = rustix::fs::open(&under.device, flags, Mode::empty()).unwrap();
            let claims = [claim.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut message = SendAncillaryBuffer::new(&mut space);
            assert!(message.push(SendAncillaryMessage::ScmRights(&claims)));
            sendmsg(&near, &[IoSlice::new(b"x")], &mut message, SendFlags::empty()).unwrap();
        }
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop((near, far));
        });
        let opened = Device::open(&under.device, access);
        ends.join().unwrap();
        opened.unwrap();
    }
}
