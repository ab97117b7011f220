//! For each rule, tests a run that must pass and a run that must be caught.

mod discards;
mod notes;
mod reads_from_before;

use super::*;

/// One volume whose sectors have stamped first content; operation numbers are the stamps.
struct OracleFixture {
    oracle: Oracle,
}

impl OracleFixture {
    fn new() -> Self {
        Self { oracle: Oracle::new(vec![SectorValue::Written(0)]) }
    }

    /// Brings the device back; if something was lost, the next flush fails.
    fn is_back(&mut self, lost: bool) {
        self.oracle.device_is_back(0);
        if lost {
            let flush = self.oracle.begin_flush(0);
            self.oracle.end(flush, false);
        }
    }

    /// Begins a write of sectors 0..2.
    fn begin(&mut self) -> OpId {
        self.oracle.begin_write(0, 0..2, false)
    }

    fn write(&mut self) -> u64 {
        let id = self.begin();
        self.oracle.end(id, true);
        id.number()
    }

    fn write_fua(&mut self) -> u64 {
        let id = self.oracle.begin_write(0, 0..2, true);
        self.oracle.end(id, true);
        id.number()
    }

    fn flush(&mut self) {
        let id = self.oracle.begin_flush(0);
        self.oracle.end(id, true);
    }

    /// Reverts the device to its content before the last successful flush.
    fn drops(&mut self) {
        self.oracle.device_dropped(0, None);
    }

    fn discard(&mut self) {
        let id = self.oracle.begin_discard(0, 0..2);
        self.oracle.end(id, true);
    }

    fn begin_read(&mut self) -> OpId {
        self.oracle.begin_read(0, 0..1)
    }

    fn returns(&mut self, id: OpId, value: SectorValue) -> bool {
        let mut bytes = [0; SECTOR];
        if let SectorValue::Written(number) = value {
            stamp::fill(&mut bytes, 0, 0, number);
        }
        self.oracle.end_read(id, &bytes).is_ok()
    }

    /// Reads sector 0 as the stamp `number`; returns whether that is allowed.
    fn reads(&mut self, number: u64) -> bool {
        let id = self.begin_read();
        self.returns(id, SectorValue::Written(number))
    }

    fn reads_zero(&mut self) -> bool {
        let id = self.begin_read();
        self.returns(id, SectorValue::Zero)
    }

    /// Returns the stamps up to `most` that sector 0 may be read as, without fixing anything.
    fn may_be(&self, most: u64) -> Vec<u64> {
        (0..=most).filter(|number| Self { oracle: self.oracle.clone() }.reads(*number)).collect()
    }
}

#[test]
fn rule_1_the_last_acknowledged_write_is_read() {
    let mut bench = OracleFixture::new();
    assert!(bench.reads(0));
    let first = bench.write();
    assert!(bench.reads(first));
    let second = bench.write();
    assert_eq!(bench.may_be(second), [second]);
    assert!(!bench.reads_zero());
}

#[test]
fn rule_1_a_write_in_flight_may_be_seen_and_then_is_there() {
    let mut bench = OracleFixture::new();
    let id = bench.begin();
    assert_eq!(bench.may_be(id.number()), [0, id.number()]);
    assert!(bench.reads(0));
    assert_eq!(bench.may_be(id.number()), [0, id.number()]);
    assert!(bench.reads(id.number()));
    assert!(!bench.reads(0), "it was seen");
}

#[test]
fn rule_1_a_read_under_way_may_return_what_was_replaced_meanwhile() {
    let mut bench = OracleFixture::new();
    let early = bench.begin_read();
    let write = bench.write();
    assert!(bench.returns(early, SectorValue::Written(0)));
    assert_eq!(bench.may_be(write), [write]);
    let late = bench.begin_read();
    assert!(!bench.returns(late, SectorValue::Written(0)));
}

#[test]
fn rule_2_overlapping_writes_end_in_either_order_and_reading_shows_it() {
    let mut bench = OracleFixture::new();
    let (first, second) = (bench.begin(), bench.begin());
    bench.oracle.end(second, true);
    bench.oracle.end(first, true);
    let (first, second) = (first.number(), second.number());
    assert_eq!(bench.may_be(second), [first, second]);
    assert!(bench.reads(first));
    assert_eq!(bench.may_be(second), [first], "the order is known now");
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(second), [first], "and a flush keeps it");
}

#[test]
fn rule_2_a_write_begun_after_the_other_ended_is_the_later_one() {
    let mut bench = OracleFixture::new();
    let first = bench.begin();
    let second = bench.begin();
    bench.oracle.end(first, true);
    let third = bench.begin();
    bench.oracle.end(second, true);
    bench.oracle.end(third, true);
    assert_eq!(
        bench.may_be(9),
        [second.number(), third.number()],
        "the first one was over when the third began"
    );
}

#[test]
fn rule_3_after_a_cut_the_flushed_one_or_a_later_one() {
    let mut bench = OracleFixture::new();
    let lost = bench.write();
    let flushed = bench.write();
    bench.flush();
    let later = bench.write();
    let flying = bench.begin().number();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(flying), [flushed, later, flying]);
    assert!(!bench.reads(lost));
    assert!(!bench.reads(0));
    assert!(!bench.reads_zero());
}

#[test]
fn rule_3_what_is_read_after_a_cut_stays_over_further_cuts() {
    let mut bench = OracleFixture::new();
    let first = bench.write();
    let second = bench.write();
    bench.oracle.power_cut();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(second), [0, first, second], "nobody has looked");
    assert!(bench.reads(first));
    assert_eq!(bench.may_be(second), [first]);
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(second), [first]);
}

#[test]
fn rule_3_a_flush_covers_what_was_acknowledged_before_it_was_asked_for() {
    let mut bench = OracleFixture::new();
    let flush = bench.oracle.begin_flush(0);
    let write = bench.write();
    bench.oracle.end(flush, true);
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(write), [0, write]);

    let mut bench = OracleFixture::new();
    let write = bench.write();
    let flush = bench.oracle.begin_flush(0);
    bench.oracle.end(flush, true);
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(write), [write]);
}

#[test]
fn rule_3_fua_is_durable_when_acknowledged_and_vouches_for_itself_only() {
    let mut bench = OracleFixture::new();
    let other = bench.oracle.begin_write(0, 5..6, false);
    bench.oracle.end(other, true);
    let write = bench.write_fua();
    let later = bench.write();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(later), [write, later]);
    let mut bytes = [0; SECTOR];
    stamp::fill(&mut bytes, 0, 5, 0);
    let read = bench.oracle.begin_read(0, 5..6);
    assert!(bench.oracle.end_read(read, &bytes).is_ok(), "sector 5 was not flushed");
}

#[test]
fn rule_3_sectors_of_one_write_are_cut_one_by_one() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    bench.oracle.power_cut();
    let mut bytes = [0; 2 * SECTOR];
    stamp::fill(&mut bytes[..SECTOR], 0, 0, 0);
    stamp::fill(&mut bytes[SECTOR..], 0, 1, write);
    let read = bench.oracle.begin_read(0, 0..2);
    assert!(bench.oracle.end_read(read, &bytes).is_ok());
    assert_eq!(bench.may_be(write), [0]);
}

#[test]
fn rule_4_a_dead_process_keeps_what_it_acknowledged() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let flying = bench.begin().number();
    bench.oracle.process_death();
    assert_eq!(bench.may_be(flying), [write, flying]);
    assert!(bench.reads(write));
    assert_eq!(bench.may_be(flying), [write], "what was in flight is decided");
    bench.oracle.power_cut();
    assert_eq!(
        bench.may_be(flying),
        [0, write],
        "it was never flushed; what did not land does not come back"
    );
}

#[test]
fn rule_4_a_flush_after_the_death_covers_what_was_acknowledged_before() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    bench.oracle.process_death();
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(write), [write]);
}

#[test]
fn rule_4_a_flush_in_flight_at_the_death_promises_nothing() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let flush = bench.oracle.begin_flush(0);
    bench.oracle.process_death();
    bench.oracle.end(flush, true);
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(write), [0, write]);
}

#[test]
fn rule_5_what_was_read_stays() {
    let mut bench = OracleFixture::new();
    let (first, second) = (bench.begin(), bench.begin());
    bench.oracle.end(first, true);
    bench.oracle.end(second, true);
    assert!(bench.reads(second.number()));
    bench.oracle.process_death();
    assert_eq!(bench.may_be(9), [second.number()]);
    let third = bench.begin();
    assert_eq!(bench.may_be(9), [second.number(), third.number()], "until it is written");
}

#[test]
fn rule_6_a_failed_write_left_old_or_new() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let failed = bench.begin();
    bench.oracle.end(failed, false);
    assert_eq!(bench.may_be(9), [write, failed.number()]);
    assert!(bench.reads(write));
    assert_eq!(bench.may_be(9), [write], "once read it stays");
    let next = bench.write();
    assert_eq!(bench.may_be(9), [next]);
}

#[test]
fn rule_8_a_failed_flush_may_have_dropped_what_it_covered() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let dropped = bench.write();
    let flush = bench.oracle.begin_flush(0);
    bench.drops();
    bench.oracle.end(flush, false);
    assert_eq!(bench.may_be(9), [kept, dropped]);
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [kept, dropped], "the next flush vouches for nothing of it");
    assert!(!bench.reads(0));
}

#[test]
fn rule_8_a_failed_flush_that_dropped_nothing_takes_a_promise_and_no_value() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let last = bench.write();
    let flush = bench.oracle.begin_flush(0);
    bench.oracle.end(flush, false);
    assert_eq!(bench.may_be(9), [last], "no device went back");
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [kept, last]);
}

#[test]
fn rule_8_a_failed_flush_does_not_answer_for_what_came_after_it_was_asked_for() {
    let mut bench = OracleFixture::new();
    bench.write();
    let flush = bench.oracle.begin_flush(0);
    let later = bench.write();
    bench.oracle.end(flush, false);
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [later]);
}

#[test]
fn rule_8_only_the_sectors_that_were_dropped_go_back() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    bench.oracle.device_dropped(0, Some(&BTreeSet::from([1])));
    assert_eq!(bench.may_be(9), [write]);
    bench.oracle.device_dropped(0, Some(&BTreeSet::from([0])));
    assert_eq!(bench.may_be(9), [0, write]);
}

#[test]
fn rule_8_the_next_process_keeps_what_came_after_a_drop() {
    let mut bench = OracleFixture::new();
    bench.write();
    bench.drops();
    let after = bench.write();
    bench.oracle.process_death();
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [after]);
}

#[test]
fn rule_8_what_a_flush_has_disowned_is_promised_anew_by_a_read_but_not_against_that_flush() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let flush = bench.oracle.begin_flush(0);
    let other = bench.oracle.begin_flush(0);
    bench.oracle.end(flush, false);
    assert!(bench.reads(write), "it outlived the first drop");
    bench.drops();
    bench.oracle.end(other, false);
    let mut cut = OracleFixture { oracle: bench.oracle.clone() };
    cut.flush();
    assert_eq!(cut.may_be(9), [0, write], "the second error was about it");
    assert!(bench.reads(write));
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [write], "there, and flushed");
}

#[test]
fn rule_8_a_failed_flush_is_about_what_a_discard_left_and_two_reads_have_shown() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let discard = bench.oracle.begin_discard(0, 0..2);
    assert!(bench.reads_zero());
    bench.oracle.end(discard, true);
    assert!(bench.reads_zero());
    let flush = bench.oracle.begin_flush(0);
    bench.drops();
    bench.oracle.end(flush, false);
    bench.flush();
    assert!(bench.reads(kept), "its client has heard that it may be gone");
}

/// In a block of eight sectors, a write of the first two is in flight when a device drops data of
/// the third.
#[test]
fn rule_8_a_write_of_a_part_of_a_block_may_bring_back_what_was_dropped_of_the_rest() {
    for block in [1, 8] {
        let mut oracle = Oracle::new(vec![SectorValue::Written(0)]).with_blocks(block);
        let dropped = oracle.begin_write(0, 2..3, false);
        oracle.end(dropped, true);
        let part = oracle.begin_write(0, 0..2, false);
        oracle.device_dropped(0, Some(&BTreeSet::from([2])));
        let reads = |oracle: &mut Oracle, number: u64| {
            let mut bytes = [0; SECTOR];
            stamp::fill(&mut bytes, 0, 2, number);
            let read = oracle.begin_read(0, 2..3);
            oracle.end_read(read, &bytes).is_ok()
        };
        assert!(reads(&mut oracle, 0));
        oracle.end(part, true);
        assert_eq!(reads(&mut oracle.clone(), dropped.number()), block == 8);
        assert!(reads(&mut oracle, 0));
        assert!(!reads(&mut oracle, dropped.number()), "the write has ended, what was read stays");
    }
}

#[test]
fn rule_8_a_flush_that_hides_a_drop_is_caught() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let dropped = bench.write();
    bench.drops();
    assert_eq!(bench.may_be(9), [kept, dropped]);
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [dropped], "the client was told that it is durable");
}

#[test]
fn rule_8_a_failed_flush_is_about_what_a_later_discard_left() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let zeroes = bench.oracle.begin_zeroes(0, 0..2, false);
    bench.oracle.end(zeroes, true);
    let flush = bench.oracle.begin_flush(0);
    let discard = bench.oracle.begin_discard(0, 0..2);
    bench.oracle.end(discard, true);
    assert!(bench.reads_zero(), "that of before");
    bench.drops();
    bench.oracle.end(flush, false);
    bench.flush();
    assert!(bench.reads(kept), "its client has heard that it may be gone");
}

/// A write was dropped when a flush failed, and another one was seen while in flight. Returns the
/// bench as it is before a client is told, the flush, the number of the dropped write, and the
/// write in flight.
fn dropped_beside_one_in_flight() -> (OracleFixture, OpId, u64, OpId) {
    let mut bench = OracleFixture::new();
    let dropped = bench.write();
    let in_flight = bench.begin();
    let flush = bench.oracle.begin_flush(0);
    assert!(bench.reads(in_flight.number()));
    bench.drops();
    (bench, flush, dropped, in_flight)
}

#[test]
fn rule_8_what_was_in_flight_hides_what_a_device_went_back_to_until_the_power_is_cut() {
    let (mut bench, flush, dropped, in_flight) = dropped_beside_one_in_flight();
    assert_eq!(
        bench.may_be(9),
        [0, dropped, in_flight.number()],
        "it was covered, or a part of it, or nothing"
    );
    assert!(bench.reads(in_flight.number()), "it was not covered");
    bench.oracle.end(flush, false);
    assert!(bench.reads(in_flight.number()));
    assert_eq!(bench.may_be(9), [in_flight.number()], "what was read stays");
    let mut cut = OracleFixture { oracle: bench.oracle.clone() };
    cut.oracle.power_cut();
    assert_eq!(cut.may_be(9), [0, dropped, in_flight.number()], "any may be what is on the medium");
    bench.oracle.end(in_flight, true);
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [in_flight.number()], "durable by now");
}

#[test]
fn rule_8_a_part_of_what_is_in_flight_may_come_back_over_a_later_write() {
    let mut bench = OracleFixture::new();
    let in_flight = bench.begin();
    assert!(bench.reads(in_flight.number()));
    let dropped = bench.write();
    assert_eq!(bench.may_be(9), [dropped]);
    bench.oracle.device_dropped(0, Some(&BTreeSet::from([0])));
    bench.oracle.end(in_flight, false);
    assert_eq!(bench.may_be(9), [0, in_flight.number(), dropped]);
}

#[test]
fn rule_8_what_is_acknowledged_after_a_drop_is_there() {
    for told_first in [false, true] {
        let (mut bench, flush, _, in_flight) = dropped_beside_one_in_flight();
        if told_first {
            bench.oracle.end(flush, false);
        }
        bench.oracle.end(in_flight, true);
        assert_eq!(bench.may_be(9), [in_flight.number()]);
        if told_first {
            bench.flush();
            bench.oracle.power_cut();
            assert_eq!(bench.may_be(9), [in_flight.number()], "and durable");
        }
    }
}

#[test]
fn rule_8_what_began_after_a_drop_was_not_dropped() {
    let mut bench = OracleFixture::new();
    bench.write();
    let flush = bench.oracle.begin_flush(0);
    bench.drops();
    let after = bench.begin();
    assert!(bench.reads(after.number()));
    bench.oracle.end(flush, false);
    assert_eq!(bench.may_be(9), [after.number()]);
}

#[test]
fn rule_8_a_drop_is_forgotten_with_its_process() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let dropped = bench.write();
    bench.drops();
    bench.oracle.process_death();
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [kept, dropped], "the new process knows nothing of it");
}

#[test]
fn rule_9_an_orderly_stop_is_a_flush() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let stop = bench.oracle.begin_stop();
    bench.oracle.end(stop, true);
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(write), [write]);
}

#[test]
fn torn_misplaced_and_unknown_content_is_caught() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let read = bench.begin_read();
    let mut bytes = [0; SECTOR];
    stamp::fill(&mut bytes, 0, 0, write);
    bytes[100] ^= 1;
    assert_eq!(bench.oracle.end_read(read, &bytes).unwrap_err().found, Err(StampError::Torn));
    let read = bench.begin_read();
    stamp::fill(&mut bytes, 0, 1, write);
    let error = bench.oracle.end_read(read, &bytes).unwrap_err();
    assert!(matches!(error.found, Err(StampError::Misplaced { sector: 1, .. })));
    assert!(!bench.reads(99));
    assert_eq!(
        error.to_string(),
        "volume 0 sector 0 read as data of volume 0 sector 1 (write 1), allowed: write 1"
    );
}

#[test]
fn touched_ranges_are_joined() {
    let mut oracle = Oracle::new(vec![SectorValue::Zero, SectorValue::Zero]);
    for (volume, sectors) in [(0, 60..70), (0, 70..72), (1, 3..4)] {
        oracle.begin_write(volume, sectors, false);
    }
    assert_eq!(oracle.touched(), [(0, 60..72), (1, 3..4)]);
}
