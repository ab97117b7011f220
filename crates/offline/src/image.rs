//! Devices as the offline checker reads them.

use super::device::Device;
use bcached_check::ReadAt;
use bcached_control::failure::Failure;
use std::cell::RefCell;
use std::io;

const SECTOR_BYTES: usize = 512;

/// A device that remembers whether a read has failed: a finding about bytes that could not be read
/// is not damage.
pub struct Image<'a> {
    device: &'a Device,
    failed: RefCell<Option<Failure>>,
}

impl<'a> Image<'a> {
    /// Wraps `device`.
    pub fn of(device: &'a Device) -> Self {
        Self { device, failed: RefCell::new(None) }
    }

    /// The first read failure.
    pub fn failure(&self) -> Option<Failure> {
        self.failed.borrow().clone()
    }
}

impl ReadAt for Image<'_> {
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()> {
        // A device reads whole sectors, the checker exactly the bytes of a structure.
        let mut whole = vec![0; buffer.len().next_multiple_of(SECTOR_BYTES)];
        self.device.read_at(sector, &mut whole).map_err(|error| {
            let other = io::Error::other(error.to_string());
            self.failed.borrow_mut().get_or_insert(error.into());
            other
        })?;
        buffer.copy_from_slice(&whole[..buffer.len()]);
        Ok(())
    }

    fn sectors(&self) -> u64 {
        self.device.info().sectors
    }
}
