//! Submits an operation: checks its form, chooses the fault that strikes it, and schedules its
//! landing and completion.

use super::device_mapping::place_of_memory;
use super::{DeviceMapping, DueEvent, OpResult, OpView, World};
use crate::digest::mix;
use crate::disk::{DiskFault, OpKind, WriteContent, WrittenPart};
use bcached_env::{Buffer, DiskId, IoErrorKind, Op, Token};
use std::ops::Range;

/// One bucket in this many is read slowly, on a cache device that has slow nodes.
const SLOW_ONE_IN: u64 = 4;

/// How many times longer than a write a flush takes.
const FLUSH_FACTOR: u64 = 4;

/// An operation that changes the device.
struct DeviceChange {
    range: Range<u64>,
    content: WriteContent,
    fua: bool,
    kind: OpKind,
}

/// The result of checking a request.
enum Admission {
    /// The device refuses it.
    Refused,
    /// The device accepts it, and this fault, if any, strikes it.
    Accepted(Option<DiskFault>),
}

impl World {
    pub(super) fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        if let Some(place) = place_of_memory(disk) {
            return self.submit_to_memory(place, token, op);
        }
        let DeviceMapping { device, is_gone } = self.way(disk);
        if let Op::Write { payload, .. } = &op {
            self.written[device] += payload.len() as u64;
        }
        if self.halt.is_some() {
            return;
        }
        self.operations += 1;
        if is_gone {
            return self.fail_gone(device, token, op);
        }
        let disk = DiskId(u32::try_from(device).expect("few devices"));
        match op {
            Op::Read { sector, buffer } => self.submit_read(disk, token, sector, buffer),
            Op::Flush => self.submit_flush(disk, token),
            Op::Write { sector, payload, fua } => {
                let range = sector..sector.saturating_add(sectors_in(payload.len()));
                // Copy lent memory now: from here on it belongs to the device, like pages that are
                // under DMA.
                let content = WriteContent::Payload(payload.stable().expect("the payload is readable"));
                self.submit_change(disk, token, DeviceChange { range, content, fua, kind: OpKind::Write });
            }
            Op::Zero { sector, sectors, unmap } => {
                let range = sector..sector.saturating_add(sectors);
                let is_known = self.devices[disk.0 as usize].model.zeroing.does(unmap);
                let content = if is_known { WriteContent::Zero } else { WriteContent::Keep };
                let change = DeviceChange { range, content, fua: false, kind: OpKind::Zero };
                self.submit_change(disk, token, change);
            }
            Op::Discard { sector, sectors } => {
                let range = sector..sector.saturating_add(sectors);
                let content = if self.rng.one_in(2) { WriteContent::Zero } else { WriteContent::Keep };
                let change = DeviceChange { range, content, fua: false, kind: OpKind::Discard };
                self.submit_change(disk, token, change);
            }
        }
    }

    fn submit_read(&mut self, disk: DiskId, token: Token, sector: u64, buffer: Buffer) {
        self.reads[disk.0 as usize] += 1;
        let range = sector..sector.saturating_add(sectors_in(buffer.len()));
        let view = OpView::of(disk, OpKind::Read, range, false);
        self.trace.submitted(self.now, &view, &WriteContent::Keep, None);
        self.pass(&view);
        let Admission::Accepted(fault) = self.screen(&view, Some(&buffer)) else {
            return self.refuse(token, &view, IoErrorKind::Invalid, Some(buffer));
        };
        let latency = self.latency(disk, 1) + self.node_read(&view);
        let done = view.ended();
        let index = disk.0 as usize;
        match fault {
            Some(DiskFault::Never) => {}
            Some(DiskFault::Unreachable) => self.refuse(token, &done, IoErrorKind::Unreachable, Some(buffer)),
            Some(DiskFault::Fail(_)) => self.refuse(token, &done, IoErrorKind::Io, Some(buffer)),
            Some(DiskFault::Decayed) => {
                self.devices[index].make_unreadable(done.sectors.clone());
                self.refuse(token, &done, IoErrorKind::Io, Some(buffer));
            }
            Some(DiskFault::Late(_)) | None => {
                let late = self.delay(fault);
                let end = self.now + latency + late;
                // Some devices answer late, others start late: these may return content of a late
                // moment.
                let span = if late > 0 && self.rng.one_in(2) { latency + late } else { latency };
                let sample = self.now + self.rng.below(span + 1);
                self.schedule(sample, DueEvent::Sample { disk: index, token, sector, buffer, end });
            }
        }
    }

    fn submit_flush(&mut self, disk: DiskId, token: Token) {
        let view = OpView::of(disk, OpKind::Flush, 0..0, false);
        self.trace.submitted(self.now, &view, &WriteContent::Keep, self.next_point(&view));
        let index = disk.0 as usize;
        if !self.flushing.insert(index) && self.one_flush {
            self.refused
                .get_or_insert(format!("a second flush of disk {index} while the first is in flight"));
        }
        let fault = self.devices[index].faults.strike(OpKind::Flush, &(0..0));
        let flush = self.devices[index].take_flush();
        let end = self.now + self.latency(disk, FLUSH_FACTOR) + self.delay(fault);
        self.pass(&view);
        let done = view.ended();
        match fault {
            Some(DiskFault::Never) => {}
            Some(DiskFault::Unreachable) => self.refuse(token, &done, IoErrorKind::Unreachable, None),
            _ if self.devices[index].gone => self.refuse(token, &done, IoErrorKind::Unreachable, None),
            _ => {
                let failed = matches!(fault, Some(DiskFault::Fail(_) | DiskFault::Decayed));
                let ending = OpResult::Flush { flush, failed };
                self.schedule(end, DueEvent::Done { disk: index, token, ending, view: done });
            }
        }
    }

    fn submit_change(&mut self, disk: DiskId, token: Token, change: DeviceChange) {
        let DeviceChange { range, content, fua, kind } = change;
        let view = OpView::of(disk, kind, range.clone(), fua);
        self.trace.submitted(self.now, &view, &content, self.next_point(&view));
        let done = view.ended();
        let Admission::Accepted(fault) = self.screen(&view, None) else {
            self.pass(&view);
            return self.refuse(token, &done, IoErrorKind::Invalid, None);
        };
        let index = disk.0 as usize;
        let unsupported = match kind {
            OpKind::Discard => !self.devices[index].model.discard,
            OpKind::Zero => matches!(content, WriteContent::Keep),
            _ => false,
        };
        if unsupported || matches!(fault, Some(DiskFault::Unreachable)) {
            self.pass(&view);
            let why = if unsupported { IoErrorKind::Unsupported } else { IoErrorKind::Unreachable };
            return self.refuse(token, &done, why, None);
        }
        let number = self.devices[index].take(range.clone(), content, fua);
        let latency = self.latency(disk, 1);
        let failed = match fault {
            Some(DiskFault::Fail(landed)) => Some(landed),
            Some(DiskFault::Decayed) => Some(WrittenPart::Nothing),
            _ => None,
        };
        if matches!(failed, None | Some(WrittenPart::Everything)) {
            self.schedule_landing(index, number, &range, latency);
        }
        if !matches!(fault, Some(DiskFault::Never)) {
            let ending = OpResult::Write { number, failed };
            let end = self.now + latency + self.delay(fault);
            self.schedule(end, DueEvent::Done { disk: index, token, ending, view: done });
        }
        self.pass(&view);
    }

    /// Schedules when a write becomes visible: at once or, one time in four, in two parts.
    fn schedule_landing(&mut self, disk: usize, number: u64, range: &Range<u64>, latency: u64) {
        let whole = self.now + self.rng.below(latency);
        if self.rng.one_in(4) {
            let unit = self.devices[disk].model.torn_sectors;
            let middle = (range.start + self.rng.below(range.end - range.start)) / unit * unit;
            let first = self.now + self.rng.below(whole - self.now + 1);
            self.schedule(first, DueEvent::Land { disk, number, end: middle.max(range.start) });
        }
        self.schedule(whole, DueEvent::Land { disk, number, end: range.end });
    }

    /// Checks the form of a request, and applies the fault rules of the device.
    fn screen(&mut self, view: &OpView, buffer: Option<&Buffer>) -> Admission {
        let device = &mut self.devices[view.disk.0 as usize];
        let sectors = view.sectors.end - view.sectors.start;
        let whole = buffer.is_none_or(|buffer| buffer.len().is_multiple_of(crate::stamp::SECTOR));
        if !whole || !device.accepts(view.sectors.start, sectors) {
            let what =
                format!("disk {} refused a {:?} of sectors {:?}", view.disk.0, view.kind, view.sectors);
            self.refused.get_or_insert(what);
            return Admission::Refused;
        }
        if device.gone {
            return Admission::Accepted(Some(DiskFault::Unreachable));
        }
        Admission::Accepted(device.faults.strike(view.kind, &view.sectors))
    }

    fn refuse(&mut self, token: Token, view: &OpView, kind: IoErrorKind, buffer: Option<Buffer>) {
        let view = view.ended();
        let end = self.now + self.latency(view.disk, 1);
        let disk = view.disk.0 as usize;
        self.schedule(end, DueEvent::Done { disk, token, ending: OpResult::Refused(kind, buffer), view });
    }

    /// Returns by how much a fault delays an operation, and extends the deadline of every wait by
    /// the same time.
    const fn delay(&mut self, fault: Option<DiskFault>) -> u64 {
        let Some(DiskFault::Late(late)) = fault else { return 0 };
        self.late += late;
        self.deadline = self.deadline.saturating_add(late);
        late
    }

    /// Returns how much longer than other reads this one takes. It is always the same nodes that
    /// are slow: requests that need others are served meanwhile, and the walk waits for each.
    fn node_read(&self, view: &OpView) -> u64 {
        let Range { start, end } = view.sectors;
        let is_slow = |(sectors, _): &(u64, u64)| {
            start.is_multiple_of(*sectors)
                && end == start + sectors
                && mix(&[start]).is_multiple_of(SLOW_ONE_IN)
        };
        let slow = self.node_reads.filter(|_| view.disk.0 == 0).filter(is_slow);
        slow.map_or(0, |(_, more)| more)
    }

    /// Draws a latency from a quarter of the device's nominal latency to four times it; one in 64
    /// takes ten times as long.
    pub(super) fn latency(&mut self, disk: DiskId, factor: u64) -> u64 {
        let middle = self.devices[disk.0 as usize].model.latency_ns * factor;
        let latency = middle / 4 + self.rng.below(middle * 15 / 4 + 1) + 1;
        if self.rng.one_in(64) { latency * 10 } else { latency }
    }
}

const fn sectors_in(bytes: usize) -> u64 {
    // An incomplete sector makes the length invalid for every device, as intended.
    if bytes.is_multiple_of(crate::stamp::SECTOR) { (bytes / crate::stamp::SECTOR) as u64 } else { u64::MAX }
}
