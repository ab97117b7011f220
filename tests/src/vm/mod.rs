//! A guest in qemu: Debian's 6.12 kernel, or a later one, emulated where the host has no KVM, up in some seconds.
//!
//! The kernel comes from `tests/fetch-kernel`. Its initramfs is built here for each guest: busybox, the block and bcache modules, the guest
//! program with its libraries, the job. Images are virtio disks; qemu keeps no cache of its own beyond the host's (`cache=unsafe`), so that a
//! killed qemu is a crashed guest and nothing else, as in [`crate::uml`].

pub mod bootable;
pub mod devices;
mod initramfs;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::guest::{Console, GuestError, JOB_BEGINS, Job, Machine, Report};
use crate::requires;

/// Memory of a guest, which also holds its initramfs, in MiB.
const MEMORY: u32 = 768;
/// How often a guest is booted whose kernel stumbles before it has done anything.
const BOOTS_MAX: u32 = 3;
/// The console, and silence of every watchdog that judges time: an emulated machine on a busy host may stand still for long, and what hangs is
/// ended by the job's limit. What the kernel has to say at its own end is all that it says here by itself.
const COMMAND_LINE: &str = "console=ttyS0 oops=panic panic=-1 loglevel=1 mitigations=off nowatchdog rcupdate.rcu_cpu_stall_suppress=1 \
    workqueue.cpu_intensive_thresh_us=0 sysctl.kernel.hung_task_timeout_secs=0";

/// qemu as it is installed here, with the downloaded kernel.
#[derive(Debug)]
pub struct Vm {
    name: &'static str,
    kernel: PathBuf,
    modules: PathBuf,
    accelerator: &'static [&'static str],
    /// What the kernel is told besides.
    told: &'static str,
    size: Size,
    also: Also,
}

/// How large the machine is.
#[derive(Clone, Copy, Debug)]
struct Size {
    mebibytes: u32,
    processors: u32,
}

/// What a guest has beside what each has.
#[derive(Clone, Debug, Default)]
pub struct Also {
    /// Modules, by their paths below the kernel's directory without the ending, in the order of insertion; after a space the parameters of one.
    pub modules: Vec<&'static str>,
    /// Programs, by their paths here.
    pub programs: Vec<PathBuf>,
    /// Without the guest program of workloads, which is large.
    pub is_bare: bool,
    /// Files, by their paths here and there.
    pub files: Vec<(PathBuf, String)>,
}

impl Vm {
    /// Finds it with kernel 6.12, or makes the test count as skipped.
    #[must_use]
    pub fn find() -> Option<Self> {
        Self::find_with("Linux 6.12 (qemu)", requires::kernel_6_12, "no 6.12 kernel: run tests/fetch-kernel")
    }

    /// The same with a kernel of 6.16 or above, whose ublk registers buffers by itself.
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

    /// The same with more in its guests.
    #[must_use]
    pub fn with(self, also: Also) -> Self {
        Self { also, ..self }
    }

    /// The same with no program but busybox.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.also.programs.clear();
        self.also.is_bare = true;
        self
    }

    /// The same with such files besides, by their paths here and there; a program brings its libraries along.
    #[must_use]
    pub fn with_files(mut self, files: impl IntoIterator<Item = (PathBuf, String)>) -> Self {
        self.also.files.extend(files);
        self
    }

    /// The same with so much memory, in MiB, and so many processors.
    #[must_use]
    pub fn sized(self, mebibytes: u32, processors: u32) -> Self {
        Self { size: Size { mebibytes, processors }, ..self }
    }

    /// The same, emulated, with a clock that counts instructions: a nanosecond is one. Of one processor.
    #[must_use]
    pub fn counting(self) -> Self {
        let accelerator =
            &["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-cpu", "max,-cx16"];
        Self { accelerator, ..self }
    }

    /// The same with processors that never sleep: to wake an emulated one takes its host much longer than a real one takes.
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

/// qemu 7.2 lets one processor of a guest run into a breakpoint that its kernel has set to change its own code on another one, and has taken away
/// again: seen once in some hundred boots. Nobody has touched the disks by then.
fn has_stumbled_in_boot(error: &GuestError) -> bool {
    let GuestError::Ended { transcript, .. } = error else { return false };
    transcript.contains("Oops: int3") && transcript.lines().all(|line| line != JOB_BEGINS)
}

/// KVM where the processor has it and we may use it. A `/dev/kvm` alone proves nothing.
fn accelerator() -> &'static [&'static str] {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let virtual_machines = processor.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if virtual_machines && fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok() {
        &["-accel", "kvm", "-cpu", "host"]
    } else {
        // qemu 7.2 translates cmpxchg16b wrongly: about every other boot dies of a double fault. A processor with ERMS has pages copied by
        // the byte, which emulation does a byte at a time, and one without by the word: a boot takes a fifth less.
        &["-accel", "tcg", "-cpu", "max,-cx16,-erms"]
    }
}

/// The first entry of a directory whose name starts so.
fn first_entry(directory: PathBuf, prefix: &str) -> Option<PathBuf> {
    let mut entries = fs::read_dir(directory).ok()?.flatten();
    entries.find(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).map(|entry| entry.path())
}
