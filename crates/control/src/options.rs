//! Options in the control API: their values, `bcached.options` version 1, the request to change
//! some, and its answer, `bcached.change` version 1. Within a version, fields are only added; a
//! field whose value is not known is absent.

pub use crate::typed::TypedValue;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The options of a volume or a cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// The volume or cache that they belong to.
    #[serde(flatten)]
    pub owner: OwnerName,
    /// All options, or the one that was asked for.
    pub options: Vec<OptionEntry>,
}

/// The name of a volume or of a cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OwnerName {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    volume: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
}

impl OwnerName {
    /// Creates the name of a volume.
    #[must_use]
    pub fn volume(name: &str) -> Self {
        Self { volume: Some(name.to_owned()), cache: None }
    }

    /// Creates the name of a cache.
    #[must_use]
    pub fn cache(name: &str) -> Self {
        Self { volume: None, cache: Some(name.to_owned()) }
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.volume.as_ref().or(self.cache.as_ref()).map_or("", String::as_str)
    }
}

/// One option.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OptionEntry {
    /// Its name.
    pub name: String,
    /// The value in force, as `set` accepts it; absent if only a device that is not present could
    /// tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The unit of the value, if its suffix does not show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Where the value comes from: `default`, `superblock`, `config`, `set` (99-set.toml) or
    /// `runtime`.
    pub origin: String,
    /// The file, for `config` and `set`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The line in that file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The default value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
    /// The value as a number.
    #[serde(flatten)]
    pub number: NumericValue,
}

/// A value as a number, with its unit in the key.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct NumericValue {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub milliseconds: Option<u64>,
}

impl OptionEntry {
    /// Formats the origin for people.
    #[must_use]
    pub fn origin_text(&self) -> String {
        match (self.origin.as_str(), &self.file, self.line) {
            ("config", Some(file), Some(line)) => format!("config {file}:{line}"),
            (origin, ..) => origin.to_owned(),
        }
    }

    fn value_text(&self) -> &str {
        match self.value.as_deref() {
            None => "unknown",
            Some("") => "\"\"",
            Some(value) => value,
        }
    }
}

impl Options {
    /// Formats the options as a table for people.
    #[must_use]
    pub fn text(&self) -> String {
        let width = |length: fn(&OptionEntry) -> usize, least| {
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

/// A change of options of one volume or cache. It is applied as a whole or not at all.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptionChange {
    /// New values, by option.
    pub set: BTreeMap<String, TypedValue>,
    /// Options whose values set by `bcached set` are dropped.
    pub unset: Vec<String>,
    /// The new values hold until the daemon stops, and are not persisted.
    pub runtime: bool,
    /// Change nothing; the answer says what would happen.
    pub dry_run: bool,
}

impl OptionChange {
    /// Formats the change as the `bcached` command for it, for the log.
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

/// Result of a change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OptionChangeReport {
    /// The volume or cache that the options belong to.
    #[serde(flatten)]
    pub owner: OwnerName,
    /// Dry run: nothing was changed, and this is what would happen.
    pub dry_run: bool,
    /// The file that persists the change over a restart, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_in: Option<String>,
    /// The options that the request named.
    pub changes: Vec<ChangedOption>,
    /// Further remarks: values that were adjusted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One option, before and after.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangedOption {
    /// Neither the value nor its origin changes.
    pub already: bool,
    /// The value in force before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// The option afterwards.
    #[serde(flatten)]
    pub after: OptionEntry,
}

impl OptionChangeReport {
    /// Formats the result as lines for people.
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
