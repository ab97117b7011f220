//! Runs a small client of vhost-user-blk servers: the front end's own test client, built as a
//! bench.

use super::fio::{FioLoad, Measurement};
use super::servers::Server;
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BOUND: &[(&str, f64)] = &[("qemu-storage-daemon", 0.95)];

const fn load(name: &'static str, kind: &'static str, (queues, depth): (u16, u32)) -> FioLoad {
    FioLoad { name, kind, bytes: 4096, depth, queues, bounds: BOUND, cpu_most: Some(1.1) }
}

/// One queue with one or 32 requests at a time, and two queues with 16 each. The client sleeps
/// while it waits, and uses the event index.
pub const LOADS: [FioLoad; 6] = [
    load("vhost 4 KiB reads, depth 1", "read", (1, 1)),
    load("vhost 4 KiB reads, depth 32", "read", (1, 32)),
    load("vhost 4 KiB reads, 2 queues of 16", "read", (2, 16)),
    load("vhost 4 KiB writes, depth 1", "write", (1, 1)),
    load("vhost 4 KiB writes, depth 32", "write", (1, 32)),
    load("vhost 4 KiB writes, 2 queues of 16", "write", (2, 16)),
];

/// Builds the client, and returns its path.
pub fn client() -> Result<PathBuf> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(crate::origin()).args(["bench", "--quiet", "--package", "bcached-front-vhost"]);
    cargo.args(["--bench", "rates", "--no-run", "--message-format=json"]);
    let output = cargo.stdin(Stdio::null()).output().context("cannot start cargo")?;
    let lines = String::from_utf8_lossy(&output.stdout);
    let built = lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let program = built.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
    program.with_context(|| format!("cannot build the client: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Measures for `seconds` seconds.
pub fn run(client: &Path, server: &Server, load: &FioLoad, seconds: u64) -> Result<Measurement> {
    let mut command = Command::new(client);
    let figures = [load.depth.to_string(), seconds.to_string(), load.queues.to_string()];
    command.arg("--socket").arg(&server.address).arg(load.kind).args(figures);
    let before = server.cpu_micros()?;
    let output = command.stdin(Stdio::null()).output().context("cannot start the client")?;
    let cpu = server.cpu_micros()? - before;
    let said = String::from_utf8_lossy(&output.stdout);
    let mut figures = said.split_whitespace().map(str::parse::<f64>);
    let (Some(Ok(rate)), Some(Ok(requests))) = (figures.next(), figures.next()) else {
        bail!("the client failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    };
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    Ok(Measurement { rate, cpu: cpu as f64 / requests })
}
