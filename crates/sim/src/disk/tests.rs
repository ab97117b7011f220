//! Tests each statement of the fault model that has code.

use super::*;
use crate::stamp::{self, SECTOR, SectorValue};

fn device(torn_sectors: u64) -> Device {
    let background = InitialContent::Stamped { volume: 0, data_start: 0 };
    Device::new(DeviceModel { torn_sectors, background, ..DeviceModel::fast(1024, 1) })
}

fn content(number: u64, range: &Range<u64>) -> WriteContent {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap() * SECTOR];
    stamp::fill(&mut bytes, 0, range.start, number);
    WriteContent::Data(bytes.into())
}

/// Submits and completes a write whose stamp is `number`.
fn write(device: &mut Device, number: u64, range: Range<u64>) {
    let taken = device.take(range.clone(), content(number, &range), false);
    device.complete(taken);
}

fn read(device: &Device, sector: u64) -> SectorValue {
    let mut bytes = [0; SECTOR];
    device.read(sector, &mut bytes).unwrap();
    stamp::parse(&bytes, 0, sector).unwrap()
}

fn cut(device: &Device, survivors: Survivors) -> Device {
    let mut after = device.clone();
    after.cut_power(0, survivors);
    after
}

#[test]
fn only_flushed_writes_are_sure_to_survive() {
    let mut device = device(1);
    write(&mut device, 1, 0..8);
    let flush = device.take_flush();
    write(&mut device, 2, 4..8);
    device.complete_flush(&flush);
    assert_eq!(read(&device, 4), SectorValue::Written(2));
    let nothing = cut(&device, Survivors::Nothing);
    assert_eq!((read(&nothing, 0), read(&nothing, 4)), (SectorValue::Written(1), SectorValue::Written(1)));
    assert_eq!(read(&cut(&device, Survivors::Everything), 4), SectorValue::Written(2));
}

#[test]
fn a_flush_does_not_cover_what_was_in_flight() {
    let mut device = device(1);
    let taken = device.take(0..1, content(1, &(0..1)), false);
    device.land(taken, u64::MAX);
    let flush = device.take_flush();
    device.complete(taken);
    device.complete_flush(&flush);
    assert_eq!(read(&cut(&device, Survivors::Nothing), 0), SectorValue::Written(0));
}

#[test]
fn fua_is_durable_alone_and_nothing_older_replaces_it() {
    let mut device = device(1);
    write(&mut device, 1, 0..4);
    let taken = device.take(1..2, content(2, &(1..2)), true);
    device.complete(taken);
    let nothing = cut(&device, Survivors::Nothing);
    assert_eq!((read(&nothing, 0), read(&nothing, 1)), (SectorValue::Written(0), SectorValue::Written(2)));
    let everything = cut(&device, Survivors::Everything);
    assert_eq!(
        (read(&everything, 0), read(&everything, 1)),
        (SectorValue::Written(1), SectorValue::Written(2))
    );
}

#[test]
fn without_a_volatile_cache_completed_is_durable() {
    let mut device = device(1);
    device.model.volatile_cache = false;
    write(&mut device, 1, 0..4);
    let taken = device.take(8..9, content(2, &(8..9)), false);
    device.land(taken, u64::MAX);
    let nothing = cut(&device, Survivors::Nothing);
    assert_eq!((read(&nothing, 0), read(&nothing, 8)), (SectorValue::Written(1), SectorValue::Written(0)));
}

/// Over many seeds, subsets keep a later write without an earlier one and tear writes, at unit
/// boundaries only.
#[test]
fn subsets_lose_reorder_and_tear() {
    let mut later_only = 0;
    let mut torn = 0;
    for seed in 0..200 {
        let mut device = device(8);
        write(&mut device, 1, 0..24);
        write(&mut device, 2, 32..56);
        let after = cut(&device, Survivors::Seeded(seed));
        let first: Vec<_> = (0..24).map(|sector| read(&after, sector)).collect();
        let second: Vec<_> = (32..56).map(|sector| read(&after, sector)).collect();
        for unit in first.chunks(8).chain(second.chunks(8)) {
            assert!(unit.iter().all(|value| value == &unit[0]), "no tear inside a unit of 4096");
        }
        torn += u32::from(first.iter().any(|value| value != &first[0]));
        let lost = |values: &[SectorValue]| values.iter().all(|value| *value == SectorValue::Written(0));
        later_only += u32::from(lost(&first) && !lost(&second));
    }
    assert!(later_only > 10, "{later_only}");
    assert!(torn > 10, "{torn}");
}

#[test]
fn a_failed_flush_drops_and_the_next_one_succeeds() {
    let mut device = device(1);
    write(&mut device, 1, 0..8);
    let flush = device.take_flush();
    write(&mut device, 2, 2..3);
    device.fail_flush(&flush);
    assert_eq!((read(&device, 0), read(&device, 2)), (SectorValue::Written(0), SectorValue::Written(2)));
    let flush = device.take_flush();
    device.complete_flush(&flush);
    let nothing = cut(&device, Survivors::Nothing);
    assert_eq!((read(&nothing, 0), read(&nothing, 2)), (SectorValue::Written(0), SectorValue::Written(2)));
}

/// What a failed flush drops stays lost after the write completes. A durable write and one that was
/// submitted later lose nothing.
#[test]
fn a_failed_flush_drops_some_of_what_was_in_flight() {
    let mut device = device(1);
    let open: Vec<u64> =
        (0..32).map(|at| device.take(at..at + 1, content(1, &(at..at + 1)), false)).collect();
    let durable = device.take(64..128, content(1, &(64..128)), true);
    open.iter().chain([&durable]).for_each(|number| device.land(*number, u64::MAX));
    let flush = device.take_flush();
    let later = device.take(32..64, content(1, &(32..64)), false);
    device.land(later, u64::MAX);
    let dropped = device.fail_flush(&flush);
    open.iter().chain([&durable, &later]).for_each(|number| device.complete(*number));
    assert!(dropped.len() > 4 && dropped.len() < 28, "{dropped:?}");
    for sector in 0..128 {
        let is = SectorValue::Written(u64::from(!dropped.contains(&sector)));
        assert_eq!(read(&device, sector), is, "{sector}");
    }
    assert!(dropped.iter().all(|sector| *sector < 32), "{dropped:?}");
}

/// Without a volatile cache, completed writes are durable, so a failed flush drops nothing that has
/// landed.
#[test]
fn without_a_volatile_cache_a_failed_flush_drops_nothing() {
    let mut device = device(1);
    device.model.volatile_cache = false;
    let open: Vec<u64> =
        (0..32).map(|at| device.take(at..at + 1, content(1, &(at..at + 1)), false)).collect();
    open.iter().for_each(|number| device.land(*number, u64::MAX));
    let flush = device.take_flush();
    assert!(device.fail_flush(&flush).is_empty());
}

#[test]
fn a_failed_write_lands_as_told() {
    for (landed, first, last) in
        [(WrittenPart::Nothing, 0, 0), (WrittenPart::Part, 1, 0), (WrittenPart::Everything, 1, 1)]
    {
        let mut device = device(1);
        let taken = device.take(0..8, content(1, &(0..8)), false);
        device.fail(taken, landed);
        assert_eq!(
            (read(&device, 0), read(&device, 7)),
            (SectorValue::Written(first), SectorValue::Written(last))
        );
    }
}

#[test]
fn a_dead_process_leaves_the_volatile_cache_alone() {
    let mut device = device(1);
    write(&mut device, 1, 0..8);
    device.take(8..16, content(2, &(8..16)), false);
    let mut killed = device.clone();
    killed.kill_process(0, Survivors::Nothing);
    assert_eq!((read(&killed, 0), read(&killed, 8)), (SectorValue::Written(1), SectorValue::Written(0)));
    assert_eq!(read(&cut(&killed, Survivors::Nothing), 0), SectorValue::Written(0), "it is still volatile");
    device.kill_process(0, Survivors::Everything);
    assert_eq!(read(&device, 8), SectorValue::Written(2));
}

#[test]
fn latent_errors_go_with_the_next_write() {
    let mut device = device(1);
    device.make_unreadable(3..4);
    let mut bytes = [0; 4 * SECTOR];
    assert_eq!(device.read(0, &mut bytes), Err(IoErrorKind::Io));
    write(&mut device, 1, 3..4);
    assert_eq!(device.read(0, &mut bytes), Ok(()));
}

#[test]
fn an_ignored_discard_repairs_nothing() {
    let mut bytes = [0; SECTOR];
    for (content, result) in [(WriteContent::Keep, Err(IoErrorKind::Io)), (WriteContent::Zero, Ok(()))] {
        let mut device = device(1);
        device.make_unreadable(3..4);
        let taken = device.take(0..8, content, false);
        device.complete(taken);
        assert_eq!(device.read(3, &mut bytes), result);
    }
}

#[test]
fn rot_shows_where_nothing_newer_stands() {
    let mut device = device(1);
    write(&mut device, 1, 0..2);
    let flush = device.take_flush();
    device.complete_flush(&flush);
    write(&mut device, 2, 1..2);
    device.rot(0, 0);
    device.rot(1, 0);
    let torn = |device: &Device, sector| {
        let mut bytes = [0; SECTOR];
        device.read(sector, &mut bytes).unwrap();
        stamp::parse(&bytes, 0, sector).is_err()
    };
    assert!(torn(&device, 0));
    assert_eq!(read(&device, 1), SectorValue::Written(2), "it is in the volatile cache, not on the medium");
    assert!(torn(&cut(&device, Survivors::Nothing), 1));
    assert_eq!(read(&cut(&device, Survivors::Everything), 1), SectorValue::Written(2));
}

#[test]
fn unaligned_and_outside_requests_are_refused() {
    let device = Device::new(DeviceModel::fast(64, 8));
    assert!(device.accepts(8, 16));
    assert!(!device.accepts(4, 8));
    assert!(!device.accepts(8, 4));
    assert!(!device.accepts(56, 16));
    assert!(!device.accepts(0, 0));
}

#[test]
fn rules_strike_where_and_as_often_as_they_say() {
    let mut faults = FaultRules::default();
    faults.add(FaultRule { on: OpKind::Write, sectors: 10..20, skip: 1, count: 1, fault: DiskFault::Never });
    assert_eq!(faults.strike(OpKind::Write, &(0..10)), None);
    assert_eq!(faults.strike(OpKind::Write, &(8..12)), None, "skipped");
    assert_eq!(faults.strike(OpKind::Read, &(8..12)), None);
    assert_eq!(faults.strike(OpKind::Write, &(19..30)), Some(DiskFault::Never));
    assert_eq!(faults.strike(OpKind::Write, &(10..20)), None, "used up");
    assert_eq!(faults.failures(), 1);
}
