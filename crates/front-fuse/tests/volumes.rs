//! Tests a volume as a file: the operations of programs, and what reaches the engine.

mod support;

use bcached_port::ram::Verdict;
use bcached_port::{ErrorKind, Operation};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;
use support::{
    EINVAL, EIO, ENOSPC, ENXIO, EPERM, EROFS, ESHUTDOWN, ETIMEDOUT, TANK, TANK_BYTES, TANK_SECTORS,
    TestServer, can_mount, errno, serve, serve_hooked, tank, wait_until,
};

fn at(served: &TestServer, offset: u64, bytes: usize) -> Vec<u8> {
    let first = offset / 512;
    let skip = usize::try_from(offset % 512).expect("small");
    let sectors = (skip + bytes).div_ceil(512) as u64;
    served.ram.content(TANK, first, sectors)[skip..skip + bytes].to_vec()
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at * 7 + at / 509 + seed) % 251).expect("below 251")).collect()
}

/// Serves, and logs what `tell` returns for each request that reaches the engine, in order.
fn serve_telling<T: Send + 'static>(tell: fn(&Operation) -> Option<T>) -> (TestServer, Arc<Mutex<Vec<T>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let served = serve_hooked(Box::new(move |_, operation| {
        log.lock().expect("no panic").extend(tell(operation));
        Verdict::Serve
    }));
    (served, seen)
}

#[test]
fn volumes_are_files_of_their_size() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let mut names: Vec<_> = std::fs::read_dir(served.path("volumes"))
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("plain"))
        .collect();
    names.sort();
    assert_eq!(names, ["archive", "tank"]);
    let found = std::fs::metadata(served.tank()).expect("is there");
    assert!(found.is_file());
    assert_eq!((found.size(), found.blocks(), found.blksize()), (TANK_BYTES, TANK_SECTORS, 8192));
    assert_eq!((found.mode() & 0o777, found.uid()), (0o600, rustix::process::geteuid().as_raw()));
    let listed = std::fs::read_dir(served.path("volumes")).expect("a directory").flatten();
    let numbers: Vec<u64> = listed.map(|entry| std::os::unix::fs::DirEntryExt::ino(&entry)).collect();
    assert!(numbers.contains(&found.ino()), "one number in a listing and a look");
    assert_eq!(std::fs::metadata(served.path("volumes/archive")).expect("is there").mode() & 0o777, 0o400);
    assert_eq!(errno(support::open(&served.path("volumes/archive"))), EROFS);
    let room = rustix::fs::statvfs(served.tank()).expect("is there");
    assert_eq!((room.f_bsize, room.f_blocks * room.f_frsize), (8192, TANK_BYTES));
    let missing = std::fs::metadata(served.path("volumes/none")).expect_err("is not there");
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    for refused in ["volumes/new", "new"] {
        assert_eq!(errno(std::fs::write(served.path(refused), "x")), EPERM);
    }
    assert_eq!(errno(std::fs::remove_file(served.tank())), EPERM);
    served.end();
}

#[test]
fn any_bytes_are_written_and_read_back() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let file = served.open();
    let mut expected = vec![0; 64 << 10];
    let pieces =
        [(0, 4096), (512, 512), (700, 100), (1000, 1), (1023, 2), (5000, 9000), (511, 514), (2048, 300)];
    for (seed, (offset, bytes)) in pieces.into_iter().enumerate() {
        let piece = pattern(bytes, seed);
        file.write_all_at(&piece, offset as u64).expect("is written");
        expected[offset..offset + bytes].copy_from_slice(&piece);
        assert!(
            at(&served, 0, expected.len()) == expected,
            "piece {seed} is in its place, and nothing else changed"
        );
    }
    for (offset, bytes) in [(0, 65_536), (1, 1), (511, 2), (513, 5000), (1000, 30_000)] {
        let mut read = vec![0; bytes];
        file.read_exact_at(&mut read, offset as u64).expect("is read");
        assert!(read == expected[offset..offset + bytes], "{bytes} from {offset}");
    }
    served.end();
}

/// The kernel splits a request after 256 pages of the program's memory. If that memory does not
/// start at a page boundary, the split is within a sector.
#[test]
fn large_writes_come_whole_from_memory_that_begins_anywhere() {
    if !can_mount() {
        return;
    }
    let partial = Arc::new(Mutex::new(0));
    let count = Arc::clone(&partial);
    let served = serve_hooked(Box::new(move |_, operation: &Operation| {
        // The only reads here are of the sectors at the ends of a write.
        *count.lock().expect("no panic") += usize::from(matches!(operation, Operation::Read { .. }));
        Verdict::Serve
    }));
    let memory = pattern((5 << 20) + 4096, 1);
    // The allocator's memory starts somewhere in a page; one of these starts in the middle of a
    // word.
    for skip in [0, 100] {
        let content = &memory[skip..skip + (5 << 20)];
        served.open().write_all_at(content, 4096).expect("is written");
        assert!(at(&served, 4096, content.len()) == content);
        let mut read = vec![0; content.len() + 8];
        served.open().read_exact_at(&mut read[skip % 8..][..content.len()], 4096).expect("is read");
        assert!(&read[skip % 8..][..content.len()] == content);
    }
    assert!(*partial.lock().expect("no panic") > 0);
    served.end();
}

#[test]
fn direct_io_is_as_any_other() {
    if !can_mount() {
        return;
    }
    let (served, seen) = serve_telling(|operation| match operation {
        Operation::Write { payload, .. } => Some(format!("write of {}", payload.len())),
        other => Some(format!("{other:?}")),
    });
    let direct = i32::try_from(OFlags::DIRECT.bits()).expect("a flag");
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(direct).open(served.tank()).expect("opens");
    // Page-aligned, as a program would use that knows about the split.
    let memory = pattern((1 << 20) + 4096, 5);
    let page = memory.as_ptr().align_offset(4096);
    let content = &memory[page..page + (1 << 20)];
    file.write_all_at(content, 1 << 20).expect("is written");
    assert!(at(&served, 1 << 20, 1 << 20) == content);
    let mut read = vec![0; 1 << 20];
    file.read_exact_at(&mut read, 1 << 20).expect("is read");
    assert!(read == content);
    assert_eq!(seen.lock().expect("no panic")[..1], ["write of 1048576"], "in one piece");
    drop(file);
    served.end();
}

/// Threads write neighbouring bytes of the same sectors at the same time, and none loses another's
/// bytes. A write of a partial sector also does not restore old bytes over another thread's write
/// of the whole sector.
#[test]
fn stress_parts_of_a_sector_do_not_overwrite_each_other() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let file = Arc::new(served.open());
    let writer = |writer: u8| {
        let file = Arc::clone(&file);
        thread::spawn(move || {
            for turn in 0..300u64 {
                let own = turn % 16 * 2048 + u64::from(writer) * 150;
                file.write_all_at(&[writer + 1; 150], own).expect("is written");
                // The first bytes of a sector, the rest of which another thread writes.
                file.write_all_at(&[writer; 10], 1 << 20).expect("is written");
            }
        })
    };
    let writers: Vec<_> = (0..7).map(writer).collect();
    for turn in 0..300u64 {
        let fill = u8::try_from(turn % 251).expect("below 251");
        file.write_all_at(&[fill; 512], 1 << 20).expect("is written");
        let mut read = [0; 502];
        file.read_exact_at(&mut read, (1 << 20) + 10).expect("is read");
        assert_eq!(read, [fill; 502]);
    }
    writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
    let expected: Vec<u8> = (0..1050usize).map(|at| u8::try_from(at / 150 + 1).expect("small")).collect();
    for block in 0..16 {
        assert!(at(&served, block * 2048, 1050) == expected, "block {block}");
    }
    drop(file);
    served.end();
}

/// A partial write is a read-modify-write. Writes that arrive in between have to wait, or they
/// would be lost; earlier writes have to complete before its read.
#[test]
fn a_part_of_a_sector_and_the_whole_wait_for_each_other() {
    if !can_mount() {
        return;
    }
    let (tell, told) = mpsc::channel();
    let served = serve_hooked(Box::new(move |_, operation: &Operation| {
        let kind = match operation {
            Operation::Read { .. } => "read",
            Operation::Write { .. } => "write",
            _ => return Verdict::Serve,
        };
        tell.send(kind).expect("somebody listens");
        Verdict::Hold
    }));
    let file = Arc::new(served.open());
    let write = |bytes: Vec<u8>| {
        let file = Arc::clone(&file);
        thread::spawn(move || file.write_all_at(&bytes, 0).expect("is written"))
    };
    let comes = |what| assert_eq!(told.recv_timeout(support::LIMIT), Ok(what));
    let comes_no_more = || told.recv_timeout(Duration::from_millis(100)).expect_err("it waits");

    let part = write(vec![1; 10]);
    comes("read");
    let whole = write(vec![2; 512]);
    comes_no_more();
    served.ram.release();
    comes("write");
    comes_no_more();
    served.ram.release();
    part.join().expect("no panic");
    comes("write");
    let second = write(vec![3; 10]);
    comes_no_more();
    served.ram.release();
    whole.join().expect("no panic");
    for what in ["read", "write"] {
        comes(what);
        served.ram.release();
    }
    second.join().expect("no panic");
    assert_eq!(at(&served, 0, 512), [vec![3; 10], vec![2; 502]].concat());
    drop(file);
    served.end();
}

#[test]
fn the_end_of_a_volume_is_its_end() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let file = served.open();
    assert_eq!(file.write_at(&[1; 1024], TANK_BYTES - 512).expect("a part"), 512);
    assert_eq!(at(&served, TANK_BYTES - 512, 512), [1; 512]);
    assert_eq!(errno(file.write_at(&[1; 512], TANK_BYTES)), ENOSPC);
    let mut buffer = [9; 1024];
    assert_eq!(file.read_at(&mut buffer, TANK_BYTES - 100).expect("a part"), 100);
    assert_eq!(file.read_at(&mut buffer, TANK_BYTES).expect("nothing"), 0);
    file.set_len(TANK_BYTES).expect("the same size");
    assert_eq!(errno(file.set_len(TANK_BYTES - 512)), EPERM);
    assert_eq!(errno(file.set_len(0)), EPERM);
    drop(file);
    assert_eq!(errno(std::fs::write(served.tank(), "x")), EPERM, "O_TRUNC is a change of size");
    served.end();
}

#[test]
fn sizes_follow_the_table() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let resize = |sectors| {
        served.exports.insert(bcached_port::Export { sectors, ..tank(&served.ram) });
    };
    resize(TANK_SECTORS / 2);
    let file = served.open();
    let size =
        || (file.metadata().expect("open").len(), std::fs::metadata(served.tank()).expect("there").len());
    assert_eq!(size(), (TANK_BYTES / 2, TANK_BYTES / 2));
    assert_eq!(errno(file.write_at(&[1; 512], TANK_BYTES / 2)), ENOSPC);
    resize(TANK_SECTORS);
    assert_eq!(size(), (TANK_BYTES, TANK_BYTES));
    file.write_all_at(&[2; 512], TANK_BYTES / 2).expect("it has grown");
    assert_eq!(seek(&file, SeekFrom::End(0)), Ok(TANK_BYTES));
    resize(TANK_SECTORS / 4);
    assert_eq!(size(), (TANK_BYTES / 4, TANK_BYTES / 4));
    assert_eq!(file.read_at(&mut [0; 512], TANK_BYTES / 2).expect("behind the end"), 0);
    drop(file);
    served.end();
}

#[test]
fn a_punched_hole_reads_as_zeroes_and_is_one() {
    if !can_mount() {
        return;
    }
    let (served, seen) = serve_telling(|operation| match operation {
        Operation::WriteZeroes { sector, sectors, may_discard, fua } => {
            Some((*sector, *sectors, *may_discard, *fua))
        }
        _ => None,
    });
    let file = served.open();
    let mut expected = pattern(256 << 10, 3);
    file.write_all_at(&expected, 0).expect("is written");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    let ranges = [
        (punch, 65_536, 65_536),
        (zero, 4096, 8192),
        (punch, 20_000, 3000),
        (zero, 30_000, 100),
        (punch, 40_448, 100),
        (zero, 41_000, 24),
        (zero, 42_000, 700),
    ];
    for (flags, offset, length) in ranges {
        fallocate(&file, flags, offset, length).expect("is done");
        let start = usize::try_from(offset).expect("small");
        expected[start..start + usize::try_from(length).expect("small")].fill(0);
        assert!(
            at(&served, 0, expected.len()) == expected,
            "{length} at {offset} are zero, and nothing else"
        );
    }
    let whole = seen.lock().expect("no panic").clone();
    assert_eq!(whole[..3], [(128, 128, true, false), (8, 16, false, false), (40, 4, true, false)]);

    // The punched ranges are holes, and so is the volume behind the written data.
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(20_480));
    assert_eq!(seek(&file, SeekFrom::Data(20_480)), Ok(22_528));
    assert_eq!(seek(&file, SeekFrom::Hole(22_528)), Ok(65_536));
    assert_eq!(seek(&file, SeekFrom::Data(70_000)), Ok(131_072));
    assert_eq!(seek(&file, SeekFrom::Data(131_077)), Ok(131_077));
    assert_eq!(seek(&file, SeekFrom::Hole(131_077)), Ok(256 << 10));
    let none = seek(&file, SeekFrom::Data(256 << 10)).expect_err("there is none");
    assert_eq!(none.raw_os_error(), ENXIO);
    assert_eq!(seek(&file, SeekFrom::Hole(TANK_BYTES - 1)), Ok(TANK_BYTES - 1));

    fallocate(&file, FallocateFlags::empty(), 0, TANK_BYTES).expect("there is room for all of it");
    let beyond = fallocate(&file, FallocateFlags::empty(), 0, TANK_BYTES + 512).expect_err("it is full");
    assert_eq!(beyond.raw_os_error(), ENOSPC);
    fallocate(&file, punch, TANK_BYTES - 512, 4096).expect("what is inside");
    drop(file);
    served.end();
}

#[test]
fn durable_is_what_is_asked_to_be() {
    if !can_mount() {
        return;
    }
    let (served, seen) = serve_telling(|operation| match operation {
        Operation::Write { fua, .. } => Some(format!("write {fua}")),
        Operation::WriteZeroes { fua, .. } => Some(format!("zero {fua}")),
        Operation::Flush => Some("flush".to_owned()),
        _ => None,
    });
    let with = |flags: OFlags| {
        let flags = i32::try_from(flags.bits()).expect("flags");
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(served.tank()).expect("opens")
    };
    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    for (flags, fua) in [(OFlags::empty(), false), (OFlags::DSYNC, true), (OFlags::SYNC, true)] {
        let file = with(flags);
        file.write_all_at(&[1; 512], 0).expect("is written");
        file.write_all_at(&[1; 10], 5).expect("is written");
        fallocate(&file, zero, 512, 512).expect("is done");
        drop(file);
        let told = std::mem::take(&mut *seen.lock().expect("no panic"));
        let writes: Vec<_> = told.into_iter().filter(|told| told != "flush").collect();
        assert_eq!(writes, [format!("write {fua}"), format!("write {fua}"), format!("zero {fua}")]);
    }
    let file = served.open();
    file.sync_data().expect("is durable");
    file.sync_all().expect("is durable");
    assert_eq!(*seen.lock().expect("no panic"), ["flush", "flush"]);
    drop(file);
    served.end();
}

#[test]
fn errors_of_the_engine_keep_their_kind() {
    if !can_mount() {
        return;
    }
    let failing = Arc::new(Mutex::new(None));
    let kind = Arc::clone(&failing);
    let served = serve_hooked(Box::new(move |_, _| match *kind.lock().expect("no panic") {
        Some(kind) => Verdict::Fail(kind),
        None => Verdict::Serve,
    }));
    let file = served.open();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for kind in ErrorKind::ALL {
        *failing.lock().expect("no panic") = Some(kind);
        let wanted = kind.codes().errno;
        assert_eq!(errno(file.read_at(&mut [0; 512], 0)), wanted);
        assert_eq!(errno(file.write_at(&[0; 512], 0)), wanted);
        assert_eq!(errno(file.write_at(&[0; 5], 3)), wanted, "at the read of what is around it");
        assert_eq!(errno(file.sync_all()), wanted);
        assert_eq!(fallocate(&file, punch, 0, 512).expect_err("fails").raw_os_error(), wanted);
        assert_eq!(seek(&file, SeekFrom::Data(0)).expect_err("fails").raw_os_error(), wanted);
    }
    let all = ErrorKind::ALL.map(|kind| kind.codes().errno);
    assert!([EIO, EINVAL, ENOSPC, EPERM, ESHUTDOWN, ETIMEDOUT].iter().all(|errno| all.contains(errno)));
    *failing.lock().expect("no panic") = None;
    file.read_exact_at(&mut [0; 512], 0).expect("works again");
    drop(file);
    served.end();
}

#[test]
fn a_volume_that_goes_while_it_is_open_answers_as_its_engine_does() {
    if !can_mount() {
        return;
    }
    let mut served = serve();
    let file = served.open();
    file.write_all_at(&[1; 512], 0).expect("is written");
    served.exports.remove("tank");
    wait_until("the name to vanish", || !served.tank().exists());
    assert!(std::fs::read_dir(served.path("volumes")).expect("a directory").count() == 1);
    assert_eq!(file.metadata().expect("it is open").len(), TANK_BYTES);
    file.read_exact_at(&mut [0; 512], 0).expect("the engine still has it");
    // The engine goes away.
    served.ram = bcached_port::ram::RamServer::start(&[(TANK, TANK_SECTORS)]);
    for result in [file.read_at(&mut [0; 512], 0), file.write_at(&[0; 512], 0), file.write_at(&[0; 5], 0)] {
        assert_eq!(errno(result), ESHUTDOWN);
    }
    assert_eq!(errno(file.sync_all()), ESHUTDOWN);
    // The volume comes back: a new open reaches it.
    served.exports.insert(tank(&served.ram));
    drop(file);
    served.open().write_all_at(&[3; 512], 0).expect("is written");
    assert_eq!(at(&served, 0, 512), [3; 512]);
    served.end();
}

/// While a volume is moved to another engine, its requests wait, but the rest of the mount does
/// not.
#[test]
fn a_volume_on_its_way_holds_nobody_up() {
    if !can_mount() {
        return;
    }
    let limits = bcached_front_fuse::Limits { threads: 2, ..Default::default() };
    let served = support::serve_with(limits, Box::new(|_, _| Verdict::Serve), Vec::new());
    let route = served.exports.route("tank").expect("is served");
    let file = Arc::new(served.open());
    route.hold(|| {});
    let waiting: Vec<_> = (0..8u64)
        .map(|n| {
            let file = Arc::clone(&file);
            thread::spawn(move || file.write_all_at(&[1; 4096], n * 4096))
        })
        .collect();
    thread::sleep(Duration::from_millis(50));
    let archive = std::fs::File::open(served.path("volumes/archive")).expect("opens");
    for _ in 0..50 {
        archive.read_exact_at(&mut [0; 512], 0).expect("is read");
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
    }
    route.release();
    for thread in waiting {
        thread.join().expect("no panic").expect("is written");
    }
    assert_eq!(at(&served, 0, 8 * 4096), [1; 8 * 4096]);
    drop((file, archive));
    served.end();
}

/// With more writers than memory or window, the writers wait, and all of them complete.
#[test]
fn full_bounds_make_writers_wait() {
    if !can_mount() {
        return;
    }
    let limits = bcached_front_fuse::Limits {
        requests: 2,
        file_bytes: 4 << 20,
        total_bytes: 4 << 20,
        ..Default::default()
    };
    let served = support::serve_with(limits, Box::new(|_, _| Verdict::Serve), Vec::new());
    let file = Arc::new(served.open());
    let writers: Vec<_> = (0..16u8)
        .map(|writer| {
            let file = Arc::clone(&file);
            thread::spawn(move || {
                let offset = u64::from(writer) << 20;
                for turn in 0..20 {
                    // Some writes are of partial sectors, so that the thread takes part.
                    let skip = u64::from(turn % 3 == 0);
                    file.write_all_at(&vec![writer; (1 << 20) - 1], offset + skip).expect("is written");
                    let mut read = vec![0; (1 << 20) - 2];
                    file.read_exact_at(&mut read, offset + 1).expect("is read");
                    assert!(read.iter().all(|byte| *byte == writer));
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
    drop(file);
    served.end();
}
