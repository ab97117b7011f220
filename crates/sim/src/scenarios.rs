//! Named failure scenarios: each tells a story, plays exactly that story, and makes one check.
//!
//! | file | stories of |
//! |---|---|
//! | `flushes` | flushes that fail or are left out, and what they covered |
//! | `clean_modes` | clean modes: the cache may lose, hide or change nothing |
//! | `detached` | volumes that are detached from the cache and attached again |
//! | `devices` | devices that die, come back, are renamed, truncated or outdated |
//! | `forgotten` | volumes that a set forgets, and flash-only volumes that it creates or resizes |
//! | `silent` | devices that do not answer for long, or never |
//! | `outdated` | backing devices that come back with old content |
//! | `unreadable` | sectors of a backing device that cannot be read until they are written |
//! | `journal` | what a crash leaves of the journal, and the note |
//! | `tree` | damaged nodes, and what a crash leaves of nodes |
//! | `metadata` | damaged priorities, torn superblocks |
//! | `space` | buckets, generations, and the reuse of buckets |
//! | `resized` | volumes that shrink |
//! | `limits` | sizes at the limits, and what does not fit |
//! | `smallest` | a system without a cache, to show how a scenario works |
//!
//! A refusal carries a message, and leaves the devices as they were. A scenario that cannot fail is
//! worthless: each was seen to fail when the line that it guards was broken.
//!
//! What no scenario shows, because it cannot happen or cannot be observed:
//! - a request that reads the root again: it is in memory from start to stop, and only GC reads it
//!   from the device;
//! - cached data that a device changed, or reverted after a flush, under keys that stayed: the data
//!   has neither a checksum nor a date. `clean_modes` shows that the backing device is correct all
//!   the same;
//! - a set of a node behind a torn set of the same node, on a device that keeps its promises: a set
//!   is durable before the next one is begun, and another life of the bucket has another sequence
//!   number. `tree` shows both, the first with a device that lies.
//!
//! A scenario is a function that panics when the story ends badly. The comment above it is the
//! story, both for readers of the code and for `sim scenario`. Each file lists its scenarios once:
//! this adds them to [`all`] and makes a test of each. A scenario that is not listed is dead code,
//! and does not build.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a scenario fails as a test does")]

pub(crate) mod bench;
mod image;
mod stage;

mod clean_modes;
mod detached;
mod devices;
mod flushes;
mod forgotten;
mod journal;
mod limits;
mod metadata;
mod outdated;
mod resized;
mod silent;
mod smallest;
mod space;
mod tree;
mod unreadable;

use crate::rig::panic::caught;

/// A named scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// The source of the file that contains it.
    source: &'static str,
    play: fn(),
}

impl Scenario {
    /// Returns the story: what happened, to what, and what must come of it. It is the comment above
    /// the function.
    #[must_use]
    pub fn story(&self) -> String {
        let head = format!("fn {}() {{", self.name);
        let before = self.source.lines().take_while(|line| *line != head);
        let mut story: Vec<&str> = Vec::new();
        for line in before {
            match line.strip_prefix("/// ") {
                Some(words) => story.push(words),
                None => story.clear(),
            }
        }
        story.join(" ")
    }

    /// Plays the scenario.
    ///
    /// # Errors
    /// Returns the message of the panic if the scenario fails.
    pub fn play(&self) -> Result<(), String> {
        caught(self.play)
    }
}

/// Returns every scenario, by file.
pub fn all() -> impl Iterator<Item = Scenario> {
    let files = [
        flushes::SCENARIOS,
        clean_modes::SCENARIOS,
        detached::SCENARIOS,
        devices::SCENARIOS,
        forgotten::SCENARIOS,
        silent::SCENARIOS,
        outdated::SCENARIOS,
        resized::SCENARIOS,
        unreadable::SCENARIOS,
        journal::SCENARIOS,
        tree::SCENARIOS,
        metadata::SCENARIOS,
        space::SCENARIOS,
        limits::SCENARIOS,
        smallest::SCENARIOS,
    ];
    files.into_iter().flatten().copied()
}

/// Lists the scenarios of a file: its source, then their names.
macro_rules! scenarios {
    ($source:expr, $($name:ident),+ $(,)?) => {
        pub(super) const SCENARIOS: &[super::Scenario] =
            &[$(super::Scenario { name: stringify!($name), source: $source, play: $name }),+];

        #[cfg(test)]
        mod tests {
            $(
                #[test]
                fn $name() {
                    super::$name();
                }
            )+
        }
    };
}
use scenarios;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_scenario_has_a_story_and_a_name_of_its_own() {
        let mut names = BTreeSet::new();
        for scenario in all() {
            let (name, story) = (scenario.name, scenario.story());
            assert!(names.insert(name), "{name} twice");
            assert!(story.len() > 80 && story.ends_with(['.', ')']), "{name}: {story:?}");
        }
    }

    #[test]
    fn a_scenario_that_ends_badly_says_how() {
        let scenario = Scenario { name: "bad", source: "", play: || panic!("lost {}", 7) };
        let said = scenario.play().unwrap_err();
        assert!(said.starts_with("lost 7 ("), "{said}");
        assert_eq!(scenario.story(), "");
    }
}
