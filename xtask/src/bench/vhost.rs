//! A small client of vhost-user-blk servers: the front end's own test client, built as a bench.

use super::fio::{Load, Measured};
use super::servers::Server;
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BOUND: &[(&str, f64)] = &[("qemu-storage-daemon", 0.95)];

/// One queue, one request or 32 at a time.
pub const LOADS: [Load; 4] = [
    Load { name: "vhost 4 KiB reads, depth 1", kind: "read", bytes: 4096, depth: 1, bounds: BOUND },
    Load { name: "vhost 4 KiB reads, depth 32", kind: "read", bytes: 4096, depth: 32, bounds: BOUND },
    Load { name: "vhost 4 KiB writes, depth 1", kind: "write", bytes: 4096, depth: 1, bounds: BOUND },
    Load { name: "vhost 4 KiB writes, depth 32", kind: "write", bytes: 4096, depth: 32, bounds: BOUND },
];

/// Builds the client; where it is.
pub fn client() -> Result<PathBuf> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(crate::origin()).args(["bench", "--quiet", "--package", "bcached-front-vhost"]);
    cargo.args(["--bench", "rates", "--no-run", "--message-format=json"]);
    let output = cargo.stdin(Stdio::null()).output().context("cargo does not start")?;
    let lines = String::from_utf8_lossy(&output.stdout);
    let built = lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let program = built.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
    program.with_context(|| format!("the client does not build: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Measures for so many seconds.
pub fn run(client: &Path, server: &Server, load: &Load, seconds: u64) -> Result<Measured> {
    let mut command = Command::new(client);
    command.arg("--socket").arg(&server.address).args([
        load.kind,
        &load.depth.to_string(),
        &seconds.to_string(),
    ]);
    let before = server.cpu_micros()?;
    let output = command.stdin(Stdio::null()).output().context("the client does not start")?;
    let cpu = server.cpu_micros()? - before;
    let said = String::from_utf8_lossy(&output.stdout);
    let mut figures = said.split_whitespace().map(str::parse::<f64>);
    let (Some(Ok(rate)), Some(Ok(requests))) = (figures.next(), figures.next()) else {
        bail!("the client failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    };
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    Ok(Measured { rate, cpu: cpu as f64 / requests })
}
