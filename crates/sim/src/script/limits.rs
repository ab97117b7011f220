//! How much a script may ask for: more than any workload that is drawn, and little enough that no script takes the machine's
//! memory. Sizes in sectors of 512 bytes.

use std::ops::RangeInclusive;

/// Bytes of a file.
pub const BYTES_MAX: u64 = 1 << 20;
/// Steps, those after a crash included.
pub const STEPS_MAX: usize = 20_000;
/// Crashes, each in the recovery from the one before.
pub const CUTS_MAX: usize = 8;
/// Requests in flight together.
pub const DEPTH: RangeInclusive<usize> = 1..=64;
/// Buckets of the cache device: fewer are no set with a journal.
pub const BUCKETS: RangeInclusive<u64> = 513..=16_384;
/// Bucket: a power of two, at least two blocks.
pub const BUCKET_SECTORS: RangeInclusive<u32> = 8..=1024;
/// Size of a volume.
pub const VOLUME_SECTORS: RangeInclusive<u64> = 8..=1 << 20;
/// Volumes.
pub const VOLUMES_MAX: usize = 8;
/// Records of the note.
pub const NOTE_RECORDS: RangeInclusive<usize> = 1..=1 << 16;
/// Memory for nodes, in MiB.
pub const NODE_BUDGET_MIB: RangeInclusive<u64> = 0..=256;
/// Middle latency of a device, in microseconds.
pub const LATENCY_US: RangeInclusive<u64> = 1..=20_000;
/// What reading a whole bucket takes besides, in microseconds.
pub const NODE_READ_US: RangeInclusive<u64> = 1..=100_000;
/// A delay of the set, in milliseconds.
pub const DELAY_MS: RangeInclusive<u64> = 1..=60_000;
/// Pieces that may be parked.
pub const PARKED: RangeInclusive<u64> = 1..=1 << 16;
/// Sectors that write-back reads at once.
pub const BATCH_SECTORS: RangeInclusive<u64> = 8..=8192;
/// One request: a discard may take most of a volume.
pub const REQUEST_SECTORS_MAX: u64 = 1 << 16;
/// All requests together: data that no flush has made durable stays in memory as often as it was written.
pub const SECTORS_MAX: u64 = 1 << 19;
/// One pause: the clients' patience with the world ends later.
pub const PAUSE_MS_MAX: u64 = 10_000;
/// All pauses together: background work goes on in each.
pub const PAUSES_MS_MAX: u64 = 1_000_000;
