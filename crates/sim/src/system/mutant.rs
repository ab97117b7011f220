//! Faulty variants of the passthrough, with one fault each. A simulator that lets one of them pass
//! is broken; the tests run all of them through the random workload and check that each one is
//! caught.

use super::passthrough::{disk_of, make, serve, shapes};
use super::{BoxFuture, Geometry, Mode, ProcessContext, Refusal, RunningSystem, System, VolumeShape};
use crate::disk::Device;
use crate::stamp::SECTOR;
use bcached_env::{Buffer, Disk, Env, Payload};
use bcached_port::{Operation, Reply};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// The fault of a variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MutantFault {
    /// A flush is acknowledged and not carried out.
    FlushSkipped,
    /// A flush is acknowledged before it is carried out.
    FlushEarly,
    /// FUA is dropped from writes.
    FuaLost,
    /// A stop does not flush.
    StopWithoutFlush,
    /// A write is acknowledged first and carried out a little later, in any order.
    WriteLate,
    /// A large write is acknowledged when its first half is written.
    WriteHalfLate,
    /// The last sector (or block) of some writes is not written.
    WriteShort,
    /// Some writes are shifted by one block.
    WriteShifted,
    /// Data that was read once is served from memory for a while, whatever was written since.
    ReadStale,
    /// Some reads return another volume's data.
    ReadElsewhere,
    /// Only half of the range of a zeroing is zeroed.
    ZeroesHalf,
    /// A discard reaches one block beyond its range.
    DiscardWide,
    /// A discard is acknowledged and takes effect later, below what was read or written since.
    DiscardLate,
    /// Now and then a request is never answered.
    Forgets,
    /// Opening restores an old copy of a block.
    OpenReverts,
    /// A write changes its device in two steps; the first one writes zeroes.
    WriteThroughZero,
    /// Requests are submitted to the device unaligned to its blocks (on 512-byte devices: beyond
    /// the end).
    Unaligned,
}

/// All faults.
pub const ALL: [MutantFault; 17] = [
    MutantFault::FlushSkipped,
    MutantFault::FlushEarly,
    MutantFault::FuaLost,
    MutantFault::StopWithoutFlush,
    MutantFault::WriteLate,
    MutantFault::WriteHalfLate,
    MutantFault::WriteShort,
    MutantFault::WriteShifted,
    MutantFault::ReadStale,
    MutantFault::ReadElsewhere,
    MutantFault::ZeroesHalf,
    MutantFault::DiscardWide,
    MutantFault::DiscardLate,
    MutantFault::Forgets,
    MutantFault::OpenReverts,
    MutantFault::WriteThroughZero,
    MutantFault::Unaligned,
];

/// The fault strikes once in this many times, so that one check does not find it.
const SELDOM: u64 = 10;

/// A passthrough with one fault.
pub struct Mutant {
    name: String,
    fault: MutantFault,
}

impl Mutant {
    /// Creates a variant with this fault.
    #[must_use]
    pub fn new(fault: MutantFault) -> Self {
        Self { name: format!("mutant-{fault:?}"), fault }
    }
}

/// What was read, by volume and first sector.
type ReadHistory = BTreeMap<(u32, u64), Vec<u8>>;

struct OpenMutant {
    env: Env,
    fault: MutantFault,
    volumes: u32,
    requests: Cell<u64>,
    seen: Rc<RefCell<ReadHistory>>,
}

impl System for Mutant {
    fn name(&self) -> &str {
        &self.name
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
        let fault = self.fault;
        let volumes = u32::try_from(geometry.volumes.len()).expect("few volumes");
        Box::pin(async move {
            if fault == MutantFault::OpenReverts {
                revert_something(&env).await;
            }
            let (requests, seen) = (Cell::new(0), Rc::default());
            Ok(Rc::new(OpenMutant { env, fault, volumes, requests, seen }) as Rc<dyn RunningSystem>)
        })
    }
}

/// Copies the first written block that it finds to the unused cache device, and restores it on the
/// next opening.
async fn revert_something(env: &Env) {
    let (disk, spare) = (disk_of(env, 0), env.disk(bcached_env::DiskId(0)));
    let unit = u64::from(disk.info().logical_block_sectors);
    let bytes = disk.info().logical_block_sectors as usize * SECTOR;
    let (result, kept) = spare.read(0, Buffer::zeroed(bytes)).await;
    if result.is_ok() && kept.as_slice().iter().any(|byte| *byte != 0) {
        let _unheard = disk.write_fua(64 * unit, kept.freeze()).await;
        return;
    }
    let (result, found) = disk.read(64 * unit, Buffer::zeroed(bytes)).await;
    if result.is_ok() {
        let _unheard = spare.write_fua(0, found.freeze()).await;
    }
}

impl OpenMutant {
    /// Returns true for one in [`SELDOM`] requests.
    fn seldom(&self) -> bool {
        self.requests.set(self.requests.get() + 1);
        self.requests.get().is_multiple_of(SELDOM)
    }

    /// Does `work` after a delay; no caller waits for it.
    fn later(&self, work: impl Future<Output = Reply> + 'static) {
        let env = self.env.clone();
        let delay = Duration::from_micros(self.env.random() % 20_000);
        self.env.spawn(async move {
            env.sleep(delay).await;
            work.await;
        });
    }

    fn write(&self, disk: Disk, sector: u64, payload: Payload, fua: bool) -> BoxFuture<Reply> {
        let unit = u64::from(disk.info().logical_block_sectors);
        let unit_bytes = disk.info().logical_block_sectors as usize * SECTOR;
        let write = |sector, payload, fua| Operation::Write { sector, payload, fua };
        let half = payload.len() / unit_bytes / 2 * unit_bytes;
        match self.fault {
            MutantFault::FuaLost => Box::pin(serve(disk, write(sector, payload, false))),
            MutantFault::WriteLate if self.seldom() => {
                self.later(serve(disk, write(sector, payload, fua)));
                done()
            }
            MutantFault::WriteHalfLate if half > 0 => {
                let (first, rest) = (payload.slice(0..half), payload.slice(half..payload.len()));
                let middle = sector + (half / SECTOR) as u64;
                self.later(serve(disk.clone(), write(middle, rest, fua)));
                Box::pin(serve(disk, write(sector, first, fua)))
            }
            MutantFault::WriteShort if half > 0 && self.seldom() => {
                let short = payload.slice(0..payload.len() - unit_bytes);
                Box::pin(serve(disk, write(sector, short, fua)))
            }
            MutantFault::WriteShifted if self.seldom() => {
                let sectors = (payload.len() / SECTOR) as u64;
                let shifted = (sector + unit).min(disk.info().sectors - sectors);
                Box::pin(serve(disk, write(shifted, payload, fua)))
            }
            MutantFault::WriteThroughZero => Box::pin(async move {
                let sectors = (payload.len() / SECTOR) as u64;
                let _unheard = disk.zero(sector, sectors, false).await;
                serve(disk, write(sector, payload, fua)).await
            }),
            MutantFault::Unaligned if self.seldom() => {
                let off = if unit > 1 { sector + 1 } else { disk.info().sectors };
                Box::pin(serve(disk, write(off, payload, fua)))
            }
            _ => Box::pin(serve(disk, write(sector, payload, fua))),
        }
    }

    fn read(&self, volume: u32, disk: Disk, sector: u64, buffer: Buffer) -> BoxFuture<Reply> {
        match self.fault {
            MutantFault::ReadStale => {
                Box::pin(serve_seen(Rc::clone(&self.seen), disk, volume, sector, buffer))
            }
            MutantFault::ReadElsewhere if self.seldom() => {
                let other = disk_of(&self.env, (volume + 1) % self.volumes);
                Box::pin(serve(other, Operation::Read { sector, buffer }))
            }
            _ => Box::pin(serve(disk, Operation::Read { sector, buffer })),
        }
    }
}

/// Serves once what was read here before; otherwise reads and remembers.
async fn serve_seen(
    seen: Rc<RefCell<ReadHistory>>,
    disk: Disk,
    volume: u32,
    sector: u64,
    buffer: Buffer,
) -> Reply {
    let kept = seen.borrow_mut().remove(&(volume, sector));
    if let Some(kept) = kept.filter(|kept| kept.len() == buffer.len()) {
        return Reply::content(Buffer::copied_from(&kept));
    }
    let reply = serve(disk, Operation::Read { sector, buffer }).await;
    if let (Ok(()), Some(buffer)) = (&reply.result, &reply.buffer) {
        seen.borrow_mut().insert((volume, sector), buffer.as_slice().to_vec());
    }
    reply
}

const fn zeroes(sector: u64, sectors: u64, fua: bool) -> Operation {
    Operation::WriteZeroes { sector, sectors, fua, may_discard: false }
}

/// Answers at once.
fn done() -> BoxFuture<Reply> {
    Box::pin(async { Reply::done() })
}

impl RunningSystem for OpenMutant {
    fn volumes(&self) -> Vec<VolumeShape> {
        shapes(&self.env, self.volumes)
    }

    fn serve(&self, volume: u32, operation: Operation) -> BoxFuture<Reply> {
        let disk = disk_of(&self.env, volume);
        let unit = u64::from(disk.info().logical_block_sectors);
        match (self.fault, operation) {
            (MutantFault::FlushSkipped, Operation::Flush) => done(),
            (MutantFault::FlushEarly, Operation::Flush) => {
                self.later(serve(disk, Operation::Flush));
                done()
            }
            (MutantFault::Forgets, _) if self.requests.replace(self.requests.get() + 1) == 60 => {
                Box::pin(std::future::pending())
            }
            (MutantFault::DiscardWide, Operation::Discard { sector, sectors, .. }) => {
                let sectors = (sectors + unit).min(disk.info().sectors - sector);
                Box::pin(serve(disk, zeroes(sector, sectors, false)))
            }
            (MutantFault::DiscardLate, Operation::Discard { sector, sectors, .. }) => {
                self.later(serve(disk, zeroes(sector, sectors, false)));
                done()
            }
            (MutantFault::ZeroesHalf, Operation::WriteZeroes { sector, sectors, fua, .. }) => {
                let sectors = (sectors / 2 / unit * unit).max(unit);
                Box::pin(serve(disk, zeroes(sector, sectors, fua)))
            }
            (_, Operation::Write { sector, payload, fua }) => self.write(disk, sector, payload, fua),
            (_, Operation::Read { sector, buffer }) => self.read(volume, disk, sector, buffer),
            (_, operation) => Box::pin(serve(disk, operation)),
        }
    }

    fn set_mode(&self, _volume: u32, _mode: Mode) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    fn stop(&self) -> BoxFuture<Result<(), Refusal>> {
        let skipped = self.fault == MutantFault::StopWithoutFlush;
        let volumes = if skipped { 0 } else { self.volumes };
        let disks: Vec<Disk> = (0..volumes).map(|volume| disk_of(&self.env, volume)).collect();
        Box::pin(async move {
            for disk in disks {
                disk.flush().await.map_err(Refusal::from_error)?;
            }
            Ok(())
        })
    }
}
