//! Sectors of a backing device that cannot be read until they are written again, as with a bad
//! sector of a disk.

use super::bench::{eager, quiet};
use super::image::{backing, cached_at, on_disk};
use super::stage::{
    BACK, DATA_START, DETACH, FLUSH, THROUGH, bench, geometry, keep, minutes, pause, read, write,
};
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::{Geometry, Mode};
use crate::workload::Step;
use bcached_format::BackingState;
use std::time::Duration;

super::scenarios! {
    include_str!("unreadable.rs"),
    a_bad_sector_of_a_disk_fails_its_own_reads_until_a_write_heals_it,
    a_bad_sector_of_a_disk_is_healed_by_write_back,
    a_part_of_a_block_with_a_bad_sector_is_not_written,
}

/// Makes one sector of the disk bad, in the middle of the block from 96 to 104.
fn go_bad(stage: &mut ScenarioRig) {
    stage.device(1).make_unreadable(DATA_START + 100..DATA_START + 101);
}

/// Returns for each step whether it was refused.
fn refused(stage: &mut ScenarioRig, steps: Vec<Step>) -> Vec<bool> {
    stage.attempt(steps).unwrap().iter().map(Result::is_err).collect()
}

/// A sector of a disk goes bad unnoticed. Its cached copy is read from the cache, until that is bad
/// too. A read of it from the disk gets an error, every time, because nothing is cached for it.
/// Reads and writes next to it succeed. A write of its block heals it in any mode, and all of it
/// can be read again, from the cache or without it.
fn a_bad_sector_of_a_disk_fails_its_own_reads_until_a_write_heals_it() {
    for mode in [Mode::Writethrough, Mode::Writearound, Mode::None, Mode::Writeback] {
        let (mut stage, bench) = bench(geometry(vec![16384], THROUGH), quiet());
        keep(&mut stage, 96..160);
        stage.stop().unwrap();
        stage.start().unwrap();
        stage.ask(Step::Mode { volume: 0, mode }).unwrap();
        // The cached copy is all that is left.
        go_bad(&mut stage);
        assert_eq!(refused(&mut stage, vec![read(96..160)]), [false], "{mode:?}: the cache has it");
        for sector in cached_at(&mut stage) {
            stage.device(0).make_unreadable(sector..sector + 1);
        }
        assert_eq!(
            refused(&mut stage, vec![read(96..160)]),
            [true],
            "{mode:?}: neither cache nor disk can return it"
        );
        assert_eq!(bench.status().failed, None);
        stage.device(1).make_unreadable(DATA_START + 300..DATA_START + 301);
        for _ in 0..3 {
            let reads = vec![read(256..320), read(192..256), read(256..296), read(304..320), read(320..384)];
            assert_eq!(refused(&mut stage, reads), [true, false, false, false, false], "{mode:?}");
            stage.ask(FLUSH).unwrap();
            pause(&mut stage, 20).unwrap();
        }
        stage.ask(write(288..296)).unwrap();
        assert_eq!(
            refused(&mut stage, vec![read(256..320)]),
            [true],
            "{mode:?}: a write to a neighbour does not repair it"
        );
        stage.together(vec![write(296..304), write(96..104)]).unwrap();
        stage.ask(FLUSH).unwrap();
        stage.together(vec![read(256..320), read(96..160)]).unwrap();
        stage.ask(DETACH).unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// The same block is written into the cache alone: reads get it from there at once. The disk
/// receives it when it is written back, which heals the sector. Write-back of its neighbours is not
/// delayed before that, and heals nothing.
fn a_bad_sector_of_a_disk_is_healed_by_write_back() {
    let options = eager(Duration::from_millis(10));
    let (mut stage, bench) = bench(geometry(vec![16384], BACK), options);
    go_bad(&mut stage);
    keep(&mut stage, 64..96);
    minutes(&mut stage, 1);
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Clean, "the neighbours are written back");
    assert_eq!(on_disk(&mut stage, 64..96), [SectorValue::Written(1); 32]);
    assert_eq!(refused(&mut stage, vec![read(64..128), read(64..96)]), [true, false]);
    stage.ask(write(96..104)).unwrap();
    assert_eq!(refused(&mut stage, vec![read(64..128)]), [false], "the cache has the unreadable data");
    minutes(&mut stage, 1);
    assert_eq!((bench.status().dirty_sectors, &bench.status().volumes[0].writeback_trouble), (0, &None));
    stage.ask(DETACH).unwrap();
    stage.together(vec![read(64..128)]).unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Only the bad sector is written, in a block of eight. The cache handles whole blocks only, and
/// the rest of this one cannot be read: the write is refused in any mode, and changes nothing.
/// Without a cache the disk accepts the sector by itself, and so does the volume when it has been
/// detached.
fn a_part_of_a_block_with_a_bad_sector_is_not_written() {
    for mode in [Mode::Writethrough, Mode::Writearound, Mode::None, Mode::Writeback] {
        let sectors = Geometry { block_sectors: 1, torn_sectors: 1, ..geometry(vec![16384], THROUGH) };
        let (mut stage, _) = bench(sectors, quiet());
        stage.ask(Step::Mode { volume: 0, mode }).unwrap();
        go_bad(&mut stage);
        let parts = vec![write(100..101), write(99..100), write(80..100), write(92..95)];
        assert_eq!(refused(&mut stage, parts), [true, true, true, false], "{mode:?}");
        assert_eq!(
            stage.values(0, 80..92).unwrap(),
            [SectorValue::Written(0); 12],
            "{mode:?}: nothing of it was written"
        );
        stage.ask(DETACH).unwrap();
        stage.ask(write(100..101)).unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}
