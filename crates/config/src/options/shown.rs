//! Options as the control API shows them.

use super::layers::ValueSource;
use super::value::Value;
use super::{OptionDefinition, Scope};
use bcached_control::options::{NumericValue, OptionEntry, OwnerName};

/// Returns the owner of options in `scope`.
#[must_use]
pub fn named(scope: Scope, name: &str) -> OwnerName {
    match scope {
        Scope::Volume => OwnerName::volume(name),
        Scope::Cache => OwnerName::cache(name),
    }
}

/// Returns an option with its value in force. Its origin is the default until [`say_where_from`]
/// changes it.
#[must_use]
pub fn shown(option: &OptionDefinition, value: Option<&Value>) -> OptionEntry {
    OptionEntry {
        name: option.name.to_owned(),
        value: value.map(ToString::to_string),
        unit: value.and_then(|value| option.unit(value)).map(str::to_owned),
        origin: "default".to_owned(),
        file: None,
        line: None,
        default: option.default().map(|value| value.to_string()),
        number: value.map(number).unwrap_or_default(),
    }
}

/// Fills in the origin of a value that was configured or set.
pub fn say_where_from(shown: &mut OptionEntry, said: Option<(&Value, ValueSource<'_>)>) {
    match said {
        Some((_, ValueSource::Runtime)) => "runtime".clone_into(&mut shown.origin),
        Some((_, ValueSource::Configured(origin))) => {
            if origin.is_by_set() { "set" } else { "config" }.clone_into(&mut shown.origin);
            shown.file = Some(origin.file().display().to_string());
            shown.line = Some(origin.line());
        }
        None => {}
    }
}

fn number(value: &Value) -> NumericValue {
    let mut number = NumericValue::default();
    match value {
        Value::Size(bytes) => number.bytes = Some(*bytes),
        Value::Rate(sectors) => number.bytes_per_second = Some(sectors * 512),
        Value::Time(time) => number.milliseconds = u64::try_from(time.as_millis()).ok(),
        _ => {}
    }
    number
}
