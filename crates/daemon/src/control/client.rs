//! The asking side: one request, one answer, a limit on both time and size.
//!
//! HTTP/1.0 on purpose: the answer ends with the connection, so that nothing but its head needs parsing.

use crate::failure::{Failure, Kind};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A daemon answers in well under this, unless its machine is in trouble.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Far more than the status of hundreds of volumes.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// The body of `GET path` from the daemon that listens on `socket`.
///
/// # Errors
/// [`Kind::NoDaemon`] if nobody listens there, [`Kind::Permission`], or what went wrong.
pub fn get(socket: &Path, path: &str) -> Result<String, Failure> {
    let answer = exchange(socket, path).map_err(|error| unreachable(socket, &error))?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| not_understood(socket))?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        Some(status) => Err(Failure::new(Kind::Io, format!("the daemon on {} refused", socket.display()))
            .why(format!("HTTP status {status} for {path}"))),
        None => Err(not_understood(socket)),
    }
}

fn exchange(socket: &Path, path: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.set_write_timeout(Some(TIME_LIMIT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: bcached\r\nAccept: application/json\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    Ok(answer)
}

fn unreachable(socket: &Path, error: &io::Error) -> Failure {
    let what = format!("no daemon answers on {}", socket.display());
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Failure::new(Kind::NoDaemon, what)
            .why(if error.kind() == io::ErrorKind::NotFound {
                "there is no such socket"
            } else {
                "nobody listens"
            })
            .next("start `bcached serve`, or name its socket with --control"),
        io::ErrorKind::PermissionDenied => Failure::new(Kind::Permission, "cannot ask the daemon")
            .why(format!("{} is for its owner only", socket.display()))
            .next("ask as the user who runs it (root)"),
        _ => Failure::new(Kind::NoDaemon, what).why(error.to_string()),
    }
}

fn not_understood(socket: &Path) -> Failure {
    Failure::new(Kind::NoDaemon, format!("what listens on {} is no bcached", socket.display()))
}
