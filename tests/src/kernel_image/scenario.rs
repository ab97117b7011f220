//! The states that a set can be brought into. Each is a few workloads between a start and an end.

use crate::guest::Machine;
use crate::set::Geometry;
use crate::workload::Workload;

/// A state of a set that is worth testing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Stopped cleanly, with dirty data in the cache.
    CleanStop,
    /// Killed in the middle of writing, with dirty data and a journal not yet replayed.
    Crash,
    /// Two backing devices on one cache, written in turn, then killed.
    TwoBackingsCrash,
    /// A flash-only volume (it lives in the cache alone), stopped cleanly.
    FlashOnly,
    /// Small scattered writes until the root is at level 2 or above. Needs buckets of 8k or 16k.
    DeepTree,
    /// Enough small writes, ordered by time and not by sector, for ten bsets in a node. Needs
    /// buckets of 512k.
    ManySets,
    /// Flushes until the journal has wrapped around more than once, then killed.
    WrappedJournal,
    /// Written until the cache has taken in its own size this many times, so that its buckets are
    /// reused again and again. A kernel allocates some hundred buckets a second and writes around
    /// the cache meanwhile, so the workload continues until the kernel reports that enough was
    /// written.
    Turnovers(u64),
}

/// The line a job prints after each workload that has run to its end.
pub(super) const RAN: &str = "workload ran";

/// A job and the writes it makes.
pub(super) struct Plan {
    /// The job.
    pub(super) script: String,
    /// The writes, in order. A crash hits the last one. Without a crash, as many have run as the
    /// job has printed [`RAN`].
    pub(super) workloads: Vec<Workload>,
    /// The line at which the guest is killed.
    pub(super) crash_at: Option<String>,
}

/// The flush after which a crashing guest is killed.
const CRASH_FLUSH: u64 = 20;
/// Writes after that flush, some of which may arrive before the guest is dead; after them, the
/// guest only waits to be killed. None of them is flushed, so the crash leaves their outcome open
/// however late it comes.
const LATE_WRITES: u64 = 500;
/// Maximum number of workloads that turn a cache over. Only those that are needed run: a few.
const TURNOVER_WORKLOADS_MAX: usize = 60;

impl Scenario {
    /// Returns true if the kernel is killed at the end.
    #[must_use]
    pub const fn crashes(self) -> bool {
        matches!(self, Self::Crash | Self::TwoBackingsCrash | Self::WrappedJournal)
    }

    /// Returns the number of backing devices.
    #[must_use]
    pub const fn backings(self) -> u64 {
        match self {
            Self::FlashOnly => 0,
            Self::TwoBackingsCrash => 2,
            _ => 1,
        }
    }

    /// Returns the number of volumes.
    #[must_use]
    pub const fn volumes(self) -> u64 {
        if matches!(self, Self::FlashOnly) { 1 } else { self.backings() }
    }

    /// Returns the job for a geometry.
    pub(super) fn plan(self, machine: &dyn Machine, geometry: &Geometry) -> Plan {
        let base = base_workload(geometry);
        let workloads = match self {
            Self::CleanStop | Self::FlashOnly => vec![base],
            Self::Crash => vec![base, after(base, crashing(base, CRASH_FLUSH))],
            Self::TwoBackingsCrash => {
                let other = Workload { seed: 21, volume: 1, ..base };
                vec![base, other, after(base, crashing(base, CRASH_FLUSH))]
            }
            Self::DeepTree => vec![Workload {
                write_sectors_max: geometry.block_sectors(),
                writes: 60_000,
                flush_every: 10_000,
                ..base
            }],
            Self::ManySets => vec![Workload {
                write_sectors_max: geometry.block_sectors(),
                writes: 3_500,
                flush_every: 500,
                ..base
            }],
            Self::WrappedJournal => {
                vec![crashing(Workload { flush_every: 1, ..base }, wrapping_flushes(geometry))]
            }
            Self::Turnovers(_) => {
                let first = Workload {
                    write_sectors_max: geometry.bucket_bytes / 512 * 8,
                    writes: 1_000,
                    flush_every: 500,
                    read_every: 50,
                    ..base
                };
                let all = std::iter::successors(Some(first), |previous| Some(after(*previous, first)));
                all.take(TURNOVER_WORKLOADS_MAX).collect()
            }
        };
        let crash_at = match self {
            Self::Crash | Self::TwoBackingsCrash => Some(format!("flushed {CRASH_FLUSH}")),
            Self::WrappedJournal => Some(format!("flushed {}", wrapping_flushes(geometry))),
            _ => None,
        };
        Plan { script: self.script(machine, geometry, &workloads, crash_at.is_some()), workloads, crash_at }
    }

    fn script(
        self,
        machine: &dyn Machine,
        geometry: &Geometry,
        workloads: &[Workload],
        crash: bool,
    ) -> String {
        let backings = usize::try_from(self.backings()).expect("at most two");
        let devices: Vec<String> = (0..=backings).map(|index| machine.device(index)).collect();
        let mut script = format!("register {}\n", devices.join(" "));
        if self == Self::FlashOnly {
            let bytes = geometry.volume_sectors * 512;
            script += &format!(
                "echo {bytes} > $(set_directory)/flash_vol_create\nwait_for 200 test -b /dev/bcache0\n"
            );
        }
        for n in 0..backings {
            let mode = geometry.mode.name();
            script += &format!(
                "wait_for 200 test -b /dev/bcache{n}\nno_bypass {n}\n\
                echo {mode} > /sys/block/bcache{n}/bcache/cache_mode\nkeep_dirty {n}\n"
            );
        }
        for (index, workload) in workloads.iter().enumerate() {
            let last = index + 1 == workloads.len();
            // Only flushes of the last workload may print the crash marker.
            let filter = if crash && !last { " > /dev/null" } else { "" };
            let run = format!("$verified_io /dev/bcache{} {workload}{filter}; echo {RAN}", workload.volume);
            script += &match self.written_mib(geometry) {
                Some(mib) => {
                    format!("[ \"$enough\" ] || {{ {run}; [ $(written_mib) -lt {mib} ] || enough=yes; }}\n")
                }
                None => format!("{run}\n"),
            };
        }
        if self.written_mib(geometry).is_some() {
            script += "[ \"$enough\" ] || { echo the kernel wrote $(written_mib) MiB only; false; }\n";
        }
        script += self.facts();
        script + if crash { "sleep 600\n" } else { "stop_everything\n" }
    }

    /// Returns how many MiB the kernel shall write into the cache's buckets, if that determines the
    /// length of the job.
    const fn written_mib(self, geometry: &Geometry) -> Option<u64> {
        match self {
            Self::Turnovers(times) => Some((times * geometry.cache_bytes).div_ceil(1 << 20)),
            _ => None,
        }
    }

    /// Shell commands that print what the kernel reports about the state, so that a test can check
    /// it.
    const fn facts(self) -> &'static str {
        match self {
            Self::FlashOnly => "",
            _ => {
                "echo state $(cat /sys/block/bcache0/bcache/state)\n\
                 echo dirty $(cat /sys/block/bcache0/bcache/dirty_data)\n\
                 echo depth $(cat $(set_directory)/tree_depth)\n\
                 cat $(set_directory)/internal/bset_tree_stats | tr -s '\\t' ' '\n"
            }
        }
    }
}

/// Returns a workload of three hundred writes of up to 32 KiB all over the volume, some read back,
/// with periodic flushes.
#[must_use]
pub const fn base_workload(geometry: &Geometry) -> Workload {
    Workload {
        seed: 20,
        volume: 0,
        first_sequence: 1,
        first_sector: 0,
        sectors: geometry.volume_sectors,
        block_sectors: geometry.block_sectors(),
        write_sectors_max: 64,
        writes: 300,
        flush_every: 16,
        flushes_max: 0,
        read_every: 5,
        discard_every: 0,
    }
}

/// Returns `next` with its sequence numbers continued from `previous` and with another seed, hence
/// other places.
const fn after(previous: Workload, next: Workload) -> Workload {
    Workload { seed: previous.seed + 1, first_sequence: previous.first_sequence + previous.writes, ..next }
}

/// Returns `workload`, long enough to be killed after the flush with this number.
const fn crashing(workload: Workload, flush: u64) -> Workload {
    Workload { writes: workload.flush_every * flush + LATE_WRITES, flushes_max: flush, ..workload }
}

/// Returns a number of flushes that makes the journal wrap around. Each flush makes an entry of at
/// least one block, and the kernel chooses the number of journal buckets (see below) at the first
/// start.
///
/// The journal must hold more entries than the number of keys a leaf takes before it is written
/// (about 168). Otherwise, a kernel with a single leaf waits half a minute for that leaf whenever
/// the journal is full. So blocks must have 512 bytes and buckets at least 64k.
fn wrapping_flushes(geometry: &Geometry) -> u64 {
    let buckets = (geometry.cache_bytes / geometry.bucket_bytes / 128).clamp(2, 256);
    let blocks = buckets * geometry.bucket_bytes / geometry.block_bytes;
    assert!(blocks > 256, "a journal of {blocks} blocks makes the kernel wait");
    blocks * 5 / 4
}
