//! `bcached take-over`: hands the running daemon's work over to this program, or to another one;
//! clients notice a pause.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::take_over::{TakeOverPhase, TakeOverReport, TakeOverRequest};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The default time limit. It is longer than any hand-over, whether it succeeds or fails.
const LIMIT: Duration = Duration::from_secs(180);

/// The pause between two requests without an answer, and how long no answer is tolerated. If one of
/// the processes dies, the other one has to notice, and may be about to read its configuration.
const PAUSE: Duration = Duration::from_millis(20);
const NOBODY_LIMIT: Duration = Duration::from_secs(5);

/// Starts the hand-over, waits for it, and reports its outcome.
pub fn run(flags: &flags::TakeOverArgs) -> Result<Report, Failure> {
    let limit = flags.timeout.as_deref().map(bcached_config::time).transpose();
    let limit = limit.map_err(|why| Failure::new(Kind::Usage, why).option("--timeout"))?.unwrap_or(LIMIT);
    let until = Instant::now() + limit;
    let socket = flags.control.socket();
    let asked = TakeOverRequest { program: program(flags.program.as_deref())?, dry_run: flags.dry_run };
    let body = client::body(&asked)?;
    // Fails early if no daemon answers.
    client::get(&socket, "/v1/take-over")?;
    let mut now: TakeOverReport = match client::post(&socket, "/v1/take-over", &body) {
        Ok(answer) => client::understood(&answer)?,
        // The other program may have to be read from disk, and reads its configuration.
        Err(failure) if failure.kind == Kind::TimeLimit && !asked.dry_run => under_way(&socket, until)?,
        // The old daemon has died since; the new one may be running.
        Err(failure) if failure.kind == Kind::NoDaemon && !asked.dry_run => under_way(&socket, until)?,
        // An earlier request may have started the hand-over before this one found the daemon busy.
        Err(failure) if failure.kind == Kind::Busy && !asked.dry_run => {
            let now = under_way(&socket, until)?;
            if now.progress != TakeOverPhase::UnderWay {
                return Err(failure);
            }
            now
        }
        Err(failure) => return Err(failure),
    };
    while now.progress == TakeOverPhase::UnderWay {
        if Instant::now() >= until {
            return Err(Failure::new(
                Kind::TimeLimit,
                format!("the take-over of daemon {} is not complete yet, and continues", now.pid),
            )
            .next("`bcached status` shows which process answers"));
        }
        now = under_way(&socket, until)?;
    }
    if now.progress == TakeOverPhase::None {
        return Err(Failure::new(Kind::Io, "the daemon was restarted during the take-over")
            .why("neither of the two processes survived the take-over")
            .next("its log says why"));
    }
    let failure = now.to_failure();
    let report = Report::of(&now)?;
    Ok(match failure {
        Some(failure) => report.failing(failure),
        None => report,
    })
}

/// Returns the progress, from whichever process answers by now. The daemon that was asked before
/// may have exited with the request pending, or may be waiting for a device and not answer
/// meanwhile.
fn under_way(socket: &Path, until: Instant) -> Result<TakeOverReport, Failure> {
    let mut nobody_since = None;
    loop {
        match client::get(socket, "/v1/take-over") {
            Ok(body) => return client::understood(&body),
            Err(failure) if failure.kind == Kind::NoDaemon => {
                if nobody_since.get_or_insert_with(Instant::now).elapsed() < NOBODY_LIMIT {
                    thread::sleep(PAUSE);
                    continue;
                }
                return Err(Failure::new(Kind::Io, "the daemon ended during the take-over")
                    .why(failure.to_string())
                    .next("start it: all flushed data is there, as after a kill"));
            }
            Err(failure) if failure.kind == Kind::TimeLimit && Instant::now() < until => {}
            Err(failure) => return Err(failure),
        }
    }
}

/// Returns the program named, or this one. The path is absolute, since the daemon has another
/// working directory.
fn program(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let found = match named {
        Some(named) => std::path::absolute(named),
        None => std::env::current_exe(),
    };
    found.map_err(|error| {
        Failure::new(Kind::Io, "cannot determine which program is to take over")
            .why(error.to_string())
            .next("name it with --program")
    })
}

impl Printable for TakeOverReport {
    const SCHEMA: &'static str = "bcached.take-over";

    fn text(&self) -> String {
        Self::text(self)
    }
}
