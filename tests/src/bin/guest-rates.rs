//! Compares a volume exported as a block device with the kernel's own caches, in one guest, on RAM
//! disks: `make bench-guest`.
//!
//! Each round applies each load to each system once. The order rotates from round to round, and
//! what counts is the ratio of two figures of the same round. It fails if a bound is not reached.
//! Environment variables:
//!
//! - `BENCH_ROUNDS`: number of rounds (7; with `BENCH_COUNT` 5).
//! - `BENCH_COUNT=1`: the guest has one processor and a clock that counts instructions. The time
//!   between two requests is then the cost of a request, kernel and client included.
//! - `BENCH_AWAKE=1`: the guest's processors never sleep.
//! - `BENCH_COPY=1`: the guest runs an older kernel, in which ublk copies the data.
//! - `BENCH_PROFILE=1`: also prints a profile of our volume, if `perf` is installed.

use bcached_tests::failure::Outcome;
use bcached_tests::guest::{Job, Machine as _};
use bcached_tests::requires;
use bcached_tests::uml::built_program;
use bcached_tests::vm::{Also, Vm};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

/// Size of each disk and each cache; `rd_size` below states it in KiB.
const DISK_BYTES: u64 = 256 << 20;
/// Time limit for the whole guest.
const LIMIT: Duration = Duration::from_secs(3000);
const MODULES: [&str; 13] = [
    "drivers/block/brd rd_nr=12 rd_size=262144",
    "drivers/block/ublk_drv",
    "drivers/dax/dax",
    "drivers/md/dm-mod",
    "drivers/md/dm-bufio",
    "drivers/md/dm-bio-prison",
    "drivers/md/persistent-data/dm-persistent-data",
    "drivers/md/dm-cache",
    "drivers/md/dm-cache-smq",
    "drivers/md/dm-writecache",
    "drivers/md/dm-delay",
    "lib/crc16",
    "crypto/crc32c_generic",
];

/// Sets up every system with devices of its own and warms it; `$name` of each is its device. Each
/// cache holds four times the data requested. Nothing may bypass it, and its dirty data stays below
/// the threshold at which write-back starts.
const SCRIPT: &str = r#"
mkdir -p /dev/shm /run/b; mount -t tmpfs shm /dev/shm
# The sectors of a RAM disk are written once, so that nobody pays for its pages.
for n in 0 1 2 3 4 5 6 7 8 9 10; do dd if=/dev/zero of=/dev/ram$n bs=1M 2>/dev/null || true; done
sectors=$(blockdev --getsize64 /dev/ram0 | awk '{print $1 / 512}')
# A RAM disk has nothing to flush: the kernel would spare it that.
slow() { dmsetup create --noudevsync --noudevrules $1 --table "0 $sectors delay $2 0 0 $2 0 0 $2 0 10"; }
dm() { echo /dev/dm-$(dmsetup info -c --noheadings -o minor $1); }
slow slow1 /dev/vda; slow slow2 /dev/vdb

make-bcache --writeback -b 65536 -w 4096 -C /dev/ram0 -B /dev/ram1 > /dev/null
make-bcache --writeback -b 65536 -w 4096 -C /dev/ram9 -B $(dm slow1) > /dev/null
register /dev/ram0 /dev/ram1 /dev/ram9 $(dm slow1)
wait_for 60 test -b /dev/bcache1
for n in 0 1; do
	echo 0 > /sys/block/bcache$n/bcache/sequential_cutoff
	echo 40 > /sys/block/bcache$n/bcache/writeback_percent
done
for set in /sys/fs/bcache/*-*-*-*-*; do
	echo 0 > $set/congested_read_threshold_us; echo 0 > $set/congested_write_threshold_us
done
kernel=/dev/$(basename $(readlink -f /sys/block/ram1/bcache/dev))
kernel_slow=/dev/$(basename $(readlink -f /sys/block/$(basename $(dm slow1))/bcache/dev))

dmsetup create --noudevsync --noudevrules writecache --table "0 $sectors writecache s /dev/ram3 /dev/ram2 4096 0"
writecache=$(dm writecache)
dmsetup create --noudevsync --noudevrules metadata --table "0 32768 linear /dev/ram11 0"
dmsetup create --noudevsync --noudevrules cache --table "0 $sectors cache $(dm metadata) /dev/ram4 /dev/ram5 128 1 writeback smq 0"
cache=$(dm cache)

ublk-file /dev/ram6 > /tmp/said 2>&1 < /dev/null &
wait_for 60 grep -q '^here ' /tmp/said
loop=$(sed -n 's/^here //p' /tmp/said)

mkdir -p /run/b
bcached make --writeback -b 64k -w 4k -C /dev/ram7 -B /dev/ram8 > /dev/null
bcached make --writeback -b 64k -w 4k -C /dev/ram10 -B $(dm slow2) > /dev/null
cat > /run/b/config.toml <<end
version = 1
[cache.one]
device = "/dev/ram7"
[cache.two]
device = "/dev/ram10"
[volume.ours]
backing = "/dev/ram8"
export = "ublk"
sequential_cutoff = 0
writeback_percent = 40
[volume.slow]
backing = "$(dm slow2)"
export = "ublk"
sequential_cutoff = 0
writeback_percent = 40
end
bcached serve --config /run/b/config.toml > /tmp/out 2> /tmp/log &
its() { sed -n "s/.*$1: available as the block device \([^ ]*\).*/\1/p" /tmp/log; }
for volume in ours slow; do wait_for 60 grep -q "$volume: available as the block device" /tmp/log || { cat /tmp/log; exit 1; }; done
ours=$(its ours); ours_slow=$(its slow)

# run DEVICE MS FIO-ARGUMENT..: requests a second.
run() {
	device=$1; for_ms=$2; shift 2
	fio --name=x --filename=$device --direct=1 --ioengine=libaio --thread --bs=4k --size=64m --randrepeat=0 --minimal \
		--time_based --runtime=${for_ms}ms "$@" | awk -F ';' '{print int($8 + $49)}'
}
each="ours kernel writecache cache loop"
for system in $each kernel_slow ours_slow; do
	eval device=\$$system
	for pass in 1 2 3; do
		fio --name=x --filename=$device --direct=1 --ioengine=libaio --thread --bs=64k --iodepth=8 --size=64m --minimal --rw=write > /dev/null
		fio --name=x --filename=$device --direct=1 --ioengine=libaio --thread --bs=64k --iodepth=8 --size=64m --minimal --rw=read > /dev/null
	done
done
# arguments LOAD: of fio.
arguments() {
	case $1 in
	write64) echo --rw=randwrite --iodepth=64 ;;
	fsync1 | slow1) echo --rw=randwrite --iodepth=1 --fsync=1 ;;
	read64) echo --rw=randread --iodepth=64 ;;
	mixed64) echo --rw=randrw --rwmixread=70 --iodepth=64 ;;
	esac
}
# Another is first: `b c a` of `a b c`.
turned() { first=$1; shift; echo $* $first; }
slow="ours_slow kernel_slow"
for round in $(seq $rounds); do
	for load in $loads; do
		case $load in slow1) systems=$slow ;; *) systems=$each ;; esac
		for system in $systems; do
			eval device=\$$system
			echo rate $load ${system%_slow} $(run $device $milliseconds $(arguments $load))
		done
	done
	each=$(turned $each) slow=$(turned $slow)
done
for load in $profiled; do
	case $load in slow1) device=$ours_slow ;; *) device=$ours ;; esac
	perf record -q -a -e cpu-clock -F 4000 -o /tmp/perf -- \
		fio --name=x --filename=$device --direct=1 --ioengine=libaio --thread --bs=4k --size=64m --randrepeat=0 --minimal \
		--time_based --runtime=2000ms $(arguments $load) > /dev/null
	perf report -i /tmp/perf --stdio --no-children -s comm,dso 2> /dev/null | grep -v '^#' | grep . | head -12 | sed "s/^/profile $load /"
	perf report -i /tmp/perf --stdio --no-children -s comm,symbol 2> /dev/null | grep -v '^#' | grep . | head -70 | sed "s/^/profile $load /"
done
"#;

const TOOLS: [&str; 3] = ["fio", "make-bcache", "dmsetup"];

/// The name of a load, its description, and the systems against which ours has a bound, as a ratio
/// of rates.
type Load = (&'static str, &'static str, &'static [(&'static str, f64)]);

/// The loads measured by time.
const LOADS: [Load; 5] = [
    ("write64", "4 KiB writes, depth 64", &[("kernel", 1.5)]),
    ("fsync1", "4 KiB writes, depth 1, each with fsync", &[("kernel", 1.5)]),
    ("slow1", "the same, the disk takes 10 ms to flush", &[("kernel", 5.0)]),
    ("read64", "4 KiB read hits, depth 64", &[("loop", 0.85), ("kernel", 0.8)]),
    ("mixed64", "4 KiB, 70 % reads, depth 64", &[]),
];
/// The loads measured by instructions. As a ratio of rates, a bound of 0.5 allows twice the
/// kernel's instructions.
const COUNTED: [Load; 3] = [
    ("write64", "4 KiB writes", &[("kernel", 0.5)]),
    ("read64", "4 KiB read hits", &[("kernel", 0.5)]),
    ("fsync1", "4 KiB writes, depth 1, each with fsync", &[]),
];

fn main() -> Outcome<ExitCode> {
    // The newer kernel's ublk does not copy data; that of 6.12 does.
    let find = if is_set("BENCH_COPY") { Vm::find } else { Vm::find_new };
    let Some(vm) = find() else { return Ok(ExitCode::SUCCESS) };
    let counts = is_set("BENCH_COUNT");
    let rounds: u32 = std::env::var("BENCH_ROUNDS")
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(if counts { 5 } else { 7 });
    let mut programs = vec![built_program("bcached")?, built_program("ublk-file")?];
    if !requires::programs(&TOOLS) {
        return Ok(ExitCode::SUCCESS);
    }
    programs.extend(TOOLS.iter().filter_map(|name| requires::program(name)));
    let profiler = is_set("BENCH_PROFILE").then(|| requires::program("perf")).flatten();
    let profiles = profiler.is_some();
    programs.extend(profiler);
    let vm = vm.with(Also { modules: MODULES.to_vec(), programs, ..Also::default() });
    let (vm, loads) = if counts {
        (vm.sized(5120, 1).counting(), COUNTED.as_slice())
    } else {
        (vm.sized(5120, 2), LOADS.as_slice())
    };
    let vm = if is_set("BENCH_AWAKE") { vm.awake() } else { vm };
    let names: Vec<_> = loads.iter().map(|(name, ..)| *name).collect();
    let milliseconds = if counts { 200 } else { 1000 };
    let names = names.join(" ");
    let profiled = if profiles { names.as_str() } else { "" };
    let script = format!(
        "rounds={rounds} milliseconds={milliseconds} loads='{names}' profiled='{profiled}'\n{SCRIPT}"
    );
    let (first, second) = (tempfile::NamedTempFile::new()?, tempfile::NamedTempFile::new()?);
    for image in [&first, &second] {
        image.as_file().set_len(DISK_BYTES)?;
    }
    let images = [first.path(), second.path()];
    let report = vm.run(&Job { images: &images, script: &script, crash_at: None, limit: LIMIT })?;
    let rates = rates(&report.output);
    report.output.iter().filter(|line| line.starts_with("profile ")).for_each(|line| println!("{line}"));
    let reached = loads
        .iter()
        .map(|(load, what, bounds)| print(what, &rates, load, bounds, counts))
        .fold(true, |all, each| all & each);
    Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "1")
}

type Rates = BTreeMap<(String, String), Vec<f64>>;

/// The figures by load and system, one per round.
fn rates(lines: &[String]) -> Rates {
    let mut rates = Rates::new();
    for line in lines {
        let words: Vec<_> = line.split(' ').collect();
        if let ["rate", load, system, rate] = words[..]
            && let Ok(rate) = rate.parse()
        {
            rates.entry((load.into(), system.into())).or_default().push(rate);
        }
    }
    rates
}

/// Prints the figures of a load. Returns false if a bound is not reached, or if a figure that has a
/// bound is missing.
fn print(what: &str, rates: &Rates, load: &str, bounds: &[(&str, f64)], counts: bool) -> bool {
    println!("\n{what}\n");
    let of = |system: &str| rates.get(&(load.to_owned(), system.to_owned())).cloned().unwrap_or_default();
    let ours = of("ours");
    let unit = if counts { "instructions each" } else { "a second" };
    println!("| | {unit} | ours to it, median (range) | bound | |\n|---|---:|---:|---:|---|");
    let mut all = true;
    for system in ["ours", "kernel", "writecache", "cache", "loop"] {
        let its = of(system);
        let bound = bounds.iter().find(|(name, _)| *name == system).map(|(_, bound)| *bound);
        if its.is_empty() {
            all &= bound.is_none();
            continue;
        }
        let figure = |rate: f64| if counts { 1e9 / rate } else { rate };
        let ratios: Vec<f64> =
            ours.iter().zip(&its).map(|(ours, its)| figure(*ours) / figure(*its)).collect();
        let (least, most) = ratios
            .iter()
            .fold((f64::MAX, 0_f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
        let reached =
            bound.is_none_or(|bound| median(ours.iter().zip(&its).map(|(ours, its)| ours / its)) >= bound);
        println!(
            "| {system} | {:.0} | {:.2} ({least:.2}-{most:.2}) | {} | {} |",
            figure(median(its.iter().copied())),
            median(ratios.iter().copied()),
            bound
                .map_or_else(String::new, |bound| format!("{:.2}", if counts { 1.0 / bound } else { bound })),
            if reached { "" } else { "**not reached**" }
        );
        all &= reached;
    }
    all
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = figures.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
