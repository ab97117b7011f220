//! `bcached config`: checks the configuration files, shows their merged content, compares it with
//! the running daemon, and proposes a configuration for the devices found. Writes nothing.

use super::name_lookup;
use super::scan::{self, ScanReport, ScannedDevice};
use crate::failure::{Failure, Kind};
use crate::flags::{self, ConfigCommand};
use crate::output::{Printable, Report};
use bcached_config::{CommandLine, Config, MergedConfig, merged};
use bcached_control::client;
use bcached_control::config_diff::ConfigDifferences;
use bcached_control::names::can_be_name;
use bcached_offline::bucket_memory;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Runs the given verb.
pub fn run(verb: &ConfigCommand) -> Result<Report, Failure> {
    match verb {
        ConfigCommand::Check(flags) => check(flags),
        ConfigCommand::Show(flags) => Report::of(&merged(&line(flags))?),
        ConfigCommand::Diff(flags) => {
            let path = "/v1/config/differences";
            let found: ConfigDifferences = client::understood(&client::get(&flags.control.socket(), path)?)?;
            let report = Report::of(&found)?;
            Ok(if found.differences.is_empty() { report } else { report.answering_no() })
        }
        ConfigCommand::Scan(flags) => from_disks(flags),
    }
}

fn line(flags: &flags::ConfigFileArgs) -> CommandLine {
    CommandLine { config: flags.config.clone(), ..CommandLine::default() }
}

/// The result of a check: whether a start would accept the configuration.
#[derive(Serialize)]
struct ConfigReport {
    sound: bool,
    caches: usize,
    volumes: usize,
    warnings: Vec<String>,
    /// The first thing that is wrong, as a start would report it, in the form of a refusal's
    /// `error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<serde_json::Value>,
    /// Everything that is wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failures: Vec<serde_json::Value>,
}

/// Answers no if a start would refuse the configuration. A file that cannot be read is a failure,
/// not an answer.
fn check(flags: &flags::ConfigFileArgs) -> Result<Report, Failure> {
    let (config, findings) = Config::findings(&line(flags))?;
    let failures: Vec<_> = findings.iter().map(Failure::to_error).collect();
    let sound = findings.is_empty();
    let of = |count: usize| if sound { count } else { 0 };
    let warnings = config.warnings().into_iter().map(|(_, sentence)| sentence).chain(config.left_open());
    let warnings = warnings.chain(bucket_memory::of_configured(&config));
    let report = Report::of(&ConfigReport {
        sound,
        caches: of(config.caches.len()),
        volumes: of(config.volumes.len() + config.flash.len()),
        warnings: warnings.filter(|_| sound).collect(),
        failure: failures.first().cloned(),
        failures,
    })?;
    let errors = findings.iter().map(ToString::to_string).collect();
    Ok(if sound { report } else { report.answering_no().wrong(errors) })
}

impl Printable for ConfigReport {
    const SCHEMA: &'static str = "bcached.config-check";

    fn text(&self) -> String {
        if !self.sound {
            return "a start would refuse this configuration\n".to_owned();
        }
        let mut text = format!("sound: caches: {}, volumes: {}\n", self.caches, self.volumes);
        text.extend(self.warnings.iter().map(|warning| format!("{warning}\n")));
        text
    }
}

impl Printable for MergedConfig {
    const SCHEMA: &'static str = "bcached.config";

    fn text(&self) -> String {
        Self::text(self)
    }
}

impl Printable for ConfigDifferences {
    const SCHEMA: &'static str = "bcached.config-diff";

    fn text(&self) -> String {
        Self::text(self)
    }
}

/// A configuration for the devices found.
#[derive(Serialize)]
struct ProposedConfig {
    /// TOML.
    config: String,
}

fn from_disks(flags: &flags::ScanArgs) -> Result<Report, Failure> {
    let (scanned, failures) = scan::scan(&flags.devices);
    let has_none = scanned.sets.iter().all(|set| set.caches.is_empty());
    if has_none && !failures.is_empty() {
        return Ok(failures.into_iter().fold(Report::silent(), Report::failing));
    }
    if has_none {
        return Err(Failure::new(Kind::NotFound, "no cache device was found")
            .why(if scanned.not_readable.is_empty() {
                "no device here has the superblock of a cache".to_owned()
            } else {
                format!("not examined, for lack of permission: {}", scanned.not_readable.join(", "))
            })
            .next("name devices, or run as root"));
    }
    let report = Report::of(&ProposedConfig { config: propose(&scanned) })?;
    Ok(failures.into_iter().fold(report, Report::failing))
}

/// Names block devices by UUID, which is stable, and files by their absolute path, which is valid
/// whatever the daemon's working directory.
fn named(member: &ScannedDevice) -> String {
    let device = &member.device;
    let name = match device.starts_with("/dev/") {
        true => format!("UUID={}", member.uuid),
        false => name_lookup::device(device),
    };
    toml_text(&name)
}

fn toml_text(text: &str) -> String {
    // Any JSON string is a valid TOML basic string.
    serde_json::Value::String(text.to_owned()).to_string()
}

fn propose(scanned: &ScanReport) -> String {
    let mut text = String::from("version = 1\n");
    let (mut taken, mut names) = (BTreeSet::new(), BTreeMap::new());
    // Writing to a string cannot fail.
    for set in &scanned.sets {
        let Some(cache) = set.caches.first() else {
            let _ = writeln!(text, "\n# set {}: its cache device was not found", set.set_uuid);
            for member in &set.backings {
                let _ =
                    writeln!(text, "#   {} ({})", member.device, member.state.as_deref().unwrap_or_default());
            }
            continue;
        };
        let name = unused(&cache.label, &format!("set-{}", &set.set_uuid[..8]), &mut taken);
        let _ = writeln!(text, "\n[cache.{}]  # set {}", toml_text(&name), set.set_uuid);
        for copy in set.caches.iter().skip(1) {
            let _ = writeln!(text, "# a copy of this cache device? {}", copy.device);
        }
        let _ = writeln!(text, "device = {}", named(cache));
        for member in &set.backings {
            volume(&mut text, member, &toml_text(&name), &mut taken);
        }
        names.insert(set.set_uuid.clone(), name);
    }
    for member in &scanned.without_set {
        // A device that was made together with a cache, and never served, is meant for that cache.
        let name = member.made_for.and_then(|set| names.get(&set.to_string()));
        volume(&mut text, member, &toml_text(name.map_or("none", |name| name)), &mut taken);
    }
    text
}

fn volume(text: &mut String, member: &ScannedDevice, cache: &str, taken: &mut BTreeSet<String>) {
    let name = unused(&member.label, &format!("bcache-{}", &member.uuid[..8]), taken);
    let state = member.state.as_deref().unwrap_or_default();
    let _ = writeln!(text, "\n[volume.{}]  # {}, {state}", toml_text(&name), member.device);
    let _ = writeln!(text, "backing = {}\ncache = {cache}", named(member));
}

/// Returns the label if it can be a name and is not in use yet, else `other`, made unique.
fn unused(label: &str, other: &str, taken: &mut BTreeSet<String>) -> String {
    let can_be = can_be_name(label) && label != "none" && !label.contains('\u{FFFD}');
    let mut name = if can_be && !taken.contains(label) { label.to_owned() } else { other.to_owned() };
    while !taken.insert(name.clone()) {
        name.push('x');
    }
    name
}

impl Printable for ProposedConfig {
    const SCHEMA: &'static str = "bcached.config-scan";

    fn text(&self) -> String {
        self.config.clone()
    }
}
