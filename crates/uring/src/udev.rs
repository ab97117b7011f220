//! Generates the udev rules file that lists bcached's own devices
//! (`packaging/udev/68-bcached.rules` describes what udev does with it).

use std::fmt::Write as _;

/// Path of the list. It sorts before our rule in udev's order, and lies on the root file system,
/// because it must exist before any part of bcached runs.
pub const OWNED_RULES_PATH: &str = "/etc/udev/rules.d/67-bcached-owned.rules";

/// Returns the list for the members (backing devices and caches) with these UUIDs, which are those
/// of the devices, not of the cache sets. Replace the file as a whole, then let udev reload. The
/// order of `devices` does not matter; the same devices give the same text.
#[must_use]
pub fn owned_rules(devices: &[[u8; 16]]) -> String {
    let mut devices = devices.to_vec();
    devices.sort_unstable();
    devices.dedup();
    let mut text = String::from("# Made by bcached from its configuration; see 68-bcached.rules.\n");
    for device in devices {
        let digits = format!("{:032x}", u128::from_be_bytes(device));
        let uuid = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-");
        writeln!(text, "ENV{{ID_FS_UUID}}==\"{uuid}\", ENV{{BCACHED_OWNED}}=\"1\"")
            .expect("a string takes everything");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_device_once() {
        let device = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef_u128.to_be_bytes();
        let text = owned_rules(&[device, [0xFF; 16], device]);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                r#"ENV{ID_FS_UUID}=="01234567-89ab-cdef-0123-456789abcdef", ENV{BCACHED_OWNED}="1""#,
                r#"ENV{ID_FS_UUID}=="ffffffff-ffff-ffff-ffff-ffffffffffff", ENV{BCACHED_OWNED}="1""#,
            ]
        );
    }
}
