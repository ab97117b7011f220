//! The cache set: a fast device in front of slow ones, in the on-disk format of Linux bcache.
//!
//! One state with one owner (`state`). Transitions are synchronous, and either complete or change
//! nothing. Flows are short async functions that query the state, wait for a disk, and update the
//! state. The world is a driver behind `bcached-env`: the same code runs on io_uring and in the
//! simulator.
//!
//! | module | contents |
//! |---|---|
//! | `open`, `open_progress`, `stop` | start-up and its progress; the orderly stop |
//! | `set`, `state` | the handle; the state that transitions change |
//! | `cpu_cost`, `phases` | cost of a transition; phases that a crash may interrupt |
//! | `request/` | client requests: reads, writes, flush, discard; which request waits for which |
//! | `volume/` | backing devices and flash-only volumes, their records, what a flush covers |
//! | `btree/` | the index: attempts, nodes in memory, loads, writes, splits, the walk at start |
//! | `journal/` | the ring, the writer, finding entries, replay |
//! | `space/` | buckets, where new data is written, how buckets are freed, stored generations |
//! | `gc/` | removal of stale keys from the tree, compaction of live data |
//! | `writeback/` | writing dirty data to the backing device |
//! | `policy/` | eviction order, sequential streams, congestion, failed operations |
//! | `options`, `settings` | options of a set and its volumes; those stored in the superblock |
//! | `stats`, `stat_windows` | hit counters and others; those of the last five minutes to a day |
//! | `latency`, `time_stats` | latency of requests; durations of internal operations |
//! | `status`, `explain` | the state of a set; where the data of a sector is |
//! | `uuids` | the table of volumes: which volume owns which number |
//! | `note`, `lost_acks` | the note whose file is gone; acknowledged writes that may be lost |
//! | `cache_writes`, `device_probe`, `backoff` | writes by cause; probes of devices; retries |
//! | `error` | kinds of errors that callers act on |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod backoff;
mod btree;
mod cache_writes;
mod cpu_cost;
mod device_probe;
mod error;
mod explain;
mod gc;
mod journal;
mod latency;
mod lost_acks;
mod note;
mod open;
mod open_progress;
mod options;
mod phases;
mod policy;
mod request;
mod set;
mod settings;
mod short_list;
mod sorted_map;
mod space;
mod stat_windows;
mod state;
mod stats;
mod status;
mod stop;
mod time_stats;
mod uuids;
mod volume;
mod writeback;

pub use bcached_env::DiskHealth;
pub use btree::budget::node_budget_min;
pub use btree::unreadable::{UnreadableNode, VolumeRange};
pub use cache_writes::{BytesWritten, WriteCause};
pub use error::{Error, ErrorContext};
pub use explain::{CacheLocation, DataLocation, Explanation};
pub use gc::pass::TreeStats;
pub use latency::{Histogram, Latencies, RequestPath};
pub use lost_acks::LostAcks;
pub use open_progress::OpenProgress;
pub use options::{ErrorPolicy, Options, VolumeOptions};
pub use phases::{Phase, Phases};
pub use policy::ClientId;
pub use request::admission::BypassReason;
pub use request::inflight::{PendingRequest, Requester, Submission};
pub use request::ranges::SectorActivity;
pub use request::{REQUESTS_MAX, Reply, Request};
pub use set::CacheSet;
pub use settings::Settings;
pub use space::buckets::table_bytes as bucket_table_bytes;
pub use space::priority_stats::PriorityStats;
pub use space::{DiscardState, DiscardStats};
pub use stat_windows::{RequestCounts, Window};
pub use stats::{BypassStats, ReadStats, Stats, Traffic, VolumeStats};
pub use status::{BucketCount, Status, TimedOutVolume, UnservedInfo};
pub use time_stats::TimeStats;
pub use volume::flash_size::PendingShrink;
pub use volume::forget::{LostRange, PendingForget};
pub use volume::record::read_superblock;
pub use volume::remove::RemovedVolume;
pub use volume::zeroings::ZeroingInfo;
pub use volume::{Lifecycle, VolumeId, VolumeInfo};
pub use writeback::dirty_age::DirtyAge;
pub use writeback::failed_extents::UnwritableData;
pub use writeback::rate::{RateController, RateInfo, RateInputs, target as dirty_target};
pub use writeback::stall_reason::WritebackError;
pub use writeback::stripes::stripe_bytes;
pub use writeback::urgent::CancelToken;
