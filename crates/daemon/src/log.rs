//! The log: lines on standard error, with the journal's priorities when the journal reads them.

use crate::events::Keeper;
use std::fmt;
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

/// What is logged if nothing is said of it, or nothing that is understood.
const DEFAULT: &str = "info";

/// Starts logging. A second call does nothing.
pub fn init() {
    let said = std::env::var_os(VARIABLE).unwrap_or_default();
    let said = said.to_string_lossy();
    let (filter, misunderstood) = match filter(&said) {
        Ok(filter) => (filter, None),
        Err(part) => (EnvFilter::new(DEFAULT), Some(part)),
    };
    // The journal sets this variable for what it reads; elsewhere a word reads better than a number.
    let lines = Lines { priorities: std::env::var_os("JOURNAL_STREAM").is_some() };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A line that cannot be written (its file system is full) would be told of on the same standard error, by a panic.
    let builder = builder.log_internal_errors(false);
    let _already = builder.event_format(lines).finish().with(Keeper).try_init();
    if let Some(part) = misunderstood {
        tracing::warn!(
            event = "log-filter-refused",
            "{VARIABLE}: `{part}` is not understood, so `{DEFAULT}` counts; it takes error, warn, info, debug or trace, or such a level for a part of the program: bcached_engine=debug"
        );
    }
}

/// What `text` asks for; the part of it that is not understood. A word by itself would be a part of the program, which alone is logged: all else
/// would be silent, which nobody means who has misspelt a level.
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

struct Lines {
    priorities: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
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
        let (priority, word) = match *event.metadata().level() {
            Level::ERROR => (3, "error: "),
            Level::WARN => (4, "warning: "),
            Level::INFO => (6, ""),
            _ => (7, "debug: "),
        };
        if self.priorities {
            write!(writer, "<{priority}>")?;
        } else {
            write!(writer, "bcached: {word}")?;
        }
        let mut line = Line::default();
        event.record(&mut line);
        // What a device or client said must not forge lines.
        writer.write_str(&line.message.replace(['\n', '\r'], " "))?;
        if !line.fields.is_empty() {
            let fields: Vec<_> = line.fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
            write!(writer, " [{}]", fields.join(" ").replace(['\n', '\r'], " "))?;
        }
        writer.write_char('\n')
    }
}

/// The message, and the other fields with their names; among them `event`, the stable id.
#[derive(Default)]
pub struct Line {
    /// The sentence.
    pub message: String,
    /// In the order in which they were said.
    pub fields: Vec<(&'static str, String)>,
}

impl Visit for Line {
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
