//! Tests of rule 10: a note whose file has been removed.

use super::OracleFixture;

#[test]
fn rule_10_what_was_asked_for_after_the_note_was_gone_and_acknowledged_is_there() {
    let mut bench = OracleFixture::new();
    let before = bench.write();
    bench.oracle.note_is(false);
    assert!(bench.reads(before));
    let mut early = OracleFixture { oracle: bench.oracle.clone() };
    early.oracle.process_death();
    assert_eq!(early.may_be(9), [0, before], "it may have gone with the note");
    let after = bench.write();
    let mut back = OracleFixture { oracle: bench.oracle.clone() };
    bench.oracle.process_death();
    assert_eq!(bench.may_be(9), [after]);
    back.oracle.note_is(true);
    let last = back.write();
    back.oracle.process_death();
    assert_eq!(back.may_be(9), [last], "another note has taken its place");
}

#[test]
fn rule_10_what_a_read_has_shown_and_nobody_was_told_goes_with_the_note() {
    let mut bench = OracleFixture::new();
    bench.oracle.note_is(false);
    let id = bench.begin();
    assert!(bench.reads(id.number()));
    bench.oracle.process_death();
    assert_eq!(bench.may_be(9), [0, id.number()]);
    assert!(bench.reads(0));
    assert!(!bench.reads(id.number()), "once read, it stays");
    let last = bench.write();
    bench.oracle.process_death();
    assert_eq!(bench.may_be(9), [last], "the next process has a note");
}

#[test]
fn rule_10_what_was_acknowledged_before_the_note_went_is_there_once_that_was_seen_to() {
    let mut bench = OracleFixture::new();
    let before = bench.write();
    let gone = bench.oracle.note_is(false).expect("it is gone");
    bench.oracle.note_is_made_up_for(gone + 1);
    let mut early = OracleFixture { oracle: bench.oracle.clone() };
    early.oracle.process_death();
    assert_eq!(early.may_be(9), [0, before], "that was another file");
    bench.oracle.note_is_made_up_for(gone);
    bench.oracle.process_death();
    assert_eq!(bench.may_be(9), [before]);
}
