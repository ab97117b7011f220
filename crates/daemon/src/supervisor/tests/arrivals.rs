//! Waiting for volumes to come to a replaced cache: what is waited for, for how long, and what ends
//! it.

use crate::engine_thread::Engine;
use crate::supervisor::table::{CacheState, VolumeState};
use crate::supervisor::tests::{SET, supervisor};
use crate::supervisor::volumes::rejoin::RejoinState;
use bcached_control::failure::{Failure, Kind};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn a_wait_for_volumes_ends_when_each_has_come_or_cannot() {
    let supervisor = supervisor(&["one", "two"]);
    let mut shared = supervisor.shared();
    let table = &mut shared.table;
    let failure = |kind| Failure::new(kind, "for this reason");
    let kind = |arrival| match arrival {
        RejoinState::Failed(failure) => Some(failure.kind),
        _ => None,
    };
    // The first look at a device is waited for without limit.
    assert_eq!(table.arrival(0, LONG), RejoinState::Waiting("the new device is not open yet".to_owned()));
    table.caches[0].state = CacheState::Waiting(failure(Kind::NotFound));
    assert!(matches!(table.arrival(0, Duration::ZERO), RejoinState::Waiting(_)));
    assert_eq!(kind(table.arrival(0, LONG)), Some(Kind::TimeLimit));
    table.caches[0].state = CacheState::Failed(failure(Kind::Damaged));
    assert_eq!(kind(table.arrival(0, Duration::ZERO)), Some(Kind::Damaged));

    let (engine, _ears) = Engine::deaf();
    let thread = std::thread::spawn(|| {});
    table.caches[0].state = CacheState::Open { set: SET, engine, io: String::new(), thread };
    table.volumes[0].state = VolumeState::Failed(failure(Kind::NotBcache));
    // A volume that can still come is waited for first.
    let waits = RejoinState::Waiting("two is not served: its device has not been looked for yet".to_owned());
    assert_eq!(table.arrival(0, Duration::ZERO), waits);
    assert_eq!(kind(table.arrival(0, LONG)), Some(Kind::TimeLimit));
    table.volumes[1].state = VolumeState::Stopped;
    assert_eq!(kind(table.arrival(0, LONG)), Some(Kind::NotBcache));
    table.volumes[0].state = VolumeState::Removed;
    assert_eq!(table.arrival(0, LONG), RejoinState::Done, "nobody wants them there");
    table.caches[0].former_of = Some("other".to_owned());
    assert_eq!(kind(table.arrival(0, LONG)), Some(Kind::Cancelled));
}

/// Regression: a volume of a cache that was never replaced was waited for as if it came from
/// another device.
#[test]
fn only_a_cache_in_place_of_a_dead_one_has_volumes_on_their_way() {
    let supervisor = supervisor(&["one"]);
    let mut shared = supervisor.shared();
    let table = &mut shared.table;
    assert_eq!(table.arrival_after_dead(0), RejoinState::Done);
    table.caches[0].is_awaited = true;
    assert!(matches!(table.arrival_after_dead(0), RejoinState::Waiting(_)));
}
