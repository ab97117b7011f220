//! Measures which lines of the engine a hunt of the simulator reaches. A hunt proves nothing about
//! code that it never ran.
//!
//! The simulator is built again with line counters, and hunts for some time from a fixed starting
//! number. `llvm-profdata` and `llvm-cov` of the toolchain (its component `llvm-tools`) turn the
//! counts into a table.

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Crates whose lines are counted: those that run in the simulator as they run on devices.
const CRATES: [&str; 2] = ["crates/engine/src/", "crates/node/src/"];
/// Files with a smaller share of covered lines are listed.
const NAMED_BELOW_PERCENT: f64 = 95.0;

/// Options of the hunt.
#[derive(clap::Args)]
pub struct CoverageArgs {
    /// CPU seconds to hunt.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Starting number of the hunt.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Print every line that was not reached, as FILE:LINE.
    #[arg(long)]
    lines: bool,
}

/// The output of `llvm-cov export`, as far as it is used.
#[derive(Deserialize)]
struct CoverageExport {
    data: Vec<CoverageData>,
}

#[derive(Deserialize)]
struct CoverageData {
    files: Vec<FileCoverage>,
}

#[derive(Deserialize)]
struct FileCoverage {
    filename: String,
    segments: Vec<Segment>,
    summary: FileSummary,
}

/// Line, column, count, whether it has a count, whether a region begins, whether it is a gap.
type Segment = (u64, u64, u64, bool, bool, bool);

#[derive(Deserialize)]
struct FileSummary {
    lines: LineCounts,
}

#[derive(Deserialize, Clone, Copy, Default)]
struct LineCounts {
    count: u64,
    covered: u64,
}

impl LineCounts {
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn percent(self) -> f64 {
        100.0 * self.covered as f64 / self.count.max(1) as f64
    }
}

/// Runs `cargo xtask coverage`. Returns false if the hunt found a fault.
///
/// # Errors
/// A tool that is missing or fails.
pub fn run(args: &CoverageArgs) -> Result<bool> {
    let origin = crate::origin();
    let work = crate::target(origin).join("coverage");
    let tools = tools()?;
    let (raw, merged) = (work.join("hunt.profraw"), work.join("hunt.profdata"));
    // Programs that run during the build count as well, and would otherwise leave their counts in
    // the source tree.
    let of_the_build = work.join("build.profraw");
    let variables = [
        ("RUSTFLAGS", OsStr::new("-C instrument-coverage")),
        ("LLVM_PROFILE_FILE", of_the_build.as_os_str()),
    ];
    let simulator = crate::build_sim(origin, &work, &variables)?;
    let mut hunt = Command::new(&simulator);
    hunt.args(["hunt", "--from", &args.from.to_string(), "--seconds", &args.seconds.to_string()]);
    hunt.env("LLVM_PROFILE_FILE", &raw).stdout(Stdio::null());
    let found_nothing = hunt.status().context("cannot start the simulator")?.success();
    let mut merge = Command::new(tools.join("llvm-profdata"));
    merge.arg("merge").arg("--sparse").arg(&raw).arg("--output").arg(&merged);
    output(&mut merge)?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export.arg("export").arg("--instr-profile").arg(&merged).arg(&simulator);
    let export: CoverageExport =
        serde_json::from_slice(&output(&mut export)?).context("cannot parse the output of llvm-cov")?;
    print(&export, origin, args.lines);
    Ok(found_nothing)
}

/// Returns the directory with the toolchain's own `llvm-cov`: that of a distribution may not
/// understand this compiler's counts.
fn tools() -> Result<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let libdir = output(Command::new(rustc).args(["--print", "target-libdir"]))?;
    let libdir = PathBuf::from(String::from_utf8_lossy(&libdir).trim());
    let tools = libdir.parent().context("the folder of the libraries has no parent")?.join("bin");
    if !tools.join("llvm-cov").exists() {
        bail!("llvm-cov is missing: install it with `rustup component add llvm-tools`");
    }
    Ok(tools)
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    if !done.status.success() {
        bail!("{name}: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(done.stdout)
}

fn print(export: &CoverageExport, origin: &Path, with_lines: bool) {
    let mut crates: BTreeMap<&str, LineCounts> = BTreeMap::new();
    let mut poor = Vec::new();
    let mut unreached = Vec::new();
    for file in export.data.iter().flat_map(|data| &data.files) {
        let path = Path::new(&file.filename);
        let name = path.strip_prefix(origin).unwrap_or(path).to_string_lossy().into_owned();
        let Some(of) = CRATES.into_iter().find(|of| name.starts_with(of)) else { continue };
        let sum = crates.entry(of).or_default();
        let lines = file.summary.lines;
        (sum.count, sum.covered) = (sum.count + lines.count, sum.covered + lines.covered);
        if lines.percent() < NAMED_BELOW_PERCENT {
            poor.push((lines.percent(), name.clone()));
        }
        if with_lines && let Ok(text) = fs::read_to_string(path) {
            let missed = not_reached(&file.segments);
            let source: Vec<&str> = text.lines().collect();
            unreached.extend(missed.into_iter().map(|line| {
                let index = usize::try_from(line).map_or(usize::MAX, |line| line.saturating_sub(1));
                format!("{name}:{line}: {}", source.get(index).unwrap_or(&"").trim())
            }));
        }
    }
    for (name, lines) in crates {
        println!("{name:<22} {:>6.1} % of {} lines", lines.percent(), lines.count);
    }
    poor.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
    for (percent, name) in poor {
        println!("  {name:<44} {percent:>6.1} %");
    }
    for line in unreached {
        println!("{line}");
    }
}

/// Returns the lines on which a region begins that was never run.
fn not_reached(segments: &[Segment]) -> Vec<u64> {
    let mut lines: Vec<u64> = segments
        .iter()
        .filter(|(_, _, count, has_count, begins, is_gap)| *has_count && *begins && !is_gap && *count == 0)
        .map(|(line, ..)| *line)
        .collect();
    lines.dedup();
    lines
}
