//! The write-back policies of a volume: when to write back and how fast. Each is an option with a
//! number, so that drawn policies, scripts, and changes while requests are in flight use the same
//! words.

use bcached_engine::VolumeOptions;
use bcached_env::rng::Rng;
use std::time::Duration;

/// The engine's own minimum rate.
const RATE_MINIMUM: u64 = 8;
/// A minimum rate at which a whole cache is written back in a minute or less.
const LASTING: u64 = 400;

/// The settings that can be changed. See `bcached_engine::VolumeOptions`. 0 disables a setting,
/// unless it is a boolean.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PolicyOption {
    /// In milliseconds.
    MaxDirtyAge,
    /// A boolean.
    Quiet,
    /// In sectors per second.
    Ceiling,
    /// In microseconds.
    Latency,
    /// In milliseconds.
    Spindown,
    /// In sectors.
    Stripe,
    /// A boolean: the array has parity.
    Parity,
    /// A boolean.
    Fragment,
    /// In milliseconds.
    RateUpdate,
    /// In sectors per second.
    RateMinimum,
    /// A boolean: write-back runs.
    Running,
    /// In percent.
    Percent,
}

impl PolicyOption {
    /// All options; those of [`VolumePolicy`] come first.
    pub const ALL: [Self; 12] = [
        Self::MaxDirtyAge,
        Self::Quiet,
        Self::Ceiling,
        Self::Latency,
        Self::Spindown,
        Self::Stripe,
        Self::Parity,
        Self::Fragment,
        Self::RateUpdate,
        Self::RateMinimum,
        Self::Running,
        Self::Percent,
    ];

    /// Number of options that a volume's initial policy sets. The last two options are set
    /// elsewhere, as they always were.
    pub const FIRST: usize = 10;

    /// Returns its name in steps and scripts.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::MaxDirtyAge => "max-dirty-age-ms",
            Self::Quiet => "writeback-quiet",
            Self::Ceiling => "writeback-rate-maximum",
            Self::Latency => "writeback-latency-us",
            Self::Spindown => "spindown-after-ms",
            Self::Stripe => "stripe-sectors",
            Self::Parity => "partial-stripes-expensive",
            Self::Fragment => "writeback-consider-fragment",
            Self::RateUpdate => "writeback-rate-update-ms",
            Self::RateMinimum => "writeback-rate-minimum",
            Self::Running => "writeback-running",
            Self::Percent => "writeback-percent",
        }
    }

    /// Returns the option of this name.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|option| option.word() == word)
    }

    /// Returns its minimum value.
    #[must_use]
    pub const fn least(self) -> u64 {
        matches!(self, Self::RateUpdate) as u64
    }

    /// Returns its maximum value.
    #[must_use]
    pub const fn most(self) -> u64 {
        match self {
            Self::Quiet | Self::Parity | Self::Fragment | Self::Running => 1,
            Self::Percent => 100,
            Self::MaxDirtyAge | Self::Spindown | Self::RateUpdate => 60_000,
            Self::Latency => 1_000_000,
            Self::Stripe => 1 << 16,
            Self::Ceiling | Self::RateMinimum => 1 << 24,
        }
    }

    /// Returns the values to draw from. A run takes a few virtual seconds, and a rate ceiling must
    /// leave room for what clients wait for.
    const fn choices(self) -> [u64; 4] {
        match self {
            Self::MaxDirtyAge => [0, 0, 40, 1000],
            Self::Quiet => [0, 0, 0, 1],
            Self::Ceiling => [0, 0, 4000, 60_000],
            Self::Latency => [0, 0, 100, 4000],
            Self::Spindown => [0, 0, 5, 300],
            Self::Stripe => [0, 16, 64, 64],
            Self::Parity => [0, 0, 1, 1],
            Self::Fragment => [0, 1, 1, 1],
            Self::RateUpdate => [20, 400, 5000, 5000],
            Self::RateMinimum => [RATE_MINIMUM, 100, LASTING, LASTING],
            Self::Running => [0, 1, 1, 1],
            Self::Percent => [0, 0, 1, 10],
        }
    }

    /// Draws a value for it.
    pub fn draw(self, rng: &mut Rng) -> u64 {
        self.choices()[usize::try_from(rng.below(4)).expect("below four")]
    }

    /// Sets it.
    pub const fn turn(self, options: &mut VolumeOptions, value: u64) {
        const fn some(value: Duration) -> Option<Duration> {
            if value.is_zero() { None } else { Some(value) }
        }
        match self {
            Self::MaxDirtyAge => options.max_dirty_age = some(Duration::from_millis(value)),
            Self::Quiet => options.writeback_quiet = value == 1,
            Self::Ceiling => {
                options.writeback_rate_maximum = if value == 0 { None } else { Some(value) };
            }
            Self::Latency => options.writeback_latency = some(Duration::from_micros(value)),
            Self::Spindown => options.spindown_after = some(Duration::from_millis(value)),
            Self::Stripe => options.stripe_size = Some(value * 512),
            Self::Parity => options.partial_stripes_expensive = Some(value == 1),
            Self::Fragment => options.writeback_consider_fragment = value == 1,
            Self::RateUpdate => options.writeback_rate_update = Duration::from_millis(value),
            Self::RateMinimum => options.writeback_rate_minimum = value,
            Self::Running => options.writeback_running = value == 1,
            Self::Percent => options.writeback_percent = value,
        }
    }
}

/// The initial policy of a volume: a value for each of the first options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumePolicy([u64; PolicyOption::FIRST]);

impl VolumePolicy {
    /// Returns the policy that every set had before policies were drawn: the defaults, on an array
    /// whose parity follows from another setting.
    #[must_use]
    pub const fn plain(has_parity: bool) -> Self {
        Self([0, 0, 0, 0, 0, 64, has_parity as u64, 1, 5000, RATE_MINIMUM])
    }

    /// Draws a policy; half of the sets keep this one.
    pub(super) fn draw(self, rng: &mut Rng) -> Self {
        if rng.one_in(2) {
            self
        } else {
            Self(std::array::from_fn(|place| PolicyOption::ALL[place].draw(rng)))
        }
    }

    /// Returns the first options and their values.
    pub fn values(self) -> impl Iterator<Item = (PolicyOption, u64)> {
        PolicyOption::ALL.into_iter().zip(self.0)
    }

    /// Returns the value of an option; 0 for one that is set elsewhere.
    #[must_use]
    pub const fn value(&self, option: PolicyOption) -> u64 {
        let place = option as usize;
        if place < PolicyOption::FIRST { self.0[place] } else { 0 }
    }

    /// Returns the same policy with another value for one option.
    #[must_use]
    pub const fn with(mut self, option: PolicyOption, value: u64) -> Self {
        let place = option as usize;
        if place < PolicyOption::FIRST {
            self.0[place] = value;
        }
        self
    }

    /// Returns a policy under which dirty data is written back automatically. If the age of dirty
    /// data is limited, only that limit triggers write-back: quiet hours, a disk that may sleep,
    /// and a ceiling must not keep the data longer. Otherwise it is written back at the minimum
    /// rate.
    #[must_use]
    pub const fn hurried(self) -> Self {
        let is_limited = self.value(PolicyOption::MaxDirtyAge) > 0;
        self.with(PolicyOption::Quiet, is_limited as u64)
            .with(PolicyOption::Spindown, is_limited as u64)
            .with(PolicyOption::Ceiling, 0)
            .with(PolicyOption::Latency, 0)
            .with(PolicyOption::RateMinimum, LASTING)
    }

    /// Applies the policy to `options`.
    pub fn tell(self, options: &mut VolumeOptions) {
        self.values().for_each(|(option, value)| option.turn(options, value));
    }
}
