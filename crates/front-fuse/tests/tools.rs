//! Tests real programs over a mounted volume.

mod support;

use std::process::Command;
use support::{TANK, TANK_BYTES, TestServer, can_mount, program, serve, skip};

fn fio(served: &TestServer, arguments: &[&str]) {
    let file = format!("--filename={}", served.tank().display());
    let common = [
        "--name=verify",
        "--rw=randrw",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--size=16m",
        "--group_reporting",
    ];
    // fio leaves files in its working directory.
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new("fio")
        .current_dir(folder.path())
        .args(common)
        .arg(file)
        .args(arguments)
        .output()
        .expect("starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}\n{complaint}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !can_mount() {
        return;
    }
    if program("fio").is_none() {
        return skip("not installed: fio");
    }
    let served = serve();
    let direct = ["--direct=1", "--ioengine=libaio", "--iodepth=16", "--bsrange=512-128k"];
    fio(&served, &direct);
    fio(&served, &["--direct=0", "--ioengine=psync", "--bsrange=4k-64k", "--fsync=32"]);
    // Sizes that are not even multiples of a sector.
    let odd = [
        "--direct=0",
        "--ioengine=psync",
        "--bsrange=100-5000",
        "--bs_unaligned=1",
        "--verify=md5",
        "--io_size=8m",
    ];
    fio(&served, &odd);
    served.end();
}

#[test]
fn dd_and_cp_copy_a_volume() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let image: Vec<u8> =
        (0..3_000_000u32).map(|at| u8::try_from(at * 31 % 251).expect("below 251")).collect();
    let (from, to) =
        (tempfile::NamedTempFile::new().expect("a file"), tempfile::NamedTempFile::new().expect("a file"));
    std::fs::write(from.path(), &image).expect("is written");
    let run = |command: &mut Command| {
        let output = command.output().expect("starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let of = format!("of={}", served.tank().display());
    let of_file = format!("if={}", from.path().display());
    run(Command::new("dd").args([of_file.as_str(), of.as_str(), "bs=1001", "conv=notrunc,fsync"]));
    assert!(served.ram.content(TANK, 0, 5860)[..image.len()] == image);
    run(Command::new("cp").arg("--sparse=always").arg(served.tank()).arg(to.path()));
    let copy = std::fs::read(to.path()).expect("is read");
    assert_eq!(copy.len() as u64, TANK_BYTES);
    assert!(copy[..image.len()] == image && copy[image.len()..].iter().all(|byte| *byte == 0));
    served.end();
}
