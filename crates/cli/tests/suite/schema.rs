//! Compares every JSON output with the program's list of fields, both ways: what is printed is
//! listed with its type, and what is listed is printed. With `BCACHED_LIST_SCHEMAS=FILE` the
//! corrected list is written to that file.

use crate::common::{self, Daemon, Images, ask, bcached, json, requires, tool};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The program's list.
const LISTED: &str =
    concat!(include_str!("../../src/schemas/offline.txt"), include_str!("../../src/schemas/daemon.txt"));

/// Objects whose keys are names: of time windows, reasons, ways, fields.
const MAPS: &[&str] = &["fields", "windows", "bypassed", "latency", "labels"];

/// What was printed under one schema's name: the fields of each value.
#[derive(Default)]
struct PrintedFields {
    version: u64,
    /// The types by path, and how often the path, and the object that contains it, appeared.
    fields: BTreeMap<String, (BTreeSet<&'static str>, u64)>,
    objects: BTreeMap<String, u64>,
}

#[derive(Default)]
struct PrintedSchemas(BTreeMap<String, PrintedFields>);

impl PrintedSchemas {
    /// Records the fields of an output.
    #[track_caller]
    fn take(&mut self, text: &str) -> Value {
        let value = json(text);
        let name = match (value["schema"].as_str(), value["record"].as_str()) {
            (Some(name), _) => name.to_owned(),
            (None, Some(record)) => format!("bcached.dump/{record}"),
            _ if value["error"].is_object() => "bcached.error".to_owned(),
            _ => unreachable!("no schema: {text}"),
        };
        let printed = self.0.entry(name).or_default();
        printed.version = value["schema_version"].as_u64().unwrap_or(1);
        printed.object("", &value);
        value
    }

    fn lines(&mut self, text: &str) {
        text.lines().for_each(|line| drop(self.take(line)));
    }
}

impl PrintedFields {
    fn object(&mut self, path: &str, value: &Value) {
        *self.objects.entry(path.to_owned()).or_default() += 1;
        for (key, inner) in value.as_object().expect("an object") {
            let is_map = MAPS.contains(&path.rsplit('.').next().unwrap_or_default());
            let key = if is_map { "*" } else { key };
            let inside = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            self.value(&inside, inner, true);
        }
    }

    fn value(&mut self, path: &str, value: &Value, counts: bool) {
        let kind = match value {
            Value::Object(_) => "object",
            Value::Array(_) => "array",
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::String(_) => "string",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
        };
        let field = self.fields.entry(path.to_owned()).or_default();
        field.0.insert(kind);
        field.1 += u64::from(counts);
        match value {
            Value::Object(_) => self.object(path, value),
            Value::Array(all) => {
                let element = format!("{path}[]");
                all.iter().for_each(|inner| self.value(&element, inner, true));
            }
            _ => {}
        }
    }

    /// Returns the lines of the list: leaves only, with `?` if one was absent at least once.
    fn lines(&self) -> BTreeMap<String, String> {
        let leaf = |path: &String| {
            !self
                .fields
                .keys()
                .any(|other| other.starts_with(&format!("{path}.")) || *other == format!("{path}[]"))
        };
        let mut lines = BTreeMap::new();
        for (path, (types, _)) in self.fields.iter().filter(|(path, _)| leaf(path)) {
            let types: Vec<_> = types.iter().copied().collect();
            lines.insert(self.marked(path), types.join("|"));
        }
        lines
    }

    fn marked(&self, path: &str) -> String {
        let mut marked = String::new();
        let mut so_far = String::new();
        for part in path.split('.') {
            let parent = so_far.clone();
            let key = part.trim_end_matches("[]");
            if !so_far.is_empty() {
                so_far.push('.');
                marked.push('.');
            }
            let whole = format!("{so_far}{key}");
            let there = self.fields.get(&whole).map_or(0, |field| field.1);
            let is_optional = key != "*" && there < self.objects.get(&parent).copied().unwrap_or(0);
            so_far.push_str(part);
            marked.push_str(key);
            marked.push_str(if is_optional { "?" } else { "" });
            marked.push_str(&part[key.len()..]);
        }
        marked
    }
}

/// The program's list of one schema: its version, and by path the types, whether the field may be
/// absent, and whether no test prints it.
struct ListedFields {
    version: u64,
    fields: BTreeMap<String, (BTreeSet<String>, bool)>,
    optional: BTreeSet<String>,
}

fn known() -> BTreeMap<String, ListedFields> {
    let mut all: BTreeMap<String, ListedFields> = BTreeMap::new();
    let mut last = String::new();
    let mut references = Vec::new();
    for line in LISTED.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some((head, _)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) {
            let (name, version) = head.rsplit_once(' ').expect("a version");
            let version = version.parse().expect("a number");
            last = name.to_owned();
            all.insert(
                last.clone(),
                ListedFields { version, fields: BTreeMap::new(), optional: BTreeSet::new() },
            );
            continue;
        }
        let (path, types) = line.split_once(' ').expect("types");
        if let Some((name, within)) = types.strip_prefix('=').and_then(|reference| reference.split_once(':'))
        {
            references.push((last.clone(), path.replace('?', ""), name.to_owned(), within.to_owned()));
            if path.contains('?') {
                all.get_mut(&last).expect("a section").optional.insert(path.replace("?[]", ""));
            }
            continue;
        }
        let (types, unseen) = types.strip_suffix(" !").map_or((types, false), |types| (types, true));
        let known = all.get_mut(&last).expect("a section");
        let mut so_far = String::new();
        for part in path.split('.') {
            so_far.push_str(if so_far.is_empty() { "" } else { "." });
            let key = part.trim_end_matches("[]");
            so_far.push_str(key.trim_end_matches('?'));
            if key.ends_with('?') {
                known.optional.insert(so_far.clone());
            }
            so_far.push_str(&part[key.len()..]);
        }
        known.fields.insert(so_far, (types.split('|').map(str::to_owned).collect(), unseen));
    }
    for (section, path, name, within) in references {
        let of = &all[&name];
        let moved = |there: &String| {
            let rest = if within.is_empty() {
                Some(there.as_str())
            } else {
                there.strip_prefix(&within)?.strip_prefix('.')
            };
            let is_envelope =
                within.is_empty() && ["schema", "schema_version", "bcached"].contains(&there.as_str());
            rest.filter(|_| !is_envelope).map(|rest| format!("{path}.{rest}"))
        };
        // The fields referred to are checked where they are listed themselves.
        let fields: Vec<_> = of
            .fields
            .iter()
            .filter_map(|(there, (types, _))| Some((moved(there)?, (types.clone(), true))))
            .collect();
        let optional: Vec<_> = of.optional.iter().filter_map(moved).collect();
        let known = all.get_mut(&section).expect("a section");
        known.fields.extend(fields);
        known.optional.extend(optional);
    }
    all
}

/// Returns what is wrong with the list, if these were all outputs.
fn compare(all: &PrintedSchemas) -> Vec<String> {
    let known = known();
    let mut wrong = Vec::new();
    for (name, printed) in &all.0 {
        let Some(known) = known.get(name) else {
            wrong.push(format!("{name} is not listed"));
            continue;
        };
        if known.version != printed.version {
            wrong.push(format!("{name} has version {}", printed.version));
        }
        for (path, (types, _)) in &printed.fields {
            let within = |listed: &String| {
                listed.starts_with(&format!("{path}."))
                    || *listed == format!("{path}[]")
                    || listed.starts_with(&format!("{path}[]."))
            };
            match known.fields.get(path) {
                Some((listed, _))
                    if types.iter().all(|one| listed.contains(*one) || listed.contains("any")) => {}
                Some((listed, _)) => wrong.push(format!("{name}: {path} is {types:?}, not {listed:?}")),
                None if known.fields.keys().any(within) => {}
                None if known.fields.iter().any(|(above, (types, _))| {
                    types.contains("any") && path.starts_with(&format!("{above}."))
                }) => {}
                None => wrong.push(format!("{name}: {path} ({types:?}) is not listed")),
            }
        }
        for path in known.fields.keys() {
            let mut so_far = String::new();
            for part in path.split('.') {
                let parent = so_far.clone();
                so_far.push_str(if so_far.is_empty() { "" } else { "." });
                let key = part.trim_end_matches("[]");
                so_far.push_str(key);
                let there = printed.fields.get(&so_far).map_or(0, |field| field.1);
                let objects = printed.objects.get(&parent).copied().unwrap_or(0);
                if key != "*" && there < objects && !known.optional.contains(&so_far) {
                    wrong.push(format!("{name}: {so_far} is listed as always there, and was absent"));
                }
                so_far.push_str(&part[key.len()..]);
            }
        }
    }
    for (name, known) in &known {
        for (path, (_, unseen)) in &known.fields {
            let is_seen = all.0.get(name).is_some_and(|printed| printed.fields.contains_key(path));
            if !is_seen && !unseen {
                wrong.push(format!("{name}: {path} is listed and was printed by nothing here"));
            }
        }
    }
    wrong.dedup();
    wrong
}

const MIB: u64 = 1 << 20;

/// Runs commands of all kinds.
fn print_everything(all: &mut PrintedSchemas) {
    let images = Images::new();
    let fast = images.blank("fast", 36 * MIB);
    let tank = images.blank("tank", 20 * MIB);
    let pond = images.blank("pond", 20 * MIB);
    let blank = images.blank("blank", MIB);
    all.take(
        &bcached(&[
            "make",
            "--json",
            "-b",
            "64k",
            "--writeback",
            "--label",
            "tank",
            "-C",
            &fast,
            "-B",
            &tank,
        ])
        .out,
    );
    all.take(&bcached(&["make", "--json", "-b", "64k", "-B", &pond]).out);
    all.take(&bcached(&["make", "--json", "--dry-run", "-b", "64k", "-B", &blank]).out);
    all.take(&bcached(&["make", "--json", "-C", &blank]).err);
    for words in [["version", "--json"], ["schema", "--json"], ["doctor", "--json"], ["scan", "--json"]] {
        all.take(&bcached(&words).out);
    }
    offline(all, &images, &[&fast, &tank, &pond, &blank]);
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[daemon]\nstop_timeout = \"1s\"\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\nwriteback_running = false\nwait = \"1s\"\n\
         [volume.gone]\nbacking = \"/nonexistent\"\nwait = \"1s\"\n[volume.more]\nbacking = {pond:?}\ncache = \"none\"\n"
    );
    std::fs::write(&config, text).expect("a file");
    let config = config.to_str().expect("text");
    for verb in ["check", "show"] {
        all.take(&bcached(&["config", verb, "--json", "--config", config]).out);
    }
    let daemon = Daemon::start(&images, &["--config", config]);
    while_it_runs(all, &images, &daemon);
    all.take(&ask(&daemon, &["stop", "--json"]).out);
    all.take(&ask(&daemon, &["stop", "--json"]).out);
    drop(daemon);
    let daemon = Daemon::start(&images, &["--config", config]);
    all.take(&ask(&daemon, &["take-over", "--json"]).out);
    all.take(&ask(&daemon, &["stop", "--json"]).out);
    drop(daemon);
    std::fs::write(config, "version = 2\n").expect("a file");
    all.take(&bcached(&["config", "check", "--json", "--config", config]).out);
    offline(all, &images, &[&fast, &tank, &pond, &blank]);
    lost(all, &images, &fast);
}

/// Runs the commands that look at devices.
fn offline(all: &mut PrintedSchemas, images: &Images, devices: &[&String]) {
    let [fast, tank, pond, blank] = devices else { unreachable!("four") };
    for device in [fast, tank, pond] {
        all.take(&bcached(&["show", "--json", device]).out);
        all.take(&bcached(&["doctor", "--json", device]).out);
    }
    all.take(&bcached(&["show", "--json", blank]).out);
    all.take(&bcached(&["scan", "--json", fast, tank, pond]).out);
    all.take(&bcached(&["config", "scan", "--json", fast, tank]).out);
    all.take(&bcached(&["check", "--json", fast, "--backing", tank]).out);
    all.take(&bcached(&["check", "--json", fast, tank, pond]).out);
    all.lines(&bcached(&["dump", "--json", fast]).out);
    let hurt = images.path("hurt");
    std::fs::copy(fast, &hurt).expect("a copy");
    for bucket in 1..40 {
        common::patch(&hurt, bucket << 16, &[0xa5; 512]);
    }
    all.take(&bcached(&["check", "--json", hurt.to_str().expect("text")]).out);
    let torn = images.path("torn");
    std::fs::copy(fast, &torn).expect("a copy");
    common::patch(&torn, 16 << 10, &[0xa5; 4096]);
    common::patch(&torn, 4096 + 120, &[1]);
    let torn = torn.to_str().expect("text");
    all.take(&bcached(&["scan", "--json", torn]).out);
    all.take(&bcached(&["show", "--json", torn]).out);
}

fn while_it_runs(all: &mut PrintedSchemas, images: &Images, daemon: &Daemon) {
    let fast = images.path("fast");
    all.take(&bcached(&["doctor", "--json", fast.to_str().expect("text")]).out);
    let data = images.path("data");
    std::fs::write(&data, vec![7; 2 << 20]).expect("a file");
    let copied = common::run(tool("nbdcopy").arg("--flush").arg(&data).arg(daemon.uri("media")));
    assert_eq!(copied.exit, 0, "{copied:?}");
    // This offset was never read, so it is not cached.
    all.take(&ask(daemon, &["explain", "media", "19M", "--json"]).out);
    all.take(&ask(daemon, &["metrics", "--json"]).out);
    let read = common::run(tool("nbdcopy").arg(daemon.uri("media")).arg(images.path("found")));
    assert_eq!(read.exit, 0, "{read:?}");
    let mut said = |words: &[&str]| drop(all.take(&ask(daemon, &[words, &["--json"]].concat()).out));
    said(&["status"]);
    said(&["status", "--full"]);
    said(&["list"]);
    said(&["get", "media"]);
    said(&["get", "gone"]);
    said(&["get", "fast"]);
    said(&["set", "fast", "io_error_limit=9"]);
    said(&["set", "media", "writeback_percent=20", "writeback_rate_minimum=1"]);
    said(&["set", "media", "writeback_percent=90", "--runtime"]);
    said(&["get", "media"]);
    said(&["config", "diff"]);
    said(&["explain", "media", "0"]);
    said(&["wait", "media", "--for", "served"]);
    said(&["stop", "--dry-run"]);
    said(&["add", "scratch", "--size", "1M"]);
    said(&["status"]);
    said(&["list"]);
    said(&["grow", "media"]);
    said(&["shrink", "media", "--size", "10M", "--dry-run"]);
    said(&["flush", "--dry-run"]);
    said(&["remove", "scratch"]);
    said(&["status"]);
    said(&["forget", "scratch", "--dry-run"]);
    daemon.fail_writes_beyond(8192);
    said(&["flush", "media", "--no-wait"]);
    said(&["status"]);
    let failed = ask(daemon, &["flush", "media", "--json"]);
    assert_eq!(failed.exit, 4, "{failed:?}");
    all.take(&failed.out);
    all.take(&failed.err);
    all.lines(&ask(daemon, &["events", "--json"]).out);
    all.take(&ask(daemon, &["top", "--json"]).out);
}

/// Produces the list of the data lost with a volume.
fn lost(all: &mut PrintedSchemas, images: &Images, fast: &str) {
    let config = images.path("config.toml");
    std::fs::write(&config, format!("version = 1\n[cache.fast]\ndevice = {fast:?}\n")).expect("a file");
    let daemon = Daemon::start(images, &["--config", config.to_str().expect("text")]);
    all.take(&ask(&daemon, &["status", "--json"]).out);
    let list = images.path("lost.json");
    let words =
        ["forget", "tank", "--accept-loss", "1G", "--lost-ranges", list.to_str().expect("text"), "--json"];
    let forgotten = ask(&daemon, &words);
    assert_eq!(forgotten.exit, 0, "{forgotten:?}");
    all.take(&forgotten.out);
    all.take(&std::fs::read_to_string(list).expect("a list"));
    let released = ask(&daemon, &["release", "fast"]);
    assert_eq!(released.exit, 0, "{released:?}");
    all.take(&ask(&daemon, &["status", "--json"]).out);
}

#[test]
fn every_output_is_listed_and_every_list_is_of_an_output() {
    if !requires("nbdcopy") {
        return;
    }
    let mut all = PrintedSchemas::default();
    print_everything(&mut all);
    if let Some(path) = std::env::var_os("BCACHED_LIST_SCHEMAS") {
        let mut text = String::new();
        for (name, printed) in &all.0 {
            text.push_str(&format!("\n[{name} {}] \n", printed.version));
            printed.lines().iter().for_each(|(path, types)| text.push_str(&format!("{path} {types}\n")));
        }
        std::fs::write(path, text).expect("a file");
        return;
    }
    let wrong = compare(&all);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_schema_is_a_json_schema() {
    let listed = bcached(&["schema"]);
    assert!(listed.exit == 0 && listed.out.contains("bcached.status 1: "), "{listed:?}");
    let schema = json(&bcached(&["schema", "status"]).out);
    assert_eq!(schema["$schema"].as_str(), Some("https://json-schema.org/draft/2020-12/schema"));
    let volume = &schema["properties"]["volumes"]["items"];
    assert_eq!(volume["properties"]["name"]["type"].as_str(), Some("string"), "{schema}");
    let required =
        |of: &Value, key: &str| of["required"].as_array().is_some_and(|all| all.contains(&Value::from(key)));
    assert!(required(volume, "name") && !required(volume, "reason"), "{volume}");
    let event = json(&bcached(&["schema", "bcached.event"]).out);
    assert_eq!(
        event["properties"]["fields"]["additionalProperties"]["type"].as_str(),
        Some("string"),
        "{event}"
    );
    let none = bcached(&["schema", "nothing"]);
    assert_eq!(
        (none.exit, none.err.contains("there is no schema `nothing`; `bcached schema` lists them")),
        (2, true)
    );
}
