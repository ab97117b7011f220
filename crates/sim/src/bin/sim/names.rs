//! The message for an unknown name: it suggests the most similar names.

/// Number of names that are suggested.
const SHOWN: usize = 3;

/// Returns a sentence that there is no such `what`, with the names that may have been meant.
pub fn unknown<'a>(what: &str, name: &str, all: impl IntoIterator<Item = &'a str>) -> String {
    let mut all: Vec<&str> = all.into_iter().collect();
    // A part of a long name is similar to it, however much is missing.
    let likeness = |other: &str| {
        let part = if other.contains(name) && !name.is_empty() { 1.0 } else { 0.0 };
        part + strsim::jaro_winkler(name, other)
    };
    all.sort_by(|one, other| likeness(other).total_cmp(&likeness(one)));
    all.truncate(SHOWN);
    format!("no {what} {name:?}; the nearest are {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_come_first() {
        let all = ["mixed", "points", "restarts", "a_story_of_a_flush_that_fails"];
        assert_eq!(
            unknown("workload", "mixd", all),
            "no workload \"mixd\"; the nearest are mixed, points, restarts"
        );
        let part = unknown("scenario", "flush", all);
        assert!(part.contains("nearest are a_story_of_a_flush_that_fails,"), "{part}");
    }
}
