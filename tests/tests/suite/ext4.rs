//! A real ext4 on a volume alternates between a kernel and our daemon: each side finds every file
//! and a file system without a fault.
//!
//! The kernel mounts it in a guest. Our side needs neither a mount nor privileges: the volume is
//! read over NBD, `e2fsck` and `debugfs` work on that copy, and the blocks that `debugfs` changed
//! are written back.

use std::fs;
use std::path::Path;
use std::process::Command;

use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::guest::{self, Job, Machine};
use bcached_tests::requires;
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ours};
use bcached_tests::uml::Uml;
use bcached_tests::workload::{Random, Target as _};

/// The unit, in bytes, in which our side writes changes back.
const BLOCK_BYTES: usize = 4096;

/// Shell commands that make the file system in the first turn, mount it, and check what earlier
/// turns left.
const MOUNT: &str = r#"
    wait_for 200 test -b /dev/bcache0; no_bypass 0; mkdir -p /run/fs
    [ $turn != 0 ] || mkfs.ext4 -q /dev/bcache0
    mount -t ext4 /dev/bcache0 /run/fs
    cd /run/fs
    [ ! -e sums ] || sha256sum --quiet -c sums
    [ ! "$from_us" ] || echo "$from_us" | sha256sum --quiet -c
    for n in 1 2 3 4 5 6 7 8; do head -c 300000 /dev/urandom > from_kernel_${turn}_$n; done
    sha256sum from_* > sums
    cd /
"#;

/// Runs one boot: checks the files (ours of the last turn by its line of `sha256sum`) and writes
/// new ones. A crash comes after everything was synced.
fn kernel_turn(uml: &Uml, set: &CacheSet, turn: u32, from_us: &str, crash: bool) -> Outcome {
    let devices = format!("{} {}", uml.device(0), uml.device(1));
    let end = if crash { "sync; echo now; sleep 600" } else { "umount /run/fs; stop_everything" };
    let script = format!("turn={turn} from_us='{from_us}'\nregister {devices}\n{MOUNT}{end}\n");
    let crash_at = crash.then_some("now");
    let report = uml.run(&Job { images: &set.images(), script: &script, crash_at, limit: guest::LIMIT })?;
    report.expect_allowed_log()?;
    Ok(())
}

/// Runs a program of e2fsprogs on a file. Its output is the error.
fn e2fs(program: &str, arguments: &[&str], image: &Path) -> Outcome<String> {
    let path = requires::program(program).context("e2fsprogs is not installed")?;
    let output = Command::new(path).args(arguments).arg(image).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    Err(Failure::new(format!("{program}: {said}{}", String::from_utf8_lossy(&output.stderr))))
}

/// Runs a turn of ours: the file system must have no fault, and one more file is written into it.
/// Returns the file's line of `sha256sum`.
fn our_turn(ours: &Ours, set: &CacheSet, turn: u32, recover: bool) -> Outcome<String> {
    let daemon = Daemon::start(ours.program(), set)?;
    let mut client = daemon.connect(set, 0)?;
    let mut before = Vec::new();
    client.read_whole(|bytes| {
        before.extend_from_slice(bytes);
        Ok(())
    })?;
    let image = set.directory().join("ext4");
    fs::write(&image, &before)?;
    if recover {
        // After a crash of the machine, ext4 replays its journal; nothing else may be wrong.
        let replayed = Command::new(requires::program("e2fsck").context("no e2fsck")?);
        recover_journal(replayed, &image)?;
    }
    e2fs("e2fsck", &["-f", "-n"], &image)?;
    let name = format!("from_us_{turn}");
    let file = set.directory().join(&name);
    let mut random = Random::new(u64::from(turn));
    let content: Vec<u8> = (0..50_000).flat_map(|_| random.next().to_le_bytes()).collect();
    fs::write(&file, content)?;
    let request = format!("write {} {name}", file.display());
    e2fs("debugfs", &["-w", "-R", &request], &image)?;
    e2fs("e2fsck", &["-f", "-n"], &image)?;
    let after = fs::read(&image)?;
    for (block, (old, new)) in (0..).zip(before.chunks(BLOCK_BYTES).zip(after.chunks(BLOCK_BYTES))) {
        if old != new {
            client.write(block * (BLOCK_BYTES as u64 / 512), new)?;
        }
    }
    client.flush()?;
    drop(client);
    daemon.stop()?;
    let sum = Command::new("sha256sum").arg(&name).current_dir(set.directory()).output()?;
    Ok(String::from_utf8(sum.stdout)?.trim().to_owned())
}

/// Runs `e2fsck -p`. Its exit status 1 means that something was repaired; a replayed journal counts
/// as that.
fn recover_journal(mut e2fsck: Command, image: &Path) -> Outcome {
    let output = e2fsck.args(["-f", "-p"]).arg(image).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if matches!(output.status.code(), Some(0 | 1)) { Ok(()) } else { Err(Failure::new(said)) }
}

#[test]
fn a_file_system_is_carried_to_and_fro() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    if !requires::programs(&["mkfs.ext4", "e2fsck", "debugfs", "sha256sum"]) {
        return Ok(());
    }
    let ours = Ours::find()?;
    let set = CacheSet::make(Geometry::small(512 << 10, 4096), 1, Maker::Tools)?;
    kernel_turn(&uml, &set, 0, "", false)?;
    let from_us = our_turn(&ours, &set, 1, false)?;
    kernel_turn(&uml, &set, 1, &from_us, true)?;
    let from_us = our_turn(&ours, &set, 2, true)?;
    kernel_turn(&uml, &set, 2, &from_us, false)?;
    our_turn(&ours, &set, 3, false)?;
    Ok(())
}
