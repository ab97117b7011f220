//! Opening, claiming and measuring files; offline access.

mod common;

use bcached_uring::{Access, Device, DeviceErrorKind, DeviceKind};
use common::{image, own};
use std::os::unix::fs::symlink;

const MIB: u64 = 1 << 20;

#[test]
fn one_owner_by_whatever_path() {
    let directory = tempfile::tempdir().unwrap();
    let paths = ["image", "symlink", "hard link"].map(|name| directory.path().join(name));
    std::fs::File::create(&paths[0]).unwrap().set_len(MIB).unwrap();
    symlink(&paths[0], &paths[1]).unwrap();
    std::fs::hard_link(&paths[0], &paths[2]).unwrap();
    let owner = own(&paths[0]);
    for path in &paths {
        for access in [Access::Own, Access::Check] {
            let error = Device::open(path, access).unwrap_err();
            assert!(matches!(error.kind, DeviceErrorKind::Twice), "{error}");
            assert!(error.is_refusal());
        }
        let look = Device::open(path, Access::Look).unwrap();
        assert_eq!(look.identity(), owner.identity());
    }
    drop(owner);
    own(&paths[2]);
}

#[test]
fn checks_share_and_keep_owners_out() {
    let file = image(MIB);
    let first = Device::open(file.path(), Access::Check).unwrap();
    let second = Device::open(file.path(), Access::Check).unwrap();
    assert!(Device::open(file.path(), Access::Own).is_err());
    drop(first);
    assert!(Device::open(file.path(), Access::Own).is_err());
    drop(second);
    own(file.path());
}

#[test]
fn what_is_no_device_is_refused_in_a_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    let empty = directory.path().join("empty");
    std::fs::File::create(&empty).unwrap();
    let cases = [
        (directory.path().to_owned(), "it is a directory, not a block device or a regular file"),
        (pipe, "it is a pipe, not a block device or a regular file"),
        ("/dev/null".into(), "it is a character device, not a block device or a regular file"),
        (directory.path().join("nothing"), "it does not exist"),
        (empty, "it is empty"),
    ];
    for (path, why) in cases {
        for access in [Access::Look, Access::Check, Access::Own] {
            let error = Device::open(&path, access).unwrap_err();
            assert_eq!(error.why(), why);
            let whole = format!("cannot use {}: {why}; {}", path.display(), error.next());
            assert_eq!(error.to_string(), whole);
            assert!(!error.is_refusal() && error.holders().is_empty());
        }
    }
}

#[test]
fn a_file_has_its_whole_blocks_and_may_grow() {
    let file = image(MIB + 700);
    let device = own(file.path());
    let info = device.info();
    assert_eq!(device.kind(), DeviceKind::File);
    assert_eq!(info.sectors % u64::from(info.logical_block_sectors), 0);
    assert!((2048..=2049).contains(&info.sectors));
    assert!(info.volatile_cache);
    file.as_file().set_len(2 * MIB).unwrap();
    assert_eq!(device.info().sectors, info.sectors, "nobody asked");
    assert_eq!(device.refresh().unwrap(), 4096);
    assert_eq!(device.info().sectors, 4096);
}

#[test]
fn a_file_leaves_direct_io_for_smaller_blocks() {
    let file = image(MIB);
    let device = own(file.path());
    // On any file system: a requirement that is met changes nothing, and a file can meet any.
    let direct = device.is_direct();
    device.require_blocks(8).unwrap();
    assert_eq!(device.is_direct(), direct);
    device.require_blocks(1).unwrap();
    assert_eq!(device.info().logical_block_sectors, 1);
    device.write_at(3, &[5; 512]).unwrap();
}

#[test]
fn offline_reads_any_sectors_and_writes_whole_blocks() {
    let file = image(MIB);
    let device = own(file.path());
    let block = u64::from(device.info().logical_block_sectors);
    let bytes = usize::try_from(block * 512).unwrap();
    let data: Vec<u8> = (0..=255).cycle().take(4 * bytes).collect();
    device.write_at(8 * block, &data).unwrap();
    device.sync().unwrap();
    // From an odd address, an odd sector, less than a page.
    let mut memory = vec![0; 3 * 512 + 1];
    device.read_at(8 * block + 1, &mut memory[1..]).unwrap();
    assert_eq!(memory[1..], data[512..][..3 * 512]);
    let mut last = [1; 512];
    device.read_at(2047, &mut last).unwrap();
    assert_eq!(last, [0; 512]);

    let range = |result: Result<(), bcached_uring::DeviceError>| {
        assert!(matches!(result.unwrap_err().kind, DeviceErrorKind::OutOfRange { .. }));
    };
    range(device.read_at(2048, &mut last));
    range(device.read_at(u64::MAX, &mut last));
    range(device.write_at(2048 - block, &vec![0; 2 * bytes]));
    let error = device.write_at(0, &[0; 100]).unwrap_err();
    assert!(matches!(error.kind, DeviceErrorKind::Unaligned { .. }));
    let look = Device::open(file.path(), Access::Look).unwrap();
    look.read_at(8 * block, &mut last).unwrap();
    assert_eq!(last, data[..512]);
    assert!(look.write_at(8 * block, &data).is_err(), "it was opened to look");
}
