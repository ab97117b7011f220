//! Maps what a process has opened to devices. When a device is pulled, its mapping (a
//! [`DeviceMapping`]) leads nowhere permanently; when the device is back, a new mapping leads to
//! it.

use super::{DueEvent, OpResult, World};
use crate::disk::{Device, Survivors, WrittenPart};
use bcached_env::{Buffer, Completion, DiskId, IoErrorKind, Op, Token};
use std::collections::BTreeSet;

/// The first [`DiskId`] of memory that is used as a device.
const MEMORY: u32 = 1 << 16;

/// How long such memory takes for an operation, in nanoseconds.
const MEMORY_NS: u64 = 1000;

/// Returns the index of the memory that a [`DiskId`] leads to, if any.
pub(super) const fn place_of_memory(disk: DiskId) -> Option<usize> {
    if disk.0 < MEMORY { None } else { Some((disk.0 - MEMORY) as usize) }
}

/// What a [`DiskId`] of a process leads to.
#[derive(Clone, Copy)]
pub(super) struct DeviceMapping {
    pub(super) device: usize,
    /// The device was pulled: every request through this way fails from then on.
    pub(super) is_gone: bool,
}

impl DeviceMapping {
    /// Returns the ways of a process that has just started: each number is that of its device.
    pub(super) fn to_each(devices: &[Device]) -> Vec<Self> {
        (0..devices.len()).map(|device| Self { device, is_gone: false }).collect()
    }
}

impl DueEvent {
    /// Returns the device that this event belongs to, if any.
    const fn device(&self) -> Option<usize> {
        match self {
            Self::Land { disk, .. } | Self::Sample { disk, .. } | Self::Done { disk, .. } => Some(*disk),
            Self::Complete(_) => None,
        }
    }

    /// Creates the completion of an operation whose device was pulled.
    const fn gone(token: Token, buffer: Option<Buffer>) -> Self {
        Self::Complete(Completion { token, result: Err(IoErrorKind::Gone), buffer })
    }

    /// Returns what becomes of this event when its device is pulled.
    fn without_device(self) -> Option<Self> {
        match self {
            Self::Land { .. } => None,
            Self::Sample { token, buffer, .. } => Some(Self::gone(token, Some(buffer))),
            Self::Done { token, ending, .. } => {
                let buffer = match ending {
                    OpResult::Read(_, buffer) => Some(buffer),
                    OpResult::Refused(_, buffer) => buffer,
                    OpResult::Write { .. } | OpResult::Flush { .. } => None,
                };
                Some(Self::gone(token, buffer))
            }
            told @ Self::Complete(_) => Some(told),
        }
    }
}

impl World {
    pub(super) fn way(&self, disk: DiskId) -> DeviceMapping {
        self.ways[disk.0 as usize]
    }

    /// Pulls a device. Unanswered operations fail; each was carried out entirely, in part or not at
    /// all, as `survivors` determines. All requests to handles opened before fail from now on. With
    /// its power the device loses what is not durable, except for `survivors`. If everything
    /// survives, the device has kept its power: all content is there and no more durable than
    /// before. Returns the sectors of the device whose content has changed.
    pub fn pull(&mut self, device: usize, survivors: Survivors) -> BTreeSet<u64> {
        self.ways.iter_mut().filter(|way| way.device == device).for_each(|way| way.is_gone = true);
        self.flushing.remove(&device);
        self.devices[device].faults.note_failure();
        for (at, due) in std::mem::take(&mut self.due) {
            let is_struck = due.device() == Some(device);
            if let Some(due) = if is_struck { due.without_device() } else { Some(due) } {
                self.due.insert(at, due);
            }
        }
        self.trace.note(self.now, || format!("device {device} is pulled: {survivors}"));
        self.devices[device].lose_host(device as u64, survivors)
    }

    /// Returns whether a device is reachable through the handle that was opened last.
    #[must_use]
    pub fn is_there(&self, device: usize) -> bool {
        self.ways.iter().any(|way| way.device == device && !way.is_gone)
    }

    /// Opens a device again that was pulled.
    pub fn reopen(&mut self, device: usize) -> DiskId {
        debug_assert!(!self.is_there(device), "it was not pulled");
        self.ways.push(DeviceMapping { device, is_gone: false });
        self.trace.note(self.now, || format!("device {device} is back"));
        DiskId(u32::try_from(self.ways.len() - 1).expect("few ways"))
    }

    /// Adds memory that the process uses as a device until it removes the memory or dies. It never
    /// fails, its operations are not points, and it is invisible from outside.
    pub fn add_memory(&mut self, memory: Device) -> DiskId {
        let disk = DiskId(MEMORY + u32::try_from(self.memories.len()).expect("few devices"));
        self.memories.push(Some(memory));
        disk
    }

    /// Removes memory that is no longer in use.
    pub fn remove_memory(&mut self, disk: DiskId) {
        if let Some(place) = place_of_memory(disk) {
            self.memories[place] = None;
        }
    }

    /// Carries out an operation on such memory at once.
    pub(super) fn submit_to_memory(&mut self, place: usize, token: Token, op: Op) {
        let memory = self.memories[place].as_mut().expect("no operation uses memory that was removed");
        let (result, buffer) = match op {
            Op::Read { sector, mut buffer } => {
                let mut own = vec![0; buffer.len()];
                let result = memory.read(sector, &mut own);
                buffer.put(&own);
                (result, Some(buffer))
            }
            Op::Write { sector, payload, .. } => {
                memory.place(sector, payload.as_slice());
                (Ok(()), None)
            }
            Op::Flush => (Ok(()), None),
            Op::Zero { .. } | Op::Discard { .. } => (Err(IoErrorKind::Unsupported), None),
        };
        self.schedule(self.now + MEMORY_NS, DueEvent::Complete(Completion { token, result, buffer }));
    }

    /// Fails an operation on a device that was pulled.
    pub(super) fn fail_gone(&mut self, device: usize, token: Token, op: Op) {
        let buffer = match op {
            Op::Read { buffer, .. } => Some(buffer),
            _ => None,
        };
        let disk = DiskId(u32::try_from(device).expect("few devices"));
        let end = self.now + self.latency(disk, 1);
        self.schedule(end, DueEvent::gone(token, buffer));
    }

    /// Postpones an event of a stalled device, and fails what a vanished device had begun.
    pub(super) fn delayed(&mut self, due: DueEvent) -> Option<DueEvent> {
        let Some(disk) = due.device() else { return Some(due) };
        let resume = self.devices[disk].stalled_until;
        if resume > self.now {
            self.schedule(resume, due);
            return None;
        }
        if !self.devices[disk].gone {
            return Some(due);
        }
        let gone = IoErrorKind::Unreachable;
        match due {
            DueEvent::Done { disk, token, ending: OpResult::Write { number, .. }, view } => {
                let landed = if self.rng.one_in(2) { WrittenPart::Everything } else { WrittenPart::Nothing };
                self.fail_write(disk, number, landed);
                Some(DueEvent::Done { disk, token, ending: OpResult::Refused(gone, None), view })
            }
            DueEvent::Done { disk, token, ending: OpResult::Flush { .. }, view } => {
                Some(DueEvent::Done { disk, token, ending: OpResult::Refused(gone, None), view })
            }
            DueEvent::Done { disk, token, ending: OpResult::Read(_, buffer), view } => {
                Some(DueEvent::Done { disk, token, ending: OpResult::Refused(gone, Some(buffer)), view })
            }
            other => Some(other),
        }
    }
}
