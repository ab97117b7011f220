//! Provides what the host of a set needs besides its devices: memory that acts as a device.

use super::ProcessContext;
use crate::disk::{Device, DeviceModel, InitialContent};
use crate::driver::World;
use bcached_env::DiskId;
use bcached_format::{CacheSuperblock, SUPERBLOCK_SECTOR};
use bcached_host::{Machine, without_cache};
use std::cell::RefCell;
use std::rc::Rc;

/// The machine of one process.
pub struct SimMachine {
    world: Rc<RefCell<World>>,
}

impl SimMachine {
    pub fn of(process: &ProcessContext) -> Self {
        Self { world: Rc::clone(&process.world) }
    }
}

impl Machine for SimMachine {
    fn memory_cache(&self, superblock: &CacheSuperblock) -> Result<DiskId, String> {
        let block_sectors = u32::try_from(superblock.block_sectors()).expect("a block is small");
        let mut memory = Device::new(DeviceModel {
            volatile_cache: false,
            background: InitialContent::Zero { data_start: 0 },
            ..DeviceModel::fast(without_cache::SECTORS, block_sectors)
        });
        memory.place(SUPERBLOCK_SECTOR, &superblock.seal()[..]);
        let mut world = self.world.borrow_mut();
        world.hosting.bypasses += 1;
        Ok(world.add_memory(memory))
    }

    fn remove(&self, disk: DiskId) {
        self.world.borrow_mut().remove_memory(disk);
    }
}
