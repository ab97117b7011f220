//! What was done, in numbers.

use crate::reached::Reached;
use bcached_engine::{Phase, Phases};

const PHASES: usize = Phase::ALL.len();

/// Counts of runs and crashes. They can be added up.
#[derive(Clone, Copy, Default, Debug)]
pub struct Figures {
    /// Requests of clients, reads of verifications included.
    pub requests: u64,
    /// Device operations.
    pub operations: u64,
    /// Processes started.
    pub lives: u64,
    /// Crashes tried.
    pub crashes: u64,
    /// Of these, inside the recovery from another crash.
    pub crashes_in_recovery: u64,
    /// Of these, inside a recovery from a crash inside a recovery.
    pub crashes_in_third: u64,
    /// Virtual nanoseconds.
    pub virtual_ns: u64,
    /// The longest poll: what a task did between two waits, in nanoseconds of charged work.
    pub longest_ns: u64,
    /// How often each phase began, in the order of [`Phase::ALL`].
    pub begun: [u64; PHASES],
    /// Crashes tried in the middle of each.
    pub cuts: [u64; PHASES],
    /// What hosts have done when a set had failed.
    pub hosting: Hosting,
    /// What the workloads themselves have asked of what, without what came after crashes that were tried.
    pub reached: Reached,
}

/// What hosts have done when a set had failed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Hosting {
    /// Times that a failed set was about to be opened again.
    pub reopenings: u64,
    /// Times that volumes were about to go past their cache meanwhile.
    pub bypasses: u64,
}

impl Figures {
    /// Adds `other`'s.
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

    /// Recoveries judged: one process has opened after each crash that was tried. Those after the restarts that a workload has
    /// of its own are counted among the processes alone.
    #[must_use]
    pub const fn recoveries(&self) -> u64 {
        self.crashes
    }

    /// How often each phase of `phases` began.
    #[must_use]
    pub fn begun(phases: &Phases) -> [u64; PHASES] {
        Phase::ALL.map(|phase| phases.begun(phase))
    }

    /// So many crashes have been tried in the middle of what `phases` say.
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
