use super::*;
use alloc::collections::BTreeSet;
use alloc::vec;
use bcached_format::{DeviceIndex, Gen, Pointer};

fn grant(ranges: &mut RangeTable, claim: Claim) -> bool {
    ranges.try_grant(claim, &mut |_| {})
}

#[test]
fn overlapping_writes_go_in_order_of_arrival() {
    // Proves invariant D34.
    let mut ranges = RangeTable::default();
    let first = ranges.queue_write(0, 10);
    let second = ranges.queue_write(5, 15);
    let third = ranges.queue_write(12, 20);
    assert!(grant(&mut ranges, first));
    assert!(!grant(&mut ranges, second));
    assert!(!grant(&mut ranges, third), "it arrived after the second, which overlaps it");
    ranges.release(first);
    assert!(grant(&mut ranges, second));
    ranges.release(second);
    assert!(grant(&mut ranges, third));
}

#[test]
fn a_write_drops_the_fills_it_overlaps_and_keeps_others_out() {
    // Proves invariant D34.
    let mut ranges = RangeTable::default();
    let fill = ranges.begin_fill(0, 8).expect("nothing in progress");
    let other = ranges.begin_fill(8, 16).expect("nothing in progress");
    let write = ranges.queue_write(4, 8);
    assert!(ranges.fill_is_good(fill));
    assert!(grant(&mut ranges, write));
    assert!(!ranges.fill_is_good(fill));
    assert!(ranges.fill_is_good(other));
    assert_eq!(ranges.begin_fill(0, 8), None);
    assert_eq!(ranges.begin_fill(12, 20), None, "a range is filled once at a time");
}

#[test]
fn cleanings_and_writes_to_the_backing_device_exclude_each_other() {
    // Proves invariant D34.
    let mut ranges = RangeTable::default();
    let clean = ranges.begin_clean(0, 100).expect("free");
    let write = ranges.queue_write(50, 60);
    assert!(grant(&mut ranges, write), "a write into the cache does not wait for a cleaning");
    assert!(!ranges.backing_is_free(50, 60));
    ranges.release(clean);
    assert!(ranges.backing_is_free(50, 60));
    assert_eq!(ranges.begin_clean(0, 51), None);
}

/// Slots are reused; a claim that was released does not find the next entry in its slot.
#[test]
fn a_claim_that_was_released_is_not_taken_for_the_next_one_in_its_place() {
    let mut ranges = RangeTable::default();
    let former = ranges.begin_miss_to_fill(0, 8).expect("nothing in progress");
    ranges.release(former);
    assert!(!ranges.fill_is_good(former));
    let next = ranges.begin_miss_to_fill(0, 8).expect("nothing in progress");
    assert_eq!(former.place, next.place, "or it proves nothing");
    assert!(ranges.fill_is_good(next) && !ranges.fill_is_good(former));
    assert_eq!((ranges.range_of(former), ranges.range_of(next)), (None, Some((0, 8))));
    ranges.has_read(former);
    assert!(ranges.claims_at(0).missing, "the next one has not read yet");
    ranges.has_read(next);
    assert!(!ranges.claims_at(0).missing);
    ranges.release(next);
    assert_eq!(ranges.claims_at(0), SectorActivity::default());
}

/// Entries that begin at the same sector can be released in any order.
#[test]
fn of_those_that_begin_together_each_ends_by_itself() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut ranges = RangeTable::default();
        let ends = [8, 16, 24];
        let claims = ends.map(|end| ranges.begin_miss(0, end));
        let mut left = vec![0, 1, 2];
        for one in order {
            ranges.release(claims[one]);
            left.retain(|other| *other != one);
            for (sector, end) in [(7, 8), (15, 16), (23, 24)] {
                let is_covered = left.iter().any(|other| ends[*other] >= end);
                assert_eq!(ranges.claims_at(sector).missing, is_covered, "{order:?}, {left:?}");
            }
        }
    }
}

#[test]
fn misses_from_before_a_moment_are_told_from_later_ones() {
    // Proves invariant D35.
    let mut ranges = RangeTable::default();
    let [early, _elsewhere] = [(0, 8), (8, 16)].map(|(start, end)| ranges.begin_miss(start, end));
    let then = ranges.now();
    let late = ranges.begin_miss(0, 8);
    assert!(
        ranges.has_misses(0, 8, then) && ranges.has_misses(7, 9, then) && !ranges.has_misses(16, 24, then)
    );
    ranges.release(early);
    assert!(!ranges.has_misses(0, 8, then));
    assert!(ranges.begin_fill(0, 8).is_some() && ranges.backing_is_free(0, 8), "a miss is in nobody's way");
    ranges.release(late);
}

#[test]
fn a_fill_whose_data_is_being_read_is_a_miss_until_it_has_been() {
    let mut ranges = RangeTable::default();
    let fill = ranges.begin_miss_to_fill(0, 8).expect("nothing in progress");
    assert_eq!(ranges.begin_miss_to_fill(0, 8), None, "a range is filled once at a time");
    let then = ranges.now();
    let claims = ranges.claims_at(4);
    assert!(ranges.has_misses(0, 8, then) && claims.missing && claims.filling);
    ranges.has_read(fill);
    let claims = ranges.claims_at(4);
    assert!(!ranges.has_misses(0, 8, then) && !claims.missing && claims.filling);
    let again = ranges.begin_miss_to_fill(8, 16).expect("that is elsewhere");
    let write = ranges.queue_write(4, 12);
    assert!(grant(&mut ranges, write));
    assert!(!ranges.fill_is_good(fill) && !ranges.fill_is_good(again));
    assert!(ranges.has_misses(8, 16, ranges.now()), "a dropped one is read all the same");
}

#[test]
fn a_long_claim_is_found_from_its_far_end() {
    let mut ranges = RangeTable::default();
    let long = ranges.begin_clean(0, 1_000_000).expect("free");
    let short = ranges.begin_clean(1_000_000, 1_000_008).expect("free");
    assert!(!ranges.backing_is_free(999_999, 1_000_000));
    ranges.release(long);
    assert!(ranges.backing_is_free(999_999, 1_000_000));
    assert!(!ranges.backing_is_free(1_000_007, 1_000_008));
    ranges.release(short);
    assert!(ranges.backing_is_free(0, 2_000_000));
}

/// The cost of a lookup for one sector does not grow with claims elsewhere, however long one of
/// them is.
#[test]
fn one_long_claim_makes_no_lookup_long() {
    let mut ranges = RangeTable::default();
    let _long = ranges.begin_miss(0, 2_000_000);
    let mut short = Vec::new();
    for at in (0..1_000_000).step_by(8) {
        short.push(ranges.begin_miss(at, at + 8));
    }
    let near: usize =
        LENGTHS.iter().zip(&ranges.lists).map(|(longest, list)| near(list, *longest, 999_992).len()).sum();
    assert!(near < 50, "{near} claims are gone over");
    assert!(!ranges.has_writes());
    let write = ranges.queue_write(0, 8);
    assert!(ranges.has_writes());
    ranges.release(write);
    assert!(!ranges.has_writes());
}

/// With claims of all lengths entered and released, a lookup finds the same overlaps as a check of
/// each claim.
#[test]
fn what_overlaps_is_found_whatever_its_length() {
    let mut rng = bcached_env::rng::Rng::new(7);
    let mut ranges = RangeTable::default();
    let mut held: Vec<(Claim, u64, u64)> = Vec::new();
    for _ in 0..3000 {
        let bits = 1 + rng.below(20);
        let length = 1 + rng.below(1 << bits);
        let start = rng.below(1 << 20);
        held.push((ranges.begin_miss(start, start + length), start, start + length));
        if held.len() > 200 {
            let at = usize::try_from(rng.below(held.len() as u64)).expect("small");
            ranges.release(held.swap_remove(at).0);
        }
        let (from, to) = (start / 2, start / 2 + length);
        let found: BTreeSet<u64> = ranges.overlapping(from, to).map(|entry| entry.number).collect();
        let wanted = held.iter().filter(|(_, start, end)| *start < to && *end > from);
        assert_eq!(found, wanted.map(|(claim, ..)| claim.number).collect());
    }
}

/// The same holds for cleanings.
#[test]
fn what_is_being_written_back_is_found_whatever_its_length() {
    let mut rng = bcached_env::rng::Rng::new(8);
    let mut ranges = RangeTable::default();
    let mut held: Vec<(Claim, u64, u64)> = Vec::new();
    let mut refused = 0;
    for _ in 0..3000 {
        let bits = 1 + rng.below(16);
        let (start, length) = (rng.below(1 << 20), 1 + rng.below(1 << bits));
        let end = start + length;
        let is_held = held.iter().any(|(_, from, to)| *from < end && *to > start);
        assert_eq!(ranges.backing_is_free(start, end), !is_held);
        assert_eq!(ranges.is_free(start, end), !is_held);
        assert_eq!(
            ranges.claims_at(start).writing_back,
            held.iter().any(|(_, from, to)| (*from..*to).contains(&start))
        );
        match ranges.begin_clean(start, end) {
            Some(claim) => {
                assert!(!is_held, "a range is cleaned once at a time");
                assert_eq!(ranges.range_of(claim), Some((start, end)));
                held.push((claim, start, end));
            }
            None => refused += u32::from(is_held),
        }
        if held.len() > 60 {
            let at = usize::try_from(rng.below(held.len() as u64)).expect("small");
            let (claim, ..) = held.swap_remove(at);
            ranges.release(claim);
            assert_eq!(ranges.range_of(claim), None);
        }
    }
    assert!(refused > 100, "{refused} met another");
}

#[test]
fn a_write_cuts_parked_pieces() {
    let mut ranges = RangeTable::default();
    let pointers = Pointers::one(Pointer::new(DeviceIndex(0), 1000, Gen(1)));
    let flushes = crate::volume::backing_flushes::BackingFlushes::new(true);
    let stamp = flushes.read_ends(flushes.read_begins());
    ranges.park(100, ParkedPiece { end: 200, pointers, stamp });
    let write = ranges.queue_write(120, 130);
    let mut parts = 0;
    assert!(ranges.try_grant(write, &mut |cut| parts = cut.parts));
    assert_eq!(parts, 2);
    let left: Vec<(u64, u64, u64)> = ranges
        .parked_in(0, 300)
        .map(|(start, piece)| (start, piece.end, piece.pointers.as_slice()[0].sector()))
        .collect();
    assert_eq!(left, [(100, 120, 1000), (130, 200, 1030)]);
}
