//! A guest in User-Mode Linux: Debian's 6.1 kernel as an ordinary process, up in about a second, no privileges needed.
//!
//! The guest's root is the host's own file system through hostfs, mounted read-only, so every program of the host is there and nothing of the
//! host can be harmed; images are its block devices `/dev/ubda`, `ubdb`, ... Each guest has a temporary directory of its own, whose path in the
//! command line also tells its processes from all others (`Console`).

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::{Console, GuestError, Job, Machine, Report, init_body, job_script};
use crate::requires;

/// Where Debian's package puts the modules of its one kernel.
const MODULES: &str = "/usr/lib/uml/modules";
/// Inserted before the job, in this order.
const WANTED_MODULES: [&str; 2] = ["lib/crc64.ko", "drivers/md/bcache/bcache.ko"];
/// Memory of a guest: the test images are small, their page cache is all that grows.
const MEMORY: &str = "mem=512M";

/// User-Mode Linux as it is installed here.
#[derive(Debug)]
pub struct Uml {
    modules: Vec<PathBuf>,
}

impl Uml {
    /// Finds it, or makes the test count as skipped.
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
        Some(Self { modules: WANTED_MODULES.iter().map(|name| kernel.join(name)).collect() })
    }

    /// The guest's first process: mounts, modules, the job, power off.
    fn init(&self, directory: &Path) -> String {
        let modules: String =
            self.modules.iter().map(|path| format!("busybox insmod {}\n", path.display())).collect();
        let body = init_body(&directory.join("job").display().to_string());
        format!(
            "#!/bin/sh\n\
            export PATH=/usr/sbin:/usr/bin:/sbin:/bin\n\
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
        let shim = build_shim(path)?;
        let program = built_program("verified-io")?;
        let write = |name: &str, text: String| {
            fs::write(path.join(name), text).map_err(GuestError::host(format!("write {name}")))
        };
        write("job", job_script(job.script, &program.display().to_string()))?;
        write("init", self.init(path))?;
        let init = path.join("init");
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
            .map_err(GuestError::host("chmod init"))?;

        let mut command = Command::new("linux.uml");
        command.env("LD_PRELOAD", shim).env("TMPDIR", "/tmp").args([
            MEMORY,
            "loglevel=0",
            "con=null",
            "con0=null,fd:1",
        ]);
        command.args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]);
        command.arg(format!("uml_dir={}", path.display())).arg(format!("init={}", init.display()));
        for (index, image) in job.images.iter().enumerate() {
            let image =
                image.canonicalize().map_err(GuestError::host(format!("find {}", image.display())))?;
            command.arg(format!("ubd{}={}", letter(index), image.display()));
        }
        Console::start(command, path)?.follow(job)
    }
}

/// `a` for the first image.
pub(crate) fn letter(index: usize) -> char {
    char::from_digit(10 + u32::try_from(index).expect("a handful of images"), 36).expect("at most 26 images")
}

/// Compiles `shim.c`, which says why it is needed.
fn build_shim(directory: &Path) -> Result<PathBuf, GuestError> {
    let source = directory.join("shim.c");
    let shim = directory.join("shim.so");
    fs::write(&source, include_str!("shim.c")).map_err(GuestError::host("write shim.c"))?;
    let output =
        Command::new("gcc").args(["-O1", "-Wall", "-shared", "-fPIC", "-o"]).args([&shim, &source]).output();
    let output = output.map_err(GuestError::host("start gcc"))?;
    if output.status.success() {
        Ok(shim)
    } else {
        Err(GuestError::Setup(format!("gcc: {}", String::from_utf8_lossy(&output.stderr))))
    }
}

/// A program of this workspace, as it was built beside (or above) the running test.
pub(crate) fn built_program(name: &str) -> Result<PathBuf, GuestError> {
    let test = std::env::current_exe().map_err(GuestError::host("find the running test"))?;
    let candidates = test.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| GuestError::Setup(format!("{name} is not built: `cargo build --workspace` first")))
}
