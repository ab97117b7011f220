//! A guest in User-Mode Linux: Debian's 6.1 kernel as an ordinary process, booted in about a
//! second, without privileges.
//!
//! The guest's root is the host's file system through hostfs, mounted read-only. So every program
//! of the host is available, and nothing on the host can be damaged. Images are its block devices
//! `/dev/ubda`, `ubdb`, ... Each guest has a temporary directory of its own, whose path in the
//! command line also distinguishes its processes from all others (`Console`).

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::{Console, GuestError, Job, Machine, Report, init_body, job_script};
use crate::requires;

/// Where Debian's package installs the modules of its one kernel.
const MODULES: &str = "/usr/lib/uml/modules";
/// Modules inserted before the job, in this order.
const WANTED_MODULES: [&str; 2] = ["lib/crc64.ko", "drivers/md/bcache/bcache.ko"];
/// The kernel versions whose requests `recorder.c` can read.
const RECORDABLE: &str = "6.1.";
/// Memory of a guest. The test images are small; only their page cache grows.
const MEMORY: &str = "mem=512M";

/// User-Mode Linux as installed on this machine.
#[derive(Clone, Debug)]
pub struct Uml {
    version: String,
    modules: Vec<PathBuf>,
    /// The file in which the guest's device requests are recorded.
    recording: Option<PathBuf>,
}

impl Uml {
    /// Finds User-Mode Linux, or makes the test count as skipped.
    #[must_use]
    pub fn find() -> Option<Self> {
        if !requires::programs(&["linux.uml", "gcc", "busybox", "make-bcache"]) {
            return None;
        }
        let version = fs::read_dir(MODULES).ok().and_then(|mut versions| versions.next()?.ok());
        let Some(version) = version else {
            requires::skip("User-Mode Linux has no modules");
            return None;
        };
        let kernel = version.path().join("kernel");
        let modules = WANTED_MODULES.iter().map(|name| kernel.join(name)).collect();
        let version = version.file_name().to_string_lossy().into_owned();
        Some(Self { version, modules, recording: None })
    }

    /// Finds a version that can be [`recorded`](Self::recorded), or makes the test count as
    /// skipped.
    #[must_use]
    pub fn find_recordable() -> Option<Self> {
        let uml = Self::find()?;
        if uml.version.starts_with(RECORDABLE) {
            return Some(uml);
        }
        requires::skip(&format!("the recorder knows User-Mode Linux {RECORDABLE}x, not {}", uml.version));
        None
    }

    /// Returns a copy that appends every write and flush of a job's images to the file `recording`
    /// ([`crate::recording`] reads it).
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn recorded(&self, recording: &Path) -> Result<Self, GuestError> {
        fs::File::create(recording).map_err(GuestError::host("make the recording"))?;
        Ok(Self { recording: Some(recording.to_owned()), ..self.clone() })
    }

    /// Sets the libraries that `linux.uml` preloads (`LD_PRELOAD`) and their parameters.
    fn preload(&self, command: &mut Command, directory: &Path, images: &[PathBuf]) -> Result<(), GuestError> {
        let shim = compile("shim", include_str!("shim.c"), directory)?;
        let Some(recording) = &self.recording else {
            command.env("LD_PRELOAD", shim);
            return Ok(());
        };
        let recorder = compile("recorder", include_str!("recorder.c"), directory)?;
        // The recorder must come first: both libraries define the functions of a flush.
        command.env("LD_PRELOAD", format!("{}:{}", recorder.display(), shim.display()));
        let images: Vec<String> = images.iter().map(|image| image.display().to_string()).collect();
        command.env("BCACHED_RECORDING", recording).env("BCACHED_RECORDED_IMAGES", images.join("\n"));
        Ok(())
    }

    /// Returns the script of the guest's first process: mounts, modules, the job, power off. The
    /// guest sees the host's `/etc`, which may configure a bcached of the host; `BCACHED_ROOT`
    /// isolates the guest from it.
    fn init(&self, directory: &Path) -> String {
        let modules: String =
            self.modules.iter().map(|path| format!("busybox insmod {}\n", path.display())).collect();
        let body = init_body(&directory.join("job").display().to_string());
        format!(
            "#!/bin/sh\n\
            export PATH=/usr/sbin:/usr/bin:/sbin:/bin BCACHED_ROOT=/run/machine\n\
            mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run; mount -t tmpfs tmp /mnt\n\
            {modules}{body}\
            busybox poweroff -f\n"
        )
    }
}

impl Machine for Uml {
    fn name(&self) -> &'static str {
        "Linux 6.1 (User-Mode Linux)"
    }

    fn device(&self, index: usize) -> String {
        format!("/dev/ubd{}", letter(index))
    }

    fn run(&self, job: &Job<'_>) -> Result<Report, GuestError> {
        let directory = tempfile::Builder::new()
            .prefix("bcached-uml-")
            .tempdir()
            .map_err(GuestError::host("make a directory"))?;
        let path = directory.path();
        let program = built_program("verified-io")?;
        let write = |name: &str, text: String| {
            fs::write(path.join(name), text).map_err(GuestError::host(format!("write {name}")))
        };
        write("job", job_script(job.script, &program.display().to_string()))?;
        write("init", self.init(path))?;
        let init = path.join("init");
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
            .map_err(GuestError::host("chmod init"))?;

        let find = |image: &&Path| {
            image.canonicalize().map_err(GuestError::host(format!("find {}", image.display())))
        };
        let images: Vec<PathBuf> = job.images.iter().map(find).collect::<Result<_, _>>()?;
        let mut command = Command::new("linux.uml");
        self.preload(&mut command, path, &images)?;
        command.env("TMPDIR", std::env::temp_dir()).args([
            MEMORY,
            "loglevel=0",
            "con=null",
            "con0=null,fd:1",
        ]);
        command.args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]);
        command.arg(format!("uml_dir={}", path.display())).arg(format!("init={}", init.display()));
        for (index, image) in images.iter().enumerate() {
            command.arg(format!("ubd{}={}", letter(index), image.display()));
        }
        Console::start(command, path)?.follow(job)
    }
}

/// Returns the letter of an image's device: `a` for the first image.
pub(crate) fn letter(index: usize) -> char {
    char::from_digit(10 + u32::try_from(index).expect("a handful of images"), 36).expect("at most 26 images")
}

/// Compiles one of the C files in this directory to a library. Each file documents why it is
/// needed.
fn compile(name: &str, text: &str, directory: &Path) -> Result<PathBuf, GuestError> {
    let source = directory.join(name).with_extension("c");
    let library = directory.join(name).with_extension("so");
    fs::write(&source, text).map_err(GuestError::host(format!("write {}", source.display())))?;
    let output = Command::new("gcc")
        .args(["-O1", "-Wall", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .output();
    let output = output.map_err(GuestError::host("start gcc"))?;
    if output.status.success() {
        Ok(library)
    } else {
        Err(GuestError::Setup(format!("gcc: {}", String::from_utf8_lossy(&output.stderr))))
    }
}

/// Returns the path of a program of this workspace, built in the directory of the running test or
/// the one above.
pub fn built_program(name: &str) -> Result<PathBuf, GuestError> {
    let test = std::env::current_exe().map_err(GuestError::host("find the running test"))?;
    let candidates = test.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| GuestError::Setup(format!("{name} is not built: `cargo build --workspace` first")))
}
