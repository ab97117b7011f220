//! Makes a run to record: a fresh set, clients that write, and the sudden death of the guest.

use std::fs::{self, File};
use std::path::Path;

use super::client::Plan;
use super::cut::BACKING;
use super::witness::{self, Event};
use super::{Recording, RecordingError};
use crate::guest::{self, GuestError, Job, Machine as _};
use crate::set::{CacheSet, Geometry, Maker};
use crate::side::backing_uuid;
use crate::uml::{Uml, built_program};

/// The line the job prints when the run is over: from then on, the guest may die.
const FINISHED: &str = "run finished";
/// Seconds to wait until a B-tree node has been written: the kernel writes a node this long after
/// the first change to it if nothing forces it earlier, with a few seconds of margin.
const NODE_DELAY: u64 = 40;
/// Index of the witness's image, after those of the set.
const WITNESS: usize = BACKING + 1;

/// The program that serves the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writer {
    /// The guest's kernel.
    Kernel,
    /// Our daemon, in the same guest, on the same devices; its clients connect over NBD.
    Ours,
}

impl Writer {
    /// Returns the name, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Ours => "bcached",
        }
    }
}

/// What happens to dirty data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteBack {
    /// It is written back as fast as possible; by our daemon, at its own rate.
    AtOnce,
    /// It stays in the cache. For the kernel only.
    Never,
    /// The kernel writes it back when the clients have finished, our daemon from the beginning. The
    /// run is over when nothing is dirty any more and the B-tree nodes that record this have been
    /// written.
    Afterwards,
}

/// A recorded run.
#[derive(Debug)]
pub struct Run {
    /// The geometry of the set.
    pub geometry: Geometry,
    /// The content of the cache device and the backing device before the recording.
    pub before: Vec<Vec<u8>>,
    /// All operations on the devices.
    pub recording: Recording,
    /// The clients' events.
    pub story: Vec<(usize, Event)>,
}

/// Makes a set of this geometry and mode, and records a run of `plan` on it.
///
/// # Errors
/// The guest failed, or a read during the run returned wrong data.
pub fn record(
    uml: &Uml,
    writer: Writer,
    geometry: Geometry,
    write_back: WriteBack,
    plan: &Plan,
) -> Result<Run, RecordingError> {
    let set = CacheSet::make(geometry, 1, Maker::Tools)?;
    let witness = set.directory().join("witness");
    File::create(&witness)?.set_len(witness::IMAGE_BYTES)?;
    let images: Vec<&Path> = set.images().into_iter().chain([witness.as_path()]).collect();
    let job = |script, crash_at| Job { images: &images, script, crash_at, limit: guest::LIMIT };
    // The mode is set in the superblock by a start that is not recorded.
    let set_mode = format!(
        "register {} {}\nwait_for 200 test -b /dev/bcache0\n\
        echo {} > /sys/block/bcache0/bcache/cache_mode\nstop_everything\n",
        uml.device(0),
        uml.device(BACKING),
        geometry.mode.name(),
    );
    uml.run(&job(&set_mode, None))?;
    let before = set.images().into_iter().map(fs::read).collect::<Result<_, _>>()?;
    let path = set.directory().join("recording");
    let script = match writer {
        Writer::Kernel => kernel_script(uml, write_back, plan)?,
        Writer::Ours => our_script(uml, &set, write_back, plan)?,
    };
    uml.recorded(&path)?.run(&job(&script, Some(FINISHED)))?;
    let recording = Recording::read(&path)?;
    let story = witness::story(&recording, WITNESS)?;
    Ok(Run { geometry, before, recording, story })
}

fn clients(uml: &Uml, volume: &str, plan: &Plan) -> Result<String, GuestError> {
    let Plan { seed, requests, sectors, block_sectors } = plan;
    let (program, witness) = (built_program("recorded-io")?, uml.device(WITNESS));
    let arguments = format!("{volume} {witness} {seed} {requests} {sectors} {block_sectors}");
    Ok(format!("{} {arguments}\n", program.display()))
}

/// The end of every job: the run is over, and the guest waits to be killed.
fn finish() -> String {
    format!("echo {FINISHED}\nsleep 100000\n")
}

fn kernel_script(uml: &Uml, write_back: WriteBack, plan: &Plan) -> Result<String, GuestError> {
    let fast = "echo 0 > /sys/block/bcache0/bcache/writeback_percent\n\
        echo 0 > /sys/block/bcache0/bcache/writeback_delay\n";
    let (before, after) = match write_back {
        WriteBack::AtOnce => (fast, String::new()),
        WriteBack::Never => ("keep_dirty 0\n", String::new()),
        WriteBack::Afterwards => {
            let start = "echo 1 > /sys/block/bcache0/bcache/writeback_running\n";
            let wait = "wait_for 200 grep -q ^clean /sys/block/bcache0/bcache/state\n";
            ("keep_dirty 0\n", format!("{fast}{start}{wait}sleep {NODE_DELAY}\n"))
        }
    };
    Ok(format!(
        "register {} {}\nwait_for 200 test -b /dev/bcache0\nno_bypass 0\n{before}{}{after}{}",
        uml.device(0),
        uml.device(BACKING),
        clients(uml, "/dev/bcache0", plan)?,
        finish(),
    ))
}

fn our_script(uml: &Uml, set: &CacheSet, write_back: WriteBack, plan: &Plan) -> Result<String, GuestError> {
    let program = built_program("bcached")?;
    let program = program.display();
    let uuid = backing_uuid(&set.backings[0]).map_err(GuestError::host("read a UUID"))?;
    let after = match write_back {
        WriteBack::AtOnce | WriteBack::Never => String::new(),
        WriteBack::Afterwards => format!(
            "nothing_dirty() {{ {program} status --control /run/bcached/control | grep -q '[^0-9.]0 B dirty'; }}\n\
            wait_for 400 nothing_dirty\nsleep {NODE_DELAY}\n"
        ),
    };
    Ok(format!(
        "mkdir /run/bcached\n\
        BCACHED_NOTES=/run/bcached {program} serve --cache {} --backing {} --control /run/bcached/control \
        --export nbd:/run/bcached/nbd > /run/bcached/said &\n\
        wait_for 200 grep -q ready /run/bcached/said\n{}{after}{}",
        uml.device(0),
        uml.device(BACKING),
        clients(uml, &format!("nbd:/run/bcached/nbd:{uuid}"), plan)?,
        finish(),
    ))
}
