//! The benchmarks in virtual time with their promised bounds: `sim bench-model`.
//!
//! A figure that misses its bound is reported as missed; nothing here is tuned until it fits.
//! `docs/performance.md` describes each benchmark, and explains missed bounds.

mod cliff;
mod soak;
mod start;
mod tails;
mod traffic;
mod writeback;

use super::hdd;

/// The size of the devices and the length of the runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BenchmarkScale {
    /// The size that the bounds apply to.
    Full,
    /// A small version that takes seconds: it shows only that the benchmark runs.
    Quick,
}

impl BenchmarkScale {
    /// Returns the value that applies to this scale.
    const fn of(self, full: u64, quick: u64) -> u64 {
        match self {
            Self::Full => full,
            Self::Quick => quick,
        }
    }
}

/// One line of the table.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchmarkRow {
    /// Name of the benchmark.
    pub id: &'static str,
    /// Description of the measured quantity.
    pub quantity: String,
    /// The measured figure.
    pub measured: String,
    /// The bound.
    pub bound: String,
    /// Whether the bound is met; `None` for a line that is only informative.
    pub is_met: Option<bool>,
}

impl BenchmarkRow {
    /// A figure that must not exceed `bound`.
    fn at_most(id: &'static str, quantity: impl Into<String>, measured: f64, bound: f64, unit: &str) -> Self {
        let figure = Comparison { measured, bound, unit };
        Self::of(id, quantity.into(), &figure, "<=", measured <= bound)
    }

    /// A figure that must not be below `bound`.
    fn at_least(
        id: &'static str,
        quantity: impl Into<String>,
        measured: f64,
        bound: f64,
        unit: &str,
    ) -> Self {
        let figure = Comparison { measured, bound, unit };
        Self::of(id, quantity.into(), &figure, ">=", measured >= bound)
    }

    /// A figure without a bound.
    fn tells(id: &'static str, quantity: impl Into<String>, measured: f64, unit: &str) -> Self {
        let quantity = quantity.into();
        Self { id, quantity, measured: shown(measured, unit), bound: String::new(), is_met: None }
    }

    fn of(id: &'static str, quantity: String, figure: &Comparison<'_>, sign: &str, is_met: bool) -> Self {
        let bound = format!("{sign} {}", shown(figure.bound, figure.unit));
        Self { id, quantity, measured: shown(figure.measured, figure.unit), bound, is_met: Some(is_met) }
    }

    /// Returns `met`, `MISSED`, or an empty string.
    #[must_use]
    pub const fn verdict(&self) -> &'static str {
        match self.is_met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        }
    }
}

struct Comparison<'a> {
    measured: f64,
    bound: f64,
    unit: &'a str,
}

/// Formats a figure with its significant decimal places.
fn shown(figure: f64, unit: &str) -> String {
    let places = match figure.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    format!("{figure:.places$} {unit}").trim_end().to_owned()
}

/// One benchmark: its name, what it measures, and the function that runs it.
#[derive(Clone, Copy)]
pub struct Benchmark {
    /// The name to call it by.
    pub id: &'static str,
    /// A short description.
    pub about: &'static str,
    /// Whether it takes minutes, so that it runs only on request.
    pub is_long: bool,
    /// Runs it.
    pub run: fn(BenchmarkScale) -> Vec<BenchmarkRow>,
}

const fn bench(
    id: &'static str,
    about: &'static str,
    run: fn(BenchmarkScale) -> Vec<BenchmarkRow>,
) -> Benchmark {
    Benchmark { id, about, is_long: false, run }
}

/// All benchmarks.
pub const BENCHES: [Benchmark; 8] = [
    bench("B12", "bytes written to the cache device per user byte", traffic::run),
    bench("B9", "write-back of dirty data at random places", writeback::run),
    bench("B7", "tails of random writes while garbage is collected", tails::run),
    bench("B8", "random writes beyond what the cache holds", cliff::run),
    bench("B20", "a day of mixed load", soak::run),
    bench("B10", "start after a crash, the cache full", start::run),
    Benchmark { is_long: true, ..bench("B10x4", "the same, four times as large", start::run_large) },
    Benchmark { is_long: true, ..bench("B10x8", "the same, eight times as large", start::run_huge) },
];

/// Returns the least time, in seconds, in which one sweep brings `blocks` blocks of 4 KiB at random
/// places of `region` sectors to the platter of `model`. Each touched track costs a seek from the
/// last one, k of k + 1 parts of a revolution for its k blocks, and their transfer.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn sweep_seconds(model: &hdd::HddModel, blocks: u64, region: u64) -> f64 {
    let tracks = region as f64 / model.track_sectors as f64;
    let touched = tracks * (1.0 - (-(blocks as f64) / tracks).exp());
    let on_track = blocks as f64 / touched;
    let gap = tracks / touched / (model.sectors as f64 / model.track_sectors as f64);
    let turn = model.turn_ns as f64;
    let seek =
        model.seek_min_ns as f64 + (model.seek_mean_ns - model.seek_min_ns) as f64 * 15.0 / 8.0 * gap.sqrt();
    let transfer = on_track * 8.0 / model.track_sectors as f64 * turn;
    touched * (seek + turn * on_track / (on_track + 1.0) + transfer) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_met_at_their_bound_and_missed_beyond() {
        assert_eq!(BenchmarkRow::at_most("B1", "x", 1.13, 1.13, "").verdict(), "met");
        assert_eq!(BenchmarkRow::at_most("B1", "x", 1.14, 1.13, "").verdict(), "MISSED");
        assert_eq!(BenchmarkRow::at_least("B1", "x", 4.9, 5.0, "").verdict(), "MISSED");
        assert_eq!(BenchmarkRow::tells("B1", "x", 1234.5, "s").verdict(), "");
        assert_eq!(BenchmarkRow::at_least("B1", "x", 596.0, 5.0, "s").bound, ">= 5.00 s");
    }

    /// The estimate agrees with figures calculated separately for 1, 4 and 64 GiB in 100 GB or 1
    /// TB.
    #[test]
    fn the_bound_of_a_sweep_is_the_one_that_was_calculated() {
        let model = hdd::HddModel::d7k8();
        for (gib, gb, wanted) in [(1, 100, 435.0), (4, 100, 518.0), (1, 1000, 1109.0), (64, 1000, 5404.0)] {
            let seconds = sweep_seconds(&model, gib << 18, gb * 1_953_125);
            assert!((seconds / wanted - 1.0).abs() < 0.02, "{gib} GiB in {gb} GB: {seconds}");
        }
    }

    /// Checks only that each benchmark runs: the figures of devices so small mean nothing.
    #[test]
    fn each_benchmark_runs_in_small() {
        for bench in BENCHES {
            let rows = (bench.run)(BenchmarkScale::Quick);
            assert!(!rows.is_empty() && rows.iter().all(|row| row.id == bench.id), "{}", bench.id);
            assert!(rows.iter().any(|row| row.is_met.is_some()), "{}", bench.id);
        }
    }
}
