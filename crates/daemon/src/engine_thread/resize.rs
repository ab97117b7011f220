//! Resizes volumes: how large a backing device lets its volume be, and what the driver is told of
//! that.

use super::{Command, Engine, STATUS_LIMIT};
use bcached_engine::{CacheSet, CancelToken, Error, LostRange, PendingShrink, VolumeId};
use bcached_uring::{Device, Disks};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

/// What is below a volume.
pub struct UnderlyingDevice {
    device: Arc<Device>,
    /// Where the volume's data begins on it, in sectors.
    data_offset: u64,
}

/// What is below `volume`, if anything is.
pub fn under(set: &CacheSet, disks: &Disks, volume: VolumeId) -> Option<UnderlyingDevice> {
    Some(UnderlyingDevice {
        device: disks.device(set.disk_of(volume)?)?,
        data_offset: set.data_offset(volume)?,
    })
}

/// Grows the volume to `sectors`; its device, if it has one, was seen to have that many.
pub async fn grow(
    set: &CacheSet,
    disks: &Disks,
    volume: VolumeId,
    sectors: u64,
    cancel: &CancelToken,
) -> Result<(), Error> {
    let Some(UnderlyingDevice { device, data_offset }) = under(set, disks, volume) else {
        return set.grow(volume, sectors, cancel).await;
    };
    let before = device.info().sectors;
    device.count_on(before.max(data_offset + sectors));
    let grown = set.grow(volume, sectors, cancel).await;
    if grown.is_err() {
        device.count_on(before);
    }
    grown
}

/// Shrinks the volume to `sectors`. Once that is done, its device may be made that short.
pub async fn shrink(
    set: &CacheSet,
    disks: &Disks,
    volume: VolumeId,
    sectors: u64,
    cancel: &CancelToken,
) -> Result<(), Error> {
    set.shrink(volume, sectors, cancel).await?;
    if let Some(UnderlyingDevice { device, data_offset }) = under(set, disks, volume) {
        device.count_on(data_offset + sectors);
    }
    Ok(())
}

impl Engine {
    /// Returns how many sectors of the volume are dirty from `sector` on; `None` if the engine does
    /// not answer in time.
    pub fn dirty_from(&self, volume: VolumeId, sector: u64) -> Option<u64> {
        let (send, receive) = mpsc::channel();
        self.send(Command::Task(Box::new(move |set, env| {
            env.spawn(async move {
                let _gone = send.send(set.dirty_from(volume, sector).await.ok());
            });
        })));
        receive.recv_timeout(STATUS_LIMIT).ok().flatten()
    }

    /// Returns how large a flash-only volume can become, in sectors; `None` if the engine does not
    /// answer in time.
    pub fn flash_sectors_max(&self, volume: VolumeId) -> Option<Result<u64, Error>> {
        let (send, receive) = mpsc::channel();
        let count = move |set: CacheSet| async move { set.flash_sectors_max(volume).await };
        self.attempt(count, Box::new(move |counted| drop(send.send(counted))));
        receive.recv_timeout(STATUS_LIMIT).ok()
    }

    /// Prepares to shrink a flash-only volume to `sectors`, as the job of this number. Waits.
    pub fn begin_shrinking(
        &self,
        number: u64,
        volume: VolumeId,
        sectors: u64,
    ) -> Result<PendingShrink, Error> {
        let (done, waits) = mpsc::channel();
        let answer = Box::new(move |begun| drop(done.send(begun)));
        self.send(Command::BeginShrinking(number, volume, sectors, answer));
        waits.recv().unwrap_or(Err(Error::Stopping))
    }

    /// Returns some of the data that it would lose, from sector `at` on, and where the rest begins.
    /// Waits.
    pub fn lost_behind(&self, of: &PendingShrink, at: u64) -> Result<(Vec<LostRange>, Option<u64>), Error> {
        let of = of.clone();
        self.wait_for(move |set| async move { set.lost_behind(&of, at).await })
    }

    /// Completes the shrinking. Waits.
    pub fn shrink_flash_only(&self, shrinking: PendingShrink) -> Result<(), Error> {
        self.wait_for(move |set| async move { set.shrink_flash_only(shrinking).await })
    }

    /// Abandons the shrinking.
    pub fn keep_size(&self, shrinking: PendingShrink) {
        self.send(Command::Task(Box::new(move |set, _| set.keep_size(shrinking))));
    }

    /// Returns how many sectors the volume can have on its backing device as that is now. A
    /// separate thread asks the device. Returns `None` if the device or the engine does not answer
    /// in time, or if there is no device.
    pub fn capacity(&self, volume: VolumeId) -> Option<Result<u64, String>> {
        let (send, receive) = mpsc::channel();
        self.send(Command::UnderlyingDevice(
            volume,
            Box::new(move |under| {
                let Some(UnderlyingDevice { device, data_offset }) = under else { return };
                let ask = move || {
                    let found = device.capacity().map(|sectors| sectors.saturating_sub(data_offset));
                    let _gone = send.send(found.map_err(|error| error.to_string()));
                };
                // If no thread is available, no answer comes.
                let _none = thread::Builder::new().name("size".to_owned()).spawn(ask);
            }),
        ));
        receive.recv_timeout(STATUS_LIMIT).ok()
    }
}
