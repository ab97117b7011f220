//! Devices that nobody serves: what is on them, what keeps them from being overwritten, and how they are. Shared with the commands that
//! work without a daemon.

pub mod device;
pub mod fresh;
pub mod image;
pub mod kernel;
pub mod lost_sets;
pub mod overwrite;
pub mod signatures;
pub mod superblock;
