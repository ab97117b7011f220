//! Figures of runs and crashes.

use crate::reached::RequestCoverage;
use bcached_engine::{Phase, Phases};
use bcached_host::watch::HealthChange;

const PHASES: usize = Phase::ALL.len();

/// Counters of runs and crashes, which can be added up.
#[derive(Clone, Copy, Default, Debug)]
pub struct RunCounts {
    /// Requests of clients, including the reads of verifications.
    pub requests: u64,
    /// Device operations.
    pub operations: u64,
    /// Processes started.
    pub lives: u64,
    /// Crashes tried.
    pub crashes: u64,
    /// Of these, crashes inside the recovery from another crash.
    pub crashes_in_recovery: u64,
    /// Of these, crashes inside the recovery from a crash inside a recovery.
    pub crashes_in_third: u64,
    /// Virtual time in nanoseconds.
    pub virtual_ns: u64,
    /// The longest poll: the charged work of a task between two waits, in nanoseconds.
    pub longest_ns: u64,
    /// How often each phase began, in the order of [`Phase::ALL`].
    pub begun: [u64; PHASES],
    /// Crashes tried in the middle of each phase.
    pub cuts: [u64; PHASES],
    /// What hosts have done after a set had failed.
    pub hosting: HostCounts,
    /// Which operations the workloads themselves have run against which targets, without what came
    /// after the crashes that were tried.
    pub reached: RequestCoverage,
}

/// What hosts have done after a set had failed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct HostCounts {
    /// How often a failed set was open again.
    pub reopenings: u64,
    /// How often volumes were about to bypass their cache meanwhile.
    pub bypasses: u64,
}

impl HostCounts {
    /// Counts a change of a set's health.
    pub fn count(&mut self, change: HealthChange) {
        self.reopenings += u64::from(change == HealthChange::Works);
    }
}

impl RunCounts {
    /// Adds the figures of `other`.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.operations += other.operations;
        self.lives += other.lives;
        self.crashes += other.crashes;
        self.crashes_in_recovery += other.crashes_in_recovery;
        self.crashes_in_third += other.crashes_in_third;
        self.virtual_ns += other.virtual_ns;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
        self.hosting.reopenings += other.hosting.reopenings;
        self.hosting.bypasses += other.hosting.bypasses;
        add_each(&mut self.begun, &other.begun);
        add_each(&mut self.cuts, &other.cuts);
        self.reached.add(&other.reached);
    }

    /// Returns the number of recoveries judged: one process has opened after each crash that was
    /// tried. Recoveries after a workload's own restarts are counted only as processes.
    #[must_use]
    pub const fn recoveries(&self) -> u64 {
        self.crashes
    }

    /// Returns how often each phase began.
    #[must_use]
    pub fn begun(phases: &Phases) -> [u64; PHASES] {
        Phase::ALL.map(|phase| phases.begun(phase))
    }

    /// Counts this many crashes in the middle of the current phases.
    pub fn cut(&mut self, phases: &Phases, crashes: u64) {
        for (count, phase) in self.cuts.iter_mut().zip(Phase::ALL) {
            *count += if phases.is_inside(phase) { crashes } else { 0 };
        }
    }
}

fn add_each(sums: &mut [u64; PHASES], counts: &[u64; PHASES]) {
    for (sum, count) in sums.iter_mut().zip(counts) {
        *sum += count;
    }
}
