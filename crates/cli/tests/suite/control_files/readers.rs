//! Programs that read the kernel's files.

use super::{ControlFilesFixture, has_fuse};
use crate::common::{requires, run, tool};
use std::collections::BTreeMap;
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A program that is killed when this is dropped.
struct ReaderProcess(Child);

impl Drop for ReaderProcess {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped_already = self.0.wait();
    }
}

/// Returns what is written to `from`, line by line.
fn lines(from: impl io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        for line in io::BufReader::new(from).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    receive
}

/// Returns all of node_exporter's bcache samples, by name and labels.
fn node_exporter(sysfs: &Path) -> BTreeMap<String, f64> {
    let mut command = tool("prometheus-node-exporter");
    command.arg(format!("--path.sysfs={}", sysfs.display()));
    command.args(["--collector.disable-defaults", "--collector.bcache", "--collector.bcache.priorityStats"]);
    command.args(["--web.disable-exporter-metrics", "--web.listen-address=127.0.0.1:0"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = ReaderProcess(child.expect("it starts"));
    let told = lines(child.0.stderr.take().expect("piped"));
    let address = loop {
        let line = told.recv_timeout(Duration::from_secs(60)).expect("it says where it listens");
        let address = line.split_once("address=127.0.0.1:").map(|(_, port)| format!("127.0.0.1:{port}"));
        if let Some(address) = address.filter(|address| !address.ends_with(":0")) {
            break address;
        }
    };
    let mut stream = TcpStream::connect(address.trim()).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n").expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    let samples: BTreeMap<_, _> =
        answer.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect();
    let works = samples.get("node_scrape_collector_success{collector=\"bcache\"}");
    assert_eq!(works, Some(&1.0), "{answer}");
    samples
}

#[test]
fn node_exporter_reads_the_control_files() {
    if !has_fuse() || !requires("prometheus-node-exporter") {
        return;
    }
    let served = ControlFilesFixture::start();
    assert_eq!(served.write("block/bcache0/bcache/writeback_running", "0\n"), 0);
    served.use_it();
    let samples = node_exporter(&served.path(""));
    let status = served.daemon.status();
    let (cache, volume) = (&status["caches"][0], &status["volumes"][0]);
    let sample = |name: &str, labels: &str| {
        let name = format!("node_bcache_{name}{{{labels}uuid=\"{}\"}}", served.set);
        *samples.get(&name).unwrap_or_else(|| panic!("{name} is not in {samples:#?}"))
    };
    let (backing, device) = ("backing_device=\"bdev0\",", "cache_device=\"cache0\",");
    for (name, labels, value) in [
        ("cache_available_percent", "", &cache["cache_available_percent"]),
        ("tree_depth", "", &cache["tree_depth"]),
        ("btree_nodes", "", &cache["btree_nodes"]),
        ("root_usage_percent", "", &cache["root_usage_percent"]),
        ("dirty_data_bytes", backing, &volume["dirty_bytes"]),
        ("cache_hits_total", backing, &volume["hits"]),
        ("cache_misses_total", backing, &volume["misses"]),
        ("io_errors", device, &cache["io_errors_recent"]),
        ("priority_stats_unused_percent", device, &cache["unused_percent"]),
        ("priority_stats_metadata_percent", device, &cache["metadata_percent"]),
    ] {
        assert_eq!(Some(sample(name, labels)), value.as_f64(), "{name}");
    }
    assert_eq!(sample("dirty_data_bytes", backing), 1_048_576.0);
    for name in ["dirty_target_bytes", "writeback_rate", "writeback_change", "cache_bypass_hits_total"] {
        sample(name, backing);
    }
    // The kernel's form has one decimal digit, so the rest of the number is lost.
    let written =
        (sample("written_bytes_total", device), cache["data_written_bytes"].as_f64().expect("a number"));
    assert!(written.0 <= written.1 && written.0 >= written.1 * 0.9, "{written:?}");
    served.end();
}

/// bcache-tools' program for udev knows only `/sys`: with the mount bound there, its registration
/// is refused.
#[test]
fn bcache_register_meets_the_control_files_in_sys() {
    const PROGRAM: &str = "/lib/udev/bcache-register";
    if !has_fuse() || !requires("unshare") {
        return;
    }
    if !Path::new(PROGRAM).exists() {
        println!("skipped: not installed: {PROGRAM}");
        return;
    }
    if run(Command::new("unshare").args(["--mount", "mount", "--bind", "/proc", "/sys"])).exit != 0 {
        println!("skipped: nothing can be mounted over /sys here");
        return;
    }
    let served = ControlFilesFixture::start();
    let script = format!(
        "mount --bind {} /sys && cat /sys/fs/bcache/{}/bdev0/state && exec {PROGRAM} {}",
        served.path("").display(),
        served.set,
        served.images.path("tank").display()
    );
    let ran = run(Command::new("unshare").args(["--mount", "sh", "-c", &script]));
    assert_eq!((ran.exit, ran.out.as_str()), (1, "clean\n"), "{ran:?}");
    let log = served.daemon.log();
    assert!(log.contains("write to fs/bcache/register: "), "{log}");
    served.end();
}
