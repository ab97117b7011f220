//! Prints the figures of runs.

use crate::out::say;
use bcached_engine::Phase;
use bcached_sim::figures::{HostCounts, RunCounts};
use bcached_sim::reached::{CoverageCase, RequestCoverage};

/// Prints the totals, and the rates over this many seconds.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn print_figures(figures: &RunCounts, seconds: f64) {
    let rate = |count: u64| count as f64 / seconds.max(0.001);
    let RunCounts { requests, operations, lives, crashes, crashes_in_recovery, crashes_in_third, .. } =
        *figures;
    let recoveries = figures.recoveries();
    say!("requests            {requests:>12} {:>10.0}/s", rate(requests));
    say!("device operations   {operations:>12} {:>10.0}/s", rate(operations));
    say!("processes           {lives:>12}");
    let HostCounts { reopenings, bypasses } = figures.hosting;
    say!("sets reopened       {reopenings:>12}, caches bypassed meanwhile {bypasses}");
    say!("recoveries          {recoveries:>12} {:>10.0}/s", rate(recoveries));
    say!("crashes             {crashes:>12}");
    say!("  inside recoveries {crashes_in_recovery:>12}");
    say!("  three deep        {crashes_in_third:>12}");
    say!("virtual seconds     {:>12.1}", figures.virtual_ns as f64 / 1e9);
    say!("longest poll        {:>12.1} us", figures.longest_ns as f64 / 1e3);
    say!("{:<34} {:>10} {:>10}", "phase", "times", "crashes");
    for ((phase, begun), cuts) in Phase::ALL.iter().zip(figures.begun).zip(figures.cuts) {
        say!("{:<34} {begun:>10} {cuts:>10}", phase.name());
    }
    print_reached(&figures.reached);
}

/// Number of unreached cases that are listed.
const MISSING_SHOWN: usize = 8;

fn print_reached(reached: &RequestCoverage) {
    reached.table().iter().for_each(|line| say!("{line}"));
    let (all, missing) = (CoverageCase::all().count(), reached.missing().count());
    say!("of {all} cases (by failed device), {} were requested", all - missing);
    for case in reached.missing().take(MISSING_SHOWN) {
        say!("  never: {case}");
    }
    if missing > MISSING_SHOWN {
        say!("  and {} more", missing - MISSING_SHOWN);
    }
}
