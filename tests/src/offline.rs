//! A set read without a kernel and without the engine: by the offline checker, which must find nothing wrong and the right content.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bcached_check::{Bucket, Options, ReadAt, Report, View, check};
use bcached_format::Inode;

use crate::workload::{Mismatch, Model};

/// Why a set at rest is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// An image could not be opened.
    #[error("open {path}")]
    Open {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The checker found something.
    #[error("the checker found:\n{0}")]
    Findings(String),
    /// The set has fewer volumes than were written.
    #[error("{found} volumes, wanted {wanted}")]
    Volumes {
        /// Volumes in the table that are in use.
        found: usize,
        /// Volumes written.
        wanted: usize,
    },
    /// A volume's content is not the model's.
    #[error("volume {volume}: {source}")]
    Content {
        /// Which.
        volume: usize,
        /// What differs.
        source: Mismatch,
    },
}

/// What the checker says of a set that passed.
#[derive(Debug)]
pub struct Examined {
    /// Its report.
    pub report: Report,
    /// Every bucket.
    pub buckets: Vec<Bucket>,
}

/// Checks the set on `cache` and `backings`: its structure, and that every clean copy equals its backing device. What the volumes must hold is
/// not asked.
///
/// # Errors
/// [`OfflineError`]: anything that is not as it should be.
pub fn examine_structure(cache: &Path, backings: &[PathBuf]) -> Result<Examined, OfflineError> {
    examine(cache, backings, &mut [], Options { compare_clean: true, ..Options::default() })
}

/// Checks the set on `cache` and `backings` and compares each volume's whole content with its model, which settles what a crash left open.
///
/// # Errors
/// [`OfflineError`]: anything that is not as it should be.
pub fn examine(
    cache: &Path,
    backings: &[PathBuf],
    models: &mut [Model],
    options: Options,
) -> Result<Examined, OfflineError> {
    let open = |path: &Path| {
        File::open(path).map_err(|source| OfflineError::Open { path: path.display().to_string(), source })
    };
    let cache = open(cache)?;
    let backings: Vec<File> = backings.iter().map(|path| open(path)).collect::<Result<_, _>>()?;
    let backings: Vec<&dyn ReadAt> = backings.iter().map(|file| file as &dyn ReadAt).collect();
    let checked = check(&cache, &backings, options);
    let findings = || {
        let lines = checked.report.findings.iter().map(|damage| format!("{damage:?}\n"));
        OfflineError::Findings(lines.collect())
    };
    if !checked.report.is_clean() {
        return Err(findings());
    }
    let view = checked.view.as_ref().ok_or_else(findings)?;
    let volumes: Vec<_> = view.volumes().iter().filter(|volume| !volume.invalidated).collect();
    if volumes.len() < models.len() {
        return Err(OfflineError::Volumes { found: volumes.len(), wanted: models.len() });
    }
    for (index, (model, volume)) in models.iter_mut().zip(volumes).enumerate() {
        let reader = VolumeReader {
            view,
            inode: Inode(volume.inode),
            sector: volume.start,
            end: volume.start + model.sectors(),
        };
        let content = io::BufReader::with_capacity(1 << 20, reader);
        model.check(content).map_err(|source| OfflineError::Content { volume: index, source })?;
    }
    Ok(Examined { report: checked.report, buckets: checked.buckets })
}

/// A volume from its first sector to its last, as a stream.
struct VolumeReader<'a, 'b> {
    view: &'a View<'b>,
    inode: Inode,
    sector: u64,
    end: u64,
}

impl Read for VolumeReader<'_, '_> {
    /// Whole sectors only: the reader above always asks for many.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let sectors = (buffer.len() as u64 / 512).min(self.end - self.sector);
        let bytes = usize::try_from(sectors * 512).map_err(io::Error::other)?;
        self.view.read(self.inode, self.sector, &mut buffer[..bytes])?;
        self.sector += sectors;
        Ok(bytes)
    }
}
