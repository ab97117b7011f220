//! Examines a set without a kernel and without the engine: with the offline checker, which must
//! find nothing wrong and the right content.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bcached_check::{Bucket, DataSource, Options, ReadAt, Report, SetView, Volume, check};
use bcached_format::Inode;

use crate::set::CacheSet;
use crate::side::backing_uuid;
use crate::workload::{Mismatch, Model, SECTOR_BYTES, Seen, identify};

/// Why a set at rest failed the examination.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// An image could not be opened.
    #[error("open {path}")]
    Open {
        /// The path of the image.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The checker found damage.
    #[error("the checker found:\n{0}")]
    Findings(String),
    /// The set has fewer volumes than were written.
    #[error("{found} volumes, wanted {wanted}")]
    Volumes {
        /// Volumes in use in the table.
        found: usize,
        /// Volumes that were written.
        wanted: usize,
    },
    /// A volume's data could not be read.
    #[error("volume {volume}")]
    Read {
        /// The index of the volume.
        volume: usize,
        /// The cause.
        source: io::Error,
    },
    /// A backing device holds, under a clean copy in the cache, data that no crash may leave there.
    #[error("volume {volume}: sector {sector} is {seen:?} below a clean copy")]
    LostBelow {
        /// The index of the volume.
        volume: usize,
        /// The sector of the volume.
        sector: u64,
        /// What the backing device holds there.
        seen: Seen,
    },
    /// A volume's content differs from its model.
    #[error("volume {volume}: {source}")]
    Content {
        /// The index of the volume.
        volume: usize,
        /// The difference.
        source: Mismatch,
    },
}

/// What the checker reports about a set that passed.
#[derive(Debug)]
pub struct Examined {
    /// The checker's report.
    pub report: Report,
    /// All buckets.
    pub buckets: Vec<Bucket>,
}

/// Checks the structure of the set on `cache` and `backings`, and that every clean copy equals the
/// data on its backing device. The volumes' content is not compared with a model.
///
/// # Errors
/// [`OfflineError`]: whatever fails the examination.
pub fn examine_structure(cache: &Path, backings: &[PathBuf]) -> Result<Examined, OfflineError> {
    examine(cache, backings, &mut [], Options { compare_clean: true, ..Options::default() })
}

/// Checks a set between two turns. It only reads the images, and the set's own models do not settle
/// anything: a crash of our daemon leaves a note that has still to be replayed, and a crash of a
/// kernel may leave clean extents that the backing device does not hold.
///
/// # Errors
/// [`OfflineError`]: whatever fails the examination.
pub fn judge(set: &CacheSet) -> Result<(), OfflineError> {
    examine(&set.cache, &set.backings, &mut set.models.clone(), Options::default()).map(|_examined| ())
}

/// Checks the set on `cache` and `backings`, and compares each volume's whole content with its
/// model. This settles in the model what a crash left open.
///
/// # Errors
/// [`OfflineError`]: whatever fails the examination.
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

/// Records in the models what the backing devices hold under clean copies that differ from them: a
/// kernel's crash leaves such copies (`docs/reliability.md`, *changed*). Returns the number of
/// those sectors.
///
/// # Errors
/// [`OfflineError`], also if a backing device has lost flushed data under a clean copy.
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
            let DataSource::Cache { sector: copy, dirty: false } = piece.source else { continue };
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

/// Returns the volumes of the backing devices in the order of `backings`, whatever their order in
/// the table, followed by the flash-only volumes.
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

/// Opens the images for reading.
fn open_images(cache: &Path, backings: &[PathBuf]) -> Result<(File, Vec<File>), OfflineError> {
    let open = |path: &Path| {
        File::open(path).map_err(|source| OfflineError::Open { path: path.display().to_string(), source })
    };
    let backings = backings.iter().map(|path| open(path)).collect::<Result<_, _>>()?;
    Ok((open(cache)?, backings))
}

/// Reads a volume from its first sector to its last, as a stream.
struct VolumeReader<'a, 'b> {
    view: &'a SetView<'b>,
    inode: Inode,
    sector: u64,
    end: u64,
}

impl Read for VolumeReader<'_, '_> {
    /// Reads whole sectors only: the buffered reader above always requests many.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let sectors = (buffer.len() as u64 / 512).min(self.end - self.sector);
        let bytes = usize::try_from(sectors * 512).map_err(io::Error::other)?;
        self.view.read(self.inode, self.sector, &mut buffer[..bytes])?;
        self.sector += sectors;
        Ok(bytes)
    }
}
