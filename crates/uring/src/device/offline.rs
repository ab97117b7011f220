//! Reading and writing without a driver, for the tools that work on devices while no daemon runs.
//!
//! Reads may start at any sector, whatever the device's block size: the surrounding blocks are
//! read. Writes are whole blocks, so nothing around them is ever rewritten.

use super::{Device, DeviceError, DeviceErrorKind};
use crate::prepared_op::SECTOR;
use bcached_env::Buffer;
use rustix::io::Errno;

impl Device {
    /// Fills `memory` (whole sectors) from `sector` on. Blocks.
    ///
    /// # Errors
    /// Outside the device, or an I/O error; the content of `memory` is then undefined.
    pub fn read_at(&self, sector: u64, memory: &mut [u8]) -> Result<(), DeviceError> {
        let sectors = self.check_range(sector, memory.len())?;
        let block = u64::from(self.info().logical_block_sectors);
        let first = sector / block * block;
        let end = (sector + sectors).next_multiple_of(block);
        let bytes = |sectors: u64| usize::try_from(sectors * SECTOR).expect("the range fits in memory");
        let mut around = Buffer::zeroed(bytes(end - first));
        let mut done = 0;
        while done < around.len() {
            let part = &mut around.as_mut_slice()[done..];
            let target = done + part.len();
            match rustix::io::pread(self.file(), part, first * SECTOR + done as u64) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("read", sector, errno)),
                Ok(got) => {
                    let next = self.advance(done, got, target);
                    done = next.ok_or_else(|| self.failed("read", sector, Errno::IO))?;
                }
            }
        }
        let skip = bytes(sector - first);
        memory.copy_from_slice(&around.as_slice()[skip..skip + memory.len()]);
        Ok(())
    }

    /// Writes `memory` (whole blocks of the device) at `sector`. Blocks; durable only after
    /// [`Device::sync`].
    ///
    /// # Errors
    /// Outside the device, not whole blocks, not opened to own, or an I/O error, after which the
    /// range may hold a mix of old and new data.
    pub fn write_at(&self, sector: u64, memory: &[u8]) -> Result<(), DeviceError> {
        let sectors = self.check_range(sector, memory.len())?;
        let block = self.info().logical_block_sectors;
        if !sector.is_multiple_of(u64::from(block)) || !sectors.is_multiple_of(u64::from(block)) {
            return Err(self.error(DeviceErrorKind::Unaligned { sector, block }));
        }
        let aligned = Buffer::copied_from(memory);
        let mut done = 0;
        while done < aligned.len() {
            match rustix::io::pwrite(self.file(), &aligned.as_slice()[done..], sector * SECTOR + done as u64)
            {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("write", sector, errno)),
                Ok(put) => {
                    let next = self.advance(done, put, aligned.len());
                    done = next.ok_or_else(|| self.failed("write", sector, Errno::IO))?;
                }
            }
        }
        Ok(())
    }

    /// Makes everything written durable. Blocks.
    ///
    /// # Errors
    /// An I/O error; everything written since the last success is then in doubt.
    pub fn sync(&self) -> Result<(), DeviceError> {
        rustix::fs::fdatasync(self.file())
            .map_err(|errno| self.error(DeviceErrorKind::from_errno("sync", errno)))
    }

    /// Returns the length in sectors, if the range is inside the device and made of whole sectors.
    fn check_range(&self, sector: u64, bytes: usize) -> Result<u64, DeviceError> {
        let info = self.info();
        let bytes = bytes as u64;
        if !bytes.is_multiple_of(SECTOR) {
            return Err(self.error(DeviceErrorKind::Unaligned { sector, block: info.logical_block_sectors }));
        }
        match sector.checked_add(bytes / SECTOR) {
            Some(end) if end <= info.sectors => Ok(bytes / SECTOR),
            _ => Err(self.error(DeviceErrorKind::OutOfRange { sector, sectors: info.sectors })),
        }
    }

    fn failed(&self, verb: &str, sector: u64, errno: Errno) -> DeviceError {
        self.error(DeviceErrorKind::Io { doing: format!("{verb} sector {sector} of"), source: errno.into() })
    }
}
