//! Checks what must happen while no client writes and every device works.

use super::Client;
use crate::failure::FailureKind;
use crate::system::Mode;
use crate::workload::Step;
use std::ops::Range;
use std::time::Duration;

/// How long write-back may take, in virtual time: thousands of its smallest batches on the slowest
/// device.
const WRITE_BACK_MAX: Duration = Duration::from_secs(900);

/// How often a place is read until it comes from the cache. Caching what was read waits for a flush
/// of the backing device; if the cache is full, it waits for buckets.
const READS_MAX: u32 = 200;

/// Number of places of a volume that are read.
const PLACES: u64 = 4;

/// Virtual milliseconds between two checks.
const PAUSE_MS: u64 = 100;

impl Client {
    /// Waits until nothing is dirty.
    ///
    /// # Errors
    /// If that takes longer than `WRITE_BACK_MAX`.
    pub async fn written_back(&self) -> Result<(), FailureKind> {
        let end = self.env().now() + WRITE_BACK_MAX;
        loop {
            let dirty = self.shared.running.dirty_sectors();
            if dirty == 0 {
                return Ok(());
            }
            if self.env().now() > end {
                return Err(FailureKind::NotWrittenBack(dirty));
            }
            self.pause(PAUSE_MS).await;
        }
    }

    /// Reads some places of each volume until they come from the cache; leaves the volumes
    /// attached, in writethrough mode.
    ///
    /// # Errors
    /// If they never do.
    pub async fn cached_again(&self) -> Result<(), FailureKind> {
        if !self.shared.running.caches() {
            return Ok(());
        }
        for (volume, shape) in (0..).zip(&self.shared.shapes) {
            self.ask(Step::Attach { volume }).await;
            self.ask(Step::Mode { volume, mode: Mode::Writethrough }).await;
            for place in 0..PLACES {
                // This size is a multiple of any set's block. Data after the last whole block is
                // never cached.
                let first = shape.sectors / PLACES * place / 8 * 8;
                if first + 8 <= shape.sectors {
                    self.is_cached(volume, first..first + 8).await?;
                }
            }
        }
        Ok(())
    }

    async fn is_cached(&self, volume: u32, sectors: Range<u64>) -> Result<(), FailureKind> {
        let reads = || self.shared.world.borrow().reads(1 + volume as usize);
        for _ in 0..READS_MAX {
            let before = reads();
            self.ask(Step::Read { volume, sectors: sectors.clone() }).await;
            if reads() == before {
                return Ok(());
            }
            self.pause(PAUSE_MS).await;
        }
        Err(FailureKind::Bypassed(volume))
    }
}
