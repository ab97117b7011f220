//! The engine on devices in memory: what needs many operations, or one exact failure, and no crash.

mod attach;
mod budget;
mod distrust;
mod durable;
mod generations;
mod memory;
mod reads;
mod rig;
mod superblock;
mod transitions;
mod uncached;
mod writeback;
