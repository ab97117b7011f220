//! Reads files with a time limit, because their file system may not answer. The daemon then
//! continues with the configuration that it has.

use bcached_control::failure::{Failure, Kind};
use bcached_control::sizes::human;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Time limit of a read: shorter than the time for which a client waits for the daemon's answer.
const LIMIT: Duration = Duration::from_secs(3);

/// Size limit of a file, enough for some ten thousand volumes. A larger file is not a
/// configuration, and reading it would take memory and time.
const BYTES_MAX: u64 = 4 << 20;

/// What most of the files are called in errors.
const CONFIGURATION: &str = "the configuration";

/// What to do about an unreadable file of `bcached set`.
pub const MEND_SET_FILE: &str = "restore it, or delete it and lose what `bcached set` stored in it";

/// Returns the content of the file at `path`. `next` is the advice to a user whose file cannot be
/// read.
///
/// # Errors
/// The file cannot be read, is too large, or is not a regular file.
pub fn content(path: &Path, next: &str) -> Result<String, Failure> {
    content_of(CONFIGURATION, path, next)
}

/// Returns the content of another file, which errors call `called`.
///
/// # Errors
/// As [`content`].
pub fn content_of(called: &str, path: &Path, next: &str) -> Result<String, Failure> {
    content_within(BYTES_MAX, called, path, next)
}

fn content_within(bytes_max: u64, called: &str, path: &Path, next: &str) -> Result<String, Failure> {
    let cannot = |kind, why: String| {
        let what = format!("cannot read {called} {}", path.display());
        Failure::new(kind, what).why(why).next(next)
    };
    match within(LIMIT, called, path, move |path| read_small(path, bytes_max))? {
        Ok(FileContent::Text(text)) => Ok(text),
        Ok(FileContent::NotAFile) => Err(cannot(Kind::Config, "it is not a regular file".to_owned())),
        Ok(FileContent::TooLarge) => Err(cannot(
            Kind::Config,
            format!("it is larger than {}, so it cannot be {called}", human(bytes_max)),
        )),
        Err(error) => {
            let kind = match error.kind() {
                ErrorKind::PermissionDenied => Kind::Permission,
                _ => Kind::Config,
            };
            Err(cannot(kind, error.to_string()))
        }
    }
}

enum FileContent {
    Text(String),
    NotAFile,
    TooLarge,
}

fn read_small(path: &Path, bytes_max: u64) -> io::Result<FileContent> {
    // Opening a pipe may block forever, and a reload would find nothing in it.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(FileContent::NotAFile);
    }
    let mut bytes = Vec::new();
    // Do not rely on the reported size: the file may grow meanwhile.
    File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Ok(FileContent::TooLarge);
    }
    String::from_utf8(bytes)
        .map(FileContent::Text)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Returns the result of `read` for `path`. A read that does not finish in time keeps its thread
/// until it does.
///
/// # Errors
/// The read has not finished in time, or no thread could be started for it.
pub fn bounded<T: Send + 'static>(
    path: &Path,
    read: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<T, Failure> {
    within(LIMIT, CONFIGURATION, path, read)
}

fn within<T: Send + 'static>(
    limit: Duration,
    called: &str,
    path: &Path,
    read: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<T, Failure> {
    let cannot = |kind| Failure::new(kind, format!("cannot read {called} {}", path.display()));
    let (sender, receiver) = mpsc::channel();
    let owned = path.to_owned();
    let body = move || drop(sender.send(read(&owned)));
    let spawned = thread::Builder::new().name("read".to_owned()).spawn(body);
    spawned.map_err(|error| cannot(Kind::Io).why(format!("cannot start a thread: {error}")))?;
    receiver.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => cannot(Kind::TimeLimit)
            .why(format!("reading it took longer than {} s", LIMIT.as_secs()))
            .next("check the file system that it is on, then try again"),
        RecvTimeoutError::Disconnected => cannot(Kind::Io).why("the thread that read it panicked"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that is too large is not read. One of 1 GiB used to take three times that in memory,
    /// and clients meanwhile got the answer that a device is slow.
    #[test]
    fn a_file_that_is_too_large_is_not_read_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.toml");
        std::fs::write(&path, "# 16 bytes here\n").expect("a file");
        let read = |bytes_max| content_within(bytes_max, CONFIGURATION, &path, "name another");
        assert_eq!(read(16).as_deref(), Ok("# 16 bytes here\n"));
        let refused = read(15).expect_err("it has one more");
        assert_eq!(refused.kind.exit(), 2);
        let end = "/config.toml: it is larger than 15 B, so it cannot be the configuration; name another";
        assert!(refused.to_string().ends_with(end), "{refused}");
    }

    /// A reload does not wait for a file on a network file system that hangs, and neither does a
    /// stop.
    #[test]
    fn a_read_that_does_not_end_is_not_waited_for() {
        let (answer, hangs) = mpsc::channel::<()>();
        let path = Path::new("/net/config.toml");
        let read = move |_: &Path| hangs.recv().is_ok();
        let refused = within(Duration::from_millis(10), CONFIGURATION, path, read).expect_err("it hangs");
        assert_eq!(refused.kind, Kind::TimeLimit);
        assert!(
            refused.to_string().starts_with("cannot read the configuration /net/config.toml: "),
            "{refused}"
        );
        drop(answer);
        assert_eq!(
            within(Duration::from_secs(60), CONFIGURATION, path, |path| path.to_owned()).as_deref(),
            Ok(path)
        );
    }
}
