//! The engine on devices in memory: what needs many operations, or one exact failure, and no crash.

mod answers;
mod attach;
mod beside;
mod budget;
mod cleaning;
mod coalesce;
mod copies;
mod detach;
mod distrust;
mod durable;
mod failed_flush;
mod generations;
mod memory;
mod opening;
mod pace;
mod policy;
mod reads;
mod remove;
mod replacement;
mod rig;
mod stopped;
mod superblock;
mod transitions;
mod uncached;
mod windows;
mod writeback;
