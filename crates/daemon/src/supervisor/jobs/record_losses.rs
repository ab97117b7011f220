//! Jobs that lose data, with the user's consent. What is lost is written down first, on a thread
//! that may wait for a file. Until the first data is given up the job can be cancelled.

use bcached_control::failure::{Failure, Kind};
use bcached_control::sizes::human;
use bcached_engine::LostRange;
use bcached_offline::lost_writes::{self, VolumeIdentity};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The loss that was accepted.
#[derive(Clone)]
pub struct AcceptedLoss {
    /// How much, in bytes.
    pub accepted: u64,
    /// The file that is to list it.
    pub list: PathBuf,
    /// The volume that loses it.
    pub owner: VolumeIdentity,
}

/// Decides the race between the cancellation of a job and the loss of its data. The first takes the
/// turn, and the other one finds that out.
#[derive(Clone, Default)]
pub struct PointOfNoReturn(Arc<AtomicU8>);

const OPEN: u8 = 0;
const GIVEN_UP: u8 = 1;
const BEGUN: u8 = 2;

impl PointOfNoReturn {
    fn take(&self, what: u8) -> bool {
        let found = self.0.compare_exchange(OPEN, what, Ordering::SeqCst, Ordering::SeqCst);
        found.map_or_else(|found| found == what, |_| true)
    }

    /// Takes the turn for a cancellation: nothing is lost. Returns false if it is too late.
    pub fn gives_up(&self) -> bool {
        self.take(GIVEN_UP)
    }

    /// Checks whether the data has begun to be lost.
    pub fn is_late(&self) -> bool {
        self.0.load(Ordering::SeqCst) == BEGUN
    }

    fn is_given_up(&self) -> bool {
        self.0.load(Ordering::SeqCst) == GIVEN_UP
    }
}

impl AcceptedLoss {
    /// Writes the list of what is lost, `lost` bytes, unless that is nothing. `more` returns a part
    /// of it and where the rest begins. After success the loss begins, and the job cannot be
    /// cancelled any more.
    ///
    /// # Errors Returns `too_much` if more is lost than was accepted, and `cancelled` if the job
    /// was cancelled. Also fails if the list cannot be written, or if `more` fails. No list is left
    /// then.
    pub fn write_down(
        &self,
        lost: u64,
        turn: &PointOfNoReturn,
        too_much: impl FnOnce() -> Failure,
        cancelled: impl Fn() -> Failure,
        mut more: impl FnMut(u64) -> Result<(Vec<LostRange>, Option<u64>), Failure>,
    ) -> Result<(), Failure> {
        if lost > self.accepted {
            return Err(too_much());
        }
        if lost > 0 {
            lost_writes::write(&self.list, &self.owner, |at| {
                if turn.is_given_up() { Err(cancelled()) } else { more(at) }
            })?;
        }
        if turn.take(BEGUN) {
            return Ok(());
        }
        // Nothing that the list names is lost.
        if lost > 0 {
            let _never_made = std::fs::remove_file(&self.list);
        }
        Err(cancelled())
    }

    /// Returns where the list is, for the log.
    pub fn list_in_words(&self, lost: u64) -> String {
        if lost > 0 { format!("listed in {}", self.list.display()) } else { "no list".to_owned() }
    }
}

/// Returns the failure of a cancelled job that would have lost data.
pub fn cancelled(what: String) -> Failure {
    Failure::new(Kind::Cancelled, what).why("the job was cancelled").next("no data was given up")
}

/// Returns the words for a refused loss: `would be lost`, and beyond which amount if one was
/// accepted.
pub fn more_than(accepted: Option<u64>) -> String {
    match accepted {
        None => "would be lost".to_owned(),
        Some(accepted) => format!("would be lost, more than the {} accepted", human(accepted)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::Uuid;

    const LOST: u64 = 4096;

    fn refused(what: &str) -> Failure {
        Failure::new(Kind::DataLoss, what.to_owned())
    }

    /// Returns the outcome of writing down `LOST` bytes when `accepted` may be lost, and whether
    /// the list exists.
    fn written_down(accepted: u64, turn: &PointOfNoReturn) -> (Result<(), String>, bool) {
        let folder = tempfile::tempdir().expect("a folder");
        let list = folder.path().join("lost.json");
        let (uuid, set_uuid) = (Uuid([1; 16]), Uuid([2; 16]));
        let owner = VolumeIdentity { uuid, label: String::new(), set_uuid, flash_only: true };
        let loss = AcceptedLoss { accepted, list: list.clone(), owner };
        let all = |_| Ok((vec![LostRange { start: 8, end: 16 }], None));
        let done = loss.write_down(LOST, turn, || refused("too much"), || refused("cancelled"), all);
        let is_alone =
            std::fs::read_dir(folder.path()).expect("a folder").count() == usize::from(list.exists());
        assert!(is_alone, "nothing half written is left");
        (done.map_err(|failure| failure.what.into()), list.exists())
    }

    #[test]
    fn what_is_lost_is_written_down_and_no_more_than_was_accepted() {
        let turn = PointOfNoReturn::default();
        assert_eq!(written_down(LOST - 1, &turn), (Err("too much".to_owned()), false));
        assert_eq!(written_down(LOST, &turn), (Ok(()), true));
        assert!(!turn.gives_up(), "too late");
        let turn = PointOfNoReturn::default();
        assert!(turn.gives_up());
        assert_eq!(written_down(LOST, &turn), (Err("cancelled".to_owned()), false));
    }
}
