//! Whether the kernel makes devices for us that outlive their server, which it does for who has `CAP_SYS_ADMIN` in the machine's own user
//! namespace. For others it makes some that do not, and in which nothing of ours is proven
//! (docs/decisions/0021-no-devices-without-privileges.md), so they count as none.

use rustix::thread::{CapabilitySet, capabilities};

/// Asked of the process and not of the driver: that tells only who has it make a device.
pub(crate) fn is_privileged() -> bool {
    let has = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    has && is_machines_own(&std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

/// Whether a map of users is that of the machine's own namespace, in which each is himself. The root of another one has all capabilities, and
/// none that counts here. Without a map, where nobody has mounted `/proc`, nothing speaks against it.
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
