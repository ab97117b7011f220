//! Who opens a set: a real kernel, or our daemon. Both prove the content they found, write to it, and stop or crash.
//!
//! A *leg* is one such turn. The sides share nothing but the image files, so any leg may follow any other (`tests/ping_pong.rs`).

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
    /// In order; dirty data stays in the cache.
    CleanStop,
    /// Killed while the last workload is running, once its flush with this number was answered.
    CrashAfterFlush(u64),
}

/// Somebody who can take a set's turn.
pub trait Side: Sync {
    /// For messages.
    fn name(&self) -> &'static str;

    /// Opens the set, compares each volume's whole content with its model (which settles what a crash left open), runs the workloads in
    /// order, ends, and enters into the models what was written.
    ///
    /// # Errors
    /// [`LegError`]: content, a refusal, or anything the side should not have said.
    fn leg(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError>;
}

/// What went wrong in a leg.
#[derive(Debug, thiserror::Error)]
pub enum LegError {
    /// The guest, or what its kernel logged.
    #[error("kernel: {0:?}")]
    Guest(#[from] GuestError),
    /// The images that a crash left.
    #[error("after the crash")]
    Left(#[from] OfflineError),
    /// A volume does not hold what its model says.
    #[error("{side}: volume {volume}: {source}; it said:\n{said}")]
    Content {
        /// Who served it.
        side: &'static str,
        /// Which.
        volume: u64,
        /// What differs.
        source: Mismatch,
        /// The daemon's log, or the kernel's and what the guest printed.
        said: String,
    },
    /// Our daemon.
    #[error("{what}; it said:\n{said}")]
    Daemon {
        /// What it did or failed to do.
        what: String,
        /// Its output.
        said: String,
    },
    /// Something on the host.
    #[error("{action}: {source}")]
    Host {
        /// What was being done.
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

/// Enters what a workload wrote into its volume's model.
fn apply(set: &mut CacheSet, workload: &Workload, fate: Fate) {
    let model = set.models.iter_mut().find(|model| model.volume() == workload.volume);
    model.expect("a workload is for one of the set's volumes").apply(workload, fate);
}
