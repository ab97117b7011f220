//! Serves the volumes of one cache set, also while a device of theirs is gone.
//!
//! The engine serves a set until a device fails under it. What happens then is decided here: which
//! requests wait and which are refused, which volumes go on past the cache, when the set is opened
//! again, and what another device in the place of a pulled one is worth. The engine's rules hold
//! here, too: no thread, no clock but that of [`bcached_env::Env`], no file. What only a machine
//! has comes in by [`Machine`].
//!
//! | module | duty |
//! |---|---|
//! | [`host`] | which set serves which volume |
//! | `status` | its status, with all volumes wherever they are |
//! | [`dispatch`] | carries requests out: they wait for a device, are tried again, or are refused |
//! | [`retry`] | what another attempt at a request needs |
//! | [`workers`] | the tasks that requests need |
//! | [`translate`] | the port's requests and replies in the engine's words |
//! | [`quiesce`] | closes a failed set with nothing in flight |
//! | [`bypass`] | serves volumes past their cache meanwhile |
//! | [`reopen`] | opens it again and brings its volumes back |
//! | [`absence`] | backing devices that are gone |
//! | [`backing_reconnect`] | another device takes the place of one that is gone |
//! | [`cache_reconnect`] | likewise for the cache device |
//! | [`Limits`] | how long and for how many it waits |
//! | `remove` | takes a volume from the set for good, or for another one |
//! | [`watch`] | tells when a set fails and when it works again |

pub mod absence;
pub mod backing_reconnect;
pub mod bypass;
pub mod cache_reconnect;
pub mod dispatch;
pub mod host;
mod limits;
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
pub mod workers;

use bcached_engine::Error;
use bcached_env::{DiskId, Note};
use bcached_format::CacheSuperblock;
pub use host::{Away, Host, Opening, State};
pub use limits::Limits;
pub use note::NoNote;

/// The reason in an [`Error::Inconsistent`] of a set that could not be opened for want of something
/// that is no device: memory, a file, a descriptor. The log has more of it.
pub const NOT_GIVEN: &str = "the machine does not give what an engine needs";

/// What a host needs of the machine beside the devices that its environment knows.
pub trait Machine {
    /// A device in memory of [`bypass::SECTORS`], with this superblock where a cache has it.
    ///
    /// # Errors
    /// The machine does not give it: [`NOT_GIVEN`].
    fn memory_cache(&self, superblock: &CacheSuperblock) -> Result<DiskId, Error>;

    /// Nobody uses the device any more. Operations in flight still end.
    fn remove(&self, disk: DiskId);

    /// The set's note as a new process would find it.
    ///
    /// # Errors
    /// It cannot be opened: [`NOT_GIVEN`].
    fn open_note(&self) -> Result<Box<dyn Note>, Error>;
}
