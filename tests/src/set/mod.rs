//! A cache set in image files, with models of what its volumes must hold.
//!
//! The images are sparse, lie in a temporary directory (in `TMPDIR`) and are deleted with the
//! value, unless `BCACHED_KEEP_IMAGES` is set. Opening images changes them; [`CacheSet::duplicate`]
//! keeps the originals.

mod geometry;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

pub use bcached_format::CacheMode;
pub use geometry::Geometry;

use crate::apart;
use crate::workload::{Model, Workload};

/// A cache set's images and models.
#[derive(Debug)]
pub struct CacheSet {
    directory: TempDir,
    /// The cache device.
    pub cache: PathBuf,
    /// The backing devices; empty for a set with a flash-only volume.
    pub backings: Vec<PathBuf>,
    /// The expected content of the volumes: of the backing devices in order, then of flash-only
    /// volumes.
    pub models: Vec<Model>,
    /// The geometry with which the set was made.
    pub geometry: Geometry,
    /// Whether the last program that served the set was a kernel.
    pub left_by_kernel: bool,
}

/// The program that writes a set's superblocks.
#[derive(Clone, Copy, Debug)]
pub enum Maker<'a> {
    /// `make-bcache` of bcache-tools.
    Tools,
    /// `bcached make` of this binary.
    Ours(&'a Path),
}

impl CacheSet {
    /// Returns a workload of `writes` further writes to volume `index`.
    #[must_use]
    pub fn further(&self, index: usize, seed: u64, writes: u64) -> Workload {
        let model = &self.models[index];
        Workload {
            seed,
            volume: model.volume(),
            first_sequence: model.next_sequence(),
            first_sector: 0,
            sectors: model.sectors(),
            block_sectors: self.geometry.block_sectors(),
            write_sectors_max: 64,
            writes,
            flush_every: 16,
            flushes_max: 0,
            read_every: 5,
            discard_every: 0,
        }
    }

    /// Makes blank images and formats them. They have never been opened.
    ///
    /// # Errors
    /// The files could not be made, or the maker failed (with its error output).
    pub fn make(geometry: Geometry, backings: u64, maker: Maker<'_>) -> io::Result<Self> {
        let directory = image_directory()?;
        let file = |name: &str, bytes: u64| {
            let path = directory.path().join(name);
            File::create(&path)?.set_len(bytes)?;
            Ok::<_, io::Error>(path)
        };
        let cache = file("cache", geometry.cache_bytes)?;
        let backings: Vec<PathBuf> = (0..backings)
            .map(|n| file(&format!("backing{n}"), geometry.backing_bytes()))
            .collect::<io::Result<_>>()?;
        maker.run(&geometry, &cache, &backings)?;
        let models = (0..backings.len() as u64).map(|n| Model::blank(n, geometry.volume_sectors)).collect();
        Ok(Self { directory, cache, backings, models, geometry, left_by_kernel: false })
    }

    /// Creates a set with one backing device from images that `write` makes: those of the cache and
    /// of the backing device.
    ///
    /// # Errors
    /// The error of `write`.
    pub fn from_images(
        geometry: Geometry,
        write: impl FnOnce(&Path, &Path) -> io::Result<()>,
    ) -> io::Result<Self> {
        let directory = image_directory()?;
        let (cache, backing) = (directory.path().join("cache"), directory.path().join("backing0"));
        write(&cache, &backing)?;
        let models = vec![Model::blank(0, geometry.volume_sectors)];
        Ok(Self { directory, cache, backings: vec![backing], models, geometry, left_by_kernel: false })
    }

    /// Returns the images of the cache and the backing devices, for a job.
    #[must_use]
    pub fn images(&self) -> Vec<&Path> {
        std::iter::once(&self.cache).chain(&self.backings).map(PathBuf::as_path).collect()
    }

    /// Returns a directory for files that belong to this set; it is deleted with the set.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Copies the image files to a second set, to be opened (and thereby changed) while this one
    /// stays as it is.
    ///
    /// # Errors
    /// Copying failed.
    pub fn duplicate(&self) -> io::Result<Self> {
        let directory = image_directory()?;
        let copy = |path: &PathBuf| {
            let target = directory.path().join(path.file_name().expect("images are files"));
            copy_sparse(path, &target).map(|()| target)
        };
        let cache = copy(&self.cache)?;
        let backings = self.backings.iter().map(copy).collect::<io::Result<_>>()?;
        let (models, geometry, left_by_kernel) = (self.models.clone(), self.geometry, self.left_by_kernel);
        Ok(Self { directory, cache, backings, models, geometry, left_by_kernel })
    }
}

impl Maker<'_> {
    /// Writes the superblocks in the way users do.
    fn run(self, geometry: &Geometry, cache: &Path, backings: &[PathBuf]) -> io::Result<()> {
        let mut command = match self {
            Self::Tools => Command::new("make-bcache"),
            Self::Ours(program) => {
                let mut command = Command::new(program);
                apart::isolated(&mut command, cache.parent().unwrap_or(cache)).arg("make");
                command
            }
        };
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(geometry.make_arguments());
        command.arg("--cache").arg(cache);
        if !backings.is_empty() {
            command.arg("--bdev").args(backings);
        }
        let output = command.output()?;
        if output.status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))))
    }
}

/// Creates the directory for a set's images. It is kept if `BCACHED_KEEP_IMAGES` is set, to look
/// into a failure.
fn image_directory() -> io::Result<TempDir> {
    let keep = std::env::var_os("BCACHED_KEEP_IMAGES").is_some();
    tempfile::Builder::new().prefix("bcached-set-").disable_cleanup(keep).tempdir()
}

/// Copies a file, preserving its holes.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let status = Command::new("cp").args(["--reflink=auto", "--sparse=always"]).args([from, to]).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("cp ended with {status}"))) }
}
