//! Named disasters of the engine: the story first, then exactly that, then one check.

use bcached_format::{DeviceFacts, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock};
use bcached_sim::disk::{Fault as DiskFault, Landed, OpKind, Rule, Survivors};
use bcached_sim::driver::Crash;
use bcached_sim::failure::Fault;
use bcached_sim::scenario::Stage;
use bcached_sim::stamp::Value;
use bcached_sim::system::{Geometry, engine::Engine};
use bcached_sim::workload::{Shape, Step};
use std::ops::Range;
use std::rc::Rc;

/// A set of one volume in write-back mode.
fn stage() -> Stage {
    stage_of(vec![16384], 2)
}

/// A set of these volumes. `first_mode`: 2 to 5 make the first one write-back; after 5 comes write-through.
fn stage_of(volumes: Vec<u64>, first_mode: u64) -> Stage {
    let mut stage = Stage::new(Rc::new(Engine), geometry(volumes, first_mode), 1);
    stage.start().expect("it opens");
    stage
}

fn geometry(volumes: Vec<u64>, first_mode: u64) -> Geometry {
    Geometry {
        block_sectors: 8,
        set_block_sectors: 8,
        bucket_sectors: 128,
        buckets: 600,
        volumes,
        torn_sectors: 8,
        backing_volatile: true,
        cache_volatile: true,
        note_records: 100,
        tuning: first_mode << 40,
    }
}

const fn write(sectors: Range<u64>) -> Step {
    write_to(0, sectors)
}

const fn write_to(volume: u32, sectors: Range<u64>) -> Step {
    Step::Write { volume, sectors, fua: false }
}

const FLUSH: Step = Step::Flush { volume: 0 };

/// Nobody asks for anything for so many milliseconds.
fn pause(stage: &mut Stage, milliseconds: u64) -> Result<(), Fault> {
    stage.play(move |client| async move {
        client.go(Step::Pause(milliseconds)).await;
        Ok(())
    })
}

/// The daemon is killed and leaves a note. Before it is started again somebody else runs the set, who knows nothing of
/// that note: a kernel, or a daemon with its note elsewhere. He writes. Then the daemon returns and finds its note: it
/// is of a history that others have gone on with, and must not put its old data over theirs. (Seen with a kernel in
/// between: two hundred sectors went back by a day.)
#[test]
fn a_note_that_comes_back_after_others_ran_the_set_is_void() {
    let mut stage = stage();
    stage.ask(write(0..64)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.ask(write(0..64)).unwrap();
    let left = stage.note().clone();
    assert!(!left.is_empty(), "the second write is in the note alone");
    stage.crash(Crash::PowerCut, Survivors::Everything);

    stage.start().unwrap();
    stage.ask(write(0..64)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);

    *stage.note() = left;
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A home server streams films right after its start, before anybody has flushed the disk: what is read may be in the
/// disk's volatile cache only, so clean copies wait for a flush. When more of them waited than may, the task that should
/// have flushed turned in circles and the volume stood still.
#[test]
fn many_clean_copies_before_the_first_flush_do_not_stop_the_world() {
    let mut stage = stage();
    let read = |start| Step::Read { volume: 0, sectors: start..start + 8 };
    for start in (0..16384).step_by(8) {
        stage.ask(read(start)).unwrap();
    }
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The SSD is worn out: it refuses every write and can still be read. The volume that has dirty data there goes on
/// reading, and its writes fail with an error. The volume that has none goes on as if it had no cache.
#[test]
fn a_cache_that_takes_no_more_writes_is_still_read_and_clean_volumes_go_on() {
    let mut stage = stage_of(vec![4096, 4096], 5);
    for volume in [0, 1] {
        stage.together(vec![write_to(volume, 0..64), write_to(volume, 640..648)]).unwrap();
        stage.ask(Step::Flush { volume }).unwrap();
    }
    let fault = DiskFault::Fail(Landed::Nothing);
    stage.device(0).faults.add(Rule {
        on: OpKind::Write,
        sectors: 0..u64::MAX,
        skip: 0,
        count: u32::MAX,
        fault,
    });
    let answers = stage.attempt(vec![write_to(0, 8..16), write_to(1, 8..16)]).unwrap();
    assert!(answers[0].is_err() || answers[1].is_ok());
    // Whatever the first failure was, by now the journal has met one.
    let answers = stage.attempt(vec![Step::Flush { volume: 0 }]).unwrap();
    assert!(answers[0].is_err(), "what is acknowledged is not durable");
    let answers = stage.attempt(vec![write_to(0, 16..24), write_to(1, 16..24)]).unwrap();
    assert!(answers[0].is_err() && answers[1].is_ok(), "{answers:?}");
    stage.verify().unwrap();
}

/// A set is stopped while the allocator stores generations, on a device that takes its time for them: the journal, which
/// the allocator needs for that, must go on until it has ended (found as a stop that never ended).
#[test]
fn a_stop_waits_for_the_allocator_before_it_ends_the_journal() {
    const LATE: u64 = 1_000_000_000;
    let mut met = 0;
    for count in 20..40 {
        let small = Geometry { bucket_sectors: 16, ..geometry(vec![4096], 2) };
        let mut stage = Stage::new(Rc::new(Engine), small, count);
        stage.start().expect("it opens");
        // Superblock, four journal buckets, then the two chains of priorities.
        let fault = DiskFault::Late(LATE);
        let chains = 6 * 16..8 * 16;
        stage.device(0).faults.add(Rule { on: OpKind::Write, sectors: chains, skip: 0, count: 1, fault });
        stage.together((0..count).map(|place| write(place * 16..(place + 1) * 16)).collect()).unwrap();
        let before = stage.rig().figures().virtual_ns;
        stage.stop().unwrap_or_else(|fault| panic!("after {count} writes: {fault}"));
        met += u32::from(stage.rig().figures().virtual_ns - before > LATE / 2);
    }
    assert!(met > 0, "no stop met the allocator at work");
}

/// Nobody asks for durability, and the power goes a while later: the keys have been in the journal since the time was
/// over that the set waits for more of them, as with a kernel.
#[test]
fn acknowledged_writes_are_durable_after_the_journal_delay() {
    let mut stage = stage();
    stage.ask(write(0..8)).unwrap();
    pause(&mut stage, 300).unwrap();
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    stage.start().unwrap();
    assert_eq!(stage.values(0, 0..8).unwrap(), [Value::Written(1); 8]);
}

/// Sizes that a superblock may have and that leave no room to append: a bucket of one block (each set of a node needs
/// its own), and a journal without room for the entries that free it. They are refused, not waited for.
#[test]
fn sizes_without_room_to_append_are_refused() {
    let refused = |stage: &mut Stage| match stage.start() {
        Err(Fault::Open(refusal)) => refusal.to_string().contains("a bucket must hold two blocks"),
        other => panic!("not refused: {other:?}"),
    };
    let one_block = Geometry { bucket_sectors: 8, ..geometry(vec![4096], 2) };
    assert!(refused(&mut Stage::new(Rc::new(Engine), one_block, 1)));

    let mut stage = stage();
    stage.stop().unwrap();
    for buckets in 0..4 {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        stage.device(0).read(SUPERBLOCK_SECTOR, &mut bytes).unwrap();
        let facts = DeviceFacts { sectors: u64::MAX, logical_block_sectors: 8 };
        let raw = RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts));
        let Ok(Superblock::Cache(mut superblock)) = raw else { panic!("a cache: {raw:?}") };
        superblock.set_journal_buckets(buckets);
        stage.device(0).place(SUPERBLOCK_SECTOR, &superblock.seal()[..]);
        assert!(refused(&mut stage), "{buckets} journal buckets");
        stage.crash(Crash::ProcessDeath, Survivors::Nothing);
    }
}

/// A device fails in the middle of everything, for good or only for once, and nobody may wait for ever: every request is
/// answered, whatever the answer, and the set stops.
#[test]
fn no_failure_of_a_device_leaves_anybody_waiting() {
    let small = Geometry { bucket_sectors: 16, ..geometry(vec![4096], 2) };
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
    let cases = (0..2).flat_map(|device| kinds.map(|on| (device, on))).flat_map(|(device, on)| {
        [1, u32::MAX]
            .into_iter()
            .flat_map(move |count| (0..110).step_by(11).map(move |skip| (device, on, count, skip)))
    });
    for (device, on, count, skip) in cases {
        let seed = u64::from(skip);
        let mut stage =
            Stage::new(Rc::new(Engine), Geometry { tuning: seed << 32 | 2 << 40, ..small.clone() }, seed);
        stage.start().unwrap();
        let fault = DiskFault::Fail(Landed::Part);
        stage.device(device).faults.add(Rule { on, sectors: 0..u64::MAX, skip, count, fault });
        let steps = Shape::named("points").expect("a shape").with_steps(120).draw(seed).steps;
        let requests = steps.into_iter().filter(|step| !matches!(step, Step::Pause(_) | Step::Settle));
        let ended = stage.attempt(requests.collect()).map(|_| ()).and_then(|()| stage.stop());
        let waiting = matches!(ended, Err(Fault::Waiting { .. }));
        assert!(!waiting, "{on:?} {skip} of device {device} fails {count} times: {ended:?}");
    }
}

/// An image file was cut short by a copy that ran out of space, and its cache holds dirty data for the part that is gone.
/// Served, that data could never be written back and would be lost without a word.
#[test]
fn a_backing_device_that_ends_before_its_dirty_data_is_refused() {
    let mut stage = stage();
    stage.ask(write(16000..16064)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.stop().unwrap();
    let whole = stage.device(1).model.sectors;
    stage.device(1).model.sectors = 8192;
    assert!(stage.start().is_err());
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    stage.device(1).model.sectors = whole;
    stage.start().unwrap();
    stage.verify().unwrap();
}

/// Write-back copies a batch to a slow disk; one copy has arrived and the other has not. A client flushes, the disk's
/// flush fails, and the copy that had arrived is gone. Then the flush of the batch itself succeeds, as the flush after a
/// failed one does: both keys turned clean, and data that had been durable for long was nowhere.
#[test]
fn a_flush_that_fails_in_the_middle_of_write_back_loses_nothing() {
    const SECOND: u64 = 1_000_000_000;
    let mut met = 0;
    for tuning in 0..8 {
        let varied = Geometry { tuning: tuning << 32 | 2 << 40, ..geometry(vec![16384], 2) };
        let mut stage = Stage::new(Rc::new(Engine), varied, tuning);
        stage.start().expect("it opens");
        for (sectors, late) in [(16..24, SECOND), (656..664, 2 * SECOND)] {
            let fault = DiskFault::Late(late);
            stage.device(1).faults.add(Rule { on: OpKind::Write, sectors, skip: 0, count: 1, fault });
        }
        stage.together(vec![write(0..8), write(640..648)]).unwrap();
        stage.ask(FLUSH).unwrap();
        pause(&mut stage, 1_500).unwrap();
        let fault = DiskFault::Fail(Landed::Nothing);
        stage.device(1).faults.add(Rule { on: OpKind::Flush, sectors: 0..0, skip: 0, count: 1, fault });
        if stage.attempt(vec![FLUSH]).unwrap()[0].is_ok() {
            // With these options nothing is under way now.
            continue;
        }
        met += 1;
        pause(&mut stage, 10_000).unwrap();
        stage.verify().unwrap();
        // Reads come from the cache still. The checker compares what is clean there with the disk.
        stage.stop().unwrap_or_else(|fault| panic!("tuning {tuning}: {fault}"));
    }
    assert!(met > 0, "no flush failed in the middle of write-back");
}

/// A worn SSD fails a flush and forgets what it covered: where acknowledged data stood there is now what stood there before,
/// perhaps another volume's. Nobody may be shown that, neither now nor by the note at the next start.
#[test]
fn what_a_failed_flush_of_the_cache_took_is_not_read() {
    let mut stage = stage();
    stage.ask(write(0..64)).unwrap();
    let always = Rule {
        on: OpKind::Flush,
        sectors: 0..u64::MAX,
        skip: 0,
        count: u32::MAX,
        fault: DiskFault::Fail(Landed::Nothing),
    };
    stage.device(0).faults.add(always);
    assert!(stage.attempt(vec![FLUSH]).unwrap()[0].is_err());
    let read = stage.attempt(vec![Step::Read { volume: 0, sectors: 0..64 }]).unwrap();
    assert!(read[0].is_err(), "it is gone");
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    stage.rig().world.borrow_mut().heal();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}
