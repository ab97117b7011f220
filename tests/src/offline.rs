//! A set read without a kernel and without the engine: by the offline checker, which must find nothing wrong and the right content.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bcached_check::{Bucket, Options, ReadAt, Report, Source, View, Volume, check};
use bcached_format::Inode;

use crate::set::CacheSet;
use crate::side::backing_uuid;
use crate::workload::{Mismatch, Model, SECTOR_BYTES, Seen, identify};

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
    /// A volume's data could not be read.
    #[error("volume {volume}")]
    Read {
        /// Which.
        volume: usize,
        /// Why.
        source: io::Error,
    },
    /// A backing device holds, below a clean copy, what no crash may leave there.
    #[error("volume {volume}: sector {sector} is {seen:?} below a clean copy")]
    LostBelow {
        /// Which.
        volume: usize,
        /// Sector of the volume.
        sector: u64,
        /// What the backing device holds.
        seen: Seen,
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

/// The checker's word on a set between two turns. It only reads the images, and the set's models settle nothing: a crash of our daemon leaves a
/// note that has still to be replayed, and one of a kernel may leave clean extents that the backing device has not.
///
/// # Errors
/// [`OfflineError`]: anything that is not as it should be.
pub fn judge(set: &CacheSet) -> Result<(), OfflineError> {
    examine(&set.cache, &set.backings, &mut set.models.clone(), Options::default()).map(|_examined| ())
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
    let paths = backings;
    let (cache, backings) = open_images(cache, backings)?;
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
    let volumes = in_order(view.volumes(), paths)?;
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

/// Enters into the models what the backing devices hold below clean copies that differ from them: a kernel's crash leaves such copies
/// (`docs/reliability.md`, *changed*). Says how many sectors those are.
///
/// # Errors
/// [`OfflineError`]: among them a device below that has lost flushed data.
pub fn note_differing_copies(set: &mut CacheSet) -> Result<u64, OfflineError> {
    let (cache, backings) = open_images(&set.cache, &set.backings)?;
    let backings: Vec<&dyn ReadAt> = backings.iter().map(|file| file as &dyn ReadAt).collect();
    let checked = check(&cache, &backings, Options::default());
    let Some(view) = checked.view.as_ref() else {
        return Err(OfflineError::Findings("no view of the set".to_owned()));
    };
    let volumes = in_order(view.volumes(), &set.backings)?;
    let mut differing = 0;
    for ((model, volume), (index, backing)) in
        set.models.iter_mut().zip(volumes).zip(backings.iter().enumerate())
    {
        for piece in view.content(Inode(volume.inode), volume.start, model.sectors()) {
            let Source::Cache { sector: copy, dirty: false } = piece.source else { continue };
            let (mut above, mut below) = ([0; SECTOR_BYTES], [0; SECTOR_BYTES]);
            for offset in 0..piece.sectors {
                let read = cache.read_at(copy + offset, &mut above);
                let read = read.and_then(|()| backing.read_at(piece.start + offset, &mut below));
                read.map_err(|source| OfflineError::Read { volume: index, source })?;
                if above == below {
                    continue;
                }
                differing += 1;
                let sector = piece.start + offset - volume.start;
                let seen = identify(&below);
                if !model.allow_below(sector, seen) {
                    return Err(OfflineError::LostBelow { volume: index, sector, seen });
                }
            }
        }
    }
    Ok(differing)
}

/// Those of the backing devices in their order, whenever each came to the table; then those in the cache alone.
fn in_order<'a>(volumes: &'a [Volume], backings: &[PathBuf]) -> Result<Vec<&'a Volume>, OfflineError> {
    let alive = || volumes.iter().filter(|volume| !volume.invalidated);
    let mut found = Vec::new();
    for path in backings {
        let open = |source| OfflineError::Open { path: path.display().to_string(), source };
        let uuid = backing_uuid(path).map_err(open)?;
        found.extend(alive().find(|volume| !volume.flash_only && volume.uuid.to_string() == uuid));
    }
    found.extend(alive().filter(|volume| volume.flash_only));
    Ok(found)
}

/// The images, to be read.
fn open_images(cache: &Path, backings: &[PathBuf]) -> Result<(File, Vec<File>), OfflineError> {
    let open = |path: &Path| {
        File::open(path).map_err(|source| OfflineError::Open { path: path.display().to_string(), source })
    };
    let backings = backings.iter().map(|path| open(path)).collect::<Result<_, _>>()?;
    Ok((open(cache)?, backings))
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
