//! `cargo xtask bench`: compares this daemon with other servers in common use, on the same bytes,
//! as ratios.
//!
//! The machine may be busy. So each round measures every server once, one after the other, and a
//! ratio compares two figures of the same round. The output is the median of the ratios with their
//! range, next to the promises of `docs/performance.md`. The CPU time of the servers is printed
//! too: from it one can estimate the figures on another machine.

mod fio;
mod report;
mod servers;
mod vhost;

use anyhow::{Context as _, Result, bail};
use fio::{FioLoad, Measurement};
use report::Measurements;
use servers::{Server, Servers};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct BenchArgs {
    /// How often each server is measured at each load.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Length of each measurement, in seconds.
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    /// Run only loads whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Directory for the images and sockets. It should be in memory, because the servers are
    /// measured and not the disks.
    #[arg(long, default_value = "/dev/shm")]
    place: PathBuf,
    /// Daemon to measure, instead of building one.
    #[arg(long, value_name = "PROGRAM")]
    bcached: Option<PathBuf>,
}

/// Size in bytes of each volume, and of what the other servers serve.
const VOLUME_BYTES: u64 = 512 << 20;

/// Runs the measurements and prints the results. Returns false if a bound is not met.
pub fn run(args: &BenchArgs) -> Result<bool> {
    if args.rounds == 0 || args.seconds == 0 {
        bail!("--rounds and --seconds must be at least 1");
    }
    let place = || tempfile::Builder::new().prefix("bcached-bench").tempdir_in(&args.place);
    let bcached = match &args.bcached {
        Some(program) => program.clone(),
        None => crate::build("bcached-cli", "bcached")?,
    };
    let wanted = |load: &FioLoad| args.only.as_ref().is_none_or(|only| load.name.contains(only.as_str()));
    let mut reached = true;
    let loads: Vec<FioLoad> = fio::LOADS.into_iter().filter(wanted).collect();
    if !loads.is_empty() {
        let place = place()?;
        let servers = Servers::start_nbd(place.path(), &bcached)?;
        let cells = measure(args, &servers, &loads, |server, load| fio::run(server, load, args.seconds))?;
        reached &= report::print("NBD, a unix socket, files in memory", &servers, &loads, &cells);
    }
    let loads: Vec<FioLoad> = vhost::LOADS.into_iter().filter(wanted).collect();
    if !loads.is_empty() {
        let client = vhost::client()?;
        let place = place()?;
        let servers = Servers::start_vhost(place.path(), &bcached)?;
        let cells =
            measure(args, &servers, &loads, |server, load| vhost::run(&client, server, load, args.seconds))?;
        reached &= report::print("vhost-user-blk, files in memory", &servers, &loads, &cells);
    }
    Ok(reached)
}

/// Measures every load on every server in every round.
fn measure(
    args: &BenchArgs,
    servers: &Servers,
    loads: &[FioLoad],
    run: impl Fn(&Server, &FioLoad) -> Result<Measurement>,
) -> Result<Vec<Measurements>> {
    let mut cells: Vec<Measurements> =
        loads.iter().flat_map(|_| servers.all()).map(|_| Measurements::default()).collect();
    for round in 0..args.rounds {
        for (load, row) in loads.iter().zip(cells.chunks_mut(servers.all().len())) {
            // Rotate the order: the first server finds the processor's caches as another load has
            // left them.
            let count = servers.all().len();
            for turn in 0..count {
                let at = (turn + round) % count;
                let server = &servers.all()[at];
                let measured =
                    run(server, load).with_context(|| format!("{} at {}", server.name, load.name))?;
                row[at].0.push(measured);
            }
        }
        eprintln!("round {} of {}", round + 1, args.rounds);
    }
    Ok(cells)
}
