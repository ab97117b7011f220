//! Tests of rule 7: what discards leave.

use super::OracleFixture;

#[test]
fn rule_7_a_discard_brings_zero_or_anything_former_once() {
    let mut bench = OracleFixture::new();
    let first = bench.write();
    let second = bench.write();
    bench.flush();
    bench.discard();
    assert_eq!(bench.may_be(9), [0, first, second]);
    let mut zero = OracleFixture { oracle: bench.oracle.clone() };
    assert!(zero.reads_zero());
    assert!(!zero.reads(second) && zero.reads_zero(), "the first read fixed it");
    assert!(bench.reads(first));
    assert!(!bench.reads_zero());
    assert_eq!(bench.may_be(9), [first]);
    let third = bench.write();
    assert_eq!(bench.may_be(9), [third]);
}

#[test]
fn rule_7_a_cut_reopens_a_discard_that_was_not_flushed() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    bench.flush();
    bench.discard();
    assert!(bench.reads(write));
    let mut flushed = OracleFixture { oracle: bench.oracle.clone() };
    bench.oracle.power_cut();
    assert!(bench.reads_zero());
    flushed.flush();
    flushed.oracle.power_cut();
    assert!(!flushed.reads_zero(), "what was read and then flushed stays");
    assert!(flushed.reads(write));
}

#[test]
fn rule_7_a_value_of_elsewhere_is_not_a_former_one() {
    let mut bench = OracleFixture::new();
    let elsewhere = bench.oracle.begin_write(0, 8..9, false);
    bench.oracle.end(elsewhere, true);
    bench.discard();
    assert!(!bench.reads(elsewhere.number()));
    let future = bench.write();
    let mut discarded_before = OracleFixture::new();
    discarded_before.discard();
    assert!(!discarded_before.reads(future));
}

#[test]
fn rule_7_zeroes_are_a_write() {
    let mut bench = OracleFixture::new();
    let write = bench.write();
    let zeroes = bench.oracle.begin_zeroes(0, 0..2, false);
    bench.oracle.end(zeroes, true);
    assert!(!bench.reads(write));
    assert!(bench.reads_zero());
    bench.oracle.power_cut();
    assert!(bench.may_be(9) == [0, write], "unflushed, like any write");
}

#[test]
fn rule_7_what_was_written_beside_a_discard_is_a_former_value_too() {
    let mut bench = OracleFixture::new();
    let discard = bench.oracle.begin_discard(0, 0..2);
    let first = bench.write();
    let second = bench.write();
    bench.oracle.end(discard, true);
    assert_eq!(bench.may_be(9), [0, first, second]);
    let mut behind = OracleFixture { oracle: bench.oracle.clone() };
    assert!(bench.reads(first), "the discard came last");
    let third = behind.oracle.begin_write(0, 0..2, false);
    behind.oracle.process_death();
    assert!(behind.reads(second));
    assert!(!behind.reads(third.number()), "it was asked for when the discard was over");
}
