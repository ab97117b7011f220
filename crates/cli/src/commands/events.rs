//! `bcached events`: prints the daemon's past events as its log words them; with `--follow` also
//! new ones.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::Report;
use bcached_control::client;
use bcached_control::events::{Event, Events};
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use std::io::{self, Write as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// The pause before asking again if nothing has happened and the request returned without waiting.
const PAUSE: Duration = Duration::from_secs(1);

/// Prints events as they arrive.
pub fn run(flags: &flags::EventsArgs, json: bool) -> Result<Report, Failure> {
    let since = flags.since.as_deref().map(moment).transpose()?;
    let socket = flags.control.socket();
    let printer = EventPrinter { json, since };
    let mut known = ask(&socket, 0, false)?;
    let mut first = std::mem::take(&mut known.events);
    let mut seen = first.last().map_or(0, |event| event.sequence);
    if let Some(lines) = flags.lines {
        first.retain(|event| printer.is_wanted(event));
        first.drain(..first.len().saturating_sub(lines));
    }
    let mut goes_on = printer.print(&first)?;
    while flags.follow && goes_on {
        let asked = Instant::now();
        let more = ask(&socket, seen, true)?;
        if more.events.is_empty() && asked.elapsed() < PAUSE {
            // The daemon lets only a few requests wait; the other clients wait here.
            thread::sleep(PAUSE);
        }
        if more.daemon != known.daemon {
            // Another daemon process numbers its events from 1.
            (seen, known) = (0, Events { events: Vec::new(), ..more });
            continue;
        }
        goes_on = more.lost == 0 || printer.lost(more.lost)?;
        goes_on = goes_on && printer.print(&more.events)?;
        seen = more.events.last().map_or(seen, |event| event.sequence);
    }
    Ok(Report::silent())
}

fn ask(socket: &Path, after: u64, waits: bool) -> Result<Events, Failure> {
    client::understood(&client::get(socket, &format!("/v1/events?after={after}&wait={waits}"))?)
}

/// Parses a point in time: a duration before now, or a date with its time.
fn moment(typed: &str) -> Result<Timestamp, Failure> {
    if let Ok(timestamp) = typed.parse::<Timestamp>() {
        return Ok(timestamp);
    }
    let ago = bcached_config::time(typed).ok().and_then(|ago| SignedDuration::try_from(ago).ok());
    ago.and_then(|ago| Timestamp::now().checked_sub(ago).ok()).ok_or_else(|| {
        Failure::new(Kind::Usage, format!("`{typed}` is not a time"))
            .next("write how long ago (30s, 5m, 2h), or a date and time (2026-07-01T12:00:00Z)")
            .option("--since")
    })
}

struct EventPrinter {
    json: bool,
    since: Option<Timestamp>,
}

impl EventPrinter {
    fn is_wanted(&self, event: &Event) -> bool {
        let Some(since) = self.since else { return true };
        event.time.parse::<Timestamp>().is_ok_and(|time| time >= since)
    }

    /// Prints the events. Returns false if the reader has closed the pipe.
    fn print(&self, events: &[Event]) -> Result<bool, Failure> {
        let mut text = String::new();
        for event in events.iter().filter(|event| self.is_wanted(event)) {
            text.push_str(&if self.json { line("bcached.event", event)? } else { event.text() });
        }
        write(&text)
    }

    /// Reports events that were dropped from the daemon's list. Returns false if the reader has
    /// closed the pipe.
    fn lost(&self, count: u64) -> Result<bool, Failure> {
        #[derive(Serialize)]
        struct LostEvents {
            event: &'static str,
            lost: u64,
        }
        write(&if self.json {
            line("bcached.events-lost", &LostEvents { event: "events-lost", lost: count })?
        } else {
            format!("events lost: {count} (this reader was too slow)\n")
        })
    }
}

/// Returns one line of the JSON stream.
fn line<T: Serialize>(schema: &'static str, value: &T) -> Result<String, Failure> {
    #[derive(Serialize)]
    struct LineEnvelope<'a, T> {
        schema: &'static str,
        schema_version: u32,
        #[serde(flatten)]
        value: &'a T,
    }
    let envelope = LineEnvelope { schema, schema_version: 1, value };
    serde_json::to_string(&envelope)
        .map(|line| line + "\n")
        .map_err(|error| Failure::new(Kind::Io, "cannot build the JSON output").why(error.to_string()))
}

fn write(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::new(Kind::Io, "cannot write standard output").why(error.to_string())),
    }
}
