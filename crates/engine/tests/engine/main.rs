//! The engine on devices in memory: what needs many operations, or one exact failure, and no crash.

mod budget;
mod generations;
mod distrust;
mod memory;
mod reads;
mod rig;
mod superblock;
mod transitions;
