//! Counts memory allocations while volumes are served without one of the kernel's drivers: see
//! `counted-requests`. Over ublk, they are counted in guests.

use bcached_tests::apart::isolated;
use bcached_tests::failure::{Failure, Outcome};
use bcached_tests::requires;
use bcached_tests::uml::built_program;
use bcached_uring::{Backend, DriverOptions, open_driver};
use std::fs::{File, create_dir, write};
use std::path::Path;
use std::process::Command;

const BYTES: u64 = 256 << 20;

#[test]
fn a_request_over_nbd_asks_for_no_memory() -> Outcome {
    counts("nbd", "nbd.sock")
}

#[test]
fn nor_does_one_of_a_file() -> Outcome {
    if !requires::fuse() {
        return Ok(());
    }
    counts("fuse", "fuse/volumes/tank")
}

/// Counts allocations on a volume exported as `way`, at `place` in the daemon's folder.
fn counts(way: &str, place: &str) -> Outcome {
    let opened = open_driver(&DriverOptions::default())?;
    if !matches!(opened.backend, Backend::Uring { .. }) {
        requires::skip(&format!("no io_uring, by which requests are counted: {}", opened.backend));
        return Ok(());
    }
    drop(opened);
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    let (fast, tank) = (path("fast"), path("tank"));
    for image in [&fast, &tank] {
        File::create(image)?.set_len(BYTES)?;
    }
    let make = |words: &[&str], image: &Path| {
        let mut command = Command::new(built_program("bcached")?);
        run(isolated(&mut command, folder.path()).args(words).arg(image))
    };
    make(&["make", "-b", "256k", "-C"], &fast)?;
    make(&["make", "--writeback", "--label", "tank", "-B"], &tank)?;
    create_dir(path("run"))?;
    // On a machine that is busy with other work, the cache appears congested, and requests would
    // bypass it.
    let text = format!(
        "version = 1
[cache.fast]
device = {fast:?}
congested_read_threshold_us = 0
congested_write_threshold_us = 0
[volume.tank]
backing = {tank:?}
export = \"{way}\"
"
    );
    write(path("config.toml"), text)?;
    let mut command = Command::new(built_program("counted-requests")?);
    isolated(&mut command, folder.path());
    command.env("BCACHED_NOTES", path("run")).env("BCACHED_STATE", path("state"));
    command.args([path("config.toml"), path("run/control.sock"), path("run").join(place)]).arg("2000");
    println!("{}", run(&mut command)?);
    Ok(())
}

/// Runs a command and returns its output, which a failure contains, too.
fn run(command: &mut Command) -> Result<String, Failure> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    Ok(said)
}
