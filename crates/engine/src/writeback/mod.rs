//! Write-back: dirty data in address order to the backing device, one flush a batch, then the keys turn clean.
//!
//! | file | what |
//! |---|---|
//! | `task` | the task of each volume: one that stands still keeps no other from going on |
//! | `batch` | choosing, flushing, turning clean |
//! | `copy` | the data on its way |
//! | `pace` | when, and how much at a time |
//! | `company` | who else uses the backing device |
//! | `room` | how fast clients may make data dirty meanwhile |
//! | `rate`, `age` | the controller; how long data has been dirty |
//! | `stripes` | dirty sectors by stripe, and what follows from them |
//! | `urgent` | when somebody waits for it |
//! | `trouble` | why data cannot be written back |
//! | `places` | where it cannot, and when that is tried again |

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
