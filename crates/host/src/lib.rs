//! Serves the volumes of one cache set, also while one of their devices is gone.
//!
//! The engine serves a set until one of its devices fails. This crate decides what happens then:
//! which requests wait and which are refused, which volumes continue without the cache, when the
//! set is reopened, and whether a device may take the place of an unplugged one. The engine's rules
//! apply here, too: no threads, no clock except that of [`bcached_env::Env`], no files. Everything
//! that depends on the machine is provided by [`Machine`].
//!
//! | module | duty |
//! |---|---|
//! | [`host`] | which set serves which volume |
//! | `status` | its status, with all volumes wherever they are |
//! | [`dispatch`] | carries out requests: they wait for a device, are retried, or are refused |
//! | [`retry`] | what another attempt at a request needs |
//! | [`workers`] | the tasks that requests need |
//! | [`translate`] | the port's requests and replies in the engine's terms |
//! | [`quiesce`] | closes a failed set with nothing in flight |
//! | [`without_cache`] | serves volumes without their cache in the meantime |
//! | [`reopen`] | reopens the set and brings its volumes back |
//! | [`missing_devices`] | backing devices that are gone |
//! | [`backing_reconnect`] | another device takes the place of one that is gone |
//! | [`cache_reconnect`] | likewise for the cache device |
//! | `limits` | time and size limits |
//! | `note` | the set's note, which outlives the set |
//! | `remove` | removes a volume from the set, or hands it over to another |
//! | [`watch`] | reports when a set fails and when it works again |

pub mod backing_reconnect;
pub mod cache_reconnect;
pub mod dispatch;
pub mod host;
mod limits;
pub mod missing_devices;
mod note;
pub mod quiesce;
mod remove;
pub mod reopen;
pub mod retry;
mod status;
#[cfg(test)]
mod testing;
pub mod translate;
pub mod watch;
pub mod without_cache;
pub mod workers;

use bcached_env::DiskId;
use bcached_format::CacheSuperblock;
pub use host::{AwayVolume, Host, HostState, OpenParams};
pub use limits::Limits;
pub use note::{NullNote, SetNote};

/// What a host needs of the machine besides the devices in its environment.
pub trait Machine {
    /// Creates a device in memory of [`without_cache::SECTORS`] sectors, with this superblock in a
    /// cache superblock's place.
    ///
    /// # Errors
    /// The machine lacks memory, a file or a descriptor; in a sentence.
    fn memory_cache(&self, superblock: &CacheSuperblock) -> Result<DiskId, String>;

    /// Removes a device that is no longer used. Operations in flight still complete.
    fn remove(&self, disk: DiskId);
}
