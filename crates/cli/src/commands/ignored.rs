//! What was typed and has no effect: said, not refused, because `make-bcache` takes it and scripts give it.

use crate::commands::make::Role;
use crate::flags::Make;

/// A line for each option of `make` that concerns no device that is made. The size of buckets stands in the superblocks
/// of backing devices too.
pub fn by_make(flags: &Make) -> Vec<String> {
    let makes = |wanted| flags.roles.iter().any(|(role, _)| *role == wanted);
    let options = [
        (flags.writeback, "--writeback", Role::Backing),
        (flags.data_offset.is_some(), "--data-offset", Role::Backing),
        (flags.discard, "--discard", Role::Cache),
        (flags.cache_replacement_policy.is_some(), "--cache-replacement-policy", Role::Cache),
    ];
    let in_vain = options.into_iter().filter(|(is_typed, _, role)| *is_typed && !makes(*role));
    in_vain
        .map(|(_, option, role)| format!("{option} has no effect: no {} device is made", role.name()))
        .collect()
}
