//! The states a set can be brought into: each is a few workloads between a start and an end.

use crate::guest::Machine;
use crate::set::Geometry;
use crate::workload::Workload;

/// A state worth opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Stopped in order, dirty data in the cache.
    CleanStop,
    /// Killed in the middle of writing: dirty data, a journal not yet replayed.
    Crash,
    /// Two backing devices on one cache, written in turn, then killed.
    TwoBackingsCrash,
    /// A volume that lives in the cache only, stopped in order.
    FlashOnly,
    /// Small scattered writes until the root is at level 2 or above. Wants buckets of 8k or 16k.
    DeepTree,
    /// Enough small writes, in order of time not of place, for ten sets in a node. Wants buckets of 512k.
    ManySets,
    /// Flushes until the journal has gone round more than once, then killed.
    WrappedJournal,
    /// Written until the cache has taken in its own size so many times, so that its buckets are used again and again. A kernel hands out some
    /// hundred buckets a second and meanwhile writes past the cache, so it goes on until the kernel says that it is enough.
    Turnovers(u64),
}

/// What a job prints after each workload that has run to its end.
pub(super) const RAN: &str = "workload ran";

/// What to do, and what it writes.
pub(super) struct Plan {
    /// The job.
    pub(super) script: String,
    /// The writes, in order. When there is a crash, it hits the last; otherwise as many have run as the job has printed [`RAN`].
    pub(super) workloads: Vec<Workload>,
    /// The line at which the guest is killed.
    pub(super) crash_at: Option<String>,
}

/// The flush after which a crashing guest is killed.
const CRASH_FLUSH: u64 = 20;
/// Writes after that flush, some of which may arrive before the guest is dead; then it only waits for its end. None of them is flushed, so the
/// crash leaves them open however late it comes.
const LATE_WRITES: u64 = 500;
/// Workloads that turn a cache over, of which only those run that are needed: a few.
const TURNOVER_WORKLOADS_MAX: usize = 60;

impl Scenario {
    /// True if the kernel is killed at the end.
    #[must_use]
    pub const fn crashes(self) -> bool {
        matches!(self, Self::Crash | Self::TwoBackingsCrash | Self::WrappedJournal)
    }

    /// How many backing devices it has.
    #[must_use]
    pub const fn backings(self) -> u64 {
        match self {
            Self::FlashOnly => 0,
            Self::TwoBackingsCrash => 2,
            _ => 1,
        }
    }

    /// How many volumes it has.
    #[must_use]
    pub const fn volumes(self) -> u64 {
        if matches!(self, Self::FlashOnly) { 1 } else { self.backings() }
    }

    /// The job for a geometry.
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
            // Only the flushes of the last workload may look like the crash marker.
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

    /// How many MiB the kernel is to write into the cache's buckets, where that decides how long it goes on.
    const fn written_mib(self, geometry: &Geometry) -> Option<u64> {
        match self {
            Self::Turnovers(times) => Some((times * geometry.cache_bytes).div_ceil(1 << 20)),
            _ => None,
        }
    }

    /// What the kernel says of the state, told so that a test can insist on it.
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

/// Three hundred writes of up to 32 KiB all over the volume, some read back, flushed now and then.
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

/// `next`, continuing the count after `previous` with other places.
const fn after(previous: Workload, next: Workload) -> Workload {
    Workload { seed: previous.seed + 1, first_sequence: previous.first_sequence + previous.writes, ..next }
}

/// `workload`, long enough to be killed after the flush with this number.
const fn crashing(workload: Workload, flush: u64) -> Workload {
    Workload { writes: workload.flush_every * flush + LATE_WRITES, flushes_max: flush, ..workload }
}

/// Flushes that take the journal round: each makes an entry of at least one block, and a kernel chooses so many buckets at the first start.
///
/// The journal must hold more entries than a leaf takes keys before it is written (about 168), or a kernel with a single leaf waits half a
/// minute for that leaf whenever the journal is full: blocks of 512 bytes and buckets of 64k at least.
fn wrapping_flushes(geometry: &Geometry) -> u64 {
    let buckets = (geometry.cache_bytes / geometry.bucket_bytes / 128).clamp(2, 256);
    let blocks = buckets * geometry.bucket_bytes / geometry.block_bytes;
    assert!(blocks > 256, "a journal of {blocks} blocks makes the kernel wait");
    blocks * 5 / 4
}
