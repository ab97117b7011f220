//! Opens devices without waiting for one that hangs. A disk or a file system that does not answer
//! holds a thread that opens or reads it in the kernel for any length of time. That must not be the
//! supervisor's thread, which starts the other devices, handles signals and writes the log.
//!
//! So each opening has its own thread. An opening that takes too long is treated as a missing
//! device, and taken when it completes; until then the same device is not opened a second time. A
//! device that could not be opened is retried without delaying anything else: it may take a while
//! to fail again (it is in use, and the holder cannot be found out).

use bcached_control::failure::{Failure, Kind};
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long one opening may delay everything else, once.
const LIMIT: Duration = Duration::from_secs(5);

/// The limit for the devices of a command line, which are checked together. It is longer than an
/// opening waits for the locks of a device and of the device below it when no holder is visible.
const LIMIT_OF_LINE: Duration = Duration::from_secs(15);

/// The limit for a device that was refused before. A healthy one needs much less, and a later
/// result is taken later.
const LIMIT_AGAIN: Duration = Duration::from_millis(100);

/// Openings of one kind that have not ended, by device name.
pub struct PendingOpens<T> {
    limit: Duration,
    pending: BTreeMap<String, Receiver<Result<T, Failure>>>,
    /// Why devices could not be opened: valid until a device gives another answer.
    refused: BTreeMap<String, Failure>,
}

impl<T> Default for PendingOpens<T> {
    fn default() -> Self {
        Self { limit: LIMIT, pending: BTreeMap::new(), refused: BTreeMap::new() }
    }
}

impl<T: Send + 'static> PendingOpens<T> {
    /// Opens `name` with `open`, or takes the result of an earlier opening.
    ///
    /// # Errors
    /// The error of `open`, or that there is no answer yet; the call may be repeated.
    pub fn open(
        &mut self,
        name: &str,
        open: impl FnOnce(&str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, OpenError> {
        let (receiver, limit) = match self.pending.remove(name) {
            Some(receiver) => (receiver, Duration::ZERO),
            None => {
                let limit = if self.refused.contains_key(name) { LIMIT_AGAIN } else { LIMIT };
                (ask(name, open).map_err(OpenError::Failed)?, limit.min(self.limit))
            }
        };
        self.take(name, receiver, limit)
    }

    /// The same for a device of the command line, which delays nothing else.
    pub fn open_of_line(
        &mut self,
        name: &str,
        open: impl FnOnce(&str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, OpenError> {
        let receiver = ask(name, open).map_err(OpenError::Failed)?;
        self.take(name, receiver, LIMIT_OF_LINE)
    }

    /// Waits up to `limit` for an opening. A later result is kept for the next call.
    fn take(
        &mut self,
        name: &str,
        receiver: Receiver<Result<T, Failure>>,
        limit: Duration,
    ) -> Result<T, OpenError> {
        match receiver.recv_timeout(limit) {
            Ok(Ok(opened)) => {
                self.refused.remove(name);
                Ok(opened)
            }
            Ok(Err(failure)) => {
                self.refused.insert(name.to_owned(), failure.clone());
                Err(OpenError::Failed(failure))
            }
            Err(RecvTimeoutError::Timeout) => {
                self.pending.insert(name.to_owned(), receiver);
                Err(OpenError::NoAnswer(self.refused.get(name).cloned().unwrap_or_else(|| {
                    Failure::new(Kind::TimeLimit, format!("{name} does not answer"))
                        .why("reading its superblock has not completed")
                        .next("check the device; it is used as soon as it answers")
                })))
            }
            Err(RecvTimeoutError::Disconnected) => Err(OpenError::Failed(
                Failure::new(Kind::Io, format!("cannot open {name}")).why("its thread panicked"),
            )),
        }
    }
}

impl<T> PendingOpens<T> {
    /// Drops openings of devices that are no longer wanted: their results are closed on arrival.
    pub fn retain(&mut self, is_wanted: impl Fn(&str) -> bool) {
        self.pending.retain(|name, _| is_wanted(name));
    }

    /// Keeps a device that was opened too early, for the next opening of `name`.
    pub fn keep(&mut self, name: &str, opened: T) {
        let (sender, receiver) = mpsc::channel();
        let _the_receiver_is_here = sender.send(Ok(opened));
        self.pending.insert(name.to_owned(), receiver);
    }
}

/// Why a device is not open.
#[derive(Debug)]
pub enum OpenError {
    /// There is no answer yet.
    NoAnswer(Failure),
    /// It cannot be opened.
    Failed(Failure),
}

fn ask<T: Send + 'static>(
    name: &str,
    open: impl FnOnce(&str) -> Result<T, Failure> + Send + 'static,
) -> Result<Receiver<Result<T, Failure>>, Failure> {
    let (sender, receiver) = mpsc::channel();
    let device = name.to_owned();
    // If the result is no longer wanted, the device is closed again.
    // A device that hangs keeps this thread and nobody else: invariant L8.
    let body = move || drop(sender.send(open(&device)));
    let spawned = thread::Builder::new().name("open".to_owned()).spawn(body);
    spawned.map_err(|error| {
        Failure::new(Kind::Io, format!("cannot open {name}")).why(format!("cannot start a thread: {error}"))
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Regression: a device that hung delayed the start of all others, and signals.
    #[test]
    fn a_device_that_hangs_is_asked_once_and_taken_when_it_answers() {
        // Proves invariant L8.
        let mut pending = PendingOpens { limit: Duration::from_millis(10), ..PendingOpens::default() };
        let (answer, hangs) = mpsc::channel::<u32>();
        let hung = pending.open("sdb", move |_| Ok(hangs.recv().expect("answered below")));
        let Err(OpenError::NoAnswer(told)) = hung else { panic!("{hung:?}") };
        assert!(told.to_string().starts_with("sdb does not answer: reading"), "{told}");
        let again = pending.open("sdb", |_| panic!("it is asked already"));
        assert!(matches!(again, Err(OpenError::NoAnswer(_))), "{again:?}");
        let mut others = PendingOpens::default();
        assert_eq!(others.open("sdc", |name| Ok(name.len())).ok(), Some(3));

        answer.send(7).expect("it still waits");
        let started = Instant::now();
        loop {
            match pending.open("sdb", |_| panic!("it is asked already")) {
                Ok(found) => break assert_eq!(found, 7),
                Err(_) => assert!(started.elapsed() < Duration::from_secs(30), "it has answered"),
            }
            thread::yield_now();
        }
        let failed = others.open("sdd", |_| Err(Failure::new(Kind::NotFound, "no such device")));
        assert!(matches!(failed, Err(OpenError::Failed(failure)) if failure.kind == Kind::NotFound));
    }

    /// Regression: a device that was opened for a volume removed meanwhile stayed claimed without a
    /// user.
    #[test]
    fn what_nobody_wants_any_more_is_closed_when_it_comes() {
        let mut pending = PendingOpens { limit: Duration::from_millis(10), ..PendingOpens::default() };
        let (answer, hangs) = mpsc::channel::<std::sync::Arc<()>>();
        let hung = pending.open("sdb", move |_| Ok(hangs.recv().expect("answered below")));
        assert!(matches!(hung, Err(OpenError::NoAnswer(_))), "{hung:?}");
        pending.retain(|name| name == "sdc");
        let opened = std::sync::Arc::new(());
        answer.send(std::sync::Arc::clone(&opened)).expect("it still waits");
        let started = Instant::now();
        while std::sync::Arc::strong_count(&opened) > 1 {
            assert!(started.elapsed() < Duration::from_secs(30), "it is kept");
            thread::yield_now();
        }
    }

    /// The reason of a refusal does not disappear and reappear with each retry.
    #[test]
    fn a_device_that_was_refused_keeps_its_reason_until_it_says_another() {
        let mut pending = PendingOpens::default();
        let in_use = || Failure::new(Kind::InUse, "sdb is in use");
        let refused = pending.open("sdb", move |_| Err::<u32, _>(in_use()));
        assert!(matches!(refused, Err(OpenError::Failed(_))), "{refused:?}");
        let (answer, hangs) = mpsc::channel::<u32>();
        let again = pending.open("sdb", move |_| Ok(hangs.recv().expect("answered below")));
        assert!(matches!(&again, Err(OpenError::NoAnswer(told)) if *told == in_use()), "{again:?}");
        answer.send(7).expect("it still waits");
        pending.keep("sdc", 8);
        assert_eq!(pending.open("sdc", |_| panic!("it is open already")).ok(), Some(8));
    }
}
