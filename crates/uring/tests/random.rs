//! Ten thousand random operations at queue depth 64 against a model, through the executor, on both
//! backends.

mod common;

use bcached_env::rng::Rng;
use bcached_env::{Buffer, Disk, Executor, RunOrder, join_all};
use bcached_uring::{BackendChoice, DriverOptions, OpenedDriver, open_driver};
use common::{backends, image, own, skip, within_limit};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

const SECTORS: u64 = 4096;
const DEPTH: usize = 64;
const OPERATIONS: u64 = 10_000;

/// The content of each sector (the number written to all its words, 0 for zeroes), and which
/// sectors have an operation in flight, because overlapping operations may be carried out in any
/// order.
struct DiskModel {
    content: Vec<u64>,
    busy: BTreeSet<u64>,
    rng: Rng,
    left: u64,
}

impl DiskModel {
    /// Returns a random free range, now busy.
    fn take_range(&mut self) -> (u64, u64) {
        loop {
            let sectors = 1 + self.rng.below(32);
            let sector = self.rng.below(SECTORS - sectors + 1);
            if self.busy.range(sector..sector + sectors).next().is_none() {
                self.busy.extend(sector..sector + sectors);
                return (sector, sectors);
            }
        }
    }

    /// Ends an operation on the range that leaves `value` there, or the old content.
    fn release(&mut self, (sector, sectors): (u64, u64), value: Option<u64>) {
        for each in sector..sector + sectors {
            self.busy.remove(&each);
            if let Some(value) = value {
                self.content[index(each)] = value;
            }
        }
    }
}

fn index(sector: u64) -> usize {
    usize::try_from(sector).expect("a small disk")
}

/// Fills every sector of the range with `value`, mixed with its own number.
fn pattern((sector, sectors): (u64, u64), value: u64, skew: usize) -> Buffer {
    let bytes = index(sectors) * 512;
    let mut buffer = Buffer::zeroed(bytes + skew);
    let _ = buffer.split_to(skew);
    for (number, chunk) in buffer.as_mut_slice().chunks_exact_mut(8).enumerate() {
        let place = sector + number as u64 / 64;
        let word = if value == 0 { 0 } else { value ^ place.rotate_left(32) };
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    buffer
}

async fn one_operation(disk: &Disk, model: &RefCell<DiskModel>, number: u64) {
    let range = model.borrow_mut().take_range();
    let (sector, sectors) = range;
    let (kind, skew) = {
        let rng = &mut model.borrow_mut().rng;
        // One in four uses memory that must be bounced.
        (rng.below(16), if rng.one_in(4) { 8 } else { 0 })
    };
    let value = match kind {
        0..=5 => {
            let mut memory = Buffer::zeroed(index(sectors) * 512 + skew);
            let _ = memory.split_to(skew);
            let (result, found) = disk.read(sector, memory).await;
            result.expect("reading works");
            for each in sector..sector + sectors {
                let expected = pattern((each, 1), model.borrow().content[index(each)], 0);
                let at = index(each - sector) * 512;
                assert_eq!(&found.as_slice()[at..at + 512], expected.as_slice(), "sector {each}");
            }
            None
        }
        6..=9 => {
            disk.write(sector, pattern(range, number, skew).freeze()).await.expect("writing works");
            Some(number)
        }
        10 | 11 => {
            disk.write_fua(sector, pattern(range, number, skew).freeze()).await.expect("writing works");
            Some(number)
        }
        12 => {
            disk.flush().await.expect("flushing works");
            None
        }
        13 => {
            disk.discard(sector, sectors).await.expect("files can be punched");
            Some(0)
        }
        _ => {
            // A file system that cannot zero and keep the space (tmpfs) punches a hole.
            if number.is_multiple_of(2) || disk.zero(sector, sectors, false).await.is_err() {
                disk.zero(sector, sectors, true).await.expect("zeroing works");
            }
            Some(0)
        }
    };
    model.borrow_mut().release(range, value);
}

async fn work(disk: Disk, seed: u64, operations: u64) {
    let model = DiskModel {
        content: vec![0; index(SECTORS)],
        busy: BTreeSet::new(),
        rng: Rng::new(seed),
        left: operations,
    };
    let model = Rc::new(RefCell::new(model));
    let workers = (0..DEPTH).map(|_| {
        let (disk, model) = (disk.clone(), Rc::clone(&model));
        async move {
            loop {
                let number = {
                    let mut model = model.borrow_mut();
                    let Some(left) = model.left.checked_sub(1) else { return };
                    model.left = left;
                    left + 1
                };
                one_operation(&disk, &model, number).await;
            }
        }
    });
    join_all(workers).await;
    let (result, whole) = disk.read(0, Buffer::zeroed(index(SECTORS) * 512)).await;
    result.expect("reading works");
    for each in 0..SECTORS {
        let expected = pattern((each, 1), model.borrow().content[index(each)], 0);
        let at = index(each) * 512;
        assert_eq!(&whole.as_slice()[at..at + 512], expected.as_slice(), "sector {each} at the end");
    }
}

fn run(options: DriverOptions, file: tempfile::NamedTempFile, check: fn(&RunReport)) {
    within_limit(move || {
        let OpenedDriver { driver, disks, backend, .. } = open_driver(&options).expect("it was probed");
        let seed = u64::from(std::process::id());
        println!("seed {seed}: {backend}");
        let mut executor = Executor::new(driver, RunOrder::Fifo, seed);
        let env = executor.env();
        let device = own(file.path());
        let direct = device.is_direct();
        let disk = env.disk(disks.add(device));
        executor.block_on(work(disk, seed, OPERATIONS)).expect("this world does not halt");
        check(&RunReport { counts: disks.counts(), direct });
    });
}

/// What a check may look at after a run.
struct RunReport {
    counts: bcached_uring::CounterSnapshot,
    direct: bool,
}

#[test]
fn random_operations_agree_with_the_model() {
    for choice in backends() {
        let options = DriverOptions { choice, ..DriverOptions::default() };
        run(options, image(SECTORS * 512), |after| assert!(!after.direct || after.counts.bounced > 500));
    }
}

/// A ring with room for four operations, and two threads: of 64 at once most must queue, and all of
/// them complete.
#[test]
fn a_full_ring_is_back_pressure_and_not_an_error() {
    for choice in backends() {
        let options = DriverOptions {
            choice,
            entries: 2,
            in_flight_max: 4,
            threads_max: 2,
            ..DriverOptions::default()
        };
        let check: fn(&RunReport) = match choice {
            BackendChoice::Uring => |after| assert!(after.counts.queued > 1000, "{:?}", after.counts),
            _ => |_| (),
        };
        run(options, image(SECTORS * 512), check);
    }
}

/// A file system that cannot zero a range and keep its space (memory) refuses, and the caller
/// punches a hole.
#[test]
fn random_operations_agree_with_the_model_on_a_file_in_memory() {
    for choice in backends() {
        let options = DriverOptions { choice, ..DriverOptions::default() };
        let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
            return skip("there is no /dev/shm");
        };
        file.as_file().set_len(SECTORS * 512).expect("a sparse file");
        run(options, file, |_| ());
    }
}
