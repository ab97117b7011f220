//! `sim bench-model`: measures the promised figures in virtual time, on modelled devices, and
//! prints them beside their bounds.

use crate::names::unknown;
use crate::out::say;
use anyhow::{Context as _, Result};
use bcached_sim::models::bench::{BENCHES, Benchmark, BenchmarkRow, BenchmarkScale};

/// Options of `sim bench-model`.
#[derive(clap::Args)]
pub struct BenchModelArgs {
    /// The benchmarks to run, such as B9; none: all but the longest.
    names: Vec<String>,
    /// Use small devices, so that it takes seconds. This shows only that it runs; the figures mean
    /// nothing.
    #[arg(long)]
    quick: bool,
}

/// Prints the table. Returns true even if bounds are missed: the table is only informative.
pub fn bench_model(args: &BenchModelArgs) -> Result<bool> {
    let named = |name: &String| {
        let found = BENCHES.iter().find(|bench| bench.id.eq_ignore_ascii_case(name));
        found.with_context(|| unknown("benchmark", name, BENCHES.iter().map(|bench| bench.id)))
    };
    let benches: Vec<&Benchmark> = match &args.names[..] {
        [] => BENCHES.iter().filter(|bench| !bench.is_long).collect(),
        names => names.iter().map(named).collect::<Result<_>>()?,
    };
    let scale = if args.quick { BenchmarkScale::Quick } else { BenchmarkScale::Full };
    say!("{:<5} {:<52} {:>12}  {:<14} verdict", "id", "quantity", "measured", "bound");
    let mut verdicts = (0, 0);
    for bench in benches {
        for row in (bench.run)(scale) {
            let BenchmarkRow { id, quantity, measured, bound, is_met } = &row;
            say!("{id:<5} {quantity:<52} {measured:>12}  {bound:<14} {}", row.verdict());
            verdicts.0 += u32::from(*is_met == Some(true));
            verdicts.1 += u32::from(*is_met == Some(false));
        }
    }
    say!("{} met, {} missed", verdicts.0, verdicts.1);
    Ok(true)
}
