//! The on-disk format of Linux bcache: bytes to checked Rust values, and values back to sealed bytes.
//!
//! Nothing here has an opinion, performs I/O or keeps state. Bytes from a device are untrusted: every `parse`
//! returns a checked value or a [`FormatError`] with typed fields, and never panics.
//!
//! See `docs/format.md` for the layout tables; a test prints them from this code.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod key;
pub mod units;

pub use key::{Key, MAX_POINTERS, Pointer, Pointers};
pub use units::{BucketId, DeviceIndex, Gen, Inode, Position, SECTOR_BYTES};
