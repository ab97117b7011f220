//! Records what happens in a world: a running hash of everything and, on request, a line for each
//! operation.
//!
//! Two runs are equal if their hashes are; the lines show where two runs diverge. A line is `TIME >
//! DEVICE OPERATION SECTORS [fua] SUM [point N]` when an operation is submitted, `TIME < DEVICE
//! OPERATION SECTORS RESULT SUM [point N]` when it has completed, and `TIME = ..` for other events.
//! `docs/testing.md` describes the format in full.

use super::{Crash, OpView};
use crate::digest::Digest;
use crate::disk::{Survivors, WriteContent};
use bcached_env::Completion;
use std::cell::RefCell;
use std::fmt;

/// Called with each line.
type TraceSink = Box<dyn FnMut(&str)>;

thread_local! {
    static TELLER: RefCell<Option<TraceSink>> = const { RefCell::new(None) };
}

/// Runs `run`, and meanwhile calls `tell` with each line of every world of this thread. The worlds
/// in which crashes are judged are not reachable from outside, hence this global.
pub fn telling<T>(tell: impl FnMut(&str) + 'static, run: impl FnOnce() -> T) -> T {
    TELLER.set(Some(Box::new(tell)));
    let result = run();
    TELLER.set(None);
    result
}

/// Emits a line about something that happens between two worlds.
pub(crate) fn tell(text: impl FnOnce() -> String) {
    TELLER.with_borrow_mut(|teller| {
        if let Some(teller) = teller {
            teller(&text());
        }
    });
}

/// The record of a run.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    digest: Digest,
    lines: Option<Vec<String>>,
    /// Whether no more lines are emitted.
    is_over: bool,
}

impl Trace {
    /// Keeps a line for each event from now on.
    pub fn record(&mut self) {
        self.lines.get_or_insert_default();
    }

    /// Returns the lines kept.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }

    /// Returns the hash of all events so far.
    #[must_use]
    pub const fn digest(&self) -> u64 {
        self.digest.value()
    }

    /// Ends the trace with the world: what the process does in the rest of its turn reaches no
    /// device.
    pub(super) const fn end(&mut self) {
        self.is_over = true;
    }

    pub(super) fn submitted(&mut self, now: u64, view: &OpView, content: &WriteContent, point: Option<u64>) {
        let mut sum = Digest::new();
        match content {
            WriteContent::Payload(payload) => sum.bytes(payload.as_slice()),
            WriteContent::Data(data) => sum.bytes(data),
            WriteContent::Zero => sum.word(0),
            WriteContent::Keep => sum.word(1),
        }
        self.event(now, view, sum.value());
        self.line(|| {
            let fua = if view.fua { " fua" } else { "" };
            let OpView { disk, kind, sectors, .. } = view;
            format!("{now} > {} {kind:?} {sectors:?}{fua} {:016x}{}", disk.0, sum.value(), PointSuffix(point))
        });
    }

    pub(super) fn completed(&mut self, now: u64, view: &OpView, completion: &Completion, point: Option<u64>) {
        let mut sum = Digest::new();
        sum.word(u64::from(completion.result.is_ok()));
        match (completion.result, &completion.buffer) {
            // Lent memory cannot be read here.
            (Ok(()), Some(buffer)) if buffer.lent().is_some() => sum.word(2),
            (Ok(()), Some(buffer)) => sum.bytes(buffer.as_slice()),
            (Ok(()), None) => {}
            (Err(kind), _) => sum.bytes(format!("{kind:?}").as_bytes()),
        }
        self.event(now, view, sum.value());
        self.line(|| {
            let (OpView { disk, kind, sectors, .. }, result) = (view, completion.result);
            format!(
                "{now} < {} {kind:?} {sectors:?} {result:?} {:016x}{}",
                disk.0,
                sum.value(),
                PointSuffix(point)
            )
        });
    }

    pub(super) fn reboot(&mut self, now: u64, crash: Crash, survivors: Survivors) {
        self.note(now, || format!("{crash} cut, {survivors} survives"));
    }

    /// Records an event of the clients.
    pub fn note(&mut self, now: u64, text: impl Fn() -> String) {
        let text = text();
        self.digest.word(now);
        self.digest.bytes(text.as_bytes());
        self.line(|| format!("{now} = {text}"));
    }

    fn event(&mut self, now: u64, view: &OpView, sum: u64) {
        for word in [
            now,
            u64::from(view.disk.0) << 8
                | (view.kind as u64) << 2
                | u64::from(view.fua) << 1
                | u64::from(view.completed),
            view.sectors.start,
            view.sectors.end,
            sum,
        ] {
            self.digest.word(word);
        }
    }

    fn line(&mut self, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(text());
        } else if !self.is_over {
            tell(text);
        }
    }
}

/// The end of an operation's line: its point number, if it is a point.
struct PointSuffix(Option<u64>);

impl fmt::Display for PointSuffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |number| write!(f, " point {number}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::OpKind;
    use bcached_env::{DiskId, IoErrorKind, Token};

    #[test]
    fn runs_that_end_otherwise_are_not_equal() {
        let traced = |result| {
            let view = OpView {
                disk: DiskId(0),
                kind: OpKind::Read,
                sectors: 0..8,
                fua: false,
                completed: true,
                failed: false,
            };
            let mut trace = Trace::default();
            trace.completed(7, &view, &Completion { token: Token(1), result, buffer: None }, None);
            trace.digest()
        };
        let results = [
            Ok(()),
            Err(IoErrorKind::Io),
            Err(IoErrorKind::Unreachable),
            Err(IoErrorKind::Invalid),
            Err(IoErrorKind::Unsupported),
        ];
        for (index, one) in results.into_iter().enumerate() {
            for (place, other) in results.into_iter().enumerate() {
                assert_eq!(traced(one) == traced(other), index == place, "{one:?}, {other:?}");
            }
        }
    }
}
