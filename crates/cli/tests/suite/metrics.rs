//! The numbers of a running daemon: in the status, as metrics on its socket and on a port, and in a
//! file for node_exporter.

use crate::common::{Daemon, Images, bcached, done, json, requires, run, tool};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: u64 = 1 << 20;

/// Starts a set with one volume, `tank`, in writeback mode, and a port for metrics that the system
/// picks.
fn start(images: &Images) -> Daemon {
    let (cache, backing) = (images.blank("cache", CACHE_BYTES), images.blank("backing", BACKING_BYTES));
    let made = bcached(&["make", "-b", "64k", "--writeback", "-C", &cache, "-B", &backing]);
    assert_eq!(made.exit, 0, "{made:?}");
    let config = images.path("config.toml");
    // On a loaded machine the cache would count as congested, and requests would bypass it.
    let text = format!(
        "version = 1\n[daemon]\nmetrics = \"127.0.0.1:0\"\n[cache.fast]\ndevice = {cache:?}\n\
         congested_read_threshold_us = 0\ncongested_write_threshold_us = 0\n\
         [volume.tank]\nbacking = {backing:?}\nsequential_cutoff = 0\n"
    );
    std::fs::write(&config, text).expect("a configuration");
    Daemon::start(images, &["--config", config.to_str().expect("text")])
}

/// Writes a MiB, and reads the whole volume.
fn use_it(daemon: &Daemon, images: &Images) {
    let data = images.path("data");
    std::fs::write(&data, vec![7; usize::try_from(DATA_BYTES).expect("small")]).expect("data");
    let (data, back) = (data.to_str().expect("text").to_owned(), images.path("back"));
    for (from, to) in [(data, daemon.uri("tank")), (daemon.uri("tank"), back.display().to_string())] {
        let copied = run(tool("nbdcopy").args(["--flush", &from, &to]));
        assert_eq!(copied.exit, 0, "{copied:?}");
    }
}

/// Returns the address of the port for metrics.
fn port(daemon: &Daemon) -> String {
    let log = daemon.log();
    let (_, rest) = log.split_once("metrics: http://").expect("the log names the port");
    rest.split('/').next().expect("an address").to_owned()
}

/// Returns head and body of the metrics port's answer to a request of `path`.
fn get(daemon: &Daemon, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(port(daemon)).expect("somebody listens");
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").as_bytes()).expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

/// Returns the value of a sample.
#[track_caller]
fn value(text: &str, sample: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    assert!(line.is_some(), "{sample} is not in\n{text}");
    line.unwrap_or_default().parse().expect("a number")
}

#[test]
fn what_was_done_stands_in_the_status() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let daemon = start(&images);
    use_it(&daemon, &images);
    let status = daemon.status();
    let (cache, volume) = (&status["caches"][0], &status["volumes"][0]);
    for window in ["total", "five_minute", "hour", "day"] {
        let counted = &volume["windows"][window];
        assert_eq!((&counted["hits"], &counted["misses"]), (&volume["hits"], &volume["misses"]), "{window}");
        assert_eq!(counted, &cache["windows"][window], "{window}");
    }
    assert!(volume["hits"].as_u64() > Some(0) && volume["misses"].as_u64() > Some(0), "{volume}");
    for (path, requests) in [("read_hit", "hits"), ("read_miss", "misses")] {
        assert_eq!(volume["latency"][path]["requests"], volume[requests], "{path}: {volume}");
    }
    let written = &volume["latency"]["write_back"];
    let order = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"].map(|part| written[part].as_u64());
    assert!(order.is_sorted() && order[0] > Some(0), "{written}");
    assert!(volume["latency"]["discard"].is_null(), "nobody discards: {volume}");

    let causes = cache["written_by_cause_bytes"].as_object().expect("by cause");
    let sum: u64 = causes.values().map(|bytes| bytes.as_u64().expect("a number")).sum();
    assert_eq!(cache["written_bytes"].as_u64(), Some(sum));
    assert_eq!(causes["data"].as_u64(), Some(DATA_BYTES));
    assert!(
        ["fill", "btree", "journal", "priorities", "uuids", "superblock"]
            .iter()
            .all(|cause| { causes[*cause].as_u64() > Some(0) })
    );
    let groups = ["unused", "clean", "dirty", "open", "metadata"]
        .map(|group| cache[format!("buckets_{group}").as_str()].as_u64().expect("a number"));
    assert_eq!(cache["buckets"].as_u64(), Some(groups.iter().sum()), "{cache}");

    assert!(cache["ages"].is_null(), "only on request");
    let full = json(&done(&daemon, &["status", "--full", "--json"]));
    let ages = &full["caches"][0]["ages"];
    assert_eq!(ages["quantiles"].as_array().map(Vec::len), Some(31), "{ages}");

    let text = done(&daemon, &["status"]);
    assert!(text.contains("volume tank: read hits: "), "{text}");
    assert!(text.contains(" written to its device ("), "{text}");
}

#[test]
fn metrics_are_told_on_the_socket_and_on_a_port() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let daemon = start(&images);
    use_it(&daemon, &images);
    let status = daemon.status();
    let (head, text) = get(&daemon, "/metrics");
    assert!(head.starts_with("HTTP/1.0 200 ") || head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    let own = done(&daemon, &["metrics"]);
    for text in [&text, &own] {
        let hits = value(text, "bcached_volume_reads_total{volume=\"tank\",result=\"hit\"}");
        assert_eq!(Some(hits), status["volumes"][0]["hits"].as_f64());
        let data = value(text, "bcached_cache_written_bytes_total{cache=\"fast\",cause=\"data\"}");
        assert_eq!(data, 1_048_576.0);
        let count = "bcached_volume_request_seconds_count{volume=\"tank\",path=\"read_hit\"}";
        assert_eq!(value(text, count), hits);
        let bucket = |bound: &str| {
            let labels = format!("{{volume=\"tank\",path=\"read_hit\",le=\"{bound}\"}}");
            value(text, &format!("bcached_volume_request_seconds_bucket{labels}"))
        };
        assert_eq!(bucket("+Inf"), hits);
        assert!(bucket("0.000016") <= bucket("0.016384") && bucket("0.016384") <= hits);
    }
    // The port serves only numbers, and changes nothing.
    for path in ["/", "/v1/status", "/v1/metrics"] {
        let (head, _) = get(&daemon, path);
        assert!(head.contains(" 404 "), "{path}: {head}");
    }
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// Any process can connect, and many silent clients must not take the descriptors that volumes
/// need.
#[test]
fn who_connects_and_says_nothing_takes_little() {
    let images = Images::new();
    let daemon = start(&images);
    let pid = daemon.status()["pid"].as_u64().expect("a process id");
    let descriptors = || std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its own user's").count();
    let before = descriptors();
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(port(&daemon)).expect("a backlog")).collect();
    // This status request is accepted after as many of them as there is room for.
    let status = daemon.status();
    assert_eq!(status["state"], "ready");
    assert!(descriptors() <= before + 20, "{} of {before}", descriptors());
    drop(silent);
    let (head, _) = get(&daemon, "/metrics");
    assert!(head.contains(" 200 "), "those who came first are gone: {head}");
}

/// The file is for node_exporter's textfile collector, which may read it at any time.
#[test]
fn a_file_for_node_exporter_is_replaced_in_one_step() {
    let images = Images::new();
    let daemon = start(&images);
    let told = done(&daemon, &["metrics", "--textfile"]);
    let uuid = daemon.status()["caches"][0]["set_uuid"].as_str().expect("a uuid").to_owned();
    let labels = format!("{{uuid=\"{uuid}\",backing_device=\"bdev0\"}}");
    assert_eq!(value(&told, &format!("node_bcache_dirty_data_bytes{labels}")), 0.0);
    assert!(told.lines().all(|line| line.starts_with('#') || line.starts_with("node_bcache_")), "{told}");
    let folder = images.path("textfile");
    std::fs::create_dir(&folder).expect("a folder");
    let file = folder.join("bcached.prom");
    std::fs::write(&file, "old").expect("a file");
    let into = format!("--textfile={}", file.display());
    assert_eq!(done(&daemon, &["metrics", &into]), "");
    let written = std::fs::read_to_string(&file).expect("written");
    let names = |text: &str| text.lines().filter(|line| line.starts_with('#')).count();
    assert_eq!(names(&written), names(&told));
    assert_eq!(std::fs::read_dir(&folder).expect("readable").count(), 1, "nothing else is left there");
    let nowhere = format!("--textfile={}", images.path("nowhere/x.prom").display());
    let ran = bcached(&["metrics", &nowhere, "--control", daemon.control()]);
    assert_eq!((ran.exit, ran.err.contains("cannot write ")), (4, true), "{ran:?}");
}

/// Any client that reaches the port can read the names and numbers of all volumes.
#[test]
fn a_port_that_others_reach_is_refused() {
    let images = Images::new();
    let config = images.path("config.toml");
    for (address, sentence) in
        [("0.0.0.0:9763", "is not a loopback address"), ("[::]:9763", "is not a loopback address")]
    {
        let text = format!("version = 1\n[daemon]\nmetrics = \"{address}\"\n[cache.a]\ndevice = \"/x\"\n");
        std::fs::write(&config, text).expect("a configuration");
        let ran = run(&mut Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]));
        assert_eq!((ran.exit, ran.err.contains(sentence)), (2, true), "{ran:?}");
        assert!(ran.err.contains("config.toml:3: "), "{ran:?}");
    }
}
