//! Volumes that a set forgets, and flash-only volumes that it creates or resizes, with a power cut
//! at every operation.

use super::bench::{ScenarioSystem, VolumeLocation, quiet};
use super::image::change_backing;
use super::stage::{BACK, FATES, FLUSH, bench, cut_at, packed, write};
use crate::scenario::ScenarioRig;
use crate::system::Geometry;
use bcached_engine::{CacheSet, CancelToken, Error, Request, VolumeId};
use bcached_env::Buffer;
use bcached_format::{BackingState, Label, Uuid};
use std::rc::Rc;

super::scenarios! {
    include_str!("forgotten.rs"),
    a_forget_that_the_power_ends_is_completed_by_the_next,
    a_volume_in_the_cache_alone_is_there_whole_or_not_at_all,
    a_deleted_volume_s_number_is_not_another_s,
    a_volume_in_the_cache_alone_has_the_old_size_or_the_new_one,
}

/// A running set with dirty data in several leaves, for a volume whose disk is gone.
fn left_behind() -> (ScenarioRig, Rc<ScenarioSystem>, Uuid) {
    let geometry = Geometry { buckets: 520, ..packed(vec![16384], BACK) };
    let (mut stage, bench) = bench(geometry, quiet());
    stage.together((0..400).map(|place| write(place * 3..place * 3 + 1)).collect()).unwrap();
    stage.ask(FLUSH).unwrap();
    let uuid = bench.status().volumes[0].uuid;
    stage.stop().unwrap();
    bench.put(0, VolumeLocation::Missing);
    stage.start().unwrap();
    (stage, bench, uuid)
}

async fn forget(set: CacheSet, uuid: Uuid) -> Result<(), Error> {
    let forgetting = set.begin_forgetting(uuid)?;
    set.forget(forgetting).await
}

/// A disk has died with its data in the cache, and an administrator gives that data up; the power
/// fails in the middle. Either the cache still knows the volume, and the same command completes the
/// work, or it knows nothing of it. There is never dirty data without an owner that no command can
/// reach.
fn a_forget_that_the_power_ends_is_completed_by_the_next() {
    let mut ends = [0, 0];
    for survivors in FATES {
        for nth in 0.. {
            let (mut stage, bench, uuid) = left_behind();
            if !cut_at(&mut stage, nth, survivors, forget(bench.set(), uuid)) {
                break;
            }
            stage.start().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            let set = bench.set();
            let status = set.status();
            let is_known = status.unserved.iter().any(|left| left.uuid == uuid);
            assert!(
                is_known || status.dirty_sectors == 0,
                "at operation {nth}, {survivors}: dirty data of no volume"
            );
            ends[usize::from(is_known)] += 1;
            if is_known {
                let again = stage.play(move |_| async move {
                    forget(set, uuid).await.unwrap();
                    Ok(())
                });
                again.unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            }
            assert_eq!((bench.status().dirty_sectors, bench.status().unserved.len()), (0, 0));
            // The dead disk is discarded.
            change_backing(&mut stage, 1, |superblock| superblock.set_state(BackingState::None));
            stage.stop().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
        }
    }
    assert!(ends[0] > 0 && ends[1] > 10, "the cuts came before and after the end: {ends:?}");
}

/// A flash-only volume is created, and the power fails before the client has its answer, or right
/// after. The volume is in the table with its size and its label, or not at all. It exists only
/// once, and does not occupy two slots.
fn a_volume_in_the_cache_alone_is_there_whole_or_not_at_all() {
    let label = Label::from_text("scratch").unwrap();
    let mut ends = [0, 0];
    for survivors in FATES {
        for nth in 0.. {
            let (mut stage, bench, _) = left_behind();
            let set = bench.set();
            let make = async move { set.create_flash_only(2048, label).await.map(drop) };
            if !cut_at(&mut stage, nth, survivors, make) {
                break;
            }
            stage.start().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            let found: Vec<_> = bench
                .status()
                .volumes
                .iter()
                .map(|info| (info.sectors, info.label, info.dirty_sectors))
                .collect();
            assert!(
                found.is_empty() || found == [(2048, label, 0)],
                "at operation {nth}, {survivors}: {found:?}"
            );
            ends[found.len()] += 1;
            stage.stop().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
        }
    }
    assert!(ends[0] > 0 && ends[1] > 0, "the cuts came before and after the end: {ends:?}");
}

/// A flash-only volume is deleted and another one is created at once. The second never reads the
/// first one's data, however little of that had been removed from the index when the power failed.
fn a_deleted_volume_s_number_is_not_another_s() {
    let label = Label::from_text("scratch").unwrap();
    for survivors in FATES {
        for nth in 0.. {
            let (mut stage, bench, _) = left_behind();
            let set = bench.set();
            let made = stage.play(move |_| async move {
                let id = set.create_flash_only(2048, label).await.unwrap();
                let uuid = set.volumes().into_iter().find(|info| info.id == id).unwrap().uuid;
                fill(&set, id, 2048).await;
                set.remove_volume(id).await.unwrap();
                Ok((set, uuid))
            });
            let (set, uuid) = made.unwrap();
            let anew = async move {
                forget(set.clone(), uuid).await?;
                set.create_flash_only(2048, label).await.map(drop)
            };
            if !cut_at(&mut stage, nth, survivors, anew) {
                break;
            }
            stage.start().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            let set = bench.set();
            let looked = stage.play(move |_| async move {
                for info in set.volumes().into_iter().filter(|info| info.uuid != uuid) {
                    assert!(content(&set, info.id, 2048).await.iter().all(|byte| *byte == 0));
                }
                Ok(())
            });
            looked.unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            stage.stop().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
        }
    }
}

/// A flash-only volume is resized and the power fails. It has the old size with all of its data, or
/// the new size. When it is grown to its old size or beyond, what was cut off behind an end reads
/// as zeroes.
fn a_volume_in_the_cache_alone_has_the_old_size_or_the_new_one() {
    // Proves invariant D48.
    const KEPT: u64 = 1024;
    const FULL: u64 = 2048;
    let label = Label::from_text("scratch").unwrap();
    for shrinks in [true, false] {
        let mut ends = [0, 0];
        for survivors in FATES {
            for nth in 0.. {
                let (mut stage, bench, _) = left_behind();
                let set = bench.set();
                let made = stage.play(move |_| async move {
                    let id = set.create_flash_only(FULL, label).await.unwrap();
                    fill(&set, id, FULL).await;
                    if !shrinks {
                        shrink(&set, id, KEPT).await.unwrap();
                    }
                    Ok((set, id))
                });
                let (set, id) = made.unwrap();
                let resized = async move {
                    if shrinks {
                        shrink(&set, id, KEPT).await
                    } else {
                        set.grow(id, FULL, &CancelToken::default()).await
                    }
                };
                if !cut_at(&mut stage, nth, survivors, resized) {
                    break;
                }
                stage.start().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
                let set = bench.set();
                let looked = stage.play(move |_| async move {
                    let info = set.volumes().into_iter().find(|info| info.label == label).unwrap();
                    let is_full = info.sectors == FULL;
                    assert!(is_full || info.sectors == KEPT, "{}", info.sectors);
                    let end = if shrinks && is_full { FULL } else { KEPT };
                    set.grow(info.id, FULL, &CancelToken::default()).await.unwrap();
                    let found = content(&set, info.id, FULL).await;
                    let zeroes = usize::try_from(end * 512).unwrap();
                    assert!(found[..zeroes].iter().all(|byte| *byte == 7), "nothing is lost before the end");
                    assert!(found[zeroes..].iter().all(|byte| *byte == 0), "nothing comes back beyond it");
                    Ok(is_full)
                });
                let is_full =
                    looked.unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
                ends[usize::from(is_full)] += 1;
                stage.stop().unwrap_or_else(|fault| panic!("at operation {nth}, {survivors}: {fault}"));
            }
        }
        assert!(ends[0] > 0 && ends[1] > 0, "the cuts came before and after the end: {ends:?}");
    }
}

async fn shrink(set: &CacheSet, id: VolumeId, sectors: u64) -> Result<(), Error> {
    let shrinking = set.begin_shrinking(id, sectors, &CancelToken::default()).await?;
    set.shrink_flash_only(shrinking).await
}

/// Fills a volume with sevens, durably.
async fn fill(set: &CacheSet, id: VolumeId, sectors: u64) {
    let bytes = vec![7; usize::try_from(sectors * 512).unwrap()];
    let payload = Buffer::copied_from(&bytes).freeze();
    set.serve(id, Request::Write { sector: 0, payload, fua: true }).await.result.unwrap();
}

async fn content(set: &CacheSet, id: VolumeId, sectors: u64) -> Vec<u8> {
    let buffer = Buffer::zeroed(usize::try_from(sectors * 512).unwrap());
    let reply = set.serve(id, Request::Read { sector: 0, buffer }).await;
    reply.result.unwrap();
    reply.buffer.unwrap().as_slice().to_vec()
}
