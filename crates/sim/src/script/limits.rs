//! Limits of what a script may ask for: above anything that is drawn, and low enough that no script
//! exhausts the machine's memory. Sizes are in sectors of 512 bytes.

use std::ops::RangeInclusive;

/// Bytes of a script file.
pub const BYTES_MAX: u64 = 1 << 20;
/// Steps, including those after a crash.
pub const STEPS_MAX: usize = 20_000;
/// Crashes, each in the recovery from the one before.
pub const CUTS_MAX: usize = 8;
/// Requests in flight.
pub const DEPTH: RangeInclusive<usize> = 1..=64;
/// Buckets of the cache device: a set with a journal needs at least the minimum.
pub const BUCKETS: RangeInclusive<u64> = 513..=16_384;
/// Bucket size: a power of two, and at least two blocks.
pub const BUCKET_SECTORS: RangeInclusive<u32> = 8..=1024;
/// Size of a volume.
pub const VOLUME_SECTORS: RangeInclusive<u64> = 8..=1 << 20;
/// Number of volumes.
pub const VOLUMES_MAX: usize = 8;
/// Records of the note.
pub const NOTE_RECORDS: RangeInclusive<usize> = 1..=1 << 16;
/// Memory budget for nodes, in MiB.
pub const NODE_BUDGET_MIB: RangeInclusive<u64> = 0..=256;
/// Median latency of a device, in microseconds.
pub const LATENCY_US: RangeInclusive<u64> = 1..=20_000;
/// Additional time to read a whole bucket, in microseconds.
pub const NODE_READ_US: RangeInclusive<u64> = 1..=100_000;
/// Each delay of the set, in milliseconds.
pub const DELAY_MS: RangeInclusive<u64> = 1..=60_000;
/// Number of parked pieces.
pub const PARKED: RangeInclusive<u64> = 1..=1 << 16;
/// Sectors that write-back reads at once.
pub const BATCH_SECTORS: RangeInclusive<u64> = 8..=8192;
/// Length of one request: a discard may cover most of a volume.
pub const REQUEST_SECTORS_MAX: u64 = 1 << 16;
/// Length of all requests together: data that no flush has made durable stays in memory once for
/// each write.
pub const SECTORS_MAX: u64 = 1 << 19;
/// One pause, in milliseconds: shorter than the time after which waiting clients report a hang.
pub const PAUSE_MS_MAX: u64 = 10_000;
/// All pauses together, in milliseconds: background work continues in each.
pub const PAUSES_MS_MAX: u64 = 1_000_000;
