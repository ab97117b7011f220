//! Reading files that may lie on a file system that does not answer: nobody waits for that longer than a moment, and a daemon goes on with
//! what it knows.

use crate::failure::{Failure, Kind};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long a read may take: less than whoever asks a daemon for something waits for its answer.
const LIMIT: Duration = Duration::from_secs(3);

/// What `read` makes of `path`, if it ends. What does not has a thread until it does.
///
/// # Errors
/// It has not ended in time, or there is no thread for it.
pub fn bounded<T: Send + 'static>(
    path: &Path,
    read: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<T, Failure> {
    within(LIMIT, path, read)
}

fn within<T: Send + 'static>(
    limit: Duration,
    path: &Path,
    read: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<T, Failure> {
    let cannot = |kind| Failure::new(kind, format!("cannot read the configuration {}", path.display()));
    let (sender, receiver) = mpsc::channel();
    let owned = path.to_owned();
    let body = move || drop(sender.send(read(&owned)));
    let spawned = thread::Builder::new().name("read".to_owned()).spawn(body);
    spawned.map_err(|error| cannot(Kind::Io).why(format!("no thread: {error}")))?;
    receiver.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => cannot(Kind::TimeLimit)
            .why(format!("reading it has not ended for {} s", LIMIT.as_secs()))
            .next("look at the file system that it lies on, then ask again"),
        RecvTimeoutError::Disconnected => cannot(Kind::Io).why("its thread ended by a panic"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file on a network file system that hung held a reload up, and a stop with it.
    #[test]
    fn a_read_that_does_not_end_is_not_waited_for() {
        let (answer, hangs) = mpsc::channel::<()>();
        let path = Path::new("/net/config.toml");
        let read = move |_: &Path| hangs.recv().is_ok();
        let refused = within(Duration::from_millis(10), path, read).expect_err("it hangs");
        assert_eq!(refused.kind, Kind::TimeLimit);
        assert!(
            refused.to_string().starts_with("cannot read the configuration /net/config.toml: "),
            "{refused}"
        );
        drop(answer);
        assert_eq!(within(Duration::from_secs(60), path, |path| path.to_owned()).as_deref(), Ok(path));
    }
}
