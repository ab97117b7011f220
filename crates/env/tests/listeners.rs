//! Completions of operations that no task waits for.

use bcached_env::{
    Buffer, Completion, CompletionListener, DiskId, DiskInfo, Driver, Event, Executor, IoError, IoErrorKind,
    Op, RunOrder, RunOutcome, Time, Token,
};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const DISK: DiskId = DiskId(3);
/// If every listener is charged this much, few fit between two checks of the driver.
const MUCH_NS: u64 = 60_000;

/// Completes all operations at the next wait; reads of sector 13 fail.
#[derive(Default)]
struct DeferredDriver {
    asked: Vec<Completion>,
    waits: Rc<Cell<u32>>,
}

impl Driver for DeferredDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        assert_eq!(disk, DISK);
        let (result, buffer) = match op {
            Op::Read { sector: 13, buffer } => (Err(IoErrorKind::Io), Some(buffer)),
            Op::Read { buffer, .. } => (Ok(()), Some(buffer)),
            _ => (Ok(()), None),
        };
        self.asked.push(Completion { token, result, buffer });
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        self.waits.set(self.waits.get() + 1);
        if self.asked.is_empty() && until.is_none() {
            events.push(Event::Halt);
        }
        events.extend(self.asked.drain(..).map(Event::Done));
    }

    fn now(&self) -> Time {
        Time(u64::from(self.waits.get()))
    }

    fn wall_seconds(&self) -> u32 {
        0
    }

    fn info(&self, _disk: DiskId) -> DiskInfo {
        DiskInfo {
            sectors: 1 << 20,
            logical_block_sectors: 1,
            volatile_cache: false,
            fua: true,
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
            discard: false,
            write_zeroes: false,
            unmap: false,
        }
    }
}

/// A completion as reported: number, result, length of the returned memory, and number of driver
/// waits before it.
type Report = (usize, Result<(), IoError>, Option<usize>, u32);

struct ReportLog {
    told: RefCell<Vec<Report>>,
    waits: Rc<Cell<u32>>,
    env: bcached_env::Env,
    charge: u64,
}

impl CompletionListener for ReportLog {
    fn ended(self: Rc<Self>, number: usize, result: Result<(), IoError>, buffer: Option<Buffer>) {
        self.env.charge(self.charge);
        self.told.borrow_mut().push((number, result, buffer.map(|buffer| buffer.len()), self.waits.get()));
    }
}

/// Creates an executor and a listener that is charged `charge` nanoseconds each time.
fn world(order: RunOrder, charge: u64) -> (Executor, Rc<ReportLog>) {
    let waits = Rc::<Cell<u32>>::default();
    let driver = DeferredDriver { asked: Vec::new(), waits: Rc::clone(&waits) };
    let executor = Executor::new(Box::new(driver), order, 1);
    let notes = ReportLog { told: RefCell::default(), waits, env: executor.env(), charge };
    (executor, Rc::new(notes))
}

fn listener(notes: &Rc<ReportLog>) -> Rc<dyn CompletionListener> {
    Rc::<ReportLog>::clone(notes)
}

#[test]
fn who_listens_is_told_of_the_end() {
    let (mut executor, notes) = world(RunOrder::Fifo, 0);
    let disk = executor.env().disk(DISK);
    disk.read_for(8, Buffer::zeroed(4096), listener(&notes), 7);
    disk.read_for(13, Buffer::zeroed(512), listener(&notes), 8);
    disk.write_for(0, Buffer::zeroed(512).freeze(), listener(&notes), 9);
    assert_eq!(disk.health().waiting, 3);
    assert_eq!(executor.run_until(|| notes.told.borrow().len() == 3), RunOutcome::Done);
    let error = IoError { kind: IoErrorKind::Io, disk: DISK, sector: 13 };
    let told = [(7, Ok(()), Some(4096), 1), (8, Err(error), Some(512), 1), (9, Ok(()), None, 1)];
    assert_eq!(*notes.told.borrow(), told);
    let health = disk.health();
    assert_eq!((health.waiting, health.errors, health.last_error), (0, 1, Some(error)));
    assert_eq!(health.successes_since, 1);
    assert_eq!(Rc::strong_count(&notes), 1, "nobody refers to who was told");
}

/// Many simultaneous completions must not keep the driver from being checked for longer than tasks
/// may.
#[test]
fn the_driver_is_looked_at_between_many_ends() {
    for order in [RunOrder::Fifo, RunOrder::Seeded(bcached_env::rng::Rng::new(5))] {
        let (mut executor, notes) = world(order, MUCH_NS);
        let disk = executor.env().disk(DISK);
        for number in 0..20 {
            disk.read_for(8, Buffer::zeroed(512), listener(&notes), number);
        }
        assert_eq!(executor.run_until(|| notes.told.borrow().len() == 20), RunOutcome::Done);
        let told = notes.told.borrow();
        for look in 1..=notes.waits.get() {
            let together = told.iter().filter(|told| told.3 == look).count();
            // The last one begins when a little of the time is left.
            assert!(together <= 4, "{together} were told between two looks");
        }
        let mut numbers: Vec<usize> = told.iter().map(|told| told.0).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..20).collect::<Vec<_>>(), "each is told once");
    }
}

/// Submits a new operation for each completion it is told of.
struct ResubmittingListener {
    told: Cell<u32>,
    env: bcached_env::Env,
}

impl CompletionListener for ResubmittingListener {
    fn ended(self: Rc<Self>, number: usize, _result: Result<(), IoError>, buffer: Option<Buffer>) {
        self.told.set(self.told.get() + 1);
        let disk = self.env.disk(DISK);
        disk.read_for(8, buffer.unwrap_or_default(), Rc::<Self>::clone(&self), number);
    }
}

/// However many completions there are, and although nothing is charged for them.
#[test]
fn tasks_go_on_beside_ends_without_an_end() {
    let (mut executor, notes) = world(RunOrder::Fifo, 0);
    let env = executor.env();
    let greedy = Rc::new(ResubmittingListener { told: Cell::new(0), env: env.clone() });
    for number in 0..1000 {
        env.disk(DISK).read_for(8, Buffer::zeroed(512), Rc::<ResubmittingListener>::clone(&greedy), number);
    }
    let polls = Rc::<Cell<u32>>::default();
    let counted = Rc::clone(&polls);
    let world = env.clone();
    env.spawn(async move {
        loop {
            counted.set(counted.get() + 1);
            world.yield_now().await;
        }
    });
    assert_eq!(executor.run_until(|| greedy.told.get() >= 20_000), RunOutcome::Done);
    assert!(polls.get() > 2000, "a task was polled {} times beside 20,000 ends", polls.get());
    assert!(notes.waits.get() > 20_000 / 1000, "the driver was looked at {} times", notes.waits.get());
}

/// The simulator picks the next item among completions and tasks.
#[test]
fn a_seed_decides_on_the_order() {
    let order_of = |seed| {
        let (mut executor, notes) = world(RunOrder::Seeded(bcached_env::rng::Rng::new(seed)), 0);
        let disk = executor.env().disk(DISK);
        (0..8).for_each(|number| disk.read_for(8, Buffer::zeroed(512), listener(&notes), number));
        // A task that becomes ready together with the completions.
        let (asks, notes_too) = (disk.read(8, Buffer::zeroed(512)), Rc::clone(&notes));
        executor.env().spawn(async move {
            let (result, buffer) = asks.await;
            notes_too.ended(99, result, Some(buffer));
        });
        assert_eq!(executor.run_until(|| notes.told.borrow().len() == 9), RunOutcome::Done);
        notes.told.borrow().iter().map(|told| told.0).collect::<Vec<_>>()
    };
    assert_eq!(order_of(1), order_of(1));
    let place_of_task = |seed| order_of(seed).iter().position(|number| *number == 99);
    assert!((2..20).any(|seed| order_of(seed) != order_of(1)), "no seed tells them in another order");
    assert!((2..20).any(|seed| place_of_task(seed) < Some(8)), "no seed lets the task go before an end");
    assert!((2..20).any(|seed| place_of_task(seed) > Some(0)), "no seed lets an end go before the task");
}

/// The crash of a simulated process.
#[test]
fn an_executor_that_goes_away_lets_go_of_who_listens() {
    let (executor, notes) = world(RunOrder::Fifo, 0);
    executor.env().disk(DISK).read_for(8, Buffer::zeroed(512), listener(&notes), 0);
    assert_eq!(Rc::strong_count(&notes), 2);
    drop(executor);
    assert_eq!(Rc::strong_count(&notes), 1);
    assert!(notes.told.borrow().is_empty(), "nothing has ended");
}
