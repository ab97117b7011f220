//! Every control file exists.

use super::formats::TextFormat;
use super::tables::{BACKING, CACHE, ExpectedFiles, FLASH, INTERNAL, SET, STATS, TOP, WINDOWS};
use super::{BACKING_BYTES, ControlFilesFixture, EACCES, has_fuse};
use crate::common::done;
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// The directory holds exactly these files, with these permissions and forms, and these other
/// entries: links with their targets, and directories.
#[track_caller]
fn holds(directory: &Path, files: ExpectedFiles, others: &[(&str, Option<String>)]) {
    let listed: BTreeSet<String> = fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
        .collect();
    let expected = files.iter().map(|(name, ..)| *name).chain(others.iter().map(|(name, _)| *name));
    assert_eq!(listed, expected.map(str::to_owned).collect(), "{}", directory.display());
    for (name, mode, form) in files {
        let path = directory.join(name);
        let about = fs::metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!((about.mode() & 0o7777, about.len()), (*mode, 4096), "{}", path.display());
        let read = fs::read_to_string(&path);
        if mode & 0o444 == 0 {
            let refused = read.expect_err("it is for writing").raw_os_error();
            assert_eq!(refused, Some(EACCES), "{}", path.display());
        } else {
            let text = read.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(form.fits(&text), "{}: {text:?}", path.display());
        }
        if mode & 0o200 == 0 {
            let refused = OpenOptions::new().write(true).open(&path).expect_err("it is for reading");
            assert_eq!(refused.raw_os_error(), Some(EACCES), "{}", path.display());
        }
    }
    for (name, target) in others {
        let path = directory.join(name);
        match target {
            Some(target) => {
                assert_eq!(fs::read_link(&path).expect("a link"), Path::new(target), "{}", path.display());
                assert!(path.is_dir(), "{} leads nowhere", path.display());
            }
            None => {
                assert!(fs::symlink_metadata(&path).is_ok_and(|about| about.is_dir()), "{}", path.display());
            }
        }
    }
}

#[test]
fn every_control_file_of_the_kernel_is_there() {
    if !has_fuse() {
        return;
    }
    let served = ControlFilesFixture::start();
    // Dirty data stays dirty.
    assert_eq!(served.write("block/bcache0/bcache/writeback_running", "0\n"), 0);
    done(&served.daemon, &["add", "alone", "--size", "4M", "--cache", "fast"]);
    served.use_it();
    let to = |target: &str| Some(target.replace("SET", &served.set));
    holds(&served.path("fs/bcache"), TOP, &[(served.set.as_str(), None)]);
    let windows = WINDOWS.map(|window| (window, None));
    let links = [
        ("internal", None),
        ("cache0", to("../../../block/fast/bcache")),
        ("bdev0", to("../../../block/tank/bcache")),
        ("volume1", to("../../../block/bcache1/bcache")),
    ];
    holds(&served.path("fs/bcache/SET"), SET, &[&links[..], &windows].concat());
    holds(&served.path("fs/bcache/SET/internal"), INTERNAL, &[]);
    holds(&served.path("fs/bcache/SET/cache0"), CACHE, &[("set", to("../../../fs/bcache/SET"))]);
    let links = [("dev", to("../../bcache0")), ("cache", to("../../../fs/bcache/SET"))];
    let of_backing = [&links[..], &windows].concat();
    holds(&served.path("fs/bcache/SET/bdev0"), BACKING, &of_backing);
    holds(&served.path("block/bcache0/bcache"), BACKING, &of_backing);
    holds(&served.path("fs/bcache/SET/volume1"), FLASH, &[("cache", to("../../../fs/bcache/SET"))]);
    for window in WINDOWS {
        holds(&served.path("fs/bcache/SET").join(window), STATS, &[]);
        holds(&served.path("block/bcache0/bcache").join(window), STATS, &[]);
    }
    // Files that monitors read beside the directories of bcache.
    let device: [(&str, u32, TextFormat); 2] =
        [("dev", 0o444, TextFormat::Text("0:0")), ("size", 0o444, TextFormat::Number)];
    let device: ExpectedFiles = Box::leak(Box::new(device));
    holds(&served.path("fs/bcache/SET/bdev0/.."), device, &[("bcache", None)]);
    holds(&served.path("fs/bcache/SET/cache0/.."), device, &[("bcache", None)]);
    holds(&served.path("fs/bcache/SET/bdev0/dev"), device, &[("bcache", to("../tank/bcache"))]);
    assert_eq!(served.read("fs/bcache/SET/bdev0/../size"), format!("{}\n", BACKING_BYTES / 512));
    assert_eq!(served.read("block/bcache0/size"), format!("{}\n", BACKING_BYTES / 512 - 16));
    assert_eq!(served.read("block/bcache1/size"), "8192\n");
    served.end();
}
