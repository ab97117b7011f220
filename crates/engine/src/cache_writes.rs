//! Writes to the cache device, counted by cause where they are submitted. All writes go through
//! here, so the sum equals what the device itself counts, failed writes included.

use crate::error::ErrorContext;
use crate::set::CacheSet;
use bcached_env::{Buffer, IoError, Payload};

/// Why something is written to the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteCause {
    /// Data written by clients: dirty data, and clean copies of written data.
    Data,
    /// Data read from a backing device, cached for later reads.
    Fill,
    /// Live data moved from one bucket to another.
    Moved,
    /// Nodes of the B-tree.
    Btree,
    /// Journal entries.
    Journal,
    /// Generations and priorities of the buckets.
    Priorities,
    /// The table of volumes.
    Uuids,
    /// Summaries at the ends of buckets of dirty data.
    Summaries,
    /// The superblock.
    Superblock,
}

impl WriteCause {
    /// All causes: data first, then metadata.
    pub const ALL: [Self; 9] = [
        Self::Data,
        Self::Fill,
        Self::Moved,
        Self::Btree,
        Self::Journal,
        Self::Priorities,
        Self::Uuids,
        Self::Summaries,
        Self::Superblock,
    ];

    /// The name of the cause, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Fill => "fill",
            Self::Moved => "moved",
            Self::Btree => "btree",
            Self::Journal => "journal",
            Self::Priorities => "priorities",
            Self::Uuids => "uuids",
            Self::Summaries => "summaries",
            Self::Superblock => "superblock",
        }
    }

    /// What the set is doing when it writes for this cause.
    #[must_use]
    pub(crate) const fn doing(self) -> ErrorContext {
        match self {
            Self::Data | Self::Fill | Self::Moved | Self::Summaries => ErrorContext::Data,
            Self::Btree => ErrorContext::Node,
            Self::Journal => ErrorContext::Journal,
            Self::Priorities => ErrorContext::Priorities,
            Self::Uuids => ErrorContext::Uuids,
            Self::Superblock => ErrorContext::Superblock,
        }
    }

    /// Returns true for the contents of volumes, false for metadata.
    #[must_use]
    pub const fn is_data(self) -> bool {
        matches!(self, Self::Data | Self::Fill | Self::Moved)
    }
}

/// Bytes submitted to be written to the cache device since the set was opened, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesWritten {
    by_cause: [u64; WriteCause::ALL.len()],
}

impl BytesWritten {
    /// Bytes for one cause.
    #[must_use]
    pub const fn of(&self, cause: WriteCause) -> u64 {
        self.by_cause[cause as usize]
    }

    /// Bytes of the contents of volumes (`written`).
    #[must_use]
    pub fn data(&self) -> u64 {
        self.total() - self.metadata()
    }

    /// The other bytes (`metadata_written`, and the superblock).
    #[must_use]
    pub fn metadata(&self) -> u64 {
        WriteCause::ALL.into_iter().filter(|cause| !cause.is_data()).map(|cause| self.of(cause)).sum()
    }

    /// All bytes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_cause.iter().sum()
    }

    pub(crate) const fn add(&mut self, cause: WriteCause, bytes: usize) {
        self.by_cause[cause as usize] += bytes as u64;
    }
}

impl CacheSet {
    /// Bytes written to the cache device so far, by cause.
    #[must_use]
    pub fn written(&self) -> BytesWritten {
        self.with(|s| s.stats.written)
    }

    /// Writes to the cache device. The write is not durable yet when it returns.
    pub(crate) async fn write_cache(
        &self,
        cause: WriteCause,
        sector: u64,
        payload: Payload,
    ) -> Result<(), IoError> {
        let bytes = payload.len();
        // In the step that submits it: invariant N1.
        self.count_written(cause, bytes);
        let written = self.cache().write(sector, payload).await;
        self.with(|s| s.cache_has_done(sector, bytes, written.is_ok()));
        written
    }

    /// Like [`CacheSet::write_cache`], but durable when it returns.
    pub(crate) async fn write_cache_fua(
        &self,
        cause: WriteCause,
        sector: u64,
        payload: Payload,
    ) -> Result<(), IoError> {
        let bytes = payload.len();
        self.count_written(cause, bytes);
        let written = self.cache().write_fua(sector, payload).await;
        self.with(|s| s.cache_has_done(sector, bytes, written.is_ok()));
        written
    }

    /// Reads data from the cache device.
    pub(crate) async fn read_cache(&self, sector: u64, buffer: Buffer) -> (Result<(), IoError>, Buffer) {
        let (read, buffer) = self.cache().read(sector, buffer).await;
        self.with(|s| s.cache_has_done(sector, buffer.len(), read.is_ok()));
        (read, buffer)
    }

    /// Counts bytes that are about to be written to the cache device.
    pub(crate) fn count_written(&self, cause: WriteCause, bytes: usize) {
        self.with(|s| s.stats.written.add(cause, bytes));
    }
}
