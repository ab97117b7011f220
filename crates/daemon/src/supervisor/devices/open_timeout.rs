//! Opening devices without waiting for one that hangs: a disk or a file system that does not answer keeps whoever opens or
//! reads it in the kernel for as long as it likes, and that must not be the supervisor, which starts the others, hears
//! signals and writes the log.
//!
//! So each opening has a thread of its own. What has not come after a while is waited for like a missing device, and taken
//! when it comes; until then nobody asks the same device the same question again. A device that could not be opened is
//! asked again without holding up anybody: it may take its time to say the same (it is in use, and by whom cannot be found
//! out).

use bcached_control::failure::{Failure, Kind};
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long an opening may hold up everybody else, once.
const LIMIT: Duration = Duration::from_secs(5);

/// The same for the devices of a command line, which are judged together: longer than a device waits for its lock and for that of
/// what is under it, if nobody can be seen who has them.
const LIMIT_OF_LINE: Duration = Duration::from_secs(15);

/// The same when the device was asked before: an ordinary one needs much less, and what comes later is taken later.
const LIMIT_AGAIN: Duration = Duration::from_millis(100);

/// Openings of one kind that have not ended, by the device's name.
pub struct Patience<T> {
    limit: Duration,
    pending: BTreeMap<String, Receiver<Result<T, Failure>>>,
    /// What devices said when they could not be opened: it holds until they say something else.
    refused: BTreeMap<String, Failure>,
}

impl<T> Default for Patience<T> {
    fn default() -> Self {
        Self { limit: LIMIT, pending: BTreeMap::new(), refused: BTreeMap::new() }
    }
}

impl<T: Send + 'static> Patience<T> {
    /// What `open` makes of `name`.
    ///
    /// # Errors
    /// Its own, or that there is no answer yet, which may be asked for again.
    pub fn open(
        &mut self,
        name: &str,
        open: impl FnOnce(&str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Unopened> {
        let (receiver, limit) = match self.pending.remove(name) {
            Some(receiver) => (receiver, Duration::ZERO),
            None => {
                let limit = if self.refused.contains_key(name) { LIMIT_AGAIN } else { LIMIT };
                (ask(name, open).map_err(Unopened::Failed)?, limit.min(self.limit))
            }
        };
        self.take(name, receiver, limit)
    }

    /// The same for a device of the command line, which nobody else waits beside.
    pub fn open_of_line(
        &mut self,
        name: &str,
        open: impl FnOnce(&str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Unopened> {
        let receiver = ask(name, open).map_err(Unopened::Failed)?;
        self.take(name, receiver, LIMIT_OF_LINE)
    }

    /// What comes of an opening within `limit`; later it is there for whoever asks again.
    fn take(
        &mut self,
        name: &str,
        receiver: Receiver<Result<T, Failure>>,
        limit: Duration,
    ) -> Result<T, Unopened> {
        match receiver.recv_timeout(limit) {
            Ok(Ok(opened)) => {
                self.refused.remove(name);
                Ok(opened)
            }
            Ok(Err(failure)) => {
                self.refused.insert(name.to_owned(), failure.clone());
                Err(Unopened::Failed(failure))
            }
            Err(RecvTimeoutError::Timeout) => {
                self.pending.insert(name.to_owned(), receiver);
                Err(Unopened::Hangs(self.refused.get(name).cloned().unwrap_or_else(|| {
                    Failure::new(Kind::TimeLimit, format!("{name} does not answer"))
                        .why("reading its superblock has not ended")
                        .next("look at the device; it is taken up when it answers")
                })))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Unopened::Failed(
                Failure::new(Kind::Io, format!("cannot open {name}")).why("its thread ended by a panic"),
            )),
        }
    }
}

impl<T> Patience<T> {
    /// Openings of devices that nobody wants any more are forgotten: what comes of them is closed as soon as it comes.
    pub fn retain(&mut self, is_wanted: impl Fn(&str) -> bool) {
        self.pending.retain(|name, _| is_wanted(name));
    }

    /// Keeps what was opened before its time, for whoever opens `name` next.
    pub fn keep(&mut self, name: &str, opened: T) {
        let (sender, receiver) = mpsc::channel();
        let _the_receiver_is_here = sender.send(Ok(opened));
        self.pending.insert(name.to_owned(), receiver);
    }
}

/// Why a device is not open.
#[derive(Debug)]
pub enum Unopened {
    /// There is no answer yet.
    Hangs(Failure),
    /// It cannot be opened.
    Failed(Failure),
}

fn ask<T: Send + 'static>(
    name: &str,
    open: impl FnOnce(&str) -> Result<T, Failure> + Send + 'static,
) -> Result<Receiver<Result<T, Failure>>, Failure> {
    let (sender, receiver) = mpsc::channel();
    let device = name.to_owned();
    // If nobody waits any more, what was opened is closed again.
    let body = move || drop(sender.send(open(&device)));
    let spawned = thread::Builder::new().name("open".to_owned()).spawn(body);
    spawned.map_err(|error| {
        Failure::new(Kind::Io, format!("cannot open {name}")).why(format!("no thread: {error}"))
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// A device that hung held up the start of all others, and the signals.
    #[test]
    fn a_device_that_hangs_is_asked_once_and_taken_when_it_answers() {
        let mut patience = Patience { limit: Duration::from_millis(10), ..Patience::default() };
        let (answer, hangs) = mpsc::channel::<u32>();
        let hung = patience.open("sdb", move |_| Ok(hangs.recv().expect("answered below")));
        let Err(Unopened::Hangs(told)) = hung else { panic!("{hung:?}") };
        assert!(told.to_string().starts_with("sdb does not answer: reading"), "{told}");
        let again = patience.open("sdb", |_| panic!("it is asked already"));
        assert!(matches!(again, Err(Unopened::Hangs(_))), "{again:?}");
        let mut others = Patience::default();
        assert_eq!(others.open("sdc", |name| Ok(name.len())).ok(), Some(3));

        answer.send(7).expect("it still waits");
        let started = Instant::now();
        loop {
            match patience.open("sdb", |_| panic!("it is asked already")) {
                Ok(found) => break assert_eq!(found, 7),
                Err(_) => assert!(started.elapsed() < Duration::from_secs(30), "it has answered"),
            }
            thread::yield_now();
        }
        let failed = others.open("sdd", |_| Err(Failure::new(Kind::NotFound, "no such device")));
        assert!(matches!(failed, Err(Unopened::Failed(failure)) if failure.kind == Kind::NotFound));
    }

    /// What had been opened for a volume that was removed meanwhile stayed claimed by nobody.
    #[test]
    fn what_nobody_wants_any_more_is_closed_when_it_comes() {
        let mut patience = Patience { limit: Duration::from_millis(10), ..Patience::default() };
        let (answer, hangs) = mpsc::channel::<std::sync::Arc<()>>();
        let hung = patience.open("sdb", move |_| Ok(hangs.recv().expect("answered below")));
        assert!(matches!(hung, Err(Unopened::Hangs(_))), "{hung:?}");
        patience.retain(|name| name == "sdc");
        let opened = std::sync::Arc::new(());
        answer.send(std::sync::Arc::clone(&opened)).expect("it still waits");
        let started = Instant::now();
        while std::sync::Arc::strong_count(&opened) > 1 {
            assert!(started.elapsed() < Duration::from_secs(30), "it is kept");
            thread::yield_now();
        }
    }

    /// Its reason does not come and go with each question.
    #[test]
    fn a_device_that_was_refused_keeps_its_reason_until_it_says_another() {
        let mut patience = Patience::default();
        let in_use = || Failure::new(Kind::InUse, "sdb is in use");
        let refused = patience.open("sdb", move |_| Err::<u32, _>(in_use()));
        assert!(matches!(refused, Err(Unopened::Failed(_))), "{refused:?}");
        let (answer, hangs) = mpsc::channel::<u32>();
        let again = patience.open("sdb", move |_| Ok(hangs.recv().expect("answered below")));
        assert!(matches!(&again, Err(Unopened::Hangs(told)) if *told == in_use()), "{again:?}");
        answer.send(7).expect("it still waits");
        patience.keep("sdc", 8);
        assert_eq!(patience.open("sdc", |_| panic!("it is open already")).ok(), Some(8));
    }
}
