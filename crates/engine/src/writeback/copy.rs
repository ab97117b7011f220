//! Copies the data of a batch from the cache to the backing device: in address order, adjacent
//! extents in one write, as many writes in flight as a disk can order, and no faster than the rate
//! allows.

use crate::btree::{live_pointers, pointer_to_read};
use crate::error::{Error, ErrorContext};
use crate::request::write::end_backing_write;
use crate::request::{Target, flush};
use crate::set::CacheSet;
use crate::volume::backing_flushes::{BackingFlushes, FlushStamp};
use crate::writeback::batch::WritebackKey;
use crate::writeback::pace::BatchSize;
use alloc::vec;
use alloc::vec::Vec;
use bcached_env::sync::{Permit, Semaphore};
use bcached_env::{Buffer, Time, join_all};
use bcached_format::Key;
use core::cell::{Cell, RefCell};
use core::ops::Range;
use core::time::Duration;

/// Data that cannot start by then, because of the rate, is left for later: a batch holds its ranges
/// until it ends.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum sectors of one write.
const RUN_SECTORS_MAX: u64 = 2048;
/// After this many consecutive failed writes the device is at fault, and the failing keys of a run
/// are not identified any more.
const FAILURES_IN_A_ROW_MAX: u32 = 32;

/// The outcome for one key's data.
#[derive(Clone, Debug)]
pub enum CopyOutcome {
    /// It was written, with this stamp, or writing failed.
    Done(Result<FlushStamp, Error>),
    /// Its turn does not come soon: the set is ending, or the rate has dropped.
    NotBegun,
}

/// The workers that copy the data of one batch.
struct CopyWorkers<'a> {
    set: &'a CacheSet,
    target: &'a Target,
    works: &'a [WritebackKey],
    /// Adjacent keys that are written together.
    runs: Vec<Range<usize>>,
    next: Cell<usize>,
    /// Workers start their runs one at a time, in order.
    gate: Semaphore,
    /// Limits the sectors in memory.
    room: Semaphore,
    room_sectors: usize,
    hurries: bool,
    began: Time,
    longest: Cell<Duration>,
    failures_in_a_row: Cell<u32>,
    copied: RefCell<Vec<CopyOutcome>>,
}

/// Copies the data of `works` to the backing device, and returns the outcome for each.
pub async fn copy_all(
    set: &CacheSet,
    target: &Target,
    works: &[WritebackKey],
    size: BatchSize,
    hurries: bool,
) -> Vec<CopyOutcome> {
    let limit = set.with(|s| s.options.writeback_batch_sectors).max(1);
    let runs = runs(works, limit.min(RUN_SECTORS_MAX));
    let carriers = size.depth.min(runs.len());
    let room_sectors = usize::try_from(limit).unwrap_or(usize::MAX);
    let all = CopyWorkers {
        set,
        target,
        works,
        runs,
        next: Cell::new(0),
        gate: Semaphore::new(1),
        room: Semaphore::new(room_sectors),
        room_sectors,
        hurries,
        began: set.env().now(),
        longest: Cell::default(),
        failures_in_a_row: Cell::default(),
        copied: RefCell::new(vec![CopyOutcome::NotBegun; works.len()]),
    };
    join_all((0..carriers).map(|_| all.carry())).await;
    set.with(|s| {
        if let Some(volume) = s.volumes.get_mut(target.id) {
            let limit = volume.options.writeback_latency;
            let longest = all.longest.get().max(volume.client_activity.take_slowest());
            // Latencies measured without sparing clients say nothing about those of gentler
            // write-back.
            if size.spares {
                volume.pace.learns_latency(longest, limit);
            }
        }
    });
    all.copied.into_inner()
}

/// Groups keys that are adjacent on the backing device into runs of at most `sectors`, unless one
/// key is longer.
fn runs(works: &[WritebackKey], sectors: u64) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, work) in works.iter().enumerate() {
        if let Some(run) = runs.last_mut()
            && works[run.end - 1].key.end == work.key.start()
            && !(work.is_alone || works[run.end - 1].is_alone)
            && work.key.end - works[run.start].key.start() <= sectors
        {
            run.end = index + 1;
        } else {
            runs.push(index..index + 1);
        }
    }
    runs
}

impl CopyWorkers<'_> {
    /// Copies runs, one after the other, until none are left.
    async fn carry(&self) {
        while let Some((run, _room)) = self.set_out().await {
            let works = &self.works[run.clone()];
            let keys: Vec<Key> = works.iter().map(|work| work.key).collect();
            let results = self.copy_run(&keys).await;
            let mut copied = self.copied.borrow_mut();
            for (index, result) in run.zip(results) {
                copied[index] = CopyOutcome::Done(result);
            }
        }
    }

    /// Returns the next run when its time has come and there is memory for it; `None` if no run is
    /// left, the set is ending, or its time does not come soon.
    async fn set_out(&self) -> Option<(Range<usize>, Permit)> {
        let _turn = self.gate.acquire(1).await;
        let run = self.runs.get(self.next.get())?.clone();
        self.next.set(self.next.get() + 1);
        let sectors: u64 = self.works[run.clone()].iter().map(|work| work.key.sectors()).sum();
        self.wait_for_rate(sectors).await?;
        // A key may be longer than the limit of sectors in memory. Then it is copied alone.
        let wanted = usize::try_from(sectors).unwrap_or(usize::MAX).min(self.room_sectors);
        Some((run, self.room.acquire(wanted).await))
    }

    async fn wait_for_rate(&self, sectors: u64) -> Option<()> {
        loop {
            if self.set.is_ending() {
                return None;
            }
            if self.hurries {
                return Some(());
            }
            let due = self.set.with(|s| s.may_copy(self.target, sectors));
            let Err(due) = due else { return Some(()) };
            // A request may have ended the hurry of an idle set. Requests must not wait for ranges
            // whose copying is put off.
            if due > self.began + PATIENCE {
                return None;
            }
            self.set.env().wait_until(&self.set.signals().writeback_work, due).await;
        }
    }

    /// Copies adjacent keys in one write. If that fails, copies them key by key, so that one bad
    /// extent does not hold up the others.
    async fn copy_run(&self, keys: &[Key]) -> Vec<Result<FlushStamp, Error>> {
        let copied = self.try_to_copy(keys).await;
        if keys.len() == 1 || copied.is_ok() {
            return vec![copied; keys.len()];
        }
        let mut results = Vec::with_capacity(keys.len());
        for key in keys {
            let is_vain = self.failures_in_a_row.get() >= FAILURES_IN_A_ROW_MAX;
            results.push(if is_vain {
                copied.clone()
            } else {
                self.try_to_copy(core::slice::from_ref(key)).await
            });
        }
        results
    }

    async fn try_to_copy(&self, keys: &[Key]) -> Result<FlushStamp, Error> {
        let copied = self.copy(keys).await;
        let failures = if copied.is_ok() { 0 } else { self.failures_in_a_row.get().saturating_add(1) };
        self.failures_in_a_row.set(failures);
        copied
    }

    /// Copies adjacent keys in one write, and returns the stamp of the written data.
    async fn copy(&self, keys: &[Key]) -> Result<FlushStamp, Error> {
        let (set, target) = (self.set, self.target);
        let (Some(first), Some(last)) = (keys.first(), keys.last()) else { return Err(Error::NoVolume) };
        let backing = target.backing.as_ref().ok_or(Error::NoVolume)?;
        let bytes = |sectors: u64| usize::try_from(sectors * 512).expect("a run fits in memory");
        let mut whole = Buffer::zeroed(bytes(last.end - first.start()));
        let reads = keys.iter().map(|key| (key, whole.split_to(bytes(key.sectors())))).collect::<Vec<_>>();
        for (read, part) in join_all(reads.into_iter().map(|(key, part)| self.read(key, part))).await {
            read?;
            whole = if whole.is_empty() { part } else { joined(whole, part) };
        }
        let begun = flush::flushes(set, target.id, BackingFlushes::write_begins).ok_or(Error::NoVolume)?;
        let set_out = set.env().now();
        let written = backing.write(first.start(), whole.freeze()).await;
        let stamp = end_backing_write(set, target, begun);
        self.longest.set(self.longest.get().max(set.env().now().since(set_out)));
        written.map_err(Error::io(ErrorContext::Backing))?;
        stamp
    }

    async fn read(&self, key: &Key, buffer: Buffer) -> (Result<(), Error>, Buffer) {
        // Of several copies one may be gone: its bucket then holds other data.
        let living = self.set.with(|s| live_pointers(&s.buckets, &key.pointers));
        let Some(pointer) = living.and_then(|pointers| pointer_to_read(&pointers)) else {
            return (Err(Error::Inconsistent("dirty data has no valid pointer")), buffer);
        };
        let (read, buffer) = self.set.read_cache(pointer.sector(), buffer).await;
        (read.map_err(Error::io(ErrorContext::Data)), buffer)
    }
}

fn joined(mut before: Buffer, piece: Buffer) -> Buffer {
    before.join(piece);
    before
}
