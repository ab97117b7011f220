//! Named disasters of the engine: the story first, then exactly that, then one check.

use bcached_sim::disk::Survivors;
use bcached_sim::driver::Crash;
use bcached_sim::scenario::Stage;
use bcached_sim::system::{Geometry, engine::Engine};
use bcached_sim::workload::Step;
use std::ops::Range;
use std::rc::Rc;

/// A set of one volume in write-back mode.
fn stage() -> Stage {
    let geometry = Geometry {
        block_sectors: 8,
        set_block_sectors: 8,
        bucket_sectors: 128,
        buckets: 600,
        volumes: vec![16384],
        torn_sectors: 8,
        backing_volatile: true,
        cache_volatile: true,
        note_records: 100,
        tuning: 2 << 40,
    };
    let mut stage = Stage::new(Rc::new(Engine), geometry, 1);
    stage.start().expect("it opens");
    stage
}

const fn write(sectors: Range<u64>) -> Step {
    Step::Write { volume: 0, sectors, fua: false }
}

const FLUSH: Step = Step::Flush { volume: 0 };

/// The daemon is killed and leaves a note. Before it is started again somebody else runs the set, who knows nothing of
/// that note: a kernel, or a daemon with its note elsewhere. He writes. Then the daemon returns and finds its note: it
/// is of a history that others have gone on with, and must not put its old data over theirs. (Seen with a kernel in
/// between: two hundred sectors went back by a day.)
#[test]
fn a_note_that_comes_back_after_others_ran_the_set_is_void() {
    let mut stage = stage();
    stage.ask(write(0..64)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.ask(write(0..64)).unwrap();
    let left = stage.note().clone();
    assert!(!left.is_empty(), "the second write is in the note alone");
    stage.crash(Crash::PowerCut, Survivors::Everything);

    stage.start().unwrap();
    stage.ask(write(0..64)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);

    *stage.note() = left;
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A home server streams films right after its start, before anybody has flushed the disk: what is read may be in the
/// disk's volatile cache only, so clean copies wait for a flush. When more of them waited than may, the task that should
/// have flushed turned in circles and the volume stood still.
#[test]
fn many_clean_copies_before_the_first_flush_do_not_stop_the_world() {
    let mut stage = stage();
    let read = |start| Step::Read { volume: 0, sectors: start..start + 8 };
    for start in (0..16384).step_by(8) {
        stage.ask(read(start)).unwrap();
    }
    stage.verify().unwrap();
    stage.stop().unwrap();
}
