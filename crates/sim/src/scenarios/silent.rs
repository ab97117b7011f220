//! Devices that do not answer for long, or never. The engine has no timeout after which a device
//! counts as dead. A request that needs the answer waits for it, all others go on, and nothing that
//! waits is reported as done.

use super::bench::{ScenarioSystem, eager, quiet};
use super::image::journal;
use super::stage::{
    BACK, DATA_START, FLUSH, THROUGH, begin, bench, geometry, keep, minutes, pause, read, small, trouble,
    unstarted, warm, write, write_fua, write_to,
};
use crate::disk::{DiskFault, OpKind, Survivors};
use crate::driver::Crash;
use crate::scenario::ScenarioRig;
use crate::system::Mode;
use crate::workload::Step;
use bcached_engine::{Options, VolumeOptions};
use std::ops::Range;
use std::time::Duration;

super::scenarios! {
    include_str!("silent.rs"),
    a_cache_that_stalls_for_ten_minutes_fails_nothing_and_loses_nothing,
    a_disk_that_stalls_under_write_through_holds_up_no_other_volume,
    a_disk_that_stalls_under_write_back_holds_up_no_other_volume,
    a_write_that_the_cache_never_answers_is_never_said_to_be_done,
    a_journal_that_the_cache_never_answers_promises_nothing_more,
    a_disk_that_never_answers_holds_up_no_other_volume_and_loses_nothing,
    a_write_back_that_is_never_answered_loses_nothing_dirty,
}

/// Asserts that exactly these requests wait for an answer.
fn assert_unanswered(stage: &ScenarioRig, steps: &[Step]) {
    let mut words: Vec<String> = steps.iter().map(ToString::to_string).collect();
    words.sort_unstable();
    assert_eq!(stage.unanswered(), words, "one was answered, or other requests wait too");
}

/// Makes all of these requests, which must succeed whatever else waits.
fn goes_on(stage: &mut ScenarioRig, steps: Vec<Step>) {
    for answer in stage.attempt(steps).unwrap() {
        answer.unwrap();
    }
}

/// Duration of a stall, in nanoseconds.
const TEN_MINUTES_NS: u64 = 600_000_000_000;

/// Makes a device stall. Returns the time at which it recovers.
fn stall(stage: &mut ScenarioRig, device: usize) -> u64 {
    stage.rig().world.borrow_mut().stall(device, TEN_MINUTES_NS);
    stage.now() + TEN_MINUTES_NS
}

/// An SSD collects its garbage, or its firmware restarts, in the middle of writes that others
/// depend on: of data, of the journal, or of a flush, whichever is in flight. It does not answer
/// for ten minutes. No client gets an error. Requests that wait for the SSD are not acknowledged,
/// those that the disk alone can answer are, and afterwards everything is done and durable.
fn a_cache_that_stalls_for_ten_minutes_fails_nothing_and_loses_nothing() {
    let mut done = 0;
    for microseconds in (0..300).step_by(10) {
        let (mut stage, bench) = unstarted(geometry(vec![16384], BACK), quiet(), 1 + microseconds);
        stage.start().unwrap();
        keep(&mut stage, 0..64);
        let asked =
            vec![write(0..64), write(32..96), write_fua(640..648), read(0..8), FLUSH, write(648..704)];
        let begun = stage.play(move |client| async move {
            for step in asked {
                client.go(step).await;
            }
            client.env().sleep(Duration::from_micros(microseconds)).await;
            Ok(())
        });
        begun.unwrap();
        let resumes = stall(&mut stage, 0);
        // Completions from before the stall are delivered.
        pause(&mut stage, 1).unwrap();
        let waiting = stage.unanswered();
        done += usize::from(waiting.is_empty());
        goes_on(&mut stage, vec![read(8000..8064)]);
        minutes(&mut stage, 9);
        assert_eq!(stage.unanswered(), waiting, "a request that waits for the cache was acknowledged");
        assert!(stage.now() < resumes, "the device had recovered already");
        // This waits for all of them.
        stage.together(vec![write(704..768)]).unwrap();
        assert_eq!(bench.status().failed, None);
        stage.ask(FLUSH).unwrap();
        stage.crash(Crash::PowerCut, Survivors::Nothing);
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
    assert!(done < 5, "all requests were answered before the stall, {done} times");
}

/// Writes the whole second volume, with occasional flushes and a read of each place. All requests
/// succeed, and are answered before `end`.
fn use_the_other(stage: &mut ScenarioRig, sectors: u64, end: u64) {
    for start in (0..sectors).step_by(128) {
        let range = start..start + 128;
        let mut steps = vec![write_to(1, range.clone())];
        if start.is_multiple_of(2048) {
            steps.push(Step::Flush { volume: 1 });
        }
        goes_on(stage, steps);
        goes_on(stage, vec![Step::Read { volume: 1, sectors: range }]);
    }
    assert!(stage.now() < end, "requests that do not need the device waited for it");
}

/// Two disks share one SSD. One of them spins down, retries a bad track, or hangs on a bus that is
/// reset: it does not answer for ten minutes, with write-through writes, misses and a flush in
/// flight. The other volume is written and read completely, in any mode, with more data than the
/// cache can hold. The cached part of the waiting volume can be read. Then everything is answered.
fn a_disk_that_stalls_under_write_through_holds_up_no_other_volume() {
    // Proves invariant L8.
    for mode in [Mode::Writethrough, Mode::Writearound, Mode::Writeback] {
        let (mut stage, bench) = bench(small(vec![4096, 16384], THROUGH), quiet());
        stage.ask(Step::Mode { volume: 1, mode }).unwrap();
        warm(&mut stage, 0..64);
        stage.ask(write(64..128)).unwrap();
        let resumes = stall(&mut stage, 1);
        let asked = [write(0..8), write_fua(128..192), read(256..320), FLUSH];
        begin(&mut stage, asked.to_vec());
        pause(&mut stage, 100).unwrap();
        goes_on(&mut stage, vec![read(8..64)]);
        use_the_other(&mut stage, 16384, resumes);
        minutes(&mut stage, 9);
        assert_unanswered(&stage, &asked);
        assert!(stage.now() < resumes, "the device had recovered already");
        stage.together(vec![write(192..256)]).unwrap();
        assert_eq!(bench.status().failed, None);
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// The same while dirty data is being written back to that disk, which has received it or not and
/// does not say. The volume itself goes on too, because its writes go to the SSD; only its flushes
/// may have to wait for the disk. The other volume is written completely, with so much data that
/// the cache reaches its limit of dirty data and the rest goes straight to its disk. Its dirty data
/// is written back meanwhile. When the stalled disk recovers, everything is written back.
fn a_disk_that_stalls_under_write_back_holds_up_no_other_volume() {
    for milliseconds in 0..6 {
        let writeback_delay = Duration::from_millis(1);
        // Too slow to be finished before the disk stalls: keys that are being marked clean then
        // wait for that.
        let options = Options {
            writeback_batch_sectors: 64,
            volume: VolumeOptions {
                writeback_delay,
                writeback_percent: 0,
                writeback_rate_maximum: Some(1000),
                ..VolumeOptions::default()
            },
            ..Options::default()
        };
        let (mut stage, bench) = unstarted(small(vec![4096, 16384], BACK), options, 1 + milliseconds);
        stage.start().unwrap();
        keep(&mut stage, 0..512);
        stage.ask(Step::Write { volume: 1, sectors: 0..64, fua: true }).unwrap();
        pause(&mut stage, milliseconds).unwrap();
        let resumes = stall(&mut stage, 1);
        goes_on(&mut stage, vec![write(448..576), write(0..8), write_fua(640..648), read(0..448)]);
        use_the_other(&mut stage, 16384, resumes);
        pause(&mut stage, 100).unwrap();
        assert!(stage.now() < resumes, "the device had recovered already");
        minutes(&mut stage, 1);
        let [waits, other] = &bench.status().volumes[..] else { panic!("two volumes") };
        assert!(waits.dirty_sectors > 0, "no dirty data waits for the disk");
        assert_eq!(other.dirty_sectors, 0, "its own disk works");
        assert!(stage.now() < resumes, "the device had recovered already");
        minutes(&mut stage, 12);
        assert_eq!(bench.status().dirty_sectors, 0, "write-back continues where it was");
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// Runs `tell` with each possible end of a process that has an operation in flight forever.
fn each_end(mut tell: impl FnMut(Crash, Survivors)) {
    for crash in [Crash::ProcessDeath, Crash::PowerCut] {
        for survivors in [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(7)] {
            tell(crash, survivors);
        }
    }
}

/// Ends the process like this, and verifies in the next life that all promised data is there.
fn end_and_verify(stage: &mut ScenarioRig, crash: Crash, survivors: Survivors) {
    stage.crash(crash, survivors);
    stage.start().unwrap_or_else(|fault| panic!("{crash} {survivors}: {fault}"));
    stage.verify().unwrap_or_else(|fault| panic!("{crash} {survivors}: {fault}"));
    stage.stop().unwrap_or_else(|fault| panic!("{crash} {survivors}: {fault}"));
}

/// The SSD's firmware loses one write of data and never answers it. Its client waits, and so does a
/// client that later writes to the same place. Everything else goes on, flushes included, and reads
/// of that place return the old data. Then the process is killed, or the plug is pulled.
fn a_write_that_the_cache_never_answers_is_never_said_to_be_done() {
    each_end(|crash, survivors| {
        let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
        keep(&mut stage, 0..64);
        let data = journal(&mut stage).end..u64::MAX;
        trouble(&mut stage, 0, OpKind::Write, data, 1, DiskFault::Never);
        let asked = [write(0..64), write(32..96)];
        begin(&mut stage, asked.to_vec());
        pause(&mut stage, 100).unwrap();
        assert_eq!(stage.device(0).faults.failures(), 1, "the lost command is the write of data");
        let others = vec![read(0..32), write(128..192), write_fua(640..704), FLUSH];
        goes_on(&mut stage, others);
        minutes(&mut stage, 10);
        assert_unanswered(&stage, &asked);
        end_and_verify(&mut stage, crash, survivors);
    });
}

/// The lost command is a write of the journal, or a flush, which each journal entry sends ahead.
/// Nothing becomes durable any more, so no flush and no FUA write is acknowledged. Data that the
/// lost flush covers is not read, because it is not known to last. Plain writes and other reads go
/// on. In the next life, what was made durable before is there; after a mere death of the process,
/// everything acknowledged is.
fn a_journal_that_the_cache_never_answers_promises_nothing_more() {
    for on in [OpKind::Write, OpKind::Flush] {
        each_end(|crash, survivors| {
            let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
            keep(&mut stage, 0..64);
            let journal = journal(&mut stage);
            trouble(&mut stage, 0, on, journal, 1, DiskFault::Never);
            goes_on(&mut stage, vec![write(32..96)]);
            let mut asked = vec![FLUSH, write_fua(640..704)];
            begin(&mut stage, asked.clone());
            minutes(&mut stage, 1);
            assert_eq!(stage.device(0).faults.failures(), 1);
            if on == OpKind::Flush {
                // Otherwise a client could see data that is lost if the flush fails.
                asked.push(read(0..96));
                begin(&mut stage, vec![read(0..96)]);
            } else {
                goes_on(&mut stage, vec![read(0..96)]);
            }
            goes_on(&mut stage, vec![write(0..8), read(8000..8064)]);
            minutes(&mut stage, 10);
            assert_unanswered(&stage, &asked);
            end_and_verify(&mut stage, crash, survivors);
        });
    }
}

/// Two volumes, the first in write-through mode; each has acknowledged durable data.
fn two_volumes() -> (ScenarioRig, std::rc::Rc<ScenarioSystem>) {
    let (mut stage, bench) = bench(small(vec![4096, 16384], THROUGH), quiet());
    stage.ask(Step::Mode { volume: 1, mode: Mode::Writeback }).unwrap();
    keep(&mut stage, 0..64);
    stage.ask(Step::Write { volume: 1, sectors: 0..64, fua: true }).unwrap();
    (stage, bench)
}

/// A disk's controller loses one command and never answers it: a read, a write or a flush. Its
/// client waits forever. The other volume, on another disk, goes on, however much is written to it.
/// Other requests to this volume go on too, except for flushes behind the lost one, because only
/// one runs at a time. Neither a kill nor a power cut loses anything promised.
fn a_disk_that_never_answers_holds_up_no_other_volume_and_loses_nothing() {
    // Proves invariant L8.
    let place: Range<u64> = 256..320;
    let lost = [(OpKind::Read, read(place.clone())), (OpKind::Write, write(place)), (OpKind::Flush, FLUSH)];
    for (on, asked) in lost {
        each_end(|crash, survivors| {
            let (mut stage, _) = two_volumes();
            goes_on(&mut stage, vec![write(32..96)]);
            trouble(&mut stage, 1, on, DATA_START + 256..DATA_START + 320, 1, DiskFault::Never);
            begin(&mut stage, vec![asked.clone()]);
            minutes(&mut stage, 1);
            assert_eq!(stage.device(1).faults.failures(), 1);
            use_the_other(&mut stage, 16384, u64::MAX);
            let others = vec![write(512..576), read(0..96), read(1024..1088)];
            goes_on(&mut stage, others);
            minutes(&mut stage, 9);
            assert_unanswered(&stage, std::slice::from_ref(&asked));
            end_and_verify(&mut stage, crash, survivors);
        });
    }
}

/// The lost command belongs to write-back: its write to the disk, or the flush behind it. The data
/// in flight stays dirty and is read from the cache. Both volumes go on, and the dirty data of the
/// other one is written back. The next life writes everything back.
fn a_write_back_that_is_never_answered_loses_nothing_dirty() {
    for on in [OpKind::Write, OpKind::Flush] {
        each_end(|crash, survivors| {
            let options = eager(Duration::from_millis(10));
            let (mut stage, bench) = bench(small(vec![4096, 16384], BACK), options);
            keep(&mut stage, 640..648);
            pause(&mut stage, 3_000).unwrap();
            keep(&mut stage, 0..64);
            trouble(&mut stage, 1, on, DATA_START..u64::MAX, 1, DiskFault::Never);
            minutes(&mut stage, 1);
            assert_eq!(stage.device(1).faults.failures(), 1);
            assert!(
                bench.status().volumes[0].dirty_sectors >= 64,
                "{on:?}: marked clean without a completed write-back"
            );
            goes_on(&mut stage, vec![write(64..128), read(0..64)]);
            use_the_other(&mut stage, 16384, u64::MAX);
            minutes(&mut stage, 1);
            let [one, other] = &bench.status().volumes[..] else { panic!("two volumes") };
            assert!(one.dirty_sectors >= 64, "{on:?}: marked clean without a completed write-back");
            assert_eq!(other.dirty_sectors, 0, "{on:?}: its own disk works");
            stage.crash(crash, survivors);
            stage.start().unwrap();
            minutes(&mut stage, 2);
            assert_eq!(bench.status().dirty_sectors, 0);
            stage.verify().unwrap();
            stage.stop().unwrap();
        });
    }
}
