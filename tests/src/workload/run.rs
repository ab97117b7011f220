//! Runs a workload's steps on a device or server, and checks what is read on the way.
//!
//! The number of each acknowledged flush is reported (`told`): a guest prints it, so that the host
//! knows after a crash what must be durable. Reads are checked against what this workload wrote;
//! sectors it has not written only have to be consistent in themselves.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::pattern::{SECTOR_BYTES, Seen, Stamp, identify};
use super::{Step, Workload};

/// An alignment that every device accepts for direct I/O.
const ALIGNMENT: usize = 4096;

/// Takes the place of a write's sequence number where the last operation was a discard; sequence
/// numbers of writes start at 1.
const DISCARDED: u64 = 0;

/// A device or server on which a workload can run.
pub trait Target {
    /// Fills `bytes` from `sector` on.
    ///
    /// # Errors
    /// The device's error.
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes `bytes` from `sector` on; returns when the device has acknowledged the write.
    ///
    /// # Errors
    /// The device's error.
    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()>;

    /// Discards a range, which reads as zeroes once this returns.
    ///
    /// # Errors
    /// The device's error.
    fn discard(&mut self, sector: u64, sectors: u64) -> io::Result<()>;

    /// Makes everything acknowledged so far survive a power cut; durable once this returns.
    ///
    /// # Errors
    /// The device's error.
    fn flush(&mut self) -> io::Result<()>;
}

/// A block device, for direct I/O.
struct Device {
    file: File,
    path: PathBuf,
}

impl Target for Device {
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, sector * SECTOR_BYTES as u64)
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, sector * SECTOR_BYTES as u64)
    }

    fn discard(&mut self, sector: u64, sectors: u64) -> io::Result<()> {
        let offset = (sector * SECTOR_BYTES as u64).to_string();
        let length = (sectors * SECTOR_BYTES as u64).to_string();
        let mut command = Command::new("blkdiscard");
        command.args(["--force", "--offset", &offset, "--length", &length]).arg(&self.path);
        // blkdiscard prints what it is about to do.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.status()?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("blkdiscard ended with {status}")))
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}

/// Why a workload stopped.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The device failed.
    #[error("{step:?}")]
    Io {
        /// The step.
        step: Step,
        /// The error.
        source: io::Error,
    },
    /// The device could not be opened.
    #[error("open {path}")]
    Open {
        /// The path of the device.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// A read returned something other than what was written.
    #[error("sector {sector} read back {found:?}, wanted write {wanted:?}")]
    Wrong {
        /// The sector.
        sector: u64,
        /// What it holds.
        found: Seen,
        /// This workload's last write there, if any.
        wanted: Option<u64>,
    },
}

/// Runs a whole workload. `told` is called with the number of each flush that was acknowledged.
///
/// # Errors
/// The first step that failed or read wrong data.
pub fn run(workload: &Workload, target: &mut dyn Target, told: &mut dyn FnMut(u64)) -> Result<(), RunError> {
    let mut storage = vec![0; sector_index(workload.write_sectors_max) * SECTOR_BYTES + ALIGNMENT];
    let offset = storage.as_ptr().align_offset(ALIGNMENT);
    let mut written: BTreeMap<u64, u64> = BTreeMap::new();
    for step in workload.steps() {
        let io = |source| RunError::Io { step, source };
        match step {
            Step::Write { sector, sectors, sequence } => {
                let bytes = &mut storage[offset..][..sector_index(sectors) * SECTOR_BYTES];
                for (sector, bytes) in (sector..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
                    Stamp { sector, sequence, volume: workload.volume }.fill(bytes);
                    if workload.read_every != 0 {
                        written.insert(sector, sequence);
                    }
                }
                target.write(sector, bytes).map_err(io)?;
            }
            Step::Discard { sector, sectors, .. } => {
                target.discard(sector, sectors).map_err(io)?;
                if workload.read_every != 0 {
                    written.extend((sector..sector + sectors).map(|sector| (sector, DISCARDED)));
                }
            }
            Step::Read { sector, sectors } => {
                let bytes = &mut storage[offset..][..sector_index(sectors) * SECTOR_BYTES];
                target.read(sector, bytes).map_err(io)?;
                verify(workload.volume, sector, bytes, &written)?;
            }
            Step::Flush { number } => {
                target.flush().map_err(io)?;
                told(number);
            }
        }
    }
    Ok(())
}

/// Opens a block device (or file), bypassing the page cache, and runs a workload on it.
///
/// # Errors
/// Those of [`run`], or that it cannot be opened.
pub fn run_on_device(workload: &Workload, device: &Path, told: &mut dyn FnMut(u64)) -> Result<(), RunError> {
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(direct)
        .open(device)
        .map_err(|source| RunError::Open { path: device.display().to_string(), source })?;
    run(workload, &mut Device { file, path: device.to_owned() }, told)
}

fn verify(volume: u64, first: u64, bytes: &[u8], written: &BTreeMap<u64, u64>) -> Result<(), RunError> {
    for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR_BYTES)) {
        let found = identify(bytes);
        let wanted = written.get(&sector).copied();
        let right = match found {
            Seen::Blank => wanted.is_none_or(|sequence| sequence == DISCARDED),
            Seen::Written(stamp) => {
                stamp.sector == sector
                    && stamp.volume == volume
                    && wanted.is_none_or(|sequence| sequence == stamp.sequence)
            }
            Seen::Junk(_) => false,
        };
        if !right {
            return Err(RunError::Wrong { sector, found, wanted });
        }
    }
    Ok(())
}

/// Converts a number of sectors to an index; a write is a few MiB at most.
fn sector_index(sectors: u64) -> usize {
    usize::try_from(sectors).expect("a write fits in memory")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Fate, Model};

    const WORKLOAD: Workload = Workload {
        seed: 3,
        volume: 1,
        first_sequence: 1,
        first_sector: 0,
        sectors: 128,
        block_sectors: 1,
        write_sectors_max: 16,
        writes: 200,
        flush_every: 50,
        flushes_max: 0,
        read_every: 2,
        discard_every: 0,
    };

    /// A memory device that may lose one write: the `lose_write`th from now.
    struct Memory {
        bytes: Vec<u8>,
        lose_write: Option<usize>,
    }

    impl Target for Memory {
        fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()> {
            bytes.copy_from_slice(&self.bytes[sector_index(sector) * SECTOR_BYTES..][..bytes.len()]);
            Ok(())
        }

        fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
            if let Some(left) = &mut self.lose_write {
                *left = left.wrapping_sub(1);
                if *left == 0 {
                    return Ok(());
                }
            }
            self.bytes[sector_index(sector) * SECTOR_BYTES..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn discard(&mut self, sector: u64, sectors: u64) -> io::Result<()> {
            self.write(sector, &vec![0; sector_index(sectors) * SECTOR_BYTES])
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn memory(lose_write: Option<usize>) -> Memory {
        Memory { bytes: vec![0; 128 * SECTOR_BYTES], lose_write }
    }

    #[test]
    fn the_model_equals_what_a_faithful_device_holds() {
        let mut memory = memory(None);
        let mut flushes = Vec::new();
        run(&WORKLOAD, &mut memory, &mut |number| flushes.push(number)).expect("a faithful device");
        assert_eq!(flushes, [1, 2, 3, 4]);
        let mut model = Model::blank(1, 128);
        model.apply(&WORKLOAD, Fate::Finished);
        model.check(&memory.bytes[..]).expect("the same steps");
    }

    #[test]
    fn a_device_that_loses_one_discard_is_caught() {
        let workload = Workload { discard_every: 20, ..WORKLOAD };
        run(&workload, &mut memory(None), &mut |_| {}).expect("a faithful device");
        let result = run(&workload, &mut memory(Some(20)), &mut |_| {});
        let found = matches!(result, Err(RunError::Wrong { wanted: Some(DISCARDED), .. }));
        assert!(found, "{result:?}");
    }

    #[test]
    fn a_device_that_loses_one_write_is_caught() {
        let result = run(&WORKLOAD, &mut memory(Some(20)), &mut |_| {});
        assert!(matches!(result, Err(RunError::Wrong { .. })), "{result:?}");
    }
}
