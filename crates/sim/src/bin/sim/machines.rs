//! `sim machines`: ten virtual machines on one cache, and what happens to them.

use crate::out::say;
use anyhow::{Context as _, Result};
use bcached_sim::machines::{self, COUNT, LOADS, RunLength, plot};
use std::path::PathBuf;

/// Options of `sim machines`.
#[derive(clap::Args)]
pub struct MachinesArgs {
    /// Seed of requests and events.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How often the cycle of all events is repeated.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    cycles: u32,
    /// Rounds of requests before each event.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Write the samples to this file, as comma-separated values.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Write the plot to this file, as SVG.
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// Runs the machines and prints the result for each. Returns false if anything was lost.
pub fn machines(args: &MachinesArgs) -> Result<bool> {
    let samples = match machines::run(args.seed, RunLength { cycles: args.cycles, rounds: args.rounds }) {
        Ok(samples) => samples,
        Err(fault) => {
            say!("{fault}");
            say!(
                "  again: {} machines --seed {} --cycles {} --rounds {}",
                crate::program::name(),
                args.seed,
                args.cycles,
                args.rounds
            );
            return Ok(false);
        }
    };
    let write = |place: &Option<PathBuf>, text: String| match place {
        Some(place) => {
            std::fs::write(place, text).with_context(|| format!("cannot write {}", place.display()))
        }
        None => Ok(()),
    };
    write(&args.csv, machines::csv(&samples))?;
    write(&args.svg, plot::svg(&samples))?;
    say!("{:<3} {:<10} {:>14} {:>10}", "", "load", "dirty at most", "hits");
    for (number, load) in LOADS.iter().enumerate().take(COUNT) {
        let of_volume = || samples.iter().map(|sample| sample.volumes[number]);
        let dirty = of_volume().map(|volume| volume.dirty_bytes).max().unwrap_or(0) / 1024;
        let (hits, reads) =
            of_volume().fold((0, 0), |sum, volume| (sum.0 + volume.hits, sum.1 + volume.reads));
        let percent =
            (hits * 100_u64).checked_div(reads).map_or("-".to_owned(), |percent| format!("{percent} %"));
        say!("{number:<3} {:<10} {dirty:>10} KiB {percent:>10}", load.name());
    }
    let events = samples.iter().filter(|sample| sample.event.is_some()).count();
    let seconds = samples.last().map_or(0, |sample| sample.now) / 1_000_000_000;
    say!("{events} events in {seconds} virtual seconds: nothing lost");
    Ok(true)
}
