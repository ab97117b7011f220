//! Looks at the devices that clients ask about, on separate threads: only the client waits, and for
//! a limited time. A disk that hangs keeps its thread in the kernel; until it answers, the same
//! look is not begun again. (Devices that the loop opens itself are in
//! [`crate::supervisor::devices::open_timeout`].)

use bcached_control::failure::{Failure, Kind};
use std::collections::BTreeSet;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The pause between two attempts to begin a look that another client has begun.
const PAUSE: Duration = Duration::from_millis(20);

/// The names of the devices whose looks have not ended.
#[derive(Clone, Default)]
pub struct PendingProbes(Arc<Mutex<BTreeSet<String>>>);

/// A look in progress; removes its name when dropped.
struct ProbeGuard(PendingProbes, String);

impl Drop for ProbeGuard {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

impl PendingProbes {
    /// Returns what `look` finds at `name`.
    ///
    /// # Errors
    /// The error of `look`, or that there is no answer before `until`.
    pub fn look<T: Send + 'static>(
        &self,
        name: &str,
        until: Instant,
        look: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let going = self.begin(name, until).ok_or_else(|| hangs(name))?;
        let (sender, receiver) = mpsc::channel();
        // A device that hangs keeps this thread only: invariant L8.
        let body = move || {
            let found = look();
            drop(going);
            drop(sender.send(found));
        };
        thread::Builder::new().name("look".to_owned()).spawn(body).map_err(|error| {
            Failure::new(Kind::Io, format!("cannot read {name}"))
                .why(format!("cannot start a thread: {error}"))
        })?;
        match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(found) => found,
            Err(RecvTimeoutError::Timeout) => Err(hangs(name)),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failure::new(Kind::Io, format!("cannot read {name}")).why("its thread panicked"))
            }
        }
    }

    /// Waits until no other look at `name` is in progress, and begins one.
    fn begin(&self, name: &str, until: Instant) -> Option<ProbeGuard> {
        while !self.lock().insert(name.to_owned()) {
            if Instant::now() >= until {
                return None;
            }
            thread::sleep(PAUSE);
        }
        Some(ProbeGuard(self.clone(), name.to_owned()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hangs(name: &str) -> Failure {
    Failure::new(Kind::TimeLimit, format!("{name} does not answer"))
        .why("reading it, or a device that may be the same one, has not completed")
        .next("nothing was started; check the device, then try again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_hangs_is_looked_at_by_one_thread() {
        // Proves invariant L8.
        let probes = PendingProbes::default();
        let soon = || Instant::now() + Duration::from_millis(50);
        let (answer, hangs) = mpsc::channel::<()>();
        let hung = probes.look("sdb", soon(), move || {
            hangs.recv().expect("answered below");
            Ok(1)
        });
        assert_eq!(hung.expect_err("no answer").kind, Kind::TimeLimit);
        let again = probes.look::<u32>("sdb", soon(), || panic!("it is looked at already"));
        assert_eq!(again.expect_err("no answer").kind, Kind::TimeLimit);
        assert_eq!(probes.look("sdc", Instant::now() + Duration::from_secs(60), || Ok(2)).ok(), Some(2));
        answer.send(()).expect("it still waits");
        assert_eq!(probes.look("sdb", Instant::now() + Duration::from_secs(60), || Ok(3)).ok(), Some(3));
    }
}
