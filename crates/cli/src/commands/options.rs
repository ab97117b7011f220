//! `bcached get`, `set` and `unset`: options of a volume that a daemon serves. The daemon judges and does; here only the
//! form of what was typed is looked at.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Report, Show};
use bcached_daemon::config::Typed;
use bcached_daemon::control::client;
use bcached_daemon::control::options::{Change, Changed, Options};
use bcached_daemon::options::{find, unknown};
use std::collections::BTreeMap;

/// Shows all options, or the value of one.
pub fn get(flags: &flags::Get) -> Result<Report, Failure> {
    if let Some(name) = flags.option.as_ref().filter(|name| find(name).is_none()) {
        return Err(unknown(name));
    }
    let socket = flags.control.socket();
    let mut options: Options = client::understood(&client::get(&socket, &resource(&flags.volume))?)?;
    let Some(name) = &flags.option else { return Report::of(&options) };
    options.options.retain(|shown| shown.name == *name);
    let shown = options.options.first();
    let value = shown.and_then(|shown| shown.value.clone()).ok_or_else(|| {
        Failure::new(Kind::Io, format!("{name} of {} is not known", options.volume))
            .why("its device has not been seen")
            .next("`bcached status` says what the volume waits for")
    })?;
    Report::of(&Value { value, options })
}

/// Changes options.
pub fn set(flags: &flags::Set) -> Result<Report, Failure> {
    let mut set = BTreeMap::new();
    for setting in &flags.settings {
        let (name, value) = setting.split_once('=').ok_or_else(|| {
            Failure::new(Kind::Usage, format!("`{setting}` is not OPTION=VALUE"))
                .next(format!("`bcached get {} {setting}` shows a value", flags.volume))
        })?;
        if set.insert(name.to_owned(), Typed(value.to_owned())).is_some() {
            return Err(Failure::new(Kind::Usage, format!("{name} is named twice")).option(name));
        }
    }
    let change = Change { set, unset: Vec::new(), runtime: flags.runtime, dry_run: flags.dry_run };
    ask(&flags.volume, &flags.control, &change)
}

/// Takes back what `set` has said.
pub fn unset(flags: &flags::Unset) -> Result<Report, Failure> {
    let change = Change { unset: flags.options.clone(), dry_run: flags.dry_run, ..Change::default() };
    ask(&flags.volume, &flags.control, &change)
}

fn ask(volume: &str, control: &flags::Control, change: &Change) -> Result<Report, Failure> {
    let socket = control.socket();
    let body = serde_json::to_string(change)
        .map_err(|error| Failure::new(Kind::Io, "could not build the request").why(error.to_string()))?;
    let changed: Changed = client::understood(&client::patch(&socket, &resource(volume), &body)?)?;
    Ok(Report::of(&changed)?.warning(changed.notes.clone()))
}

fn resource(volume: &str) -> String {
    format!("/v1/volumes/{}/options", client::encoded(volume))
}

/// One option, of which people see the value alone.
#[derive(serde::Serialize)]
struct Value {
    #[serde(skip)]
    value: String,
    #[serde(flatten)]
    options: Options,
}

impl Show for Value {
    const SCHEMA: &'static str = Options::SCHEMA;

    fn text(&self) -> String {
        format!("{}\n", self.value)
    }
}

impl Show for Options {
    const SCHEMA: &'static str = "bcached.options";

    fn text(&self) -> String {
        Self::text(self)
    }
}

impl Show for Changed {
    const SCHEMA: &'static str = "bcached.change";

    fn text(&self) -> String {
        Self::text(self)
    }
}
