//! What happened in a world: a running hash of everything, and on request a line for each operation.
//!
//! Two runs are equal if their hashes are; the lines tell where two runs part.

use super::{Crash, OpView};
use crate::digest::Digest;
use crate::disk::{Content, Survivors};
use bcached_env::Completion;

/// The record of a run.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    digest: Digest,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// Keeps a line for each event from now on.
    pub fn record(&mut self) {
        self.lines.get_or_insert_default();
    }

    /// The lines kept.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }

    /// The hash of all events so far.
    #[must_use]
    pub const fn digest(&self) -> u64 {
        self.digest.value()
    }

    pub(super) fn submitted(&mut self, now: u64, view: &OpView, content: &Content) {
        let mut sum = Digest::new();
        match content {
            Content::Payload(payload) => sum.bytes(payload.as_slice()),
            Content::Data(data) => sum.bytes(data),
            Content::Zero => sum.word(0),
            Content::Keep => sum.word(1),
        }
        self.event(now, view, sum.value());
        self.line(|| {
            let fua = if view.fua { " fua" } else { "" };
            format!("{now} > {} {:?} {:?}{fua} {:016x}", view.disk.0, view.kind, view.sectors, sum.value())
        });
    }

    pub(super) fn completed(&mut self, now: u64, view: &OpView, completion: &Completion) {
        let mut sum = Digest::new();
        sum.word(u64::from(completion.result.is_ok()));
        match (completion.result, &completion.buffer) {
            (Ok(()), Some(buffer)) => sum.bytes(buffer.as_slice()),
            (Ok(()), None) => {}
            (Err(kind), _) => sum.bytes(format!("{kind:?}").as_bytes()),
        }
        self.event(now, view, sum.value());
        self.line(|| {
            let result = completion.result;
            format!(
                "{now} < {} {:?} {:?} {result:?} {:016x}",
                view.disk.0,
                view.kind,
                view.sectors,
                sum.value()
            )
        });
    }

    pub(super) fn reboot(&mut self, now: u64, crash: Crash, survivors: Survivors) {
        self.note(now, || format!("{crash} cut, {survivors} survives"));
    }

    /// Takes in an event of the clients.
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
        }
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
            let view =
                OpView { disk: DiskId(0), kind: OpKind::Read, sectors: 0..8, fua: false, completed: true };
            let mut trace = Trace::default();
            trace.completed(7, &view, &Completion { token: Token(1), result, buffer: None });
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
