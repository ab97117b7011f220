//! `bcached top`: prints the status repeatedly, with each cache's traffic in between. On a terminal
//! it fills the screen; elsewhere it prints once, after one interval.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::Report;
use bcached_control::client;
use bcached_control::sizes::human;
use bcached_control::status::Status;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Prints until the count is reached, the reader closes the pipe, or Ctrl-C.
pub fn run(flags: &flags::TopArgs, json: bool) -> Result<Report, Failure> {
    let interval = match flags.interval.as_deref() {
        None => Duration::from_secs(2),
        Some(typed) => bcached_config::time(typed).ok().filter(|time| !time.is_zero()).ok_or_else(|| {
            Failure::new(Kind::Usage, format!("`{typed}` is not an interval")).option("--interval")
        })?,
    };
    let socket = flags.control.socket();
    if json {
        return Report::of(&look(&socket)?.0);
    }
    let is_terminal = io::stdout().is_terminal();
    let count = flags.count.or((!is_terminal).then_some(1));
    let (mut before, mut began) = look(&socket)?;
    let mut shown = 0;
    while count.is_none_or(|count| shown < count) {
        thread::sleep(interval);
        let (now, at) = look(&socket)?;
        let text = now.text() + &traffic(&before, &now, at - began);
        let clear = if is_terminal { "\x1b[H\x1b[2J" } else { "" };
        let mut out = io::stdout().lock();
        if write!(out, "{clear}{text}").and_then(|()| out.flush()).is_err() {
            break;
        }
        (before, began) = (now, at);
        shown += 1;
    }
    Ok(Report::silent())
}

fn look(socket: &Path) -> Result<(Status, Instant), Failure> {
    Ok((client::understood(&client::get(socket, "/v1/status")?)?, Instant::now()))
}

/// Returns each cache's traffic since `before`, in bytes per second.
fn traffic(before: &Status, now: &Status, time: Duration) -> String {
    let mut text = String::new();
    for cache in &now.caches {
        let then = before.caches.iter().find(|then| then.name == cache.name);
        let (Some(then), Some(counts)) = (then.and_then(|then| then.counts.as_ref()), &cache.counts) else {
            continue;
        };
        // A restarted daemon counts from zero.
        let rate = |then: u64, now: u64| {
            let millis = time.as_millis().max(1);
            let rate = u128::from(now.saturating_sub(then)) * 1000 / millis;
            format!("{}/s", human(u64::try_from(rate).unwrap_or(u64::MAX)))
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "cache {}: {} hit, {} missed, {} written, {} written back, {} bypassed",
            cache.name,
            rate(then.hit_bytes, counts.hit_bytes),
            rate(then.miss_bytes, counts.miss_bytes),
            rate(then.write_bytes, counts.write_bytes),
            rate(then.written_back_bytes, counts.written_back_bytes),
            rate(then.bypassed_bytes, counts.bypassed_bytes),
        );
    }
    text
}
