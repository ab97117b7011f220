//! The log: lines on standard error, with the journal's priorities if the journal reads them. No
//! thread waits for a line to be written: see `queue`.

mod queue;

use crate::events::{self, EventLayer};
use queue::Queue;
use rustix::stdio::stderr;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{Directive, LevelFilter};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Which events are logged, in tracing's filter syntax; `info` unless set.
const VARIABLE: &str = "BCACHED_LOG";

/// The filter if none is set, or if it is not understood.
const DEFAULT: &str = "info";

/// How long writing the last lines may take at the end.
const FLUSH: Duration = Duration::from_secs(2);

/// How long an answer waits for the lines that were logged before it.
const BEFORE_ANSWER: Duration = Duration::from_millis(100);

pub use queue::Condition;

/// The log of this process; unset before [`init`].
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    queue: Queue,
    priorities: bool,
    /// The writer thread could not be started, so the logging thread writes. Such a daemon does not
    /// get far, and is to say why.
    is_direct: bool,
}

/// Receives one whole line at a time, as the formatter writes it.
struct LogWriter(&'static Log);

impl io::Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.say(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn start() -> Self {
        // The journal sets this variable for processes whose output it reads. Elsewhere a word
        // reads better than a number.
        let priorities = std::env::var_os("JOURNAL_STREAM").is_some();
        let write = || {
            let log = LOG.wait();
            let write = |line: &[u8]| queue::write_whole(stderr(), line);
            let told = |lines| events::keep("warning", queue::GAP, queue::gap(lines));
            log.queue.write_all(write, log.priorities, told);
        };
        let started = thread::Builder::new().name("log".to_owned()).stack_size(128 << 10).spawn(write);
        Self { queue: Queue::default(), priorities, is_direct: started.is_err() }
    }

    fn say(&self, line: &[u8]) {
        if self.is_direct {
            let _unread = queue::write_whole(stderr(), line);
        } else {
            self.queue.push(line);
        }
    }
}

/// Sends the output of panics the same way, with the same bound: the panic of one engine must wait
/// neither for a reader nor for the lock of standard error.
fn catch_panics(log: &'static Log) {
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("unnamed");
        tracing::error!(event = "panic", "internal error of bcached in thread {name}: {panic}");
        // Captured only if the environment asks for it.
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            log.say(format!("{trace}\n").as_bytes());
        }
        // The panic may end the process.
        log.queue.flush(FLUSH);
    }));
}

/// Returns the condition of the log.
pub fn condition() -> Condition {
    LOG.get().map_or_else(Condition::default, |log| log.queue.condition())
}

/// Writes a line that is no event to standard error: through the log if there is one. It takes at
/// most [`FLUSH`], since the program is about to end.
pub fn last_words(line: &str) {
    if let Some(log) = LOG.get() {
        log.say(format!("{line}\n").as_bytes());
        log.queue.flush(FLUSH);
    } else {
        // It fails if standard error has no reader, which is no reason to fail here.
        let _unread = writeln!(io::stderr(), "{line}");
    }
}

/// Waits until all lines are written, at most [`FLUSH`].
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.queue.flush(FLUSH);
    }
}

/// Completes once the lines logged until now are written, or after [`BEFORE_ANSWER`]. So a client
/// that has an answer finds in the log what led to it.
pub async fn settled() {
    let Some(log) = LOG.get() else { return };
    let mark = log.queue.mark();
    let _or_long_enough = tokio::time::timeout(BEFORE_ANSWER, async {
        while log.queue.is_behind(mark) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// Starts logging. A second call does nothing.
pub fn init() {
    if LOG.get().is_some() {
        return;
    }
    let log = LOG.get_or_init(Log::start);
    catch_panics(log);
    let said = std::env::var_os(VARIABLE).unwrap_or_default();
    let said = said.to_string_lossy();
    let (filter, misunderstood) = match filter(&said) {
        Ok(filter) => (filter, None),
        Err(part) => (EnvFilter::new(DEFAULT), Some(part)),
    };
    let lines = LineFormatter { priorities: log.priorities };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || LogWriter(log));
    let builder = builder.log_internal_errors(false);
    let _already = builder.event_format(lines).finish().with(EventLayer).try_init();
    if let Some(part) = misunderstood {
        tracing::warn!(
            event = "log-filter-refused",
            "{VARIABLE}: `{part}` is not valid, so `{DEFAULT}` is used; valid are error, warn, info, debug and trace, and such a level for a part of the program: bcached_engine=debug"
        );
    }
}

/// Parses `text` as a filter, or returns the part that is not understood. A single word that is no
/// level is refused: tracing would take it for a part of the program and log that alone, but it is
/// most likely a misspelt level.
fn filter(text: &str) -> Result<EnvFilter, &str> {
    let parts = || text.split(',').filter(|part| !part.is_empty());
    let text = if parts().next().is_none() { DEFAULT } else { text };
    for part in parts() {
        let is_level = part.parse::<LevelFilter>().is_ok();
        let is_directive = part.contains('=') && part.parse::<Directive>().is_ok();
        if !is_level && !is_directive {
            return Err(part);
        }
    }
    EnvFilter::try_new(text).map_err(|_| text)
}

/// The beginning of a line.
fn prefix(priorities: bool, level: Level) -> String {
    let (priority, word) = match level {
        Level::ERROR => (3, "error: "),
        Level::WARN => (4, "warning: "),
        Level::INFO => (6, ""),
        _ => (7, "debug: "),
    };
    if priorities { format!("<{priority}>") } else { format!("bcached: {word}") }
}

struct LineFormatter {
    priorities: bool,
}

impl<S, N> FormatEvent<S, N> for LineFormatter
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str(&prefix(self.priorities, *event.metadata().level()))?;
        let mut line = LogLine::default();
        event.record(&mut line);
        // Text from a device or client must not forge lines.
        writer.write_str(&line.message.replace(['\n', '\r'], " "))?;
        if !line.fields.is_empty() {
            let fields: Vec<_> = line.fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
            write!(writer, " [{}]", fields.join(" ").replace(['\n', '\r'], " "))?;
        }
        writer.write_char('\n')
    }
}

/// The message and the other fields with their names; among them `event`, the stable id.
#[derive(Default)]
pub struct LogLine {
    /// The sentence.
    pub message: String,
    /// In the order in which they were recorded.
    pub fields: Vec<(&'static str, String)>,
}

impl Visit for LogLine {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.fields.push((field.name(), format!("{value:?}")));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_filter_is_told() {
        for sound in
            ["", ",", "info,", "debug", "warn,bcached_engine=debug", "off", "bcached_front_nbd=trace"]
        {
            assert!(filter(sound).is_ok(), "{sound}");
        }
        for (text, part) in [("verbose", "verbose"), ("info,engine=loud", "engine=loud")] {
            assert_eq!(filter(text).err(), Some(part), "{text}");
        }
    }
}
