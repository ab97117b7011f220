//! A guest in qemu: Debian's 6.12 kernel or a later one, emulated where the host has no KVM, booted
//! in some seconds.
//!
//! The kernel comes from `tests/fetch-kernel`. Its initramfs is built here for each guest: busybox,
//! the block and bcache modules, the guest program with its libraries, the job. Images are virtio
//! disks. qemu keeps no cache of its own beyond the host's (`cache=unsafe`), so that killing qemu
//! crashes the guest and has no other effect, as in [`crate::uml`].

pub mod bootable;
pub mod devices;
mod initramfs;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::guest::{Console, GuestError, JOB_BEGINS, Job, Machine, Report};
use crate::requires;

/// Memory of a guest, in MiB; it also holds the initramfs.
const MEMORY: u32 = 768;
/// How often a guest is booted if its kernel fails before it has done anything.
const BOOTS_MAX: u32 = 3;
/// The kernel's command line: it selects the console and turns off every watchdog that judges time.
/// An emulated machine on a busy host may stall for long, and the job's limit ends what hangs. At
/// this log level, the kernel prints by itself only what it reports when it dies.
const COMMAND_LINE: &str = "console=ttyS0 oops=panic panic=-1 loglevel=1 mitigations=off nowatchdog rcupdate.rcu_cpu_stall_suppress=1 \
    workqueue.cpu_intensive_thresh_us=0 sysctl.kernel.hung_task_timeout_secs=0";

/// qemu as installed on this machine, with the downloaded kernel.
#[derive(Debug)]
pub struct Vm {
    name: &'static str,
    kernel: PathBuf,
    modules: PathBuf,
    accelerator: &'static [&'static str],
    /// Additional arguments on the kernel's command line.
    told: &'static str,
    size: Size,
    also: Also,
}

/// The size of the machine.
#[derive(Clone, Copy, Debug)]
struct Size {
    mebibytes: u32,
    processors: u32,
}

/// What a guest has in addition to the common contents.
#[derive(Clone, Debug, Default)]
pub struct Also {
    /// Modules, in the order of insertion, by their paths below the kernel's directory without the
    /// extension. Parameters follow a module after a space.
    pub modules: Vec<&'static str>,
    /// Programs, by their paths on this machine.
    pub programs: Vec<PathBuf>,
    /// Leaves out the guest program for workloads, which is large.
    pub is_bare: bool,
    /// Files, by their paths on this machine and in the guest.
    pub files: Vec<(PathBuf, String)>,
}

impl Vm {
    /// Finds qemu with kernel 6.12, or makes the test count as skipped.
    #[must_use]
    pub fn find() -> Option<Self> {
        Self::find_with("Linux 6.12 (qemu)", requires::kernel_6_12, "no 6.12 kernel: run tests/fetch-kernel")
    }

    /// Like [`find`](Self::find), with a kernel of version 6.16 or later, whose ublk registers
    /// buffers automatically.
    #[must_use]
    pub fn find_new() -> Option<Self> {
        Self::find_with(
            "Linux 6.16+ (qemu)",
            requires::kernel_new,
            "no later kernel: run tests/fetch-kernel new",
        )
    }

    fn find_with(name: &'static str, kernel: fn() -> Option<PathBuf>, lacks: &str) -> Option<Self> {
        if !requires::programs(&["qemu-system-x86_64", "busybox", "cpio", "xz", "gzip", "ldd", "make-bcache"])
        {
            return None;
        }
        let found = kernel().and_then(|directory| {
            let kernel = first_entry(directory.join("boot"), "vmlinuz")?;
            let modules = first_entry(directory.join("lib/modules"), "")?.join("kernel");
            Some((kernel, modules))
        });
        let Some((kernel, modules)) = found else {
            requires::skip(lacks);
            return None;
        };
        let size = Size { mebibytes: MEMORY, processors: 1 };
        Some(Self {
            name,
            kernel,
            modules,
            accelerator: accelerator(),
            told: "",
            size,
            also: Also::default(),
        })
    }

    /// Returns the machine with these additions to its guests.
    #[must_use]
    pub fn with(self, also: Also) -> Self {
        Self { also, ..self }
    }

    /// Returns the machine with no program but busybox in its guests.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.also.programs.clear();
        self.also.is_bare = true;
        self
    }

    /// Returns the machine with these additional files, by their paths on this machine and in the
    /// guest. The libraries of a program are copied, too.
    #[must_use]
    pub fn with_files(mut self, files: impl IntoIterator<Item = (PathBuf, String)>) -> Self {
        self.also.files.extend(files);
        self
    }

    /// Returns the machine with this amount of memory, in MiB, and this number of processors.
    #[must_use]
    pub fn sized(self, mebibytes: u32, processors: u32) -> Self {
        Self { size: Size { mebibytes, processors }, ..self }
    }

    /// Returns the machine as an emulation whose clock counts instructions: one takes a nanosecond.
    /// For a single processor only.
    #[must_use]
    pub fn counting(self) -> Self {
        let accelerator =
            &["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-cpu", "max,-cx16"];
        Self { accelerator, ..self }
    }

    /// Returns the machine with processors that never sleep: waking an emulated processor takes the
    /// host much longer than waking a real one.
    #[must_use]
    pub fn awake(self) -> Self {
        Self { told: " idle=poll", ..self }
    }
}

impl Machine for Vm {
    fn name(&self) -> &'static str {
        self.name
    }

    fn device(&self, index: usize) -> String {
        format!("/dev/vd{}", crate::uml::letter(index))
    }

    fn run(&self, job: &Job<'_>) -> Result<Report, GuestError> {
        for _ in 1..BOOTS_MAX {
            match self.run_once(job) {
                Err(error) if has_stumbled_in_boot(&error) => println!("booted once more, because {error}"),
                ended => return ended,
            }
        }
        self.run_once(job)
    }
}

impl Vm {
    fn run_once(&self, job: &Job<'_>) -> Result<Report, GuestError> {
        let directory = tempfile::Builder::new()
            .prefix("bcached-vm-")
            .tempdir()
            .map_err(GuestError::host("make a directory"))?;
        let initramfs = initramfs::build(directory.path(), &self.modules, &self.also, job.script)?;
        let mut command = Command::new("qemu-system-x86_64");
        let Size { mebibytes, processors } = self.size;
        command.args(["-M", "q35", "-nic", "none", "-no-reboot"]);
        command.args(["-smp", &processors.to_string(), "-m", &format!("{mebibytes}M")]);
        command.args(["-display", "none", "-monitor", "none", "-serial", "stdio"]).args(self.accelerator);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(initramfs);
        command.args(["-append", &format!("{COMMAND_LINE}{}", self.told)]);
        for image in job.images {
            let image =
                image.canonicalize().map_err(GuestError::host(format!("find {}", image.display())))?;
            let image = image.display();
            command
                .arg("-drive")
                .arg(format!("file={image},format=raw,if=virtio,cache=unsafe,file.locking=off"));
        }
        Console::start(command, directory.path())?.follow(job)
    }
}

/// Returns whether the boot failed because of a bug in qemu 7.2. One processor of a guest can run
/// into a breakpoint that its kernel has set on another processor to change its own code, and has
/// already removed. This was seen about once in some hundred boots. The disks are still untouched
/// at that point.
fn has_stumbled_in_boot(error: &GuestError) -> bool {
    let GuestError::Ended { transcript, .. } = error else { return false };
    transcript.contains("Oops: int3") && transcript.lines().all(|line| line != JOB_BEGINS)
}

/// Selects KVM if the processor supports it and we may use it. The existence of `/dev/kvm` alone
/// proves nothing.
fn accelerator() -> &'static [&'static str] {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let virtual_machines = processor.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if virtual_machines && fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok() {
        &["-accel", "kvm", "-cpu", "host"]
    } else {
        // qemu 7.2 mistranslates cmpxchg16b: about every other boot dies of a double fault. For a
        // processor with ERMS, the kernel copies pages by the byte, which emulation does one byte
        // at a time; without ERMS, it copies by the word, and a boot takes a fifth less.
        &["-accel", "tcg", "-cpu", "max,-cx16,-erms"]
    }
}

/// Returns the first entry of a directory whose name starts with `prefix`.
fn first_entry(directory: PathBuf, prefix: &str) -> Option<PathBuf> {
    let mut entries = fs::read_dir(directory).ok()?.flatten();
    entries.find(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).map(|entry| entry.path())
}
