//! Numbers for devices, shared between the driver and the code that adds and removes devices while
//! it runs.
//!
//! The driver keeps a private copy of the list and refreshes it only when the version has changed,
//! so submission costs one atomic load and no lock. A number is never used twice: an operation for
//! a removed disk fails as unreachable and can never reach another device.

use crate::counters::{CounterSnapshot, Counters};
use crate::device::Device;
use bcached_env::{DiskId, DiskInfo};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

#[derive(Default)]
struct DiskRegistry {
    /// Incremented with every change of `devices`, while its lock is held.
    version: AtomicU64,
    devices: RwLock<Vec<Option<Arc<Device>>>>,
    counters: Arc<Counters>,
}

/// The devices of one driver. Clones refer to the same list and may be used from any thread.
#[derive(Clone, Default)]
pub struct Disks(Arc<DiskRegistry>);

impl Disks {
    /// Gives `device` the next number; the driver accepts operations for it from now on.
    ///
    /// # Panics
    /// After 2^32 additions.
    #[must_use = "the number is the only way to the device"]
    pub fn add(&self, device: Device) -> DiskId {
        let mut devices = self.0.devices.write().unwrap_or_else(PoisonError::into_inner);
        let id = u32::try_from(devices.len()).expect("fewer than 2^32 devices in one process's life");
        devices.push(Some(Arc::new(device)));
        self.0.version.fetch_add(1, Ordering::Release);
        DiskId(id)
    }

    /// Removes the device: later operations for it fail as unreachable. It is closed, and its claim
    /// released, when the returned handle and the last operation in flight are gone and the driver
    /// has next looked at the list.
    pub fn remove(&self, disk: DiskId) -> Option<Arc<Device>> {
        let mut devices = self.0.devices.write().unwrap_or_else(PoisonError::into_inner);
        let device = devices.get_mut(usize::try_from(disk.0).ok()?)?.take();
        self.0.version.fetch_add(1, Ordering::Release);
        device
    }

    /// Returns the device with this number.
    #[must_use]
    pub fn device(&self, disk: DiskId) -> Option<Arc<Device>> {
        let devices = self.0.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.get(usize::try_from(disk.0).ok()?)?.clone()
    }

    /// Returns counts of what the driver had to do beyond passing operations on.
    #[must_use]
    pub fn counts(&self) -> CounterSnapshot {
        self.0.counters.read()
    }

    pub(crate) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.0.counters)
    }

    /// Implements [`bcached_env::Driver::info`]: a disk that does not exist has no sectors and no
    /// abilities.
    pub(crate) fn info(&self, disk: DiskId) -> DiskInfo {
        let nothing = DiskInfo {
            sectors: 0,
            logical_block_sectors: 1,
            volatile_cache: true,
            fua: false,
            discard: false,
            write_zeroes: false,
            unmap: false,
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
        };
        self.device(disk).map_or(nothing, |device| device.info())
    }
}

impl core::fmt::Debug for Disks {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_list().entries(self.0.devices.read().iter()).finish()
    }
}

/// The driver's copy of the list.
pub(crate) struct DiskTable {
    disks: Disks,
    version: u64,
    devices: Vec<Option<Arc<Device>>>,
}

impl DiskTable {
    pub(crate) const fn new(disks: Disks) -> Self {
        Self { disks, version: 0, devices: Vec::new() }
    }

    pub(crate) fn get(&mut self, disk: DiskId) -> Option<&Arc<Device>> {
        self.renew();
        self.devices.get(usize::try_from(disk.0).ok()?)?.as_ref()
    }

    /// Adopts changes. Called on each submission and each wait, so that removed devices are closed
    /// soon.
    pub(crate) fn renew(&mut self) {
        if self.version == self.disks.0.version.load(Ordering::Acquire) {
            return;
        }
        let devices = self.disks.0.devices.read().unwrap_or_else(PoisonError::into_inner);
        // Read again under the lock, where it cannot change.
        self.version = self.disks.0.version.load(Ordering::Acquire);
        self.devices.clone_from(&devices);
    }

    pub(crate) const fn disks(&self) -> &Disks {
        &self.disks
    }
}
