//! The on-disk format of Linux bcache: parses bytes into checked Rust values, and turns values back
//! into sealed bytes.
//!
//! This crate has no policy, performs no I/O and keeps no state. Bytes from a device are untrusted:
//! every `parse` returns a checked value or an error with typed fields, and never panics.
//!
//! ```text
//! cache device   | boot | superblock | journal | buckets: priorities, uuids, nodes, data |
//!                         sector 8     from first_bucket on
//!
//! superblock     says where the journal is; the newest entry says where everything else is:
//!   journal entry -> root node -> interior nodes -> leaves -> data (B-tree, copied on split)
//!                 -> uuid table                                    (rewritten elsewhere on change)
//!                 -> chain of priority sets: all generations       (rewritten elsewhere on change)
//!   journal entry holds keys that may not be in a leaf yet.
//!
//! backing device | boot | superblock | data, from data_offset on |
//! ```
//!
//! The reference is always written last: a node before the parent that points to it, a chain or
//! table before the journal entry, data before its key. A pointer is valid only while it carries
//! its bucket's current generation. Incrementing the generation therefore voids all old pointers
//! into a bucket at once.
//!
//! See `docs/format.md` for the layout tables; a test renders them from this code.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

// The format is little-endian, and this crate reads and writes it byte by byte. Whether all code
// does so has never been tested on a big-endian machine, and users' data must not be the test.
#[cfg(target_endian = "big")]
compile_error!("bcached is not built for big-endian machines: it has never been tested on one");

pub mod bset;
pub mod checksum;
pub mod error;
pub mod features;
pub mod geometry;
pub mod identity;
pub mod jset;
pub mod key;
pub mod key_check;
pub mod key_list;
pub mod layout;
pub mod node_log;
pub mod prio;
pub mod stamp;
pub mod summary;
pub mod superblock;
pub mod units;
pub mod uuid;

pub use bset::{Bset, NodeIdentity};
pub use error::{
    BsetError, FormatError, JsetError, KeyError, KeyListError, NodeError, PrioError, SuperblockError,
    UuidError,
};
pub use geometry::Geometry;
pub use identity::{Label, SetMagic, Uuid};
pub use jset::{Jset, JsetHeader, TableSeal};
pub use key::{Key, MAX_POINTERS, Pointer, Pointers};
pub use key_list::KeyList;
pub use node_log::NodeLog;
pub use prio::{BucketPrio, PrioSet};
pub use superblock::{
    Attachment, BackingFormat, BackingState, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock,
    DeviceGeometry, RawSuperblock, ReplacementPolicy, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock,
};
pub use units::{BucketId, DeviceIndex, Gen, Inode, Position, SECTOR_BYTES};
pub use uuid::UuidSlot;
