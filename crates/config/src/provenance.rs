//! Where settings come from: the values in the files, key by key, and the file that takes effect.

use super::{CommandLine, Config, FILE_DEFAULT, files};
use bcached_control::failure::{Failure, Kind};
use bcached_control::paths;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The merged files.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MergedConfig {
    /// The files in the order in which they are read. The last one that sets a key takes effect.
    pub files: Vec<PathBuf>,
    /// The settings, by section and key.
    pub settings: Vec<MergedSetting>,
    /// Volumes in the file of `bcached set` that no other file configures. Their settings have no
    /// effect.
    pub set_and_gone: Vec<String>,
}

/// One key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MergedSetting {
    /// The section, as `volume.media`; empty for keys before the first section.
    pub section: String,
    /// Its name.
    pub key: String,
    /// The value as written in the file.
    pub value: String,
    /// The file that takes effect.
    pub file: PathBuf,
    /// The line in that file.
    pub line: usize,
}

/// Returns the merged content of the files that `line` asks for, if all of it is valid.
///
/// # Errors
/// As [`Config::load`].
pub fn merged(line: &CommandLine) -> Result<MergedConfig, Failure> {
    let config = Config::load(line)?;
    let main = line.config.clone().unwrap_or_else(|| paths::of_machine(FILE_DEFAULT));
    let main = std::path::absolute(&main).unwrap_or(main);
    let files = files(&main);
    let mut settings = BTreeMap::new();
    for file in &files {
        let text = std::fs::read_to_string(file).map_err(|error| {
            Failure::new(Kind::Config, format!("cannot read {}", file.display())).why(error.to_string())
        })?;
        let table = DeTable::parse(&text).map_err(|error| {
            Failure::new(Kind::Config, format!("cannot read {}", file.display()))
                .why(error.message().to_owned())
        })?;
        flatten(table.get_ref(), &text, file, &mut Vec::new(), &mut settings);
    }
    let is_gone = |section: &[String]| {
        section.first().is_some_and(|first| first == "volume")
            && section.get(1).is_some_and(|name| config.set_and_gone.contains(name))
    };
    settings.retain(|(section, _): &(Vec<String>, String), _| !is_gone(section));
    Ok(MergedConfig { files, settings: settings.into_values().collect(), set_and_gone: config.set_and_gone })
}

fn flatten(
    table: &DeTable<'_>,
    text: &str,
    file: &Path,
    section: &mut Vec<String>,
    settings: &mut BTreeMap<(Vec<String>, String), MergedSetting>,
) {
    for (key, value) in table {
        let name = key.get_ref().to_string();
        if let DeValue::Table(inner) = value.get_ref() {
            section.push(name);
            flatten(inner, text, file, section, settings);
            section.pop();
            continue;
        }
        let before = text.get(..key.span().start).unwrap_or_default();
        let said = MergedSetting {
            section: section.iter().map(|part| quoted(part)).collect::<Vec<_>>().join("."),
            key: quoted(&name),
            value: text.get(value.span()).unwrap_or_default().to_owned(),
            file: file.to_owned(),
            line: 1 + before.bytes().filter(|byte| *byte == b'\n').count(),
        };
        settings.insert((section.clone(), name), said);
    }
}

/// Formats a key as TOML.
fn quoted(part: &str) -> String {
    let is_bare = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    if !part.is_empty() && part.chars().all(is_bare) {
        part.to_owned()
    } else {
        toml::Value::String(part.to_owned()).to_string()
    }
}

impl MergedConfig {
    /// Formats a single file with the same content, and the origins as comments.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut section = "";
        for said in &self.settings {
            if said.section != section {
                section = &said.section;
                text.push_str(&format!("\n[{section}]\n"));
            }
            let MergedSetting { key, value, file, line, .. } = said;
            text.push_str(&format!("{key} = {value}  # {}:{line}\n", file.display()));
        }
        for name in &self.set_and_gone {
            let note = "has options in 99-set.toml, but is not configured: they have no effect";
            text.push_str(&format!("\n# {name} {note}\n"));
        }
        text
    }
}
