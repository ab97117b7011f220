//! `sim hunt`: runs fresh seeds of all workloads until the time is over or a fault is found.

use crate::figures::print_figures;
use crate::out::{self, say};
use crate::program;
use crate::save::{check_new, save_found};
use crate::shorten::shorten;
use crate::what::system;
use anyhow::Result;
use bcached_sim::digest::mix;
use bcached_sim::figures::RunCounts;
use bcached_sim::hunt::HuntRound;
use bcached_sim::workload::{DRAWING, check_drawing};
use rustix::time::{ClockId, clock_gettime};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// Options of `sim hunt`.
#[derive(clap::Args)]
pub struct HuntArgs {
    /// The system under test.
    #[arg(long, default_value = "engine")]
    system: String,
    /// Begin no further round after this much CPU time, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The number that the hunt's seeds derive from, instead of a fresh one.
    #[arg(long)]
    from: Option<u64>,
    /// The drawing that was printed with this number.
    #[arg(long, requires = "from")]
    drawing: Option<u32>,
    /// Begin with this round of the hunt.
    #[arg(long, default_value_t = 0, requires = "from")]
    round: u64,
    /// Print a line for each round, the first half of it when the round begins.
    #[arg(long)]
    rounds: bool,
    /// Report a failure as it is found, without shortening it.
    #[arg(long)]
    as_found: bool,
    /// Write the failing workload, shortened if possible, to this new file, for `sim run --script`.
    #[arg(long)]
    save: Option<PathBuf>,
}

/// Runs the hunt up to the first failure. Returns true if nothing was found.
pub fn hunt(args: &HuntArgs) -> Result<bool> {
    args.drawing.map_or(Ok(()), check_drawing)?;
    check_new(args.save.as_deref())?;
    let system = system(&args.system)?;
    let from = args.from.unwrap_or_else(fresh_number);
    say!("hunt {from}, drawing {DRAWING}");
    let (mut figures, mut rounds) = (RunCounts::default(), 0);
    let mut found = None;
    let novelty = Rc::default();
    let limit = Duration::from_secs(args.seconds);
    while found.is_none() && (rounds == 0 || processor_time() < limit) {
        // There is no round after the last number.
        let Some(index) = args.round.checked_add(rounds) else { break };
        let began = processor_time();
        let round = HuntRound::of(from, index);
        rounds += 1;
        if args.rounds {
            // Printed in advance, in case this round ends the process.
            out::print(format_args!("round {index}: {} {}", round.workload.name, round.workload.seed));
        }
        let judged = round.judge(&system, &novelty);
        if args.rounds {
            let spent = processor_time().saturating_sub(began).as_secs_f64();
            let crashes = judged.as_ref().map_or(0, |done| done.crashes);
            say!(", {crashes} crashes, {spent:.1} s");
        }
        match judged {
            Ok(done) => figures.add(&done),
            Err(failure) => found = Some((index, round.workload, *failure)),
        }
    }
    let spent = processor_time().as_secs_f64();
    if found.is_some() {
        // The figures of the failing round itself are lost.
        say!("a fault was found (see below); figures of the {} rounds before it:", rounds - 1);
    }
    print_figures(&figures, spent);
    let Some((index, mut workload, mut failure)) = found else {
        say!("{rounds} rounds, nothing found");
        return Ok(true);
    };
    say!("found in round {index} after {spent:.1} s: {}", failure.told(&program::name()));
    if !args.as_found {
        let shorter = shorten(&system, &workload, failure);
        (workload, failure) = (shorter.workload, shorter.failure);
    }
    if let Some(path) = &args.save {
        save_found(path, &args.system, &workload, &failure.cuts);
    }
    Ok(false)
}

/// Returns the CPU time of this process, which does not depend on how busy the machine is.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns a number with which, most likely, no earlier hunt has begun.
fn fresh_number() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    mix(&[since.as_secs(), u64::from(since.subsec_nanos()), u64::from(std::process::id())]) >> 32
}
