//! The UUID table is lost, outdated, another set's, or has slots that differ from what was written.
//! No volume is served under another one's inode, and none that can prove its own is refused.

use crate::forged_set::{as_a_kernel_writes_it, geometry, newest_entry};
use crate::memory::NoNote;
use crate::rig::{BACKING, CACHE, Rig, SECOND, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::Env;
use bcached_format::{CacheMode, Inode, Label, Uuid, UuidSlot, uuid};
use std::time::Duration;

/// A table of 64 slots.
const SIZES: Sizes = Sizes { block: 8, bucket: 16, buckets: 4000, backing: 20_000 };

fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

async fn reopened(env: Env) -> CacheSet {
    CacheSet::open(env, CACHE, Box::new(NoNote), options()).await.expect("the set opens")
}

/// Inode 0 has dirty data, inode 1 has clean data, and inode 2 is a flash-only volume.
fn three_volumes() -> Rig {
    let mut rig = Rig::with_second(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, first) = open(env, options()).await.expect("sound");
        ask(&set, first, write(0, 64, 1)).await;
        let second = set.add_backing(SECOND, Some(CacheMode::Writethrough)).await.expect("sound");
        ask(&set, second, write(0, 64, 2)).await;
        let flash = set.create_flash_only(64, Label::default()).await.expect("there is room");
        ask(&set, flash, write(0, 64, 3)).await;
        ask(&set, flash, Request::Flush).await;
        set.stop().await.expect("it stops");
    });
    rig
}

/// First sector of the table to which the newest journal entry points.
fn table(rig: &Rig) -> u64 {
    let world = rig.world.borrow();
    newest_entry(&world, &geometry(&world)).0.uuids.pointers.as_slice()[0].sector()
}

fn slots(rig: &Rig) -> Vec<UuidSlot> {
    let mut bytes = vec![0; usize::from(SIZES.bucket) * 512];
    let sector = table(rig);
    rig.world.borrow().look(0, sector, &mut bytes);
    uuid::parse(&bytes).expect("whole slots").collect()
}

fn place(rig: &Rig, slots: &[UuidSlot]) {
    let bytes: Vec<u8> = slots.iter().flat_map(UuidSlot::to_bytes).collect();
    let sector = table(rig);
    rig.world.borrow_mut().place(0, sector, &bytes);
}

/// Simulates that the write of the table was lost.
pub fn lose_table(rig: &Rig) {
    place(rig, &vec![UuidSlot::FREE; slots(rig).len()]);
}

/// Rewrites the newest journal entry, and the superblocks of backing devices, as a kernel does.
fn as_a_kernel_leaves_it(rig: &Rig) {
    let geometry = geometry(&rig.world.borrow());
    as_a_kernel_writes_it(&mut rig.world.borrow_mut(), &geometry);
    for disk in [1, 2] {
        let mut sector = vec![0; 512];
        rig.world.borrow().look(disk, 8, &mut sector);
        // Changes the start time and the checksum, so that bcached's stamp does not match any more.
        sector[200] ^= 1;
        let sum = bcached_format::checksum::checksum(&sector[8..208]);
        sector[..8].copy_from_slice(&sum.to_le_bytes());
        rig.world.borrow_mut().place(disk, 8, &sector);
    }
}

fn number(set: &CacheSet, volume: VolumeId) -> Option<u32> {
    set.volumes().iter().find(|info| info.id == volume)?.inode.map(|Inode(number)| number)
}

/// Ways in which the table differs from what was written: each maps the slots to damaged ones.
type Damage = fn(Vec<UuidSlot>) -> Vec<UuidSlot>;
const DAMAGES: [(&str, Damage); 8] = [
    ("lost", |slots| vec![UuidSlot::FREE; slots.len()]),
    ("of before the second volume", |mut slots| {
        slots[1..].fill(UuidSlot::FREE);
        slots
    }),
    ("of another set", |slots| {
        let other = |(number, slot): (u32, UuidSlot)| {
            if slot.is_free() {
                return slot;
            }
            let mut slot = UuidSlot { uuid: Uuid([0x80 + number.to_le_bytes()[0]; 16]), ..slot };
            slot.seal(Uuid([7; 16]), Inode(number), slot.edition);
            slot
        };
        (0..).zip(slots).map(other).collect()
    }),
    ("with swapped slots", |mut slots| {
        slots.swap(0, 1);
        slots
    }),
    ("with a flipped bit", |mut slots| {
        slots[0].uuid.0[3] ^= 4;
        slots
    }),
    ("with invalidated slots", |mut slots| {
        slots[..2].iter_mut().for_each(|slot| slot.uuid = Uuid::INVALIDATED);
        slots
    }),
    ("with one volume twice", |mut slots| {
        slots[1] = slots[0];
        slots
    }),
    ("with one volume under another number", |mut slots| {
        slots[5] = slots[0];
        slots[0] = UuidSlot::FREE;
        slots
    }),
];

/// Both backing devices record the inode under which the cache holds their data: whatever the table
/// says, each gets its own.
#[test]
fn a_volume_that_can_prove_its_number_has_it_back() {
    for (what, damage) in DAMAGES {
        for second_comes_first in [false, true] {
            let mut rig = three_volumes();
            place(&rig, &damage(slots(&rig)));
            run(&mut rig, move |env| async move {
                let set = reopened(env).await;
                let order = if second_comes_first { [SECOND, BACKING] } else { [BACKING, SECOND] };
                let mut volumes = [VolumeId(0); 2];
                for disk in order {
                    let added = set.add_backing(disk, None).await;
                    let place = usize::from(disk == SECOND);
                    volumes[place] = added.unwrap_or_else(|error| panic!("{what}: {error}"));
                }
                assert_eq!(volumes.map(|id| number(&set, id)), [Some(0), Some(1)], "{what}");
                for (id, content) in volumes.into_iter().zip([1, 2]) {
                    assert_eq!(bytes(&set, id, 0, 64).await, vec![content; 64], "{what}");
                }
                set.stop().await.expect("it stops");
                set.assert_invariants();
            });
        }
    }
}

/// A flash-only volume can prove nothing. It is served only if its slot is as it was written.
/// Otherwise its inode is not given to another volume, nor is its data invalidated.
/// Proves invariant D19.
#[test]
fn a_volume_in_the_cache_alone_is_served_under_a_sound_slot_only() {
    for (what, damage) in DAMAGES {
        let mut rig = three_volumes();
        let before = slots(&rig);
        let damaged = damage(before.clone());
        let is_sound = damaged[2] == before[2];
        place(&rig, &damaged);
        for _ in 0..2 {
            run(&mut rig, move |env| async move {
                let set = reopened(env.clone()).await;
                let flash: Vec<VolumeId> = set.volumes().iter().map(|info| info.id).collect();
                assert_eq!(flash.len(), usize::from(is_sound), "{what}");
                for id in flash {
                    assert_eq!(
                        (number(&set, id), bytes(&set, id, 0, 64).await),
                        (Some(2), vec![3; 64]),
                        "{what}"
                    );
                }
                let ownerless = set.status().ownerless_dirty_sectors;
                let made = set.create_flash_only(8, Label::default()).await.expect("there is room");
                assert!(number(&set, made) > Some(2), "{what}: it has a number with keys of others");
                assert_eq!(bytes(&set, made, 0, 8).await, vec![0; 8], "{what}");
                // Wait until the scan for data that may be invalidated has run.
                env.sleep(Duration::from_secs(40)).await;
                let kept = set.status().ownerless_dirty_sectors;
                assert!(
                    kept == ownerless && (is_sound || kept >= 64),
                    "{what}: {kept} of {ownerless} sectors are kept"
                );
                let uuid = set.volumes().iter().find(|info| info.id == made).expect("it is served").uuid;
                set.remove_volume(made).await.expect("it is served");
                let forgetting = set.begin_forgetting(uuid).expect("it is known");
                set.forget(forgetting).await.expect("it is forgotten");
                set.stop().await.expect("it stops");
                set.assert_invariants();
            });
        }
    }
}

/// After a kernel only the table proves an inode. A dirty volume that is not in it is refused, and
/// no other volume gets its inode. Proves invariant D19.
#[test]
fn after_a_kernel_nobody_gets_a_number_that_has_keys() {
    for (what, damage) in DAMAGES {
        if matches!(
            what,
            "with swapped slots" | "with one volume under another number" | "with a flipped bit"
        ) {
            // Such a table of a kernel contradicts nothing.
            continue;
        }
        let mut rig = three_volumes();
        as_a_kernel_leaves_it(&rig);
        place(&rig, &damage(slots(&rig)));
        run(&mut rig, move |env| async move {
            let set = reopened(env).await;
            let second = set.add_backing(SECOND, None).await.expect("it is clean");
            assert!(
                !matches!(number(&set, second), None | Some(0)),
                "{what}: it has the number of the first"
            );
            assert_eq!(bytes(&set, second, 0, 64).await, vec![2; 64], "{what}");
            match set.add_backing(BACKING, None).await {
                Ok(first) => {
                    assert_eq!(number(&set, first), Some(0), "{what}");
                    assert_eq!(bytes(&set, first, 0, 64).await, vec![1; 64], "{what}");
                }
                Err(error) => {
                    assert_eq!(error, Error::DirtyUnknown, "{what}");
                    // Dirty data without an owner, or of a volume that is not present.
                    assert!(set.status().dirty_sectors >= 64, "{what}");
                    set.set_cache_mode(second, CacheMode::Writeback).await.expect("it is served");
                    ask(&set, second, write(0, 8, 5)).await;
                    set.write_back(second, &CancelToken::default()).await.expect("its own data");
                    // Dirty data without an owner, or of a volume that is not present.
                    assert!(set.status().dirty_sectors >= 64, "{what}");
                }
            }
            set.stop().await.expect("it stops");
            set.assert_invariants();
        });
    }
}
