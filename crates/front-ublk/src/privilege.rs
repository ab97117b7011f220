//! Whether the kernel makes devices for us that outlive their server. It does so for a process with
//! `CAP_SYS_ADMIN` in the initial user namespace. For others it makes devices that do not, and that
//! are not tested with this code (docs/decisions/0021-no-devices-without-privileges.md), so these
//! count as unavailable.

use rustix::thread::{CapabilitySet, capabilities};

/// Checks the process rather than the driver, because the driver reports this only when a device is
/// made.
pub(crate) fn is_privileged() -> bool {
    let has = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    has && is_machines_own(&std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

/// Whether a uid map is that of the initial user namespace, the identity map. Root of another
/// namespace has all capabilities, but none that counts here. An empty map means that `/proc` is
/// not mounted, and counts as the initial namespace.
fn is_machines_own(map: &str) -> bool {
    map.is_empty() || map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_of_a_container_of_an_ordinary_user_is_none_here() {
        assert!(is_machines_own("         0          0 4294967295\n") && is_machines_own(""));
        assert!(!is_machines_own("         0       1000          1\n"));
        assert!(!is_machines_own("0 1000 1\n1 100000 65536\n"));
    }
}
