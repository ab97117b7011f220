//! Runs fio as the client of an NBD server.

use super::VOLUME_BYTES;
use super::servers::Server;
use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use std::process::{Command, Stdio};

/// A load, and the performance promised for it.
pub struct FioLoad {
    pub name: &'static str,
    /// The kind of the load, in fio's terms.
    pub kind: &'static str,
    pub bytes: u32,
    pub depth: u32,
    /// Queues of each connection, as a disk of a virtual machine has them.
    pub queues: u16,
    /// Servers by name, and the minimum ratio to each.
    pub bounds: &'static [(&'static str, f64)],
    /// Maximum CPU time of the server per request, as a ratio to that of those servers.
    pub cpu_most: Option<f64>,
}

const READS: &[(&str, f64)] = &[("nbdkit file", 0.95), ("nbdkit cache", 1.2), ("qemu-nbd", 1.4)];
const WRITES: &[(&str, f64)] = &[("nbdkit file", 0.7), ("qemu-nbd", 1.2)];
const STREAMS: &[(&str, f64)] = &[("nbdkit file", 0.9)];

const fn load(
    (name, kind): (&'static str, &'static str),
    (bytes, depth): (u32, u32),
    bounds: &'static [(&'static str, f64)],
) -> FioLoad {
    FioLoad { name, kind, bytes, depth, queues: 1, bounds, cpu_most: None }
}

/// Read hits, write-back writes, and streams of both.
pub const LOADS: [FioLoad; 6] = [
    load(("4 KiB reads, depth 1", "randread"), (4096, 1), READS),
    load(("4 KiB reads, depth 32", "randread"), (4096, 32), READS),
    load(("4 KiB writes, depth 1", "randwrite"), (4096, 1), WRITES),
    load(("4 KiB writes, depth 32", "randwrite"), (4096, 32), WRITES),
    load(("1 MiB reads, depth 4", "read"), (1 << 20, 4), STREAMS),
    load(("1 MiB writes, depth 4", "write"), (1 << 20, 4), STREAMS),
];

impl FioLoad {
    /// Returns true for large sequential requests.
    pub fn is_stream(&self) -> bool {
        self.bytes > 64 << 10
    }
}

/// The result of one measurement of a server.
#[derive(Clone, Copy)]
pub struct Measurement {
    /// Requests per second.
    pub rate: f64,
    /// Microseconds of the server's CPU time per request.
    pub cpu: f64,
}

#[derive(Deserialize)]
struct FioOutput {
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
struct FioJob {
    error: i32,
    read: FioDirection,
    write: FioDirection,
}

#[derive(Deserialize)]
struct FioDirection {
    iops: f64,
    total_ios: u64,
}

/// Measures for `seconds` seconds.
pub fn run(server: &Server, load: &FioLoad, seconds: u64) -> Result<Measurement> {
    let mut fio = Command::new("fio");
    fio.args(["--name=bench", "--ioengine=nbd", "--thread", "--output-format=json", "--time_based"]);
    fio.args(["--norandommap", "--randrepeat=0"]).arg(format!("--size={VOLUME_BYTES}"));
    fio.arg(format!("--uri={}", server.address_for(load))).arg(format!("--runtime={seconds}"));
    fio.arg(format!("--rw={}", load.kind)).arg(format!("--bs={}", load.bytes));
    fio.arg(format!("--iodepth={}", load.depth)).stdin(Stdio::null());
    let before = server.cpu_micros()?;
    let output = fio.output().context("cannot start fio")?;
    let cpu = server.cpu_micros()? - before;
    let text = String::from_utf8_lossy(&output.stdout);
    // fio first prints a line about its connection.
    let Some(json) = text.find('{').map(|start| &text[start..]) else {
        bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    };
    let output: FioOutput = serde_json::from_str(json).context("cannot parse the output of fio")?;
    let [FioJob { error: 0, read, write }] = output.jobs.as_slice() else { bail!("fio failed: {text}") };
    let requests = read.total_ios + write.total_ios;
    if requests == 0 {
        bail!("fio made no request");
    }
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    Ok(Measurement { rate: read.iops + write.iops, cpu: cpu as f64 / requests as f64 })
}
