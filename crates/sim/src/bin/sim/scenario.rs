//! `sim scenario`: lists named failure scenarios, tells their stories and plays them.

use crate::names::unknown;
use crate::out::say;
use anyhow::{Context as _, Result};
use bcached_sim::scenarios::{Scenario, all};

/// Options of `sim scenario`.
#[derive(clap::Args)]
pub struct ScenarioArgs {
    /// The scenarios to play; none: list them all.
    names: Vec<String>,
    /// Play all scenarios.
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

/// Lists or plays scenarios. Returns true if none of them failed.
pub fn scenario(args: &ScenarioArgs) -> Result<bool> {
    if args.all {
        return Ok(play(&all().collect::<Vec<_>>()));
    }
    if args.names.is_empty() {
        for scenario in all() {
            say!("{}\n    {}", scenario.name, first_sentence(&scenario.story()));
        }
        return Ok(true);
    }
    let named = |name: &String| {
        let found = all().find(|scenario| scenario.name == name);
        found.with_context(|| unknown("scenario", name, all().map(|scenario| scenario.name)))
    };
    let scenarios = args.names.iter().map(named).collect::<Result<Vec<_>>>()?;
    if let [scenario] = scenarios[..] {
        say!("{}\n", scenario.story());
    }
    Ok(play(&scenarios))
}

/// Plays each scenario, even if others have failed.
fn play(scenarios: &[Scenario]) -> bool {
    let mut failed = 0;
    for scenario in scenarios {
        match scenario.play() {
            Ok(()) => say!("pass {}", scenario.name),
            Err(how) => {
                failed += 1;
                say!("FAIL {}: {how}", scenario.name);
            }
        }
    }
    say!("{} played, {failed} failed", scenarios.len());
    failed == 0
}

/// Returns the story up to the first full stop, colon or semicolon that ends a thought.
fn first_sentence(story: &str) -> &str {
    let end = [". ", ": ", "; "].iter().filter_map(|mark| story.find(mark)).min();
    end.map_or(story, |end| &story[..end])
}
