//! Examines devices and files without serving them: what is on a device, whether it may be
//! overwritten, whether it is a device of bcached's, and the notes and records that belong to it.
//!
//! It is used by the commands that work without a daemon, and by the daemon before it serves
//! anything.
#![forbid(unsafe_code)]

pub mod bucket_memory;
pub mod device;
pub mod devices;
pub mod image;
pub mod kernel;
pub mod lost_sets;
pub mod lost_writes;
pub mod make_checks;
pub mod notes;
pub mod overwrite;
pub mod signatures;
pub mod superblock;
