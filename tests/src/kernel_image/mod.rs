//! Cache sets made by real kernels, with the model of what their volumes hold.
//!
//! Each call formats fresh image files with `make-bcache`, boots a machine, and lets its kernel bring them into one named state
//! ([`Scenario`]). The images live in a temporary directory and are gone with the returned value; they are sparse and made in seconds, so none
//! is kept in the repository.

mod geometry;
mod scenario;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

pub use geometry::{CacheMode, Geometry};
pub use scenario::Scenario;

use crate::guest::{GuestError, Job, Machine, Report};
use crate::workload::{Fate, Model};

/// A guest that takes longer than this for one image is stuck; most need two seconds.
const LIMIT: Duration = Duration::from_secs(120);

/// A cache set in image files, and what its volumes must hold.
#[derive(Debug)]
pub struct KernelImage {
    directory: TempDir,
    /// The cache device.
    pub cache: PathBuf,
    /// The backing devices; none for a flash-only volume.
    pub backings: Vec<PathBuf>,
    /// The volumes' content: of the backing devices in order, then of the flash-only volume.
    pub models: Vec<Model>,
    /// The geometry it was made with.
    pub geometry: Geometry,
    /// What the kernel that made it said.
    pub report: Report,
}

impl KernelImage {
    /// The cache and the backing devices, as a job's images.
    #[must_use]
    pub fn images(&self) -> Vec<&Path> {
        std::iter::once(&self.cache).chain(&self.backings).map(PathBuf::as_path).collect()
    }

    /// A directory for whatever belongs to this image; gone with it.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A second set of image files with the same bytes, to be opened (and so changed) while this one stays.
    ///
    /// # Errors
    /// What copying failed with.
    pub fn duplicate(&self) -> io::Result<Self> {
        let directory = tempfile::tempdir()?;
        let copy = |path: &PathBuf| {
            let target = directory.path().join(path.file_name().expect("images are files"));
            copy_sparse(path, &target).map(|()| target)
        };
        let cache = copy(&self.cache)?;
        let backings = self.backings.iter().map(copy).collect::<io::Result<_>>()?;
        let (models, report) = (self.models.clone(), self.report.clone());
        Ok(Self { directory, cache, backings, models, geometry: self.geometry, report })
    }

    /// The content of each volume as the kernel of `machine` serves it. Opens a duplicate: the images stay as they are.
    ///
    /// # Errors
    /// [`GuestError`], also when the kernel logs what it should not.
    pub fn content_by_kernel(&self, machine: &dyn Machine) -> Result<Vec<File>, GuestError> {
        let copy = self.duplicate().map_err(GuestError::host("copy the images"))?;
        let contents: Vec<PathBuf> =
            (0..self.models.len()).map(|n| copy.directory().join(format!("content{n}"))).collect();
        for (path, model) in contents.iter().zip(&self.models) {
            File::create(path)
                .and_then(|file| file.set_len(model.sectors() * 512))
                .map_err(GuestError::host("make a file for the content"))?;
        }
        let images: Vec<&Path> =
            copy.images().into_iter().chain(contents.iter().map(PathBuf::as_path)).collect();
        let mut script = format!("register {}\n", devices(machine, copy.images().len()));
        for (n, model) in self.models.iter().enumerate() {
            let (size, output) = (model.sectors(), machine.device(copy.images().len() + n));
            script += &format!(
                "wait_for 20 test -b /dev/bcache{n}\n\
                test $(cat /sys/block/bcache{n}/size) = {size}\n\
                dd if=/dev/bcache{n} of={output} bs=1M conv=fsync 2>/dev/null\n"
            );
        }
        script += "stop_everything\n";
        let report = machine.run(&Job { images: &images, script: &script, crash_at: None, limit: LIMIT })?;
        expect_allowed(&report)?;
        contents.iter().map(|path| File::open(path).map_err(GuestError::host("open the content"))).collect()
    }
}

/// Makes one kernel image.
///
/// # Errors
/// [`GuestError`]: `make-bcache` or the guest failed, or the kernel logged what it should not.
pub fn kernel_image(
    machine: &dyn Machine,
    geometry: Geometry,
    scenario: Scenario,
) -> Result<KernelImage, GuestError> {
    let directory = tempfile::Builder::new()
        .prefix("bcached-image-")
        .tempdir()
        .map_err(GuestError::host("make a directory"))?;
    let file = |name: &str, bytes: u64| {
        let path = directory.path().join(name);
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .map_err(GuestError::host(format!("make {name}")))?;
        Ok(path)
    };
    let cache = file("cache", geometry.cache_bytes)?;
    let backings: Vec<PathBuf> = (0..scenario.backings())
        .map(|n| file(&format!("backing{n}"), geometry.backing_bytes()))
        .collect::<Result<_, GuestError>>()?;
    format(&geometry, &cache, &backings)?;

    let plan = scenario.plan(machine, &geometry);
    let images: Vec<&Path> = std::iter::once(&cache).chain(&backings).map(PathBuf::as_path).collect();
    let job = Job { images: &images, script: &plan.script, crash_at: plan.crash_at.as_deref(), limit: LIMIT };
    let report = machine.run(&job)?;
    expect_allowed(&report)?;

    let fate =
        plan.crash_at.as_ref().map_or(Fate::Finished, |_| Fate::CrashedAfterFlush(report.last_flush()));
    let mut models = Vec::new();
    for volume in 0..scenario.volumes() {
        let mut model = Model::blank(volume, geometry.volume_sectors);
        let workloads: Vec<_> = plan.workloads.iter().filter(|workload| workload.volume == volume).collect();
        for (index, workload) in workloads.iter().enumerate() {
            // Only the plan's very last workload is running when a guest is killed.
            let last = index + 1 == workloads.len() && plan.workloads.last() == Some(*workload);
            model.apply(workload, if last { fate } else { Fate::Finished });
        }
        models.push(model);
    }
    Ok(KernelImage { directory, cache, backings, models, geometry, report })
}

/// Writes the superblocks as users do.
fn format(geometry: &Geometry, cache: &Path, backings: &[PathBuf]) -> Result<(), GuestError> {
    let mut command = Command::new("make-bcache");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(geometry.make_arguments());
    command.arg("--cache").arg(cache);
    if !backings.is_empty() {
        command.arg("--bdev").args(backings);
    }
    let output = command.output().map_err(GuestError::host("start make-bcache"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(GuestError::Setup(format!("make-bcache: {}", String::from_utf8_lossy(&output.stderr))))
}

/// The guest's names of a job's first `count` images.
fn devices(machine: &dyn Machine, count: usize) -> String {
    (0..count).map(|index| machine.device(index)).collect::<Vec<_>>().join(" ")
}

/// A kernel that says something new has met something wrong.
fn expect_allowed(report: &Report) -> Result<(), GuestError> {
    let unexpected = report.kernel_log.unexpected();
    if unexpected.is_empty() {
        return Ok(());
    }
    Err(GuestError::Setup(format!(
        "the kernel's log is not in tests/kernel-log.allow:\n{}\nthe job said:\n{}",
        unexpected.join("\n"),
        report.output.join("\n")
    )))
}

/// Copies a file with its holes.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let status = Command::new("cp").args(["--reflink=auto", "--sparse=always"]).args([from, to]).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("cp ended with {status}"))) }
}
