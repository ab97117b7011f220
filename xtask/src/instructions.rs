//! `cargo xtask instructions`: counts the instructions of a 4 KiB request in the engine alone with
//! callgrind, and the memory of a cached block, and compares both with Open CAS.
//!
//! A count is the same on a busy machine and on an idle one, to about a thousandth. So counts can
//! be compared where times cannot.

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Options of the counts.
#[derive(clap::Args)]
pub struct InstructionArgs {
    /// Number of requests in flight; one run for each value.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32])]
    depths: Vec<usize>,
    /// Print this many functions of each phase, those with the highest cost by themselves.
    #[arg(long, value_name = "FUNCTIONS", default_value_t = 0)]
    profile: usize,
    /// Keep callgrind's files in this folder.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// Do not measure the memory.
    #[arg(long)]
    no_memory: bool,
}

/// A phase, the cost in Open CAS (its tuned build, no copy), and our promised bound. Both are in
/// instructions per request.
struct PhaseBound {
    phase: &'static str,
    what: &'static str,
    open_cas: u64,
    bound: u64,
}

/// The rows, in the order in which they are printed.
const ROWS: [PhaseBound; 8] = [
    row("read_hit_clean", "read hit, clean", 2210, 2200),
    row("read_hit_dirty", "read hit, dirty", 2268, 2200),
    row("write_hit_dirty", "write over dirty", 2845, 5900),
    row("write_clean_to_dirty", "write over clean", 5900, 5900),
    row("write_insert_free", "write of a new block, space is free", 7455, 5900),
    row("write_insert_evict", "write of a new block, clean blocks are evicted", 8724, 5900),
    row("miss_free", "miss and fill, space is free", 4655, 5800),
    row("miss_evict", "miss and fill, clean blocks are evicted", 5808, 5800),
];

const fn row(phase: &'static str, what: &'static str, open_cas: u64, bound: u64) -> PhaseBound {
    PhaseBound { phase, what, open_cas, bound }
}

/// The runs of the program, each with a set of its own.
const RUNS: [&str; 3] = ["hits", "inserts", "evictions"];

/// The counts of a phase.
#[derive(Clone)]
struct PhaseCounts {
    instructions: u64,
    /// Device operations per request, and whatever else the program reports.
    asked: BTreeMap<String, f64>,
}

/// Counts and prints the results. Returns false if a bound is not met.
pub fn run(args: &InstructionArgs) -> Result<bool> {
    if args.depths.contains(&0) {
        bail!("--depths: each depth must be at least 1");
    }
    if !is_there("valgrind") {
        bail!("valgrind, which counts the instructions, is missing; install it: apt-get install valgrind");
    }
    if std::env::consts::ARCH != "x86_64" {
        bail!("instructions can be counted on x86_64 only");
    }
    let program = bench("instructions")?;
    let place = tempfile::Builder::new().prefix("bcached-instructions").tempdir()?;
    let place = args.keep.as_deref().unwrap_or_else(|| place.path());
    fs::create_dir_all(place).with_context(|| format!("cannot create {}", place.display()))?;
    let mut reached = true;
    for depth in &args.depths {
        let phases = count(&program, place, *depth, args.profile)?;
        reached &= print(&phases, *depth);
    }
    if !args.no_memory {
        let status = Command::new(bench("memory")?).stdin(Stdio::null()).status()?;
        reached &= status.success();
    }
    Ok(reached)
}

fn is_there(program: &str) -> bool {
    let mut version = Command::new(program);
    version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

/// Builds a program of the engine's benches, and returns its path.
fn bench(name: &str) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct CargoMessage {
        executable: Option<PathBuf>,
    }
    let mut cargo = crate::cargo();
    cargo.current_dir(crate::origin()).args([
        "bench",
        "--quiet",
        "--no-run",
        "--message-format=json-render-diagnostics",
        "--package=bcached-engine",
        "--bench",
        name,
    ]);
    let output =
        cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cannot build the bench {name}");
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let built = messages.lines().filter_map(|line| serde_json::from_str::<CargoMessage>(line).ok());
    built
        .filter_map(|message| message.executable)
        .next_back()
        .context("cargo did not report the program that it built")
}

/// Counts all phases with `depth` requests in flight.
fn count(
    program: &Path,
    place: &Path,
    depth: usize,
    profile: usize,
) -> Result<BTreeMap<String, PhaseCounts>> {
    let mut phases = BTreeMap::new();
    for run in RUNS {
        let file = place.join(format!("{run}.{depth}"));
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--quiet", "--tool=callgrind", "--instr-atstart=no"]);
        valgrind.arg(format!("--callgrind-out-file={}", file.display()));
        valgrind.arg(program).args([run, &depth.to_string()]);
        let output = valgrind.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            bail!("{run} at depth {depth} failed");
        }
        let told = String::from_utf8_lossy(&output.stdout);
        for (number, line) in told.lines().filter_map(|line| line.strip_prefix("phase ")).enumerate() {
            let dump = PathBuf::from(format!("{}.{}", file.display(), number + 1));
            let text =
                fs::read_to_string(&dump).with_context(|| format!("cannot read {}", dump.display()))?;
            let (name, counted) = phase(line, &text).with_context(|| format!("cannot parse {line:?}"))?;
            if profile > 0 {
                crate::callgrind::print(&name, &text, depth, requests(line).unwrap_or(1.0), profile);
            }
            phases.insert(name, counted);
        }
        eprintln!("{run} at depth {depth}");
    }
    Ok(phases)
}

/// Returns the number of requests that a line of the program covers.
fn requests(line: &str) -> Option<f64> {
    line.split_once(" requests ")?.1.split_whitespace().next()?.parse().ok()
}

/// Returns the name and counts of a phase, from the program's output and callgrind's counts.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "instructions a request")]
fn phase(line: &str, dump: &str) -> Option<(String, PhaseCounts)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let total: f64 = dump.lines().find_map(|line| line.strip_prefix("totals: "))?.trim().parse().ok()?;
    let instructions = (total / requests(line)?).round() as u64;
    let pairs = words[1..].chunks_exact(2);
    let asked = pairs.filter_map(|pair| Some((pair[0].to_owned(), pair[1].parse().ok()?))).collect();
    Some(((*words.first()?).to_owned(), PhaseCounts { instructions, asked }))
}

/// Prints the results as a table. Returns false if a bound is not met.
fn print(phases: &BTreeMap<String, PhaseCounts>, depth: usize) -> bool {
    println!("\n4 KiB at random places, depth {depth}: instructions of the engine for each\n");
    println!("| | counted | bound | | Open CAS, tuned | writes to the cache device | of metadata, bytes |");
    println!("|---|---:|---:|---|---:|---:|---:|");
    let mut reached = true;
    for row in &ROWS {
        let Some(counted) = phases.get(row.phase) else { continue };
        let verdict = if counted.instructions <= row.bound { "met" } else { "**missed**" };
        reached &= counted.instructions <= row.bound;
        let asked = |name: &str| counted.asked.get(name).copied().unwrap_or(0.0);
        println!(
            "| {} | {} | {} | {verdict} | {} | {:.2} | {:.0} |",
            row.what,
            counted.instructions,
            row.bound,
            row.open_cas,
            asked("cache_writes"),
            asked("metadata_bytes"),
        );
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_what_was_counted_by_how_many_there_were() {
        let line = "miss_free depth 1 requests 1000 cache_writes 1.002 metadata_bytes 78.3";
        let (name, counted) =
            phase(line, "events: Ir\nfn=(1) main\ntotals: 4655499\n").expect("it makes sense");
        assert_eq!((name.as_str(), counted.instructions), ("miss_free", 4655));
        assert_eq!(counted.asked["metadata_bytes"], 78.3);
        assert!(phase(line, "events: Ir\n").is_none(), "nothing was counted");
        assert!(phase("", "totals: 1\n").is_none());
    }
}
