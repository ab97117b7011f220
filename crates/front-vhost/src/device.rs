//! Handles a VMM's messages: the disk as one client has configured it.
//!
//! The crate `vhost` receives and checks messages and calls the methods here. Its companion
//! `vhost-user-backend` would also provide rings and threads. But it cannot record in-flight
//! requests in the VMM's memory, without which they are lost when a daemon dies. It would also put
//! a thread and a lock between the messages and each ring.

use crate::config::{self, GuestBlockSize, SPACE_BYTES};
use crate::config_notice::ConfigNotifier;
use crate::inflight::{self, InflightArea};
use crate::memory::{MemoryTable, REGIONS_MAX};
use crate::requests::{EndReason, RequestHandler, TakeOutcome, TurnQuota};
use crate::ring::{RING_SIZE_MAX, Ring};
use bcached_port::ExportTable;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

/// A disk, for one client.
pub(crate) struct Device {
    pub(crate) serving: RequestHandler,
    pub(crate) rings: Vec<Ring>,
    pub(crate) memory: MemoryTable,
    exports: ExportTable,
    block: GuestBlockSize,
    features: u64,
    is_read_only: bool,
    inflight: Option<InflightArea>,
    /// The backend channel to the VMM, and one that comes with the message being read.
    notices: Option<ConfigNotifier>,
    pub(crate) notices_offered: Option<ConfigNotifier>,
    /// Waits until replies may have arrived, at most for the given time.
    wait: WaitFn,
    /// How long a ring may take to stop.
    drain: Duration,
    /// The engine's thread serves the rings.
    pub(crate) is_lent: bool,
    /// The ring whose turn is first on the engine's thread.
    first: usize,
    /// The memory for recording in-flight requests is, or once was, of a kind that may block.
    has_waited: bool,
    /// A ring was placed when no guest memory had been shared.
    pub(crate) shares_nothing: bool,
}

/// How a turn of the engine's thread ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TurnOutcome {
    /// There is nothing to do until the next event.
    Idle,
    /// There is more to do.
    More,
    /// Something has to be done by the volume's own thread.
    NeedsThread,
}

/// Waits until the bell has rung, at most for the given time.
pub(crate) type WaitFn = Box<dyn FnMut(Duration) + Send>;

/// The parameters of a device.
pub(crate) struct DeviceParams {
    pub(crate) exports: ExportTable,
    pub(crate) block: GuestBlockSize,
    pub(crate) is_read_only: bool,
    pub(crate) queues: u16,
    pub(crate) wait: WaitFn,
    pub(crate) drain: Duration,
}

/// The protocol features that are supported beyond the base protocol.
const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

impl Device {
    pub(crate) fn new(serving: RequestHandler, setup: DeviceParams) -> io::Result<Self> {
        let rings = (0..setup.queues).map(|_| Ring::new()).collect::<std::result::Result<_, _>>();
        Ok(Self {
            serving,
            rings: rings.map_err(io::Error::other)?,
            memory: MemoryTable::default(),
            exports: setup.exports,
            block: setup.block,
            features: 0,
            is_read_only: setup.is_read_only,
            inflight: None,
            notices: None,
            notices_offered: None,
            wait: setup.wait,
            drain: setup.drain,
            is_lent: false,
            first: 0,
            has_waited: false,
            shares_nothing: false,
        })
    }

    /// Takes requests from ring `index`. Returns true if there may be more.
    pub(crate) fn take(&mut self, index: u16) -> bool {
        let memory = Arc::clone(self.memory.mapped());
        let ring = &mut self.rings[usize::from(index)];
        if !ring.is_running() {
            return false;
        }
        ring.hush(&memory);
        ring.set_faulty(false);
        self.serving.begin_turn(TurnQuota::of_thread(ring.size()));
        let taken = self.serving.take((index, ring), &memory, false);
        ring.tell(&memory);
        match taken {
            TakeOutcome::QuotaUsed => true,
            // The bell will ring; kicks are not needed.
            TakeOutcome::Full => false,
            TakeOutcome::Drained => ring.listen(&memory),
        }
    }

    /// Passes the engine's replies to the guest.
    pub(crate) fn answer(&mut self) {
        let memory = Arc::clone(self.memory.mapped());
        self.serving.begin_turn(TurnQuota::of_thread(u16::MAX));
        while self.serving.answer(&mut self.rings, &memory) {
            self.serving.begin_turn(TurnQuota::of_thread(u16::MAX));
        }
        self.rings.iter_mut().for_each(|ring| ring.tell(&memory));
    }

    /// The reason why this client is no longer served, if there is one.
    pub(crate) fn over(&mut self) -> Option<EndReason> {
        if self.inflight.as_ref().is_some_and(InflightArea::is_cut) {
            self.serving.over.get_or_insert(EndReason::Memory);
        }
        self.serving.is_over(self.memory.mapped());
        self.serving.over
    }

    /// Lends the rings to the engine's thread, if nothing about them can make it wait. From then on
    /// `watch` signals kicks.
    pub(crate) fn lend(&mut self, watch: &Arc<OwnedFd>) -> bool {
        let is_fit = self.over().is_none() && self.memory.never_waits() && !self.has_waited;
        let has_any = self.rings.iter().any(Ring::is_running);
        self.is_lent = is_fit && has_any && self.rings.iter_mut().all(|ring| ring.is_fit(watch));
        self.is_lent
    }

    /// Performs a turn of the engine's thread. `is_rung`: there may be replies, or room for kept
    /// requests.
    pub(crate) fn turn(&mut self, is_rung: bool) -> TurnOutcome {
        let memory = Arc::clone(self.memory.mapped());
        let was_writing = self.serving.is_writing();
        self.serving.begin_turn_on_ring();
        let mut has_more = is_rung && self.serving.answer(&mut self.rings, &memory);
        self.serving.begin_takes_on_ring();
        let count = self.rings.len();
        for place in 0..count {
            let at = (self.first + place) % count;
            let (index, ring) = (u16::try_from(at).unwrap_or(u16::MAX), &mut self.rings[at]);
            let may_take = if self.serving.has_kept(index) { is_rung } else { ring.has_available(&memory) };
            if !may_take || !ring.is_running() {
                continue;
            }
            ring.hush(&memory);
            if self.serving.take((index, ring), &memory, false) == TakeOutcome::QuotaUsed {
                // The rings after this one come first in the next turn.
                (self.first, has_more) = (at + 1, true);
                break;
            }
        }
        self.rings.iter_mut().for_each(|ring| ring.tell(&memory));
        let is_for_thread = self.serving.wants_thread || self.over().is_some();
        if is_for_thread || self.serving.is_writing() != was_writing {
            return TurnOutcome::NeedsThread;
        }
        if has_more { TurnOutcome::More } else { TurnOutcome::Idle }
    }

    /// Whether there are requests to take that were not signalled.
    pub(crate) fn has_news(&self) -> bool {
        let memory = self.memory.mapped();
        let has = |(index, ring): (u16, &Ring)| {
            ring.is_running() && !self.serving.has_kept(index) && ring.has_available(memory)
        };
        (0..).zip(&self.rings).any(has)
    }

    /// Enables kicks. Returns true if there are requests already.
    pub(crate) fn listen(&mut self) -> bool {
        let memory = Arc::clone(self.memory.mapped());
        let mut has_any = false;
        for (index, ring) in (0..).zip(&mut self.rings) {
            // A ring with a kept request waits for the bell.
            if ring.is_running() && !self.serving.has_kept(index) {
                has_any |= ring.listen(&memory);
            }
        }
        has_any
    }

    /// Takes no more requests from any ring.
    pub(crate) fn pause(&mut self) {
        self.rings.iter_mut().for_each(Ring::pause);
    }

    /// Works on the requests taken, without waiting. Returns whether all of them have been given
    /// back.
    pub(crate) fn finish(&mut self) -> bool {
        self.answer();
        let memory = Arc::clone(self.memory.mapped());
        self.serving.begin_turn(TurnQuota::of_thread(u16::MAX));
        let mut is_idle = true;
        for (index, ring) in (0..).zip(&mut self.rings) {
            if ring.is_started() {
                self.serving.take((index, ring), &memory, true);
                ring.tell(&memory);
                is_idle &= self.serving.is_idle(index, ring);
            }
        }
        is_idle
    }

    /// Tells the VMM that the configuration space has changed, if it has set up the channel.
    pub(crate) fn tell_of_change(&self) {
        let Some(notices) = &self.notices else { return };
        if let Err(error) = notices.changed() {
            let volume = &self.serving.export.name;
            tracing::debug!(
                event = "vhost-change-untold",
                volume,
                %error,
                "cannot tell the VMM that the volume has changed"
            );
        }
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index)).ok_or(Error::InvalidParam)
    }

    /// Waits until every request taken from a ring has been given back, but at most for the drain
    /// limit.
    fn drain(&mut self, index: u16) {
        let deadline = Instant::now() + self.drain;
        self.rings[usize::from(index)].pause();
        loop {
            self.finish();
            let ring = &self.rings[usize::from(index)];
            let left = deadline.saturating_duration_since(Instant::now());
            if self.serving.is_idle(index, ring) {
                return;
            }
            if left.is_zero() {
                let (volume, requests) = (&self.serving.export.name, ring.under_way);
                tracing::warn!(
                    event = "vhost-not-drained",
                    volume,
                    requests,
                    "a ring is stopped before all of its requests are answered"
                );
                return;
            }
            (self.wait)(left);
        }
    }

    fn size_now(&self) -> [u8; SPACE_BYTES] {
        let known = &self.serving.export;
        // The volume may have grown since the client connected. A different volume of the same name
        // does not count.
        let now = self.exports.find(&known.name).ok().filter(|now| now.uuid == known.uuid);
        let queues = u16::try_from(self.rings.len()).unwrap_or(u16::MAX);
        config::space(now.as_deref().unwrap_or(known), self.block, queues)
    }
}

/// Wraps an error of ours for the crate.
fn refused(error: impl Display) -> Error {
    Error::ReqHandlerError(io::Error::other(error.to_string()))
}

/// The error for unsupported messages.
const UNKNOWN: Error = Error::InvalidOperation("not supported");

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        Err(UNKNOWN)
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(self.is_read_only, u16::try_from(self.rings.len()).unwrap_or(u16::MAX)))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.get_features()? != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        self.serving.is_write_through = !config::flushes(features);
        // For a VMM without protocol features, rings are enabled from the start.
        let is_enabled = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
        for ring in &mut self.rings {
            ring.set_event_index(config::has_event_index(features));
            if is_enabled {
                ring.set_enabled(true);
            }
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.memory.replace(regions, files).map_err(refused).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, entries: u32) -> Result<()> {
        self.ring(index)?.resize(entries).map_err(refused)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.shares_nothing |= self.memory.is_empty();
        let find = |user| self.memory.guest_address(user).ok_or(Error::InvalidParam);
        let (descriptors, available, used) = (find(descriptors)?, find(available)?, find(used)?);
        self.ring(index)?.place(descriptors, available, used).map_err(refused)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.ring(index)?.set_base(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let started = self.ring(index)?.is_started();
        let number = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        if started {
            self.drain(number);
        }
        let kept = self.serving.forget_kept(number);
        let base = self.ring(index)?.stop(kept);
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        // Without a descriptor the ring would have to be polled continuously.
        let kick = file.ok_or(Error::InvalidParam)?;
        let memory = Arc::clone(self.memory.mapped());
        let ring = self.rings.get_mut(usize::from(index)).ok_or(Error::InvalidParam)?;
        let inflight = self.inflight.as_ref().map(|area| (area, u16::from(index)));
        ring.set_kick(kick, &memory, inflight).map_err(refused)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(u32::from(index))?.set_call(file);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(u32::from(index))?.set_error(file);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        if features & !PROTOCOL.bits() == 0 { Ok(()) } else { Err(Error::InvalidParam) }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.set_enabled(enable);
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let space = self.size_now();
        // Bytes beyond belong to features that are not offered.
        let bytes = space.iter().copied().chain(std::iter::repeat(0));
        Ok(bytes.skip(offset as usize).take(size as usize).collect())
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        Err(UNKNOWN)
    }

    fn set_backend_req_fd(&mut self, _vmm: Backend) {
        self.notices = self.notices_offered.take();
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        Err(UNKNOWN)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(UNKNOWN)
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        if usize::from(queues) > self.rings.len() || size > RING_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        let file = inflight::file(queues, size).map_err(Error::ReqHandlerError)?;
        Ok((VhostUserInflight::new(inflight::area_bytes(queues, size), 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, area: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, size) = (area.num_queues, area.queue_size);
        if usize::from(queues) > self.rings.len() || size > RING_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        let area = InflightArea::map(file, area.mmap_offset, queues, size).map_err(refused)?;
        self.has_waited |= !area.is_memory;
        self.inflight = Some(area);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        self.memory.add(region, file).map_err(refused).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.memory.remove(region).map_err(refused)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(UNKNOWN)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(UNKNOWN)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(UNKNOWN)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(UNKNOWN)
    }
}
