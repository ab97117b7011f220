//! Named disasters: the story first, then exactly that, then one check.
//!
//! | file | stories of |
//! |---|---|
//! | `flushes` | flushes that fail, that are left out, and what they covered |
//! | `clean_modes` | write-through, write-around, none: the cache may lose, hide or change nothing |
//! | `detached` | volumes that are taken from the cache and put back |
//! | `devices` | devices that die, come back, are renamed, cut short or outdated |
//! | `silent` | devices that do not answer for long, or never |
//! | `outdated` | backing devices that come back with old content |
//! | `unreadable` | sectors of a backing device that cannot be read until they are written |
//! | `journal` | what a crash leaves of the journal, and the note |
//! | `tree` | damaged nodes, and what a crash leaves of nodes |
//! | `metadata` | damaged priorities, torn superblocks |
//! | `space` | buckets, generations, and who reuses them when |
//! | `resized` | volumes that become smaller |
//! | `limits` | sizes at the edge, and what does not fit |
//! | `smallest` | a system without a cache: how a story is told, and that its end depends on its crash |
//!
//! What is refused is refused in words, and leaves the devices as they were. A scenario that cannot fail is worth nothing:
//! each was seen to fail with the line broken that it guards.
//!
//! What no scenario shows, because it cannot be or cannot be seen:
//! - the root read again by a request: it is in memory from the start to the stop, and only GC looks at the device;
//! - cached data that a device has changed, or taken back after a flush, under keys that stayed: it has no sum and no date.
//!   `clean_modes` shows that the backing device is right all the same;
//! - a set of a node behind a torn one of the same node, left by a device that keeps its promises: a set is durable before the
//!   next one is begun, and another life of the bucket has another number. `tree` shows both, the first with a lie.
//!
//! A scenario is a function that panics when the story ends badly; the comment above it is the story, for readers of the
//! code and of `sim scenario` alike. Each file lists its scenarios once: that puts them into [`all`] and makes a test of
//! each. One that is not listed is dead code, and does not build.
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

/// A named disaster.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// The file that it is told in.
    source: &'static str,
    play: fn(),
}

impl Scenario {
    /// What happened, to whom, and what must come of it: the comment above the function.
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

    /// Plays it.
    ///
    /// # Errors
    /// How it ended instead.
    pub fn play(&self) -> Result<(), String> {
        caught(self.play)
    }
}

/// Every scenario, by file.
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
