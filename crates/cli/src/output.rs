//! Prints one value, as text for people or as JSON for programs, and determines the exit status.

use crate::failure::{Failure, Kind};
use bcached_daemon::log;
use serde::Serialize;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// What a command found out or did. Both forms come from the same value, so they cannot disagree.
pub struct Report {
    text: String,
    /// Kept as text, so that the envelope's fields stay first.
    json: Option<String>,
    exit: u8,
    /// Sentences for standard error beside the text. The JSON form itself holds those that concern
    /// its devices.
    warnings: Vec<String>,
    /// The same for errors in what was examined: they are the answer, and no failure of the
    /// command.
    errors: Vec<String>,
    /// What went wrong although there is something to show: printed on standard error after the
    /// report.
    failures: Vec<Failure>,
    /// The text reports the failures, so that nothing else is printed for people.
    tells_failures: bool,
}

/// A value with a form for people; its JSON form is its `Serialize`.
pub trait Printable: Serialize {
    /// Name of the JSON schema, as in `bcached.show`.
    const SCHEMA: &'static str;
    /// Within one version, fields are only added.
    const SCHEMA_VERSION: u32 = 1;

    /// Returns lines for people, each with its newline.
    fn text(&self) -> String;
}

impl Report {
    /// Returns a report of `value`, with exit status 0.
    pub fn of<T: Printable>(value: &T) -> Result<Self, Failure> {
        #[derive(Serialize)]
        struct Envelope<'a, T> {
            schema: &'static str,
            schema_version: u32,
            bcached: &'static str,
            #[serde(flatten)]
            value: &'a T,
        }
        let envelope = Envelope {
            schema: T::SCHEMA,
            schema_version: T::SCHEMA_VERSION,
            bcached: env!("CARGO_PKG_VERSION"),
            value,
        };
        let json = serde_json::to_string_pretty(&envelope)
            .map_err(|error| Failure::new(Kind::Io, "cannot build the JSON output").why(error.to_string()))?;
        Ok(Self {
            text: value.text(),
            json: Some(json),
            exit: 0,
            warnings: Vec::new(),
            errors: Vec::new(),
            failures: Vec::new(),
            tells_failures: false,
        })
    }

    /// Returns a report that prints nothing: the command has written its stream itself.
    #[must_use]
    pub fn silent() -> Self {
        Self::text_only(String::new())
    }

    /// Returns a report with text only (help).
    #[must_use]
    pub fn text_only(text: String) -> Self {
        let (warnings, errors, failures) = (Vec::new(), Vec::new(), Vec::new());
        Self { text, json: None, exit: 0, warnings, errors, failures, tells_failures: false }
    }

    /// Returns the same report, with `warnings` beside its text.
    #[must_use]
    pub fn warning(mut self, warnings: Vec<String>) -> Self {
        self.warnings.extend(warnings);
        self
    }

    /// Returns the same report, with `errors` beside its text.
    #[must_use]
    pub fn wrong(mut self, errors: Vec<String>) -> Self {
        self.errors.extend(errors);
        self
    }

    /// Returns true if something went wrong.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        !self.failures.is_empty()
    }

    /// Returns the same report, with the answer "no" (exit status 1).
    #[must_use]
    pub fn answering_no(mut self) -> Self {
        self.exit = Kind::No.exit();
        self
    }

    /// Returns the same report, followed by `failure`: what could be shown is shown, then what went
    /// wrong. Of several failures the first determines the exit status.
    #[must_use]
    pub fn failing(mut self, failure: Failure) -> Self {
        if self.failures.is_empty() {
            self.exit = failure.kind.exit();
        }
        self.failures.push(failure);
        self
    }

    /// Returns the same report, whose text already contains the failures: only the JSON form prints
    /// them again.
    #[must_use]
    pub const fn telling_failures(mut self) -> Self {
        self.tells_failures = true;
        self
    }
}

/// Prints the outcome and returns the exit status.
pub fn finish(outcome: Result<Report, Failure>, json: bool) -> ExitCode {
    let (report, failures) = match outcome {
        Ok(mut report) => {
            let failures = std::mem::take(&mut report.failures);
            (Some(report), failures)
        }
        Err(failure) => (None, vec![failure]),
    };
    let mut exit = failures.first().map_or(0, |failure| failure.kind.exit());
    let are_told = report.as_ref().is_some_and(|report| report.tells_failures && !json);
    if let Some(report) = report {
        exit = report.exit;
        if !json {
            for (what, sentences) in [("warning", &report.warnings), ("error", &report.errors)] {
                sentences.iter().for_each(|told| eprintln_quietly(&format!("bcached: {what}: {told}")));
            }
        }
        if let Err(error) = print(&report, json)
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            eprintln_quietly(&format!("bcached: cannot write standard output: {error}"));
            exit = Kind::Io.exit();
        }
    }
    for failure in failures.iter().filter(|_| !are_told) {
        if json {
            eprintln_quietly(&failure.to_json().to_string());
        } else {
            eprintln_quietly(&format!("bcached: {failure}"));
        }
    }
    ExitCode::from(exit)
}

fn print(report: &Report, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match &report.json {
        Some(object) if json => writeln!(out, "{object}")?,
        _ => out.write_all(report.text.as_bytes())?,
    }
    out.flush()
}

/// Prints a line on standard error. It is no failure if that is closed.
fn eprintln_quietly(line: &str) {
    log::last_words(line);
}
