//! Calibration tests: each modelled drive alone gives the known figures of its real counterpart,
//! within a tenth.

use super::gauge::{Measurement, closed_loop, fsynced, random, sequential};
use super::hdd::{self, Hdd};
use super::mechanism::CommandKind::{self, Read, Write};
use super::mechanism::TimingModel;
use super::ssd::{self, Ssd};

/// Sectors of 4 KiB.
const PAGE: u64 = 8;
/// Range of random commands to a solid-state drive, in sectors: 100 GiB.
const REGION: u64 = 200 << 21;

/// Asserts that `figure` is `wanted` within a tenth.
fn assert_near(what: &str, figure: f64, wanted: f64) {
    println!("{what}: {figure:.1}, wanted {wanted}");
    assert!((figure / wanted - 1.0).abs() <= 0.1, "{what}: {figure}, wanted {wanted}");
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn mean_us(gauged: &Measurement) -> f64 {
    gauged.latencies.mean() as f64 / 1e3
}

fn disk(model: &hdd::HddModel, kind: CommandKind, depth: u64, count: u64) -> Measurement {
    closed_loop(&mut Hdd::new(model.clone()), 0, (depth, count), random(kind, model.sectors, PAGE, 1))
}

#[test]
fn a_7k8_reads_at_random() {
    let model = hdd::HddModel::d7k8();
    assert_near("7k8 read, depth 1, IOPS", disk(&model, Read, 1, 5_000).iops(), 80.0);
    assert_near("7k8 read, depth 32, IOPS", disk(&model, Read, 32, 20_000).iops(), 198.0);
}

#[test]
fn a_7k8_streams() {
    for kind in [Read, Write] {
        let mut drive = Hdd::new(hdd::HddModel::d7k8());
        let gauged = closed_loop(&mut drive, 0, (4, 2_000), sequential(kind, 2048));
        #[expect(clippy::cast_precision_loss)]
        let rate = 2_000.0 * 1048.576 / (gauged.nanoseconds as f64 / 1e6);
        assert_near("7k8 stream, MB/s", rate, 205.0);
    }
}

/// A write and a flush, with the write cache on, take 12 to 14.5 ms.
#[test]
fn a_7k8_makes_a_write_durable() {
    let model = hdd::HddModel::d7k8();
    let gauged = closed_loop(&mut Hdd::new(model.clone()), 0, (1, 4_000), fsynced(model.sectors, PAGE, 1));
    let together = mean_us(&gauged) * 2.0 / 1e3;
    println!("7k8 fsync: {together:.1} ms");
    assert!((12.0..=14.5).contains(&together), "{together} ms");
}

#[test]
fn a_7k8_flushes_64_scattered_writes() {
    let model = hdd::HddModel::d7k8();
    let mut drive = Hdd::new(model.clone());
    let (mut now, mut flushes) = (0, 0.0);
    const ROUNDS: u32 = 50;
    for round in 0..ROUNDS {
        let scattered = random(Write, model.sectors, PAGE, u64::from(round));
        now += closed_loop(&mut drive, now, (64, 64), scattered).nanoseconds;
        let gauged = closed_loop(&mut drive, now, (1, 1), |_| (CommandKind::Flush, 0, 0));
        now += gauged.nanoseconds;
        flushes += mean_us(&gauged) / 1e3;
    }
    assert_near("7k8 flush of 64, ms", flushes / f64::from(ROUNDS), 335.0);
}

#[test]
fn a_barracuda_reads_at_random() {
    let model = hdd::HddModel::barracuda();
    let alone = disk(&model, Read, 1, 5_000);
    assert_near("barracuda read, depth 1, ms", mean_us(&alone) / 1e3, 17.3);
    let deep = disk(&model, Read, 32, 20_000).iops();
    println!("barracuda read, depth 32: {deep:.1} IOPS");
    assert!((82.0..=94.0).contains(&deep), "{deep} IOPS");
}

/// Known figures of a drive, over a small region: read latency in µs, reads per second at depth 32
/// (256 for NVMe), write latency in µs, sustained random writes per second, and durable writes per
/// second.
struct DriveFigures {
    read_us: f64,
    deep: Option<(u64, f64)>,
    write_us: Option<f64>,
    writes: f64,
    fsyncs: f64,
}

fn assert_known(name: &str, model: &ssd::SsdModel, known: &DriveFigures) {
    let fresh = || Ssd::new(model.clone());
    let run =
        |depth, count, kind| closed_loop(&mut fresh(), 0, (depth, count), random(kind, REGION, PAGE, 1));
    assert_near(&format!("{name} read, µs"), mean_us(&run(1, 2_000, Read)), known.read_us);
    if let Some((depth, reads)) = known.deep {
        assert_near(&format!("{name} reads a second"), run(depth, 200_000, Read).iops(), reads);
    }
    if let Some(write_us) = known.write_us {
        assert_near(&format!("{name} write, µs"), mean_us(&run(1, 2_000, Write)), write_us);
    }
    assert_near(&format!("{name} writes a second"), run(32, 300_000, Write).iops(), known.writes);
    let durable: &mut dyn TimingModel = &mut fresh();
    let gauged = closed_loop(durable, 0, (1, 4_000), fsynced(REGION, PAGE, 1));
    assert_near(&format!("{name} fsyncs a second"), gauged.iops() / 2.0, known.fsyncs);
}

#[test]
fn a_protected_sata_drive() {
    let known = DriveFigures {
        read_us: 121.0,
        deep: Some((32, 96_000.0)),
        write_us: Some(42.0),
        writes: 24_600.0,
        fsyncs: 14_500.0,
    };
    assert_known("sata-plp", &ssd::SsdModel::sata_plp(), &known);
}

#[test]
fn a_drive_for_consumers() {
    let known = DriveFigures { read_us: 79.0, deep: None, write_us: None, writes: 11_800.0, fsyncs: 260.0 };
    assert_known("consumer", &ssd::SsdModel::consumer(), &known);
}

#[test]
fn a_protected_nvme_drive() {
    let known = DriveFigures {
        read_us: 82.0,
        deep: Some((256, 850_000.0)),
        write_us: Some(23.0),
        writes: 124_000.0,
        fsyncs: 33_000.0,
    };
    assert_known("nvme-plp", &ssd::SsdModel::nvme_plp(), &known);
}
