//! `bcached get`, `set` and `unset`: options of a volume or a cache that a daemon serves. The
//! daemon validates and applies them; this module checks only the syntax of what was typed.

use super::name_lookup::called;
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use bcached_config::TypedValue;
use bcached_config::options::{Scope, unknown};
use bcached_control::client;
use bcached_control::options::{OptionChange, OptionChangeReport, Options};
use std::collections::BTreeMap;

/// Shows all options, or the value of one.
pub fn get(flags: &flags::GetArgs) -> Result<Report, Failure> {
    let both = [Scope::Volume, Scope::Cache];
    if let Some(name) = &flags.option
        && both.into_iter().all(|scope| scope.find(name).is_none())
    {
        return Err(unknown(Scope::Volume, name));
    }
    let socket = flags.control.socket();
    let (scope, answer) = of_either(&flags.volume, |resource| client::get(&socket, resource))?;
    if let Some(name) = flags.option.as_ref().filter(|name| scope.find(name).is_none()) {
        return Err(unknown(scope, name));
    }
    let mut options: Options = client::understood(&answer)?;
    let Some(name) = &flags.option else { return Report::of(&options) };
    options.options.retain(|shown| shown.name == *name);
    let shown = options.options.first().ok_or_else(|| {
        Failure::new(Kind::Usage, format!("{} has no {name}", options.owner.name()))
            .why("it is a flash-only volume")
            .next(format!("`bcached get {}` lists its options", options.owner.name()))
            .option(name.as_str())
    })?;
    let value = shown.value.clone().ok_or_else(|| {
        Failure::new(Kind::Io, format!("{name} of {} is unknown", options.owner.name()))
            .why("it is stored on its device, which could not be read yet")
            .next("`bcached status` says why")
    })?;
    Report::of(&OptionReport { value, options })
}

/// Changes options.
pub fn set(flags: &flags::SetArgs) -> Result<Report, Failure> {
    let mut set = BTreeMap::new();
    for setting in &flags.settings {
        let (name, value) = setting.split_once('=').ok_or_else(|| {
            Failure::new(Kind::Usage, format!("`{setting}` is not OPTION=VALUE"))
                .next(format!("`bcached get {} {setting}` shows a value", flags.volume))
        })?;
        if set.insert(name.to_owned(), TypedValue(value.to_owned())).is_some() {
            return Err(Failure::new(Kind::Usage, format!("{name} is named twice")).option(name));
        }
    }
    let change = OptionChange { set, unset: Vec::new(), runtime: flags.runtime, dry_run: flags.dry_run };
    ask(&flags.volume, &flags.control, &change)
}

/// Removes options stored by `set`.
pub fn unset(flags: &flags::UnsetArgs) -> Result<Report, Failure> {
    let change =
        OptionChange { unset: flags.options.clone(), dry_run: flags.dry_run, ..OptionChange::default() };
    ask(&flags.volume, &flags.control, &change)
}

fn ask(volume: &str, control: &flags::ControlArgs, change: &OptionChange) -> Result<Report, Failure> {
    let socket = control.socket();
    let body = client::body(change)?;
    let (_, answer) = of_either(volume, |resource| client::patch(&socket, resource, &body))?;
    let changed: OptionChangeReport = client::understood(&answer)?;
    Ok(Report::of(&changed)?.warning(changed.notes.clone()))
}

/// Asks for the options of the volume called `name`, or, if there is none, of the cache.
fn of_either(name: &str, ask: impl Fn(&str) -> Result<String, Failure>) -> Result<(Scope, String), Failure> {
    called(name, |name| {
        let name = client::encoded(name);
        match ask(&format!("/v1/volumes/{name}/options")) {
            Err(none) if none.kind == Kind::UnknownName => {
                let of_cache = ask(&format!("/v1/caches/{name}/options"));
                of_cache.map(|answer| (Scope::Cache, answer)).map_err(|failure| match failure.kind {
                    Kind::UnknownName => nobody(none, &failure),
                    _ => failure,
                })
            }
            answer => answer.map(|answer| (Scope::Volume, answer)),
        }
    })
}

/// The failure if neither a volume nor a cache has that name: it lists the names of both.
fn nobody(no_volume: Failure, no_cache: &Failure) -> Failure {
    let there_are = |failure: &Failure| {
        failure.next.as_deref().and_then(|next| next.strip_prefix("there are: ")).map(str::to_owned)
    };
    let all: Vec<_> = there_are(&no_volume).into_iter().chain(there_are(no_cache)).collect();
    if all.is_empty() { no_volume } else { no_volume.next(format!("there are: {}", all.join(", "))) }
}

/// One option. The text form shows only its value.
#[derive(serde::Serialize)]
struct OptionReport {
    #[serde(skip)]
    value: String,
    #[serde(flatten)]
    options: Options,
}

impl Printable for OptionReport {
    const SCHEMA: &'static str = Options::SCHEMA;

    fn text(&self) -> String {
        format!("{}\n", self.value)
    }
}

impl Printable for Options {
    const SCHEMA: &'static str = "bcached.options";

    fn text(&self) -> String {
        Self::text(self)
    }
}

impl Printable for OptionChangeReport {
    const SCHEMA: &'static str = "bcached.change";

    fn text(&self) -> String {
        Self::text(self)
    }
}
