//! Creates images with the bcache of a real kernel: Linux 6.1 in User-Mode Linux, booted from the
//! test.
//!
//! The guest's root is the host's file system, mounted read-only. A temporary directory is mounted
//! writable; the guest copies the content of its volumes there. The guest ends with a clean stop,
//! or with a panic after which nothing is written.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
const MODULES: &str = "/usr/lib/uml/modules";

/// How the kernel stops.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum KernelStop {
    Clean,
    Crash,
}

/// What a guest left behind.
pub struct KernelImages {
    pub cache: Vec<u8>,
    pub backing: Vec<u8>,
    /// Content of the backed volume and of the flash-only one, as the kernel served them.
    pub volumes: [Vec<u8>; 2],
}

/// Returns why no guest can run here, if that is so.
pub fn missing() -> Option<String> {
    for program in ["linux.uml", "gcc", "busybox", "make-bcache"] {
        if find(program).is_none() {
            return Some(format!("{program} is not installed"));
        }
    }
    fs::read_dir(MODULES).err().map(|error| format!("{MODULES}: {error}"))
}

/// Formats, boots, works on the set, and stops. `bucket` and `block` are sizes as make-bcache takes
/// them.
pub fn make(bucket: &str, block: &str, cache_mib: u64, end: KernelStop) -> KernelImages {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (name, size) in [("cache", cache_mib << 20), ("backing", 16 << 20)] {
        fs::File::create(at(name)).unwrap().set_len(size).unwrap();
    }
    let mut format = Command::new(find("make-bcache").unwrap());
    format.args(["--bucket", bucket, "--block", block, "-C"]).arg(at("cache")).arg("-B").arg(at("backing"));
    assert!(format.stdout(Stdio::null()).status().unwrap().success());
    boot(directory.path(), end);
    let read = |name: &str| fs::read(at(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    KernelImages {
        cache: read("cache"),
        backing: read("backing"),
        volumes: [read("volume0"), read("volume1")],
    }
}

/// Writes of all kinds, with flushes in between, so that leaves have several sets and the journal
/// holds keys.
const JOB: &str = r#"
set -e
for device in ubda ubdb; do echo /dev/$device > /sys/fs/bcache/register; done
wait_for() { i=0; while [ ! -e $1 ]; do i=$((i + 1)); [ $i -lt 100 ]; busybox usleep 100000; done; }
wait_for /dev/bcache0
set=$(echo /sys/fs/bcache/*-*-*)
b=/sys/block/bcache0/bcache
echo 0 > $b/sequential_cutoff; echo 0 > $set/congested_read_threshold_us; echo 0 > $set/congested_write_threshold_us
echo writeback > $b/cache_mode; echo judged > $b/label
# Dirty data stays: on a busy machine the job outlasts the delay after which the kernel writes it back.
echo 0 > $b/writeback_running
echo 2M > $set/flash_vol_create
wait_for /dev/bcache1
put() { dd if=/dev/urandom of=/dev/$1 bs=$2 seek=$3 count=$4 oflag=direct conv=notrunc 2> /dev/null; }
i=0; while [ $i -lt 300 ]; do
	put bcache0 4k $(((i * 7919 + 13) % 3000)) $((i % 3 + 1))
	[ $((i % 50)) = 49 ] && sync /dev/bcache0
	i=$((i + 1))
done
put bcache0 64k 100 5; put bcache1 64k 3 4; put bcache1 4k 100 7
busybox dd if=/dev/bcache0 of=/dev/null bs=1M 2> /dev/null
echo writethrough > $b/cache_mode; put bcache0 4k 2000 20; put bcache0 64k 20 3; echo writeback > $b/cache_mode
echo 1 > $set/internal/trigger_gc; busybox usleep 500000
i=0; while [ $i -lt 60 ]; do put bcache0 4k $(((i * 31 + 7) % 3000)) 1; i=$((i + 1)); done
sync
for n in 0 1; do dd if=/dev/bcache$n of=/mnt/volume$n bs=64k iflag=direct 2> /dev/null; done
sync
"#;

fn boot(directory: &Path, end: KernelStop) {
    let shim = directory.join("shim.so");
    let source = directory.join("shim.c");
    fs::write(&source, include_str!("../../../../../tests/src/uml/shim.c")).unwrap();
    let mut compiler = Command::new("gcc");
    assert!(
        compiler.args(["-O1", "-shared", "-fPIC", "-o"]).args([&shim, &source]).status().unwrap().success()
    );
    let version = fs::read_dir(MODULES).unwrap().next().unwrap().unwrap().path().join("kernel");
    let stop = match end {
        KernelStop::Clean => "busybox poweroff -f",
        KernelStop::Crash => "echo c > /proc/sysrq-trigger",
    };
    let init = directory.join("init");
    let here = directory.display();
    let modules = version.display();
    let script = format!(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n\
         mount -t hostfs none /mnt -o {here}\n\
         for m in lib/crc64 drivers/md/bcache/bcache; do busybox insmod {modules}/$m.ko; done\n\
         sh /mnt/job > /mnt/log 2>&1 && echo done > /mnt/done\n{stop}\nbusybox poweroff -f\n"
    );
    fs::write(&init, script).unwrap();
    fs::write(directory.join("job"), JOB).unwrap();
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).unwrap();
    let mut guest = Command::new(find("linux.uml").unwrap());
    guest.env("LD_PRELOAD", &shim).args(["mem=256M", "con=null", "con0=null", "quiet", "root=/dev/root"]);
    guest.args(["rootfstype=hostfs", "rootflags=/", "ro"]).arg(format!("init={}", init.display()));
    guest.arg(format!("uml_dir={here}"));
    for (name, image) in [("ubda", "cache"), ("ubdb", "backing")] {
        guest.arg(format!("{name}={}", directory.join(image).display()));
    }
    guest.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let ended = wait(guest.spawn().unwrap());
    if !ended {
        kill_rest(&format!("uml_dir={here}"));
    }
    let log = fs::read_to_string(directory.join("log")).unwrap_or_default();
    let done = directory.join("done").exists();
    assert!(ended && done, "the guest ended: {ended}, its job succeeded: {done}, it said: {log}");
}

/// Waits for the guest; returns whether it ended by itself.
fn wait(mut guest: Child) -> bool {
    let start = Instant::now();
    while guest.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            guest.kill().unwrap();
            guest.wait().unwrap();
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// Kills the processes that a killed guest leaves behind. They ran its user space, and carry its
/// arguments.
fn kill_rest(argument: &str) {
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        if arguments.split(|byte| *byte == 0).any(|word| word == argument.as_bytes()) {
            let _ = Command::new("kill").arg("-9").arg(process.file_name()).status();
        }
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let admin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(admin).map(|place| place.join(program)).find(|file| file.is_file())
}
