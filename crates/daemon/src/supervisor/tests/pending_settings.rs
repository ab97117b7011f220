//! Cache modes that engines refuse, in an order that clients do not see.

use crate::engine_thread::Engine;
use crate::supervisor::Supervisor;
use crate::supervisor::options::Completion;
use crate::supervisor::options::pending_settings::RequestId;
use crate::supervisor::table::{CacheState, VolumeState};
use crate::supervisor::tests::moves::{backing, go_on, serves};
use crate::supervisor::tests::{SET, supervisor};
use bcached_config::NO_CACHE;
use bcached_config::options::value::Value;
use bcached_format::CacheMode;

fn say(supervisor: &Supervisor, mode: CacheMode) {
    let word = Value::Word(mode.name());
    supervisor.shared().table.volumes[0].options.runtime.insert("cache_mode", word);
    supervisor.apply_cache_mode(0, Completion::nobody());
}

fn in_force(supervisor: &Supervisor) -> CacheMode {
    match &supervisor.shared().table.volumes[0].state {
        VolumeState::Served(info) => info.mode,
        _ => panic!("it is served"),
    }
}

/// The latest request that is not settled, of this many.
fn open_word(supervisor: &Supervisor, of: usize) -> RequestId {
    let words = supervisor.shared().table.volumes[0].pending_modes.in_force.open();
    assert_eq!(words.len(), of);
    words[of - 1].clone()
}

/// Regression: two modes were refused, the second after the first request had timed out for its
/// client. The table then said that the first mode was in force, so a repeated request for it was
/// answered as done, without asking the engine.
#[test]
fn two_cache_modes_that_are_refused_leave_the_one_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut supervisor = supervisor(&["one"]);
    {
        let entry = &mut supervisor.shared().table.volumes[0];
        (entry.backing, entry.wanted_cache) =
            (Some(backing(&folder.path().join("one"))), Some(NO_CACHE.to_owned()));
    }
    go_on(&mut supervisor, |supervisor| serves(supervisor, 1));
    let before = in_force(&supervisor);
    let (engine, _ears) = Engine::deaf();
    let deaf = CacheState::Open { set: SET, engine, io: String::new(), thread: std::thread::spawn(|| {}) };
    let _served_it = std::mem::replace(&mut supervisor.shared().table.caches[1].state, deaf);

    say(&supervisor, CacheMode::Writearound);
    let first = open_word(&supervisor, 1);
    say(&supervisor, CacheMode::None);
    let second = open_word(&supervisor, 2);
    supervisor.mode_settled(0, &first, true);
    assert_eq!(in_force(&supervisor), CacheMode::None, "nobody has refused that");
    supervisor.mode_settled(0, &second, true);
    assert_eq!(in_force(&supervisor), before);
}
