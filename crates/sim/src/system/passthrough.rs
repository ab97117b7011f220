//! The smallest system: each volume is its backing device. It has no cache and no fault, and proves
//! that the simulator raises no false alarms.

use super::{BoxFuture, Geometry, Mode, ProcessContext, Refusal, RunningSystem, System, VolumeShape};
use crate::disk::Device;
use bcached_env::{Buffer, Disk, DiskId, Env, IoError, IoErrorKind};
use bcached_port::{ErrorKind, Operation, Reply};
use std::cell::Cell;
use std::rc::Rc;

/// A system in which volume `v` is device `1 + v`.
pub struct Passthrough;

struct OpenPassthrough {
    env: Env,
    volumes: u32,
    /// By volume.
    failures: Vec<Rc<FlushFailures>>,
}

/// Counts the flushes of one device that have failed. Each may have dropped what others had
/// written, and the next one succeeds.
#[derive(Default)]
struct FlushFailures {
    count: Cell<u64>,
    /// How many of them a client's flush has reported.
    told: Cell<u64>,
    /// Changes that were acknowledged and are not durable by themselves.
    acknowledged: Cell<u64>,
}

/// Like [`serve`], but no successful flush hides the failure of another one. This holds for changes
/// that needed both flushes to be durable, for changes that were acknowledged before, and for
/// changes in flight that are acknowledged afterwards.
async fn serve_durably(disk: Disk, operation: Operation, failures: Rc<FlushFailures>) -> Reply {
    let is_flush = matches!(operation, Operation::Flush);
    let is_read = matches!(operation, Operation::Read { .. });
    let (begun, before) = (failures.count.get(), failures.acknowledged.get());
    let known = if is_flush { failures.told.get() } else { begun };
    let mut reply = serve(disk, operation).await;
    if is_read {
        return reply;
    }
    let own = u64::from(reply.result.is_err());
    failures.count.update(|count| count + own);
    if failures.count.get() > known && reply.result.is_ok() {
        // A flush has failed that may have dropped what was written.
        reply.result = Err(ErrorKind::Io);
    }
    if is_flush {
        // A failure during this flush, its own included, may have dropped what was acknowledged
        // during it: the next flush reports that.
        let is_alone = failures.acknowledged.get() == before;
        failures.told.set(failures.told.get().max(begun + if is_alone { own } else { 0 }));
    } else {
        failures.acknowledged.update(|count| count + u64::from(reply.result.is_ok()));
    }
    reply
}

/// Returns the device behind a volume.
pub(super) fn disk_of(env: &Env, volume: u32) -> Disk {
    env.disk(DiskId(1 + volume))
}

/// Makes devices without any metadata.
pub(super) fn make(geometry: &Geometry) -> Vec<Device> {
    let volumes = 0..u32::try_from(geometry.volumes.len()).expect("few volumes");
    let backing = volumes.map(|volume| geometry.backing_device(volume, 0));
    std::iter::once(geometry.cache_device()).chain(backing).collect()
}

/// Returns the shapes of the volumes.
pub(super) fn shapes(env: &Env, volumes: u32) -> Vec<VolumeShape> {
    let info = |volume| disk_of(env, volume).info();
    let shape = |volume| VolumeShape {
        sectors: info(volume).sectors,
        unit_sectors: info(volume).logical_block_sectors,
    };
    (0..volumes).map(shape).collect()
}

/// Carries out a request for a volume on its device.
pub(super) async fn serve(disk: Disk, operation: Operation) -> Reply {
    let mut memory: Option<Buffer> = None;
    let result = match operation {
        Operation::Read { sector, buffer } => {
            let (result, buffer) = disk.read(sector, buffer).await;
            memory = Some(buffer);
            result
        }
        Operation::Write { sector, payload, fua: true } => disk.write_fua(sector, payload).await,
        Operation::Write { sector, payload, fua: false } => disk.write(sector, payload).await,
        Operation::Flush => disk.flush().await,
        Operation::Discard { sector, sectors, .. } => match disk.discard(sector, sectors).await {
            // A discard is a hint; a device without support leaves the former values, which is
            // allowed.
            Err(error) if error.kind == IoErrorKind::Unsupported => Ok(()),
            other => other,
        },
        Operation::WriteZeroes { sector, sectors, fua, may_discard } => {
            match zero(&disk, sector, sectors, may_discard).await {
                Ok(()) if fua => disk.flush().await,
                other => other,
            }
        }
        Operation::BlockStatus { .. } => return Reply::failed(ErrorKind::Unsupported, None),
    };
    Reply { result: result.map_err(|_| ErrorKind::Io), buffer: memory, extents: Vec::new() }
}

/// Zeroes a range; writes the zeroes if the device cannot zero by itself.
async fn zero(disk: &Disk, sector: u64, sectors: u64, may_unmap: bool) -> Result<(), IoError> {
    let ways: &[bool] = if may_unmap { &[true, false] } else { &[false] };
    for unmap in ways {
        match disk.zero(sector, sectors, *unmap).await {
            Err(error) if error.kind == IoErrorKind::Unsupported => {}
            other => return other,
        }
    }
    let bytes = usize::try_from(sectors).expect("a small device") * crate::stamp::SECTOR;
    disk.write(sector, Buffer::zeroed(bytes).freeze()).await
}

impl System for Passthrough {
    fn name(&self) -> &'static str {
        "passthrough"
    }

    fn make(&self, geometry: &Geometry, _seed: u64) -> Vec<Device> {
        make(geometry)
    }

    fn open(
        &self,
        process: ProcessContext,
        geometry: &Geometry,
    ) -> BoxFuture<Result<Rc<dyn RunningSystem>, Refusal>> {
        let env = process.env;
        let volumes = u32::try_from(geometry.volumes.len()).expect("few volumes");
        let failures = (0..volumes).map(|_| Rc::default()).collect();
        Box::pin(
            async move { Ok(Rc::new(OpenPassthrough { env, volumes, failures }) as Rc<dyn RunningSystem>) },
        )
    }
}

impl RunningSystem for OpenPassthrough {
    fn volumes(&self) -> Vec<VolumeShape> {
        shapes(&self.env, self.volumes)
    }

    fn serve(&self, volume: u32, operation: Operation) -> BoxFuture<Reply> {
        let failures = Rc::clone(&self.failures[volume as usize]);
        Box::pin(serve_durably(disk_of(&self.env, volume), operation, failures))
    }

    fn set_mode(&self, _volume: u32, _mode: Mode) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    fn stop(&self) -> BoxFuture<Result<(), Refusal>> {
        let flush = |volume| {
            serve_durably(
                disk_of(&self.env, volume),
                Operation::Flush,
                Rc::clone(&self.failures[volume as usize]),
            )
        };
        let flushes: Vec<_> = (0..self.volumes).map(flush).collect();
        Box::pin(async move {
            for flush in flushes {
                flush.await.result.map_err(Refusal::from_error)?;
            }
            Ok(())
        })
    }
}
