//! A VMM: it sets up a guest's queues through the crate's frontend. Every message for which that is
//! possible is acknowledged.

use super::guest::{GuestQueue, MEMORY_BYTES, SIZE, TestGuest};
use super::{LIMIT, wait_until};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};

/// The address of the guest's memory in the VMM.
pub const USER: u64 = 0x7f00_0000_0000;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT_DESC: u64 = 1 << 28;
pub const VERSION_1: u64 = 1 << 32;
pub const BLK_FLUSH: u64 = 1 << 9;
pub const BLK_RO: u64 = 1 << 5;
/// The features that a driver accepts by default.
pub const USUAL: u64 = VERSION_1 | BLK_FLUSH | INDIRECT_DESC | PROTOCOL_FEATURES;

pub struct TestVmm {
    pub frontend: Frontend,
    pub socket: UnixStream,
    pub offered: u64,
}

/// The VMM's addresses of the parts of a queue's ring.
pub fn places(queue: &GuestQueue) -> VringConfigData {
    VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER + queue.descriptors(),
        used_ring_addr: USER + queue.used_ring(),
        avail_ring_addr: USER + queue.available_ring(),
        log_addr: None,
    }
}

impl TestVmm {
    /// Connects, and negotiates up to the features.
    pub fn connect(path: &Path) -> Self {
        Self::try_connect(path).expect("is answered")
    }

    pub fn try_connect(path: &Path) -> Result<Self, vhost::Error> {
        let socket = UnixStream::connect(path).expect("somebody listens");
        socket.set_read_timeout(Some(LIMIT)).expect("a timeout");
        socket.set_write_timeout(Some(LIMIT)).expect("a timeout");
        let mut frontend = Frontend::from_stream(socket.try_clone().expect("a descriptor"), 64);
        frontend.set_owner()?;
        let offered = frontend.get_features()?;
        let protocol = frontend.get_protocol_features()?;
        frontend.set_protocol_features(protocol)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        Ok(Self { frontend, socket, offered })
    }

    /// Connects once the server has noticed that the former VMM is gone.
    pub fn connect_again(path: &Path) -> Self {
        let mut found = None;
        wait_until("a place", || {
            found = Self::try_connect(path).ok();
            found.is_some()
        });
        found.expect("was found")
    }

    pub fn protocol(&mut self) -> VhostUserProtocolFeatures {
        self.frontend.get_protocol_features().expect("is answered")
    }

    pub fn share_memory(&mut self, guest: &TestGuest) {
        self.frontend.set_mem_table(&[region(guest)]).expect("memory is taken");
    }

    /// Sets everything up: the guest's driver runs.
    pub fn run(&mut self, guest: &mut TestGuest, features: u64) {
        self.frontend.set_features(features).expect("features that were offered");
        self.share_memory(guest);
        for queue in &mut guest.queues {
            queue.has_event_index = features & EVENT_IDX != 0;
            let base = queue.used;
            self.start(queue, base, features & PROTOCOL_FEATURES != 0);
        }
    }

    pub fn set_up(&mut self, queue: &GuestQueue, base: u16) {
        let index = usize::from(queue.index);
        self.frontend.set_vring_num(index, SIZE).expect("a size");
        self.frontend.set_vring_base(index, base).expect("a base");
        self.frontend.set_vring_addr(index, &places(queue)).expect("a place");
    }

    pub fn start(&mut self, queue: &GuestQueue, base: u16, enable: bool) {
        let index = usize::from(queue.index);
        self.set_up(queue, base);
        self.frontend.set_vring_kick(index, &queue.kick).expect("starts");
        self.frontend.set_vring_call(index, &queue.call).expect("a call");
        if enable {
            self.frontend.set_vring_enable(index, true).expect("enabled");
        }
    }

    /// Gets an area for in-flight requests, for queues of the usual size.
    pub fn inflight(&mut self, queues: u16) -> (VhostUserInflight, File) {
        let wanted = VhostUserInflight::new(0, 0, queues, SIZE);
        self.frontend.get_inflight_fd(&wanted).expect("an area")
    }

    pub fn set_inflight(&mut self, (area, file): &(VhostUserInflight, File)) {
        self.frontend.set_inflight_fd(area, file.as_raw_fd()).expect("is taken");
    }

    pub fn config(&mut self) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        self.frontend.get_config(0, 60, flags, &[0; 60]).expect("is answered").1
    }

    pub fn capacity(&mut self) -> u64 {
        u64::from_le_bytes(self.config()[..8].try_into().expect("eight"))
    }

    /// Disconnects as if the process were killed.
    pub fn kill(self) {
        drop(self);
    }
}

pub fn region(guest: &TestGuest) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: MEMORY_BYTES,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: guest.file.as_raw_fd(),
    }
}
