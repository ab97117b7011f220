//! What a process has opened leads to a device: until that is pulled, and then to nothing for ever.
//! When the device is back, it is at the end of another way.

use super::{Due, Ending, World};
use crate::disk::{Device, Landed, Survivors};
use bcached_env::{Buffer, Completion, DiskId, IoErrorKind, Op, Token};
use std::collections::BTreeSet;

/// The first number of memory that is used as a device.
const MEMORY: u32 = 1 << 16;

/// How long such memory takes for an operation.
const MEMORY_NS: u64 = 1000;

/// Which memory a number leads to, if any.
pub(super) const fn place_of_memory(disk: DiskId) -> Option<usize> {
    if disk.0 < MEMORY { None } else { Some((disk.0 - MEMORY) as usize) }
}

/// What a [`DiskId`] of a process leads to.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) device: usize,
    /// The device was pulled. All that is asked on this way fails from then on.
    pub(super) is_gone: bool,
}

impl Way {
    /// Those of a process that has just begun: each number is that of its device.
    pub(super) fn to_each(devices: &[Device]) -> Vec<Self> {
        (0..devices.len()).map(|device| Self { device, is_gone: false }).collect()
    }
}

impl Due {
    /// Whose doing it is, if it is any device's.
    const fn device(&self) -> Option<usize> {
        match self {
            Self::Land { disk, .. } | Self::Sample { disk, .. } | Self::Done { disk, .. } => Some(*disk),
            Self::Told(_) => None,
        }
    }

    /// An operation whose device was pulled ends.
    const fn gone(token: Token, buffer: Option<Buffer>) -> Self {
        Self::Told(Completion { token, result: Err(IoErrorKind::Gone), buffer })
    }

    /// What becomes of it when the device is pulled.
    fn without_device(self) -> Option<Self> {
        match self {
            Self::Land { .. } => None,
            Self::Sample { token, buffer, .. } => Some(Self::gone(token, Some(buffer))),
            Self::Done { token, ending, .. } => {
                let buffer = match ending {
                    Ending::Read(_, buffer) => Some(buffer),
                    Ending::Refused(_, buffer) => buffer,
                    Ending::Write { .. } | Ending::Flush { .. } => None,
                };
                Some(Self::gone(token, buffer))
            }
            told @ Self::Told(_) => Some(told),
        }
    }
}

impl World {
    pub(super) fn way(&self, disk: DiskId) -> Way {
        self.ways[disk.0 as usize]
    }

    /// Pulls a device. What it was asked and has not answered was done, in part, or not, as `survivors` says, and fails;
    /// all that is asked of what was opened fails from now on. With its power goes what is not durable, but for
    /// `survivors`; if that is everything the device has kept its power, and all is there and no more durable than before.
    /// Which sectors of the device read otherwise than they did.
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

    /// Whether a device can be reached by what was opened last.
    #[must_use]
    pub fn is_there(&self, device: usize) -> bool {
        self.ways.iter().any(|way| way.device == device && !way.is_gone)
    }

    /// Opens a device that was pulled anew.
    pub fn reopen(&mut self, device: usize) -> DiskId {
        debug_assert!(!self.is_there(device), "it was not pulled");
        self.ways.push(Way { device, is_gone: false });
        self.trace.note(self.now, || format!("device {device} is back"));
        DiskId(u32::try_from(self.ways.len() - 1).expect("few ways"))
    }

    /// Memory that the process uses as a device, until it removes that or dies. It never fails,
    /// nothing of it is a point, and nobody sees it from outside.
    pub fn add_memory(&mut self, memory: Device) -> DiskId {
        let disk = DiskId(MEMORY + u32::try_from(self.memories.len()).expect("few devices"));
        self.memories.push(Some(memory));
        disk
    }

    /// Nobody uses it any more.
    pub fn remove_memory(&mut self, disk: DiskId) {
        if let Some(place) = place_of_memory(disk) {
            self.memories[place] = None;
        }
    }

    /// What a process asks of such a device happens at once.
    pub(super) fn submit_to_memory(&mut self, place: usize, token: Token, op: Op) {
        let memory = self.memories[place].as_mut().expect("nobody asks anything of memory that is no more");
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
        self.schedule(self.now + MEMORY_NS, Due::Told(Completion { token, result, buffer }));
    }

    /// Fails what is asked of a device that was pulled.
    pub(super) fn fail_gone(&mut self, device: usize, token: Token, op: Op) {
        let buffer = match op {
            Op::Read { buffer, .. } => Some(buffer),
            _ => None,
        };
        let disk = DiskId(u32::try_from(device).expect("few devices"));
        let end = self.now + self.latency(disk, 1);
        self.schedule(end, Due::gone(token, buffer));
    }

    /// Puts off what a stalled device would do now, and fails what a vanished one had begun.
    pub(super) fn delayed(&mut self, due: Due) -> Option<Due> {
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
            Due::Done { disk, token, ending: Ending::Write { number, .. }, view } => {
                let landed = if self.rng.one_in(2) { Landed::Everything } else { Landed::Nothing };
                self.fail_write(disk, number, landed);
                Some(Due::Done { disk, token, ending: Ending::Refused(gone, None), view })
            }
            Due::Done { disk, token, ending: Ending::Flush { .. }, view } => {
                Some(Due::Done { disk, token, ending: Ending::Refused(gone, None), view })
            }
            Due::Done { disk, token, ending: Ending::Read(_, buffer), view } => {
                Some(Due::Done { disk, token, ending: Ending::Refused(gone, Some(buffer)), view })
            }
            other => Some(other),
        }
    }
}
