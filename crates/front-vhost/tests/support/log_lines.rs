//! Collects what this process logs.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The log lines from warnings upwards, by field.
pub type LogLines = Arc<Mutex<Vec<BTreeMap<&'static str, String>>>>;

/// Starts collecting; possible once in a process.
pub fn listen() -> LogLines {
    let lines = LogLines::default();
    tracing::subscriber::set_global_default(LogListener(Arc::clone(&lines))).expect("the first");
    lines
}

struct LogListener(LogLines);

struct LogLine(BTreeMap<&'static str, String>);

impl Visit for LogLine {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for LogListener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = LogLine(BTreeMap::new());
        event.record(&mut line);
        self.0.lock().expect("no panic").push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
