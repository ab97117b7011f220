//! The semantics of operations, checked with both backends on a regular file.

mod common;

use bcached_env::rng::Rng;
use bcached_env::{Buffer, IoErrorKind, join_all};
use common::{image, on_each, own};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::rc::Rc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn filled(bytes: usize, seed: u64) -> Buffer {
    let mut rng = Rng::new(seed);
    let mut buffer = Buffer::zeroed(bytes);
    for chunk in buffer.as_mut_slice().chunks_mut(8) {
        chunk.copy_from_slice(&rng.next().to_le_bytes()[..chunk.len()]);
    }
    buffer
}

#[test]
fn what_is_written_is_read_back_and_is_in_the_file() {
    on_each(|env, parts| async move {
        let file = image(MIB);
        let disk = env.disk(parts.disks.add(own(file.path())));
        assert_eq!(disk.info().sectors, 2048);
        assert!(disk.info().volatile_cache);
        let data = filled(8192, 7);
        let expected = data.as_slice().to_vec();
        let payload = data.freeze();
        disk.write(16, payload.clone()).await.unwrap();
        disk.write_fua(512, payload).await.unwrap();
        disk.flush().await.unwrap();
        let (result, buffer) = disk.read(16, Buffer::zeroed(8192)).await;
        result.unwrap();
        assert_eq!(buffer.as_slice(), expected);
        let mut found = vec![0; 8192];
        file.as_file().read_exact_at(&mut found, 512 * 512).unwrap();
        assert_eq!(found, expected);
    });
}

#[test]
fn memory_that_the_device_does_not_take_goes_through_a_copy() {
    on_each(|env, parts| async move {
        let file = image(MIB);
        let device = own(file.path());
        let direct = device.is_direct();
        let disk = env.disk(parts.disks.add(device));
        // A page-aligned buffer less its first byte: no device accepts that directly.
        let mut data = filled(4097, 3);
        let _ = data.split_to(1);
        let expected = data.as_slice().to_vec();
        disk.write(8, data.freeze()).await.unwrap();
        let mut memory = Buffer::zeroed(4097);
        let _ = memory.split_to(1);
        let address = memory.as_slice().as_ptr();
        let (result, memory) = disk.read(8, memory).await;
        result.unwrap();
        assert_eq!(memory.as_slice(), expected);
        assert_eq!(memory.as_slice().as_ptr(), address, "the caller's own memory comes back");
        assert_eq!(parts.disks.counts().bounced, if direct { 2 } else { 0 });
        // Aligned memory is not bounced.
        disk.write(8, filled(4096, 4).freeze()).await.unwrap();
        assert_eq!(parts.disks.counts().bounced, if direct { 2 } else { 0 });
    });
}

#[test]
fn what_is_not_wholly_inside_the_device_is_refused() {
    on_each(|env, parts| async move {
        let file = image(MIB);
        let disk = env.disk(parts.disks.add(own(file.path())));
        let invalid = IoErrorKind::Invalid;
        for (sector, bytes) in [(2048, 512), (2047, 1024), (u64::MAX, 512), (u64::MAX / 512, 4096), (0, 100)]
        {
            let (result, buffer) = disk.read(sector, Buffer::zeroed(bytes)).await;
            assert_eq!(result.unwrap_err().kind, invalid, "read of {bytes} bytes at {sector}");
            assert_eq!(buffer.len(), bytes, "the memory comes back");
            let error = disk.write(sector, Buffer::zeroed(bytes).freeze()).await.unwrap_err();
            assert_eq!(error.kind, invalid, "write of {bytes} bytes at {sector}");
        }
        for (sector, sectors) in [(2048, 1), (0, 2049), (1, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(disk.discard(sector, sectors).await.unwrap_err().kind, invalid);
            assert_eq!(disk.zero(sector, sectors, false).await.unwrap_err().kind, invalid);
        }
        // The last sector is inside, and an empty range is never refused.
        disk.write(2047, filled(512, 1).freeze()).await.unwrap();
        disk.read(2048, Buffer::zeroed(0)).await.0.unwrap();
        disk.discard(5, 0).await.unwrap();
        assert_eq!(file.as_file().metadata().unwrap().len(), MIB);
    });
}

/// A file in memory: its file system never blocks, wherever this runs.
fn image_in_memory() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("Linux has /dev/shm");
    file.as_file().set_len(MIB).expect("a sparse file");
    file
}

#[test]
fn a_file_cut_behind_our_back_is_an_error_not_a_short_success() {
    // Proves invariant D45.
    on_each(|env, parts| async move {
        let shrunk = IoErrorKind::Shrunk { expected: 2048, found: 1024 };
        for file in [image(MIB), image_in_memory()] {
            let disk = env.disk(parts.disks.add(own(file.path())));
            file.as_file().set_len(MIB / 2).unwrap();
            let (result, buffer) = disk.read(MIB / 1024 - 8, Buffer::zeroed(8192)).await;
            assert_eq!(result.unwrap_err().kind, shrunk);
            assert_eq!(buffer.len(), 8192);
            // The data is lost and nothing may hide that: not even the rest of it is read or
            // written.
            file.as_file().set_len(MIB).unwrap();
            assert_eq!(disk.read(0, Buffer::zeroed(4096)).await.0.unwrap_err().kind, shrunk);
            assert_eq!(disk.write(0, filled(4096, 1).freeze()).await.unwrap_err().kind, shrunk);
            assert_eq!(disk.zero(0, 8, false).await.unwrap_err().kind, shrunk);
            assert_eq!(disk.flush().await.unwrap_err().kind, shrunk);
        }
    });
}

#[test]
fn a_cut_file_that_a_write_made_longer_again_proves_nothing_durable() {
    // Proves invariant D45.
    on_each(|env, parts| async move {
        for file in [image(MIB), image_in_memory()] {
            let disk = env.disk(parts.disks.add(own(file.path())));
            file.as_file().set_len(MIB / 2).unwrap();
            let _ = disk.write(1536, filled(4096, 1).freeze()).await;
            let error = disk.flush().await.unwrap_err();
            assert_eq!(error.kind, IoErrorKind::Shrunk { expected: 2048, found: 1544 });
        }
    });
}

#[test]
fn zeroes_of_a_cut_file_are_never_read_as_data() {
    // Proves invariant D45.
    on_each(|env, parts| async move {
        let file = image_in_memory();
        let disk = env.disk(parts.disks.add(own(file.path())));
        disk.write_fua(1024, filled(4096, 2).freeze()).await.unwrap();
        file.as_file().set_len(MIB / 2).unwrap();
        let _ = disk.write(1536, filled(4096, 1).freeze()).await;
        let error = disk.read(1024, Buffer::zeroed(4096)).await.0.unwrap_err();
        assert!(matches!(error.kind, IoErrorKind::Shrunk { .. }), "{error}");
    });
}

#[test]
fn a_forced_write_into_a_cut_file_is_no_success() {
    on_each(|env, parts| async move {
        let file = image_in_memory();
        let disk = env.disk(parts.disks.add(own(file.path())));
        file.as_file().set_len(MIB / 2).unwrap();
        let error = disk.write_fua(8, filled(4096, 1).freeze()).await.unwrap_err();
        assert!(matches!(error.kind, IoErrorKind::Shrunk { .. }), "{error}");
    });
}

#[test]
fn a_cut_file_does_not_get_its_length_back_from_a_write_to_its_end() {
    on_each(|env, parts| async move {
        for zero in [false, true] {
            for file in [image(MIB), image_in_memory()] {
                let disk = env.disk(parts.disks.add(own(file.path())));
                file.as_file().set_len(MIB / 2).unwrap();
                if zero {
                    let _ = disk.zero(2040, 8, false).await;
                } else {
                    let error = disk.write(2040, filled(4096, 1).freeze()).await.unwrap_err();
                    assert_eq!(error.kind, IoErrorKind::Shrunk { expected: 2048, found: 1024 });
                }
                assert_eq!(file.as_file().metadata().unwrap().len(), MIB / 2);
                assert!(disk.flush().await.is_err());
            }
        }
    });
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zero_and_nothing_else_does() {
    on_each(|env, parts| async move {
        let file = image(MIB);
        let disk = env.disk(parts.disks.add(own(file.path())));
        let data = filled(1 << 20, 9).freeze();
        disk.write_fua(0, data.clone()).await.unwrap();
        disk.zero(8, 16, false).await.unwrap();
        disk.zero(512, 256, true).await.unwrap();
        disk.discard(1024, 512).await.unwrap();
        let (result, found) = disk.read(0, Buffer::zeroed(1 << 20)).await;
        result.unwrap();
        let mut expected = data.as_slice().to_vec();
        expected[8 * 512..24 * 512].fill(0);
        expected[512 * 512..768 * 512].fill(0);
        expected[1024 * 512..1536 * 512].fill(0);
        assert_eq!(found.as_slice(), expected);
        assert_eq!(file.as_file().metadata().unwrap().len(), MIB);
        assert!(
            file.as_file().metadata().unwrap().blocks() < 2048 - 512 - 128,
            "both holes gave their space back"
        );
    });
}

#[test]
fn a_disk_that_is_not_there_is_unreachable() {
    on_each(|env, parts| async move {
        let (first, second) = (image(MIB), image(MIB));
        let id = parts.disks.add(own(first.path()));
        let disk = env.disk(id);
        disk.flush().await.unwrap();
        drop(parts.disks.remove(id));
        assert_eq!(disk.flush().await.unwrap_err().kind, IoErrorKind::Unreachable);
        assert_eq!(disk.read(0, Buffer::zeroed(512)).await.0.unwrap_err().kind, IoErrorKind::Unreachable);
        assert_eq!(disk.info().sectors, 0);
        // It is closed by now, and its number is not given to another device.
        assert_eq!(own(first.path()).info().sectors, 2048);
        assert_ne!(parts.disks.add(own(second.path())), id);
        assert_eq!(disk.flush().await.unwrap_err().kind, IoErrorKind::Unreachable);
    });
}

#[test]
fn the_bell_wakes_a_sleeping_engine_and_many_rings_are_one_event() {
    on_each(|env, parts| async move {
        let bell = parts.bell.clone();
        let rings = 3;
        for _ in 0..rings {
            let bell = bell.clone();
            let thread = std::thread::spawn(move || {
                // Long enough for the engine to be asleep, most of the time.
                std::thread::sleep(Duration::from_millis(5));
                bell.ring();
            });
            env.bell().await;
            thread.join().unwrap();
        }
        // Rung many times while awake: heard once, at the next look.
        for _ in 0..1000 {
            bell.ring();
        }
        env.bell().await;
    });
}

/// Rings without pause against an engine that sleeps as often as it can: a lost wake-up hangs the
/// test.
#[test]
fn no_ring_is_ever_lost() {
    const MESSAGES: u64 = 20_000;
    on_each(|env, parts| async move {
        let sent = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let (seen_sender, seen) = std::sync::mpsc::channel::<u64>();
        let (bell, counter) = (parts.bell.clone(), std::sync::Arc::clone(&sent));
        let thread = std::thread::spawn(move || {
            for message in 1..=MESSAGES {
                counter.store(message, std::sync::atomic::Ordering::Relaxed);
                bell.ring();
                // Waits for the answer, so that each message needs a wake-up of its own.
                assert_eq!(seen.recv().unwrap(), message);
            }
        });
        let mut last = 0;
        while last < MESSAGES {
            let now = sent.load(std::sync::atomic::Ordering::Relaxed);
            if now == last {
                env.bell().await;
                continue;
            }
            last = now;
            seen_sender.send(now).unwrap();
        }
        thread.join().unwrap();
    });
}

#[test]
fn timers_fire_in_order_and_not_early() {
    on_each(|env, _parts| async move {
        let start = env.now();
        let order = Rc::new(std::cell::RefCell::new(Vec::new()));
        let sleeps = [30_u64, 10, 20, 0].map(|milliseconds| {
            let (env, order) = (env.clone(), Rc::clone(&order));
            async move {
                env.sleep(Duration::from_millis(milliseconds)).await;
                assert!(env.now().since(start) >= Duration::from_millis(milliseconds));
                order.borrow_mut().push(milliseconds);
            }
        });
        join_all(sleeps).await;
        assert_eq!(*order.borrow(), [0, 10, 20, 30]);
        assert!(env.wall_seconds() > 1_700_000_000, "the wall clock is past 2023");
    });
}
