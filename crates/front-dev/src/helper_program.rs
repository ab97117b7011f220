//! Runs helper programs, each with a time limit.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Polling interval while a program runs.
const PAUSE: Duration = Duration::from_millis(5);
/// The most bytes read of a program's output. A pipe holds many times that, so a program never
/// blocks on its output; anything beyond is not read.
const SAID_MAX: u64 = 4096;

/// Runs a program and returns its standard output: trimmed, with its lines joined by `; `.
///
/// # Errors
/// Returns the program's standard error, or says that it is not installed or has not ended within
/// `limit`. In the last case it is killed, and ends when the kernel lets it.
pub(crate) fn run(program: &str, arguments: &[&str], limit: Duration) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A service may run with a `PATH` that lacks the administrator's directories.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin:/usr/bin:/bin"));
    let mut child = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            format!("{program} is not installed (util-linux; Debian package mount)")
        }
        _ => format!("{program} cannot be started: {error}"),
    })?;
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(said(child.stdout.take())),
            Ok(Some(status)) => {
                let why = said(child.stderr.take());
                return Err(if why.is_empty() { format!("{program} ended with {status}") } else { why });
            }
            Ok(None) if Instant::now() < deadline => thread::sleep(PAUSE),
            Ok(None) => {
                give_up(child);
                return Err(format!("{program} has not ended within {} s", limit.as_secs()));
            }
            Err(error) => return Err(format!("{program}: {error}")),
        }
    }
}

/// Kills the program. A thread waits for it, because the kernel may not let it end yet.
fn give_up(mut child: Child) {
    let _is_over = child.kill();
    let _no_thread = thread::Builder::new().name("helper".to_owned()).spawn(move || drop(child.wait()));
}

fn said(pipe: Option<impl std::io::Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _as_far_as_it_goes = pipe.take(SAID_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).trim().replace('\n', "; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn a_program_says_what_it_has_to_say_or_why_not() {
        assert_eq!(run("echo", &["a", "b"], LIMIT), Ok("a b".to_owned()));
        let refused = run("ls", &["/no/such/place"], LIMIT).expect_err("there is none");
        assert!(refused.contains("/no/such/place"), "{refused}");
        assert_eq!(run("false", &[], LIMIT), Err("false ended with exit status: 1".to_owned()));
        let missing = run("no-such-program-of-anybody", &[], LIMIT).expect_err("there is none");
        assert!(missing.contains("is not installed"), "{missing}");
    }

    #[test]
    fn a_program_that_does_not_end_is_not_waited_for() {
        let late = run("sleep", &["600"], Duration::from_millis(50)).expect_err("it sleeps");
        assert!(late.contains("has not ended"), "{late}");
    }
}
