//! Keeps the newest events of the log, for clients that ask the daemon instead of reading the log.
//!
//! There is one ring for all readers. Each remembers what it has seen, so a slow reader costs
//! nothing: it misses the oldest events and is told how many. The events are those of the daemon's
//! log after its filter; the level of detail is chosen there.

use crate::control_server::EventsHandler;
use crate::log::LogLine;
use bcached_control::events::{Event, Events};
use jiff::Timestamp;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::{Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Events that are kept.
const EVENTS_MAX: usize = 1024;

/// Bytes of a message or another text that are kept: what a client sent may be long.
const TEXT_MAX: usize = 2048;

/// How long a request waits for the next event: less than a client waits for an answer.
const WAIT: Duration = Duration::from_secs(5);

/// Requests that may wait at once; further ones are answered at once, and their clients ask again.
const WAITING_MAX: usize = 16;

/// The events and the last sequence number.
#[derive(Default)]
struct EventRing {
    /// The sequence number of the last event; 0 if there was none.
    last: u64,
    events: VecDeque<Event>,
}

/// The ring of this process.
struct EventStore {
    daemon: String,
    ring: Mutex<EventRing>,
    /// Notified at each new event.
    rung: Condvar,
    waiting: AtomicUsize,
}

fn known() -> &'static EventStore {
    static KNOWN: OnceLock<EventStore> = OnceLock::new();
    KNOWN.get_or_init(|| EventStore {
        daemon: format!("{}-{}", std::process::id(), Timestamp::now().as_millisecond()),
        ring: Mutex::default(),
        rung: Condvar::new(),
        waiting: AtomicUsize::new(0),
    })
}

impl EventStore {
    fn ring(&self) -> MutexGuard<'_, EventRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the ring once it has an event after `seen`, or after [`WAIT`]; at once if too many
    /// requests wait already.
    fn more_than(&self, seen: u64) -> MutexGuard<'_, EventRing> {
        let deadline = Instant::now() + WAIT;
        let is_one_of_few = self.waiting.fetch_add(1, Ordering::Relaxed) < WAITING_MAX;
        let mut ring = self.ring();
        while is_one_of_few && ring.last <= seen {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            ring = self.rung.wait_timeout(ring, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        ring
    }
}

impl EventRing {
    fn add(&mut self, event: Event) {
        self.last += 1;
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(Event { sequence: self.last, ..event });
    }

    /// Returns the events after the sequence number `seen`, and how many of those are gone.
    fn after(&self, seen: u64) -> (Vec<Event>, u64) {
        let first = self.events.front().map_or(self.last + 1, |event| event.sequence);
        let lost = first.saturating_sub(seen.saturating_add(1));
        (self.events.iter().filter(|event| event.sequence > seen).cloned().collect(), lost)
    }
}

/// Returns the function that the control thread calls: it returns the events after a sequence
/// number, if asked to once there are any, or after [`WAIT`].
pub fn ask() -> EventsHandler {
    Box::new(|seen, waits| {
        let known = known();
        let ring = if waits { known.more_than(seen) } else { known.ring() };
        let (events, lost) = ring.after(seen);
        Ok(Events { daemon: known.daemon.clone(), events, lost })
    })
}

/// Puts the log's events into the ring.
pub struct EventLayer;

impl<S: Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, event: &tracing::Event<'_>, _context: Context<'_, S>) {
        let mut line = LogLine::default();
        event.record(&mut line);
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            _ => "debug",
        };
        let mut fields = line.fields;
        let id = fields.iter().position(|(name, _)| *name == "event").map(|place| fields.remove(place).1);
        add(Event {
            sequence: 0,
            time: format!("{:.3}", Timestamp::now()),
            level: level.to_owned(),
            event: id,
            message: short(line.message),
            fields: fields.into_iter().map(|(name, value)| (name.to_owned(), short(value))).collect(),
        });
    }
}

fn add(event: Event) {
    let known = known();
    known.ring().add(event);
    known.rung.notify_all();
}

/// Keeps an event of the log itself, which passes no filter.
pub fn keep(level: &str, event: &str, message: String) {
    add(Event {
        sequence: 0,
        time: format!("{:.3}", Timestamp::now()),
        level: level.to_owned(),
        event: Some(event.to_owned()),
        message,
        fields: BTreeMap::new(),
    });
}

fn short(mut text: String) -> String {
    if text.len() > TEXT_MAX {
        let end = (0..=TEXT_MAX).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push_str("..");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(message: &str) -> Event {
        Event {
            sequence: 0,
            time: String::new(),
            level: "info".to_owned(),
            event: None,
            message: message.to_owned(),
            fields: BTreeMap::new(),
        }
    }

    /// A reader that is too slow is told exactly how many events it has missed.
    #[test]
    fn what_is_lost_is_counted() {
        let mut ring = EventRing::default();
        assert_eq!(ring.after(0), (Vec::new(), 0));
        for number in 0..EVENTS_MAX as u64 + 10 {
            ring.add(event(&number.to_string()));
        }
        let (all, lost) = ring.after(0);
        assert_eq!((all.len(), lost, all[0].sequence), (EVENTS_MAX, 10, 11));
        let (all, lost) = ring.after(5);
        assert_eq!((all.len(), lost), (EVENTS_MAX, 5));
        assert_eq!(ring.after(10).1, 0);
        let last = EVENTS_MAX as u64 + 10;
        let (rest, lost) = ring.after(last - 2);
        assert_eq!(
            (rest.iter().map(|event| event.sequence).collect::<Vec<_>>(), lost),
            (vec![last - 1, last], 0)
        );
        assert_eq!(ring.after(last), (Vec::new(), 0));
        assert_eq!(ring.after(u64::MAX), (Vec::new(), 0), "of another daemon");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = format!("x{}", "\u{e4}".repeat(TEXT_MAX));
        let cut = short(text);
        assert!(cut.len() <= TEXT_MAX + 2 && cut.ends_with("\u{e4}.."), "{}", cut.len());
        assert_eq!(short("short".to_owned()), "short");
    }
}
