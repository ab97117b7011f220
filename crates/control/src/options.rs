//! What is said about options, both ways: `bcached.options` version 1, the request to change some, and its answer,
//! `bcached.change` version 1. Within a version, fields are only added; what is not known is absent.

pub use crate::typed::Typed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The options of a volume or a cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// Whose they are.
    #[serde(flatten)]
    pub owner: Named,
    /// All of them, or the one that was asked for.
    pub options: Vec<Shown>,
}

/// The name of a volume, or else of a cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Named {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    volume: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
}

impl Named {
    /// A volume.
    #[must_use]
    pub fn volume(name: &str) -> Self {
        Self { volume: Some(name.to_owned()), cache: None }
    }

    /// A cache.
    #[must_use]
    pub fn cache(name: &str) -> Self {
        Self { volume: None, cache: Some(name.to_owned()) }
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.volume.as_ref().or(self.cache.as_ref()).map_or("", String::as_str)
    }
}

/// One option.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shown {
    /// Its name.
    pub name: String,
    /// Its value in force, as `set` takes it; absent if only a device can say it that is not here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// What the value counts, where its suffix does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Who says so: `default`, `superblock`, `config`, `set` (99-set.toml) or `runtime`.
    pub origin: String,
    /// Where that is, for `config` and `set`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The line in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The value if nobody says anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
    /// The value as a number.
    #[serde(flatten)]
    pub number: Number,
}

/// A value as a number, its unit in the key.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct Number {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub milliseconds: Option<u64>,
}

impl Shown {
    /// Who says so, for people.
    #[must_use]
    pub fn origin_text(&self) -> String {
        match (self.origin.as_str(), &self.file, self.line) {
            ("config", Some(file), Some(line)) => format!("config {file}:{line}"),
            (origin, ..) => origin.to_owned(),
        }
    }

    fn value_text(&self) -> &str {
        match self.value.as_deref() {
            None => "not known",
            Some("") => "\"\"",
            Some(value) => value,
        }
    }
}

impl Options {
    /// A table for people.
    #[must_use]
    pub fn text(&self) -> String {
        let width = |length: fn(&Shown) -> usize, least| {
            self.options.iter().map(length).max().map_or(least, |most| most.max(least))
        };
        let names = width(|shown| shown.name.len(), "OPTION".len());
        let values = width(|shown| shown.value_text().len(), "VALUE".len());
        let units = width(|shown| shown.unit.as_ref().map_or(0, String::len), "UNIT".len());
        let line = |name: &str, value: &str, unit: &str, origin: &str| {
            format!("{name:names$}  {value:values$}  {unit:units$}  {origin}\n")
        };
        let mut text = line("OPTION", "VALUE", "UNIT", "FROM");
        for shown in &self.options {
            let unit = shown.unit.as_deref().unwrap_or_default();
            text.push_str(&line(&shown.name, shown.value_text(), unit, &shown.origin_text()));
        }
        text
    }
}

/// What is to be changed of the options of a volume or a cache: all of it or nothing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Change {
    /// New values, by option.
    pub set: BTreeMap<String, Typed>,
    /// Options of which nothing said by `set` is to hold any more.
    pub unset: Vec<String>,
    /// The new values hold until the daemon stops, and are not kept.
    pub runtime: bool,
    /// Nothing is changed: the answer says what would be.
    pub dry_run: bool,
}

impl Change {
    /// The command of `bcached` that says so, for the log.
    #[must_use]
    pub fn text(&self, owner: &str) -> String {
        let mut text = String::new();
        if !self.set.is_empty() {
            let _ = write!(text, "set {owner}");
            for (option, value) in &self.set {
                let _ = write!(text, " {option}={}", value.0);
            }
        }
        if !self.unset.is_empty() {
            let gap = if text.is_empty() { "" } else { "; " };
            let _ = write!(text, "{gap}unset {owner} {}", self.unset.join(" "));
        }
        for (is_said, option) in [(self.runtime, " --runtime"), (self.dry_run, " --dry-run")] {
            text.push_str(if is_said { option } else { "" });
        }
        text
    }
}

/// What became of a change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Changed {
    /// Whose options they are.
    #[serde(flatten)]
    pub owner: Named,
    /// Nothing was done: it is what would be.
    pub dry_run: bool,
    /// Where it is kept over a restart, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_in: Option<String>,
    /// The options that were named.
    pub changes: Vec<Changing>,
    /// What else is to be known: values that were taken otherwise than they were typed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One option, before and after.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Changing {
    /// Nothing is different afterwards, neither the value nor whose it is.
    pub already: bool,
    /// The value in force before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// It afterwards.
    #[serde(flatten)]
    pub after: Shown,
}

impl Changed {
    /// Lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for change in &self.changes {
            let (name, value) = (&change.after.name, change.after.value_text());
            let (owner, origin) = (self.owner.name(), change.after.origin_text());
            // Writing to a string cannot fail.
            let _ = match (change.already, self.dry_run) {
                (true, _) => writeln!(text, "{owner}: {name} is {value} already ({origin})"),
                (false, true) => writeln!(text, "{owner}: {name} would be {value} ({origin})"),
                (false, false) => writeln!(text, "{owner}: {name} is {value} ({origin})"),
            };
        }
        text
    }
}
