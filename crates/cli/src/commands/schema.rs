//! `bcached schema`: prints the JSON Schema of each JSON output.
//!
//! The source is `schemas/`, one line for each field. A test compares it with what the commands
//! print, both ways: every printed field is listed with its type, and every listed field is
//! printed.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// All schemas. A section starts with `[NAME VERSION] WHERE`. A line holds a path and its types.
/// `a[].b` is in each element of the array `a`; `*` stands for any key. A key that ends in `?` may
/// be absent; `!` says that no test causes it to be printed. `a =NAME:b` puts the fields of `b` in
/// the output NAME into `a`.
const LISTED: &str = concat!(include_str!("../schemas/offline.txt"), include_str!("../schemas/daemon.txt"));

/// One output.
struct OutputFields {
    name: &'static str,
    version: u64,
    of: &'static str,
    fields: Vec<OutputField>,
}

struct OutputField {
    path: String,
    types: Vec<&'static str>,
}

/// The fields that every output begins with.
const ENVELOPE: &[&str] = &["schema", "schema_version", "bcached"];

fn listed() -> Vec<OutputFields> {
    let mut all: Vec<OutputFields> = Vec::new();
    let mut references: Vec<(usize, &str, &str)> = Vec::new();
    for line in LISTED.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some((head, of)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) {
            let (name, version) = head.rsplit_once(' ').unwrap_or((head, "1"));
            all.push(OutputFields { name, version: version.parse().unwrap_or(1), of, fields: Vec::new() });
            continue;
        }
        let Some((path, types)) = line.split_once(' ') else { continue };
        let place = all.len().saturating_sub(1);
        if let Some(reference) = types.strip_prefix('=') {
            references.push((place, path, reference));
        } else if let Some(last) = all.last_mut() {
            let types = types.trim_end_matches(" !").split('|').collect();
            last.fields.push(OutputField { path: path.to_owned(), types });
        }
    }
    for (place, path, reference) in references {
        let Some((name, within)) = reference.split_once(':') else { continue };
        let there: Vec<OutputField> = all
            .iter()
            .filter(|one| one.name == name)
            .flat_map(|one| &one.fields)
            .filter_map(|field| field.moved(within, path))
            .collect();
        all[place].fields.extend(there);
    }
    all
}

impl OutputField {
    /// Returns the field moved to `path`, if it lies within `within`. The whole of an output is at
    /// the empty path.
    fn moved(&self, within: &str, path: &str) -> Option<Self> {
        let rest = match within {
            "" => Some(self.path.as_str()).filter(|path| !ENVELOPE.contains(path)),
            within => self.path.strip_prefix(within)?.strip_prefix('.'),
        };
        Some(Self { path: format!("{path}.{}", rest?), types: self.types.clone() })
    }
}

/// Lists the schemas, or prints one.
pub fn run(flags: &flags::SchemaArgs) -> Result<Report, Failure> {
    let all = listed();
    let Some(typed) = &flags.name else {
        let line =
            |one: &OutputFields| SchemaEntry { name: one.name, schema_version: one.version, of: one.of };
        return Report::of(&SchemaList { schemas: all.iter().map(line).collect() });
    };
    let wanted = all.iter().find(|one| one.name == typed || one.name.strip_prefix("bcached.") == Some(typed));
    let wanted = wanted.ok_or_else(|| {
        Failure::new(Kind::UnknownName, format!("there is no schema `{typed}`"))
            .next("`bcached schema` lists them")
    })?;
    Report::of(&JsonSchema(wanted.to_json_schema()))
}

impl OutputFields {
    fn to_json_schema(&self) -> Value {
        let mut root = SchemaNode::default();
        for field in &self.fields {
            root.add(&field.path, &field.types);
        }
        let mut schema = root.to_value();
        if let Value::Object(object) = &mut schema {
            object.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
            object.insert("title".to_owned(), json!(self.name));
            object.insert("description".to_owned(), json!(self.of));
        }
        schema
    }
}

/// A value and its fields. Fields may be added within a schema's version, so an output may hold
/// others as well.
#[derive(Default)]
struct SchemaNode {
    types: Vec<String>,
    keys: Vec<(String, bool, SchemaNode)>,
    element: Option<Box<SchemaNode>>,
}

impl SchemaNode {
    fn add(&mut self, path: &str, types: &[&str]) {
        let (key, rest) = path.split_once('.').unwrap_or((path, ""));
        let (key, is_array) = key.strip_suffix("[]").map_or((key, false), |key| (key, true));
        let (key, is_optional) = key.strip_suffix('?').map_or((key, false), |key| (key, true));
        let place = self.keys.iter().position(|(known, ..)| known == key);
        let place = place.unwrap_or_else(|| {
            self.keys.push((key.to_owned(), is_optional, Self::default()));
            self.keys.len() - 1
        });
        let node = &mut self.keys[place].2;
        let node = if is_array { node.element.get_or_insert_default() } else { node };
        if rest.is_empty() {
            node.types = types.iter().map(|one| (*one).to_owned()).collect();
        } else {
            node.add(rest, types);
        }
    }

    fn to_value(&self) -> Value {
        if let Some(element) = &self.element {
            return json!({ "type": "array", "items": element.to_value() });
        }
        if self.keys.is_empty() {
            return match self.types.as_slice() {
                [one] if one == "any" => json!({}),
                [one] => json!({ "type": one }),
                several => json!({ "type": several }),
            };
        }
        let (mut properties, mut object) = (Map::new(), Map::new());
        for (key, _, node) in &self.keys {
            if key == "*" {
                object.insert("additionalProperties".to_owned(), node.to_value());
            } else {
                properties.insert(key.clone(), node.to_value());
            }
        }
        let required: Vec<_> = self
            .keys
            .iter()
            .filter(|(key, optional, _)| !optional && key != "*")
            .map(|(key, ..)| key)
            .collect();
        object.insert("type".to_owned(), json!("object"));
        object.insert("properties".to_owned(), Value::Object(properties));
        object.insert("required".to_owned(), json!(required));
        Value::Object(object)
    }
}

/// One schema, which is JSON in both forms.
#[derive(Serialize)]
struct JsonSchema(Value);

impl Printable for JsonSchema {
    const SCHEMA: &'static str = "bcached.schema";

    fn text(&self) -> String {
        serde_json::to_string_pretty(&self.0).map_or_else(|_| String::new(), |text| text + "\n")
    }
}

#[derive(Serialize)]
struct SchemaList {
    schemas: Vec<SchemaEntry>,
}

#[derive(Serialize)]
struct SchemaEntry {
    name: &'static str,
    schema_version: u64,
    of: &'static str,
}

impl Printable for SchemaList {
    const SCHEMA: &'static str = "bcached.schemas";

    fn text(&self) -> String {
        let line = |one: &SchemaEntry| format!("{} {}: {}\n", one.name, one.schema_version, one.of);
        self.schemas.iter().map(line).collect()
    }
}
