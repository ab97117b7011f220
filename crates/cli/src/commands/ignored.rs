//! Options that have no effect as given. They cause a warning, not a refusal: `make-bcache` accepts
//! them, and scripts pass them.

use crate::commands::make::DeviceRole;
use crate::flags::MakeArgs;

/// Returns a line for each option of `make` that applies to none of the devices made. `--bucket` is
/// not among them: superblocks of backing devices hold the bucket size, too.
pub fn by_make(flags: &MakeArgs) -> Vec<String> {
    let makes = |wanted| flags.roles.iter().any(|(role, _)| *role == wanted);
    let options = [
        (flags.writeback, "--writeback", DeviceRole::Backing),
        (flags.data_offset.is_some(), "--data-offset", DeviceRole::Backing),
        (flags.discard, "--discard", DeviceRole::Cache),
        (flags.cache_replacement_policy.is_some(), "--cache-replacement-policy", DeviceRole::Cache),
    ];
    let in_vain = options.into_iter().filter(|(is_typed, _, role)| *is_typed && !makes(*role));
    in_vain
        .map(|(_, option, role)| format!("{option} has no effect: no {} device is made", role.name()))
        .collect()
}
