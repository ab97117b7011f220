//! The options of volumes and caches: one table for each ([`cache_options`] has the caches'). The
//! tables define the configuration keys, `get`, `set`, `unset`, their help and the guide; a new
//! option is a line in a table.
//!
//! Names, ranges, defaults and units of bare numbers are the kernel's
//! (`/sys/block/bcacheN/bcache/`), where it has the option. [`layers`] decides where a value comes
//! from.

pub mod cache_options;
pub mod layers;
pub mod quiet_hours;
pub mod runtime;
pub mod shown;
pub mod value;

use bcached_control::failure::{Failure, Kind as FailureKind};
use bcached_engine::{ErrorPolicy, Options, Settings, VolumeOptions};
use bcached_format::ReplacementPolicy;
use value::{Value, ValueError, ValueKind};

/// One option.
#[derive(Debug)]
pub struct OptionDefinition {
    /// The kernel's name, where it has the option.
    pub name: &'static str,
    /// What has the option.
    pub scope: Scope,
    /// What it does, in a sentence.
    pub help: &'static str,
    /// The values that it accepts.
    pub kind: ValueKind,
    /// The unit of a plain number; empty where the kind or the name shows it.
    unit: &'static str,
    /// `none` is a valid value, too.
    is_optional: bool,
    /// The kernel has the option. A number out of range becomes the nearest end of the range, as in
    /// the kernel, but not silently.
    pub is_of_kernel: bool,
    /// Where its value is stored.
    pub place: OptionStorage,
}

/// What has an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Each volume has its own value.
    Volume,
    /// Each cache has its own value.
    Cache,
}

/// Where the value of an option is stored.
#[derive(Clone, Copy, Debug)]
pub enum OptionStorage {
    /// In the backing superblock, read-only here.
    Label,
    /// In the backing superblock.
    CacheMode,
    /// In the engine, which recomputes it every few seconds.
    WritebackRate,
    /// In the supervisor, which tells the engine when they begin and end.
    QuietHours,
    /// In the engine, as long as the volume is served.
    Engine {
        /// Reads the value from the engine's options.
        read: fn(&VolumeOptions) -> Value,
        /// Changes it there.
        write: fn(&mut VolumeOptions, &Value),
    },
    /// In the superblock of a cache; a value in the options of its engine overrides that.
    CacheSuperblock {
        /// Reads the value from the superblock's settings.
        read: fn(&Settings) -> Option<Value>,
        /// Makes the engine use a value, or with `None` the one in the superblock.
        write: fn(&mut Options, Option<&Value>),
        /// Changes the value that is to be written to the superblock.
        keep: fn(&mut Settings, &Value),
    },
    /// In the engine of a cache.
    CacheEngine {
        /// Reads the value from the engine's options.
        read: fn(&Options) -> Value,
        /// Changes it there.
        write: fn(&mut Options, &Value),
    },
}

/// An option of the engine: a field of [`VolumeOptions`] and the variant of [`Value`] that its kind
/// uses.
macro_rules! engine {
    ($variant:ident, $field:ident) => {
        OptionStorage::Engine {
            read: |options| Value::$variant(options.$field),
            write: |options, value| {
                if let Value::$variant(new) = value {
                    options.$field = *new;
                }
            },
        }
    };
    (policy $field:ident) => {
        OptionStorage::Engine {
            read: |options| Value::Word(options.$field.name()),
            write: |options, value| {
                let is_meant = |policy: &ErrorPolicy| *value == Value::Word(policy.name());
                if let Some(policy) = ErrorPolicy::ALL.into_iter().find(is_meant) {
                    options.$field = policy;
                }
            },
        }
    };
    (optional $variant:ident, $field:ident) => {
        OptionStorage::Engine {
            read: |options| options.$field.map_or(Value::None, Value::$variant),
            write: |options, value| {
                options.$field = match value {
                    Value::$variant(new) => Some(*new),
                    _ => None,
                }
            },
        }
    };
}

impl OptionDefinition {
    const fn of_kernel(
        name: &'static str,
        kind: ValueKind,
        place: OptionStorage,
        help: &'static str,
    ) -> Self {
        Self {
            name,
            scope: Scope::Volume,
            help,
            kind,
            unit: "",
            is_optional: false,
            is_of_kernel: true,
            place,
        }
    }

    /// An option of bcached, not of the kernel, that may be `none`.
    const fn goal(name: &'static str, kind: ValueKind, place: OptionStorage, help: &'static str) -> Self {
        Self { is_optional: true, is_of_kernel: false, ..Self::of_kernel(name, kind, place, help) }
    }

    /// An option of bcached, not of the kernel, that always has a value.
    const fn own(name: &'static str, kind: ValueKind, place: OptionStorage, help: &'static str) -> Self {
        Self { is_optional: false, ..Self::goal(name, kind, place, help) }
    }

    /// Permits `none`: something else then determines the value.
    const fn optional(self) -> Self {
        Self { is_optional: true, ..self }
    }

    const fn counting(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }
}

/// The kernel stores numbers in 32 bits.
const NUMBER_MAX: u64 = u32::MAX as u64;

/// The largest number of seconds that the kernel can store, in milliseconds.
const TIME_MAX: u64 = NUMBER_MAX * 1000;

/// The highest rate of the kernel's controller, in sectors per second: half a terabyte.
const RATE_MAX: u64 = 1_000_000_000;

/// The rate of write-back before anything has been measured, in sectors per second.
const RATE_FIRST: u64 = 1024;

/// All options of a volume, in the order in which `get` prints them.
pub static OPTIONS: &[OptionDefinition] = &[
    OptionDefinition::of_kernel(
        "cache_mode",
        ValueKind::Choice(&["writethrough", "writeback", "writearound", "none"]),
        OptionStorage::CacheMode,
        "where a write goes, and when it is complete; stored in the backing superblock",
    ),
    OptionDefinition::of_kernel(
        "label",
        ValueKind::Text,
        OptionStorage::Label,
        "label of up to 32 bytes, stored on the device; the volume's name unless the configuration names it",
    ),
    OptionDefinition::of_kernel(
        "sequential_cutoff",
        ValueKind::Size,
        engine!(Size, sequential_cutoff),
        "streams of at least this many bytes bypass the cache; 0: none does",
    ),
    OptionDefinition::of_kernel(
        "writeback_running",
        ValueKind::Flag,
        engine!(Flag, writeback_running),
        "write-back runs; 0: dirty data stays in the cache until a command such as `flush` or `detach` writes it back",
    ),
    OptionDefinition::of_kernel(
        "writeback_percent",
        ValueKind::Number(0, 40),
        engine!(Number, writeback_percent),
        "how much of the cache may be dirty, all volumes together; 0: write-back without a rate limit",
    )
    .counting("%"),
    OptionDefinition::of_kernel(
        "writeback_delay",
        ValueKind::Time(0, TIME_MAX),
        engine!(Time, writeback_delay),
        "how long write-back pauses after each pass over the volume",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate",
        ValueKind::Rate(1, RATE_MAX),
        OptionStorage::WritebackRate,
        "current rate of write-back, computed from the amount of dirty data; --runtime sets it until it is computed again",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate_update_seconds",
        ValueKind::Time(1000, 60_000),
        engine!(Time, writeback_rate_update),
        "how often the rate is computed",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate_p_term_inverse",
        ValueKind::Number(1, NUMBER_MAX),
        engine!(Number, writeback_rate_p_term_inverse),
        "number of dirty sectors above the target that raise the rate by 1 sector/s",
    )
    .counting("sectors"),
    OptionDefinition::of_kernel(
        "writeback_rate_i_term_inverse",
        ValueKind::Number(1, NUMBER_MAX),
        engine!(Number, writeback_rate_i_term_inverse),
        "the same for the excess that adds up over time, in sectors times seconds",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate_fp_term_low",
        ValueKind::Number(1, NUMBER_MAX),
        engine!(Number, writeback_rate_fp_term_low),
        "sectors/s for each percent of used buckets above 50, if dirty data is fragmented; less than _mid",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate_fp_term_mid",
        ValueKind::Number(1, NUMBER_MAX),
        engine!(Number, writeback_rate_fp_term_mid),
        "the same above 57; less than _high",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate_fp_term_high",
        ValueKind::Number(1, NUMBER_MAX),
        engine!(Number, writeback_rate_fp_term_high),
        "the same above 64",
    ),
    OptionDefinition::of_kernel(
        "writeback_consider_fragment",
        ValueKind::Flag,
        engine!(Flag, writeback_consider_fragment),
        "fragmented dirty data is written back faster when the cache fills",
    ),
    OptionDefinition::of_kernel(
        "writeback_rate_minimum",
        ValueKind::Rate(1, RATE_MAX),
        engine!(Rate, writeback_rate_minimum),
        "minimum rate of write-back",
    ),
    OptionDefinition::goal(
        "writeback_rate_maximum",
        ValueKind::Rate(1, RATE_MAX),
        engine!(optional Rate, writeback_rate_maximum),
        "maximum rate of write-back; none: what the devices allow",
    ),
    OptionDefinition::goal(
        "max_dirty_age",
        ValueKind::Time(1000, TIME_MAX),
        engine!(optional Time, max_dirty_age),
        "data that has been dirty for longer is written back regardless of the rate",
    ),
    OptionDefinition::goal(
        "quiet_hours",
        ValueKind::Hours,
        OptionStorage::QuietHours,
        "hours of local time in which nothing is written back unless it must be",
    ),
    OptionDefinition::goal(
        "writeback_latency",
        ValueKind::Time(1, 60_000),
        engine!(optional Time, writeback_latency),
        "write-back slows down while its writes, or requests of clients to the disk, take longer than this",
    ),
    OptionDefinition::goal(
        "spindown_after",
        ValueKind::Time(1000, TIME_MAX),
        engine!(optional Time, spindown_after),
        "write-back does not wake a disk that no client has used for this long, unless it must",
    ),
    OptionDefinition::of_kernel(
        "stripe_size",
        ValueKind::Stripe,
        engine!(optional Size, stripe_size),
        "length of the backing device's stripes; 0: it has no stripes; none: as the device reports",
    )
    .optional(),
    OptionDefinition::of_kernel(
        "partial_stripes_expensive",
        ValueKind::Flag,
        engine!(optional Flag, partial_stripes_expensive),
        "full stripes are written back first, and writes to a stripe with dirty data are cached; none: only on md RAID 4, 5 and 6",
    )
    .optional(),
    OptionDefinition::own(
        "on_cache_error",
        ValueKind::Choice(&["freeze", "read-only", "fail"]),
        engine!(policy on_cache_error),
        "requests that need dirty data of a failed cache: they wait; writes are refused and others fail; or all fail",
    ),
    OptionDefinition::own(
        "on_backing_error",
        ValueKind::Choice(&["freeze", "read-only", "fail"]),
        engine!(policy on_backing_error),
        "requests that need a missing backing device: they wait; writes are refused and others fail; or all fail",
    ),
    OptionDefinition::own(
        "freeze_timeout",
        ValueKind::Time(0, TIME_MAX),
        engine!(Time, freeze_timeout),
        "how long requests wait with freeze, for either device, before they fail",
    ),
];

impl Scope {
    /// Returns all options in this scope, in the order in which `get` prints them.
    #[must_use]
    pub fn options(self) -> &'static [OptionDefinition] {
        match self {
            Self::Volume => OPTIONS,
            Self::Cache => cache_options::OPTIONS,
        }
    }

    /// Returns the option called `name`.
    #[must_use]
    pub fn find(self, name: &str) -> Option<&'static OptionDefinition> {
        self.options().iter().find(|option| option.name == name)
    }

    /// Returns the other scope.
    const fn other(self) -> Self {
        match self {
            Self::Volume => Self::Cache,
            Self::Cache => Self::Volume,
        }
    }

    /// Returns the placeholder for its name in a command line.
    #[must_use]
    pub const fn placeholder(self) -> &'static str {
        match self {
            Self::Volume => "VOLUME",
            Self::Cache => "CACHE",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Volume => "volume",
            Self::Cache => "cache",
        }
    }
}

/// Returns the names of options nearest to `typed`, which is not an option; the most likely one
/// first.
#[must_use]
pub fn near(scope: Scope, typed: &str) -> Vec<&'static str> {
    nearest(scope.options().iter().map(|option| option.name), typed)
}

/// Returns those of `names` nearest to `typed`, which is none of them; the most likely one first.
#[must_use]
pub fn nearest<'a>(names: impl Iterator<Item = &'a str>, typed: &str) -> Vec<&'a str> {
    /// Chosen by trial: a name with a wrong letter or a missing word is near, that of another
    /// option is not.
    const ENOUGH: f64 = 0.8;
    /// How much farther than the nearest a name may be: all names that begin with `writeback_` are
    /// alike.
    const BEHIND_MAX: f64 = 0.02;
    let typed = typed.to_lowercase().replace('-', "_");
    let mut near: Vec<_> = names
        .map(|name| (strsim::jaro_winkler(&typed, name), name))
        .filter(|(likeness, name)| *likeness >= ENOUGH || (typed.len() > 3 && name.contains(&typed)))
        .collect();
    near.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let nearest = near.first().map_or(0.0, |(likeness, _)| *likeness);
    let close = near.into_iter().filter(|(likeness, _)| nearest - likeness <= BEHIND_MAX);
    close.map(|(_, name)| name).take(3).collect()
}

/// Creates the failure for an option that does not exist in this scope.
#[must_use]
pub fn unknown(scope: Scope, name: &str) -> Failure {
    let (it, other) = (scope.name(), scope.other());
    if other.find(name).is_some() {
        return Failure::new(FailureKind::Usage, format!("`{name}` is not an option of a {it}"))
            .why(format!("it is an option of a {}", other.name()))
            .next(format!("`bcached get {} {name}` shows it", other.placeholder()))
            .option(name);
    }
    let near = near(scope, name);
    let failure = Failure::new(FailureKind::Usage, format!("there is no option `{name}`")).option(name);
    match near.as_slice() {
        [] => failure.next(format!("`bcached get {}` lists the options", scope.placeholder())),
        near => failure.next(format!("perhaps {} is meant", near.join(" or "))),
    }
}

/// Formats the lines for `--help`: each option and its purpose.
#[must_use]
pub fn help() -> String {
    let both = [Scope::Volume, Scope::Cache];
    let all = || both.into_iter().flat_map(Scope::options);
    let width = all().map(|option| option.name.len()).max().unwrap_or(0);
    let lines = |scope: Scope| {
        let line = |option: &OptionDefinition| format!("  {:width$}  {}", option.name, option.help);
        scope.options().iter().map(line).collect::<Vec<_>>().join("\n")
    };
    both.map(|scope| format!("Options of a {}:\n{}", scope.name(), lines(scope))).join("\n\n")
}

impl OptionDefinition {
    /// Parses `typed`.
    ///
    /// # Errors
    /// It is not a value, or is out of range.
    pub fn read(&self, typed: &str) -> Result<Value, ValueError> {
        if self.is_optional && typed == "none" { Ok(Value::None) } else { self.kind.read(typed) }
    }

    /// Returns the default; `None` if only the device can tell.
    #[must_use]
    pub fn default(&self) -> Option<Value> {
        match self.place {
            OptionStorage::Label => None,
            OptionStorage::WritebackRate => Some(Value::Rate(RATE_FIRST)),
            OptionStorage::CacheMode => Some(Value::Word("writethrough")),
            OptionStorage::QuietHours => Some(Value::None),
            OptionStorage::Engine { read, .. } => Some(read(&VolumeOptions::default())),
            OptionStorage::CacheEngine { read, .. } => Some(read(&Options::default())),
            // What `make` writes by default.
            OptionStorage::CacheSuperblock { read, .. } => {
                read(&Settings { discard: Some(false), replacement: Some(ReplacementPolicy::default()) })
            }
        }
    }

    /// Returns whether a volume that lives in its cache only has the option, because it concerns no
    /// backing device.
    #[must_use]
    pub fn is_of_flash(&self) -> bool {
        matches!(self.name, "label" | "on_cache_error" | "freeze_timeout")
    }

    /// Returns what to do instead if the option cannot be a key of the configuration, else `None`.
    #[must_use]
    pub const fn not_configured(&self) -> Option<&'static str> {
        match self.place {
            OptionStorage::Label => {
                Some("the device stores it; use `bcached set VOLUME label=..` while it is served")
            }
            OptionStorage::WritebackRate => Some(
                "it is computed from the amount of dirty data; writeback_rate_minimum and \
                 writeback_rate_maximum limit it",
            ),
            _ => None,
        }
    }

    /// Returns the unit of the printed form of `value`, a value of this option.
    #[must_use]
    pub fn unit(&self, value: &Value) -> Option<&'static str> {
        let own = (!self.unit.is_empty() && matches!(value, Value::Number(_))).then_some(self.unit);
        value.unit().or(own)
    }

    /// Describes its values in words, for tables.
    #[must_use]
    pub fn values(&self) -> String {
        let range = |min: u64, max: u64, make: fn(u64) -> Value| {
            if max >= RATE_MAX {
                format!("from {}", make(min))
            } else {
                format!("{} to {}", make(min), make(max))
            }
        };
        let time = |time| Value::Time(std::time::Duration::from_millis(time));
        let values = match self.kind {
            ValueKind::Flag => "1, 0".to_owned(),
            ValueKind::Number(min, max) => range(min, max, Value::Number),
            ValueKind::Size => "size; bare: bytes".to_owned(),
            ValueKind::Stripe => {
                "size (its smallest multiple of at least 4M is used); bare: bytes".to_owned()
            }
            ValueKind::Rate(..) => "size per second; bare: sectors".to_owned(),
            ValueKind::Time(min, max) => format!("time {}; bare: seconds", range(min, max, time)),
            ValueKind::Choice(words) => words.join(", "),
            ValueKind::Hours => "HH:MM-HH:MM".to_owned(),
            ValueKind::Text => "text".to_owned(),
        };
        if self.is_optional { format!("{values}, or none") } else { values }
    }
}

#[cfg(test)]
mod tests;
