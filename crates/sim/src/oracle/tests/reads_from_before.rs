//! Tests of rule 8 with reads that began before a device dropped something, or while it was away.

use super::OracleFixture;
use crate::stamp::SectorValue;
use std::collections::BTreeSet;

impl OracleFixture {
    /// Pulls the backing device; the data that it had in sectors 0 and 1 is lost with its power.
    fn loses_its_device(&mut self) {
        self.oracle.device_goes(0, BTreeSet::from([0, 1]));
    }
}

#[test]
fn rule_8_a_read_from_before_may_return_what_is_gone() {
    let mut bench = OracleFixture::new();
    let kept = bench.write();
    bench.flush();
    let read = bench.begin_read();
    bench.write();
    bench.flush();
    let flush = bench.oracle.begin_flush(0);
    bench.oracle.end(flush, false);
    assert!(bench.returns(read, SectorValue::Written(kept)));
    assert!(!bench.reads(kept));
}

#[test]
fn rule_8_a_read_from_before_says_nothing_of_what_is_there_after() {
    let mut bench = OracleFixture::new();
    let dropped = bench.write();
    let (before, another) = (bench.begin_read(), bench.begin_read());
    bench.drops();
    assert!(bench.returns(before, SectorValue::Written(dropped)));
    assert_eq!(bench.may_be(9), [0, dropped], "it may be gone all the same");
    assert!(bench.reads(0));
    assert!(!bench.returns(another, SectorValue::Written(9)), "never a third value");
    assert!(!bench.reads(dropped), "what was read after it stays");
}

/// In write-back mode, the cache has long replaced what a backing device reverts to.
#[test]
fn rule_8_a_read_from_before_may_return_what_a_backing_device_went_back_to() {
    let mut bench = OracleFixture::new();
    let (kept, _) = (bench.write(), bench.flush());
    bench.write();
    let (read, another, third) = (bench.begin_read(), bench.begin_read(), bench.begin_read());
    let cached = bench.write();
    bench.flush();
    bench.oracle.device_dropped(0, Some(&BTreeSet::from([0])));
    assert!(bench.returns(read, SectorValue::Written(kept)));
    assert!(!bench.returns(another, SectorValue::Written(99)), "never written there");
    assert!(!bench.returns(third, SectorValue::Zero), "never zeroed");
    assert_eq!(bench.may_be(99), [cached], "nor for reads that begin later");
}

#[test]
fn rule_8_what_is_read_while_a_device_is_away_may_be_gone_when_it_is_back() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    bench.loses_its_device();
    assert_eq!(bench.may_be(9), [0, write], "from the cache");
    assert!(bench.reads(write));
    let read = bench.begin_read();
    let mut dead = OracleFixture { oracle: bench.oracle.clone() };
    dead.oracle.process_death();
    assert_eq!(dead.may_be(9), [0, write], "the next process reads the device");
    bench.is_back(true);
    assert!(bench.returns(read, SectorValue::Written(write)), "it began before");
    assert!(bench.reads(0));
    assert!(!bench.reads(write), "what was read after it stays");
}

#[test]
fn rule_8_a_device_that_is_back_has_lost_something_or_nothing_and_a_flush_says_which() {
    for lost in [true, false] {
        let mut bench = OracleFixture::new();
        let write = bench.write();
        bench.loses_its_device();
        bench.is_back(lost);
        bench.flush();
        bench.oracle.power_cut();
        let allowed = if lost { vec![0, write] } else { vec![write] };
        assert_eq!(bench.may_be(9), allowed, "lost: {lost}");
    }
}

#[test]
fn rule_8_what_is_written_after_a_device_is_back_is_there() {
    let mut bench = OracleFixture::new();
    bench.write();
    bench.loses_its_device();
    bench.is_back(true);
    let write = bench.write();
    assert_eq!(bench.may_be(9), [write]);
    bench.flush();
    bench.oracle.power_cut();
    assert_eq!(bench.may_be(9), [write]);
}

/// The device had answered the write, and the system acknowledges it while the device is away.
#[test]
fn rule_8_what_was_under_way_when_a_device_went_may_be_gone_though_it_is_acknowledged() {
    for lost in [true, false] {
        let mut bench = OracleFixture::new();
        let id = bench.begin();
        bench.loses_its_device();
        bench.oracle.end(id, true);
        let mut dead = OracleFixture { oracle: bench.oracle.clone() };
        dead.oracle.process_death();
        assert_eq!(dead.may_be(9), [0, id.number()]);
        bench.is_back(lost);
        assert_eq!(bench.may_be(9), [0, id.number()]);
        bench.flush();
        bench.oracle.power_cut();
        let allowed = if lost { vec![0, id.number()] } else { vec![id.number()] };
        assert_eq!(bench.may_be(9), allowed, "lost: {lost}");
    }
}

#[test]
fn rule_8_what_was_asked_for_while_a_device_is_away_and_acknowledged_is_there() {
    let mut bench = OracleFixture::new();
    bench.write();
    bench.loses_its_device();
    let cached = bench.write();
    let mut dead = OracleFixture { oracle: bench.oracle.clone() };
    dead.oracle.process_death();
    assert_eq!(dead.may_be(9), [cached]);
    bench.is_back(true);
    assert_eq!(bench.may_be(9), [cached]);
}
