//! Write-back: writes dirty data to the backing device in address order, with one flush per batch,
//! and then turns the keys clean.
//!
//! | file | what |
//! |---|---|
//! | `task` | the task of each volume: a stalled volume does not hold up others |
//! | `batch` | choosing keys, flushing, turning keys clean |
//! | `copy` | copying the data of a batch |
//! | `pace` | when to write back, and how much at a time |
//! | `contention` | how clients use the backing device |
//! | `dirty_throttle` | how fast clients may make data dirty meanwhile |
//! | `rate`, `dirty_age` | the controller; how long data has been dirty |
//! | `stripes` | dirty sectors per stripe, and what depends on them |
//! | `urgent` | write-back that a caller waits for |
//! | `stall_reason` | why data cannot be written back |
//! | `failed_extents` | where it cannot, and when that is retried |

pub mod batch;
pub mod contention;
pub mod copy;
pub mod dirty_age;
pub mod dirty_throttle;
pub mod failed_extents;
pub mod pace;
pub mod rate;
pub mod stall_reason;
pub mod stripes;
pub mod task;
pub mod urgent;
