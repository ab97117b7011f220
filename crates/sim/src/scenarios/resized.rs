//! Volumes that shrink while they are served.

use super::bench::{ScenarioSystem, quiet};
use super::stage::{BACK, FATES, FLUSH, bench, cut_at, packed, read, write};
use crate::scenario::ScenarioRig;
use crate::system::Geometry;
use bcached_engine::{CacheSet, CancelToken, Error};
use std::rc::Rc;

super::scenarios! {
    include_str!("resized.rs"),
    a_shrink_that_the_power_ends_has_lost_nothing,
}

const SECTORS: u64 = 16384;
const HALF: u64 = SECTORS / 2;

/// Returns a volume with dirty data all over, and clean copies of its end.
fn filled() -> (ScenarioRig, Rc<ScenarioSystem>) {
    let geometry = Geometry { buckets: 520, ..packed(vec![SECTORS], BACK) };
    let (mut stage, bench) = bench(geometry, quiet());
    stage.together((0..100).map(|place| write(place * 160..place * 160 + 8)).collect()).unwrap();
    stage.ask(read(SECTORS - 64..SECTORS)).unwrap();
    stage.ask(FLUSH).unwrap();
    (stage, bench)
}

async fn shrink(set: CacheSet, sectors: u64) -> Result<(), Error> {
    let volume = set.volumes()[0].id;
    set.shrink(volume, sectors, &CancelToken::default()).await
}

/// A volume is shrunk to half its size, and the power fails in the middle. The size of a volume is
/// not recorded anywhere, so it is as large as its disk again, with everything that was ever
/// written. The same command shrinks it again; after that only the disk has the data behind the
/// end.
fn a_shrink_that_the_power_ends_has_lost_nothing() {
    // Proves invariant D46.
    let mut cuts = 0;
    for survivors in FATES {
        for nth in 0.. {
            let (mut stage, bench) = filled();
            if !cut_at(&mut stage, nth, survivors, shrink(bench.set(), HALF)) {
                break;
            }
            cuts += 1;
            stage.start().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            assert_eq!(bench.status().volumes[0].sectors, SECTORS);
            stage.verify().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            let set = bench.set();
            let again = stage.play(move |_| async move {
                shrink(set.clone(), HALF).await.unwrap();
                let volume = set.volumes()[0].id;
                set.detach(volume, &CancelToken::default()).await.unwrap();
                Ok(())
            });
            again.unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            stage.stop().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            stage.start().unwrap();
            stage.verify().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
        }
    }
    assert!(cuts > 30, "{cuts}");
}
