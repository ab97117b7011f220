//! The two sides that open a set: a real kernel and our daemon. Both check the content they find,
//! write to it, and stop or crash.
//!
//! A *leg* is one such turn. The sides share nothing but the image files, so any leg may follow any
//! other (`tests/suite/ping_pong.rs`).

mod kernel;
mod ours;

pub use kernel::Kernel;
pub use ours::backing_uuid as uuid_of;
pub(crate) use ours::backing_uuid;
pub use ours::{Daemon, KEEP_DIRTY, Ours};

use crate::guest::GuestError;
use crate::offline::OfflineError;
use crate::set::CacheSet;
use crate::workload::{Fate, Mismatch, Workload};

/// How a leg ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Cleanly; dirty data stays in the cache.
    CleanStop,
    /// Killed while the last workload is running, after its flush with this number was
    /// acknowledged.
    CrashAfterFlush(u64),
}

/// A side that can take a turn with a set.
pub trait Side: Sync {
    /// Returns the name, for messages.
    fn name(&self) -> &'static str;

    /// Opens the set, compares each volume's whole content with its model (which settles what a
    /// crash left open), runs the workloads in order, ends, and records in the models what was
    /// written.
    ///
    /// # Errors
    /// [`LegError`]: wrong content, a refusal, or an unexpected message of the side.
    fn leg(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError>;
}

/// What went wrong in a leg.
#[derive(Debug, thiserror::Error)]
pub enum LegError {
    /// The guest failed, or its kernel logged something unexpected.
    #[error("kernel: {0:?}")]
    Guest(#[from] GuestError),
    /// The images that a crash left are damaged.
    #[error("after the crash")]
    Left(#[from] OfflineError),
    /// A volume's content differs from its model.
    #[error("{side}: volume {volume}: {source}; it said:\n{said}")]
    Content {
        /// The side that served it.
        side: &'static str,
        /// The number of the volume.
        volume: u64,
        /// The difference.
        source: Mismatch,
        /// The daemon's log, or the kernel's log and the guest's output.
        said: String,
    },
    /// Our daemon failed.
    #[error("{what}; it said:\n{said}")]
    Daemon {
        /// What it did or failed to do.
        what: String,
        /// Its output.
        said: String,
    },
    /// An operation on the host failed.
    #[error("{action}: {source}")]
    Host {
        /// The operation.
        action: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl LegError {
    fn host(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Host { action: action.into(), source }
    }
}

/// Records in its volume's model what a workload wrote.
fn apply(set: &mut CacheSet, workload: &Workload, fate: Fate) {
    let model = set.models.iter_mut().find(|model| model.volume() == workload.volume);
    model.expect("a workload is for one of the set's volumes").apply(workload, fate);
}
