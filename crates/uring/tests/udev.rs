//! Tests our udev rule against the real udev and the real rule of bcache-tools: which devices does
//! the kernel's bcache get?
//!
//! Needs root, loop devices, udev, blkid and bcache-tools; skipped with the reason otherwise.
//! Everything happens in a private mount namespace, where the machine's own rules directory, udev
//! database and links are covered.

use bcached_uring::udev::owned_rules;
use std::path::Path;
use std::process::Command;

/// The command that 69-bcache.rules runs to register a device with the kernel's bcache.
const REGISTERS: &str = "run: 'bcache-register";

/// Makes a backing device, shows it to udev with our rule and the given list, and prints what udev
/// would do.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs none /etc/udev/rules.d
mkdir -p /run/udev /dev/disk
mount -t tmpfs none /run/udev
mount -t tmpfs none /dev/disk
truncate -s 16M "$DIRECTORY/image"
make-bcache --cset-uuid 11111111-2222-3333-4444-555555555555 -B "$DIRECTORY/image" > /dev/null
uuid=$(blkid -p -o value -s UUID "$DIRECTORY/image")
cp "$RULE" /etc/udev/rules.d/
sed "s/00000000-0000-0000-0000-000000000001/$uuid/" "$DIRECTORY/list" > /etc/udev/rules.d/67-bcached-owned.rules
loop=$(losetup --find --show "$DIRECTORY/image")
trap 'losetup --detach "$loop"' EXIT
udevadm test --action="$ACTION" "/sys/class/block/${loop#/dev/}" 2>&1
"#;

/// Returns why these tests cannot run here, if so.
fn obstacle() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".into());
    }
    let programs = ["unshare", "udevadm", "make-bcache", "blkid", "losetup"];
    let missing = |program: &&&str| Command::new(program).arg("--help").output().is_err();
    if let Some(program) = programs.iter().find(missing) {
        return Some(format!("{program} is not installed"));
    }
    let places = ["/lib/udev/rules.d/69-bcache.rules", "/usr/lib/udev/rules.d/69-bcache.rules"];
    if !places.iter().any(|place| Path::new(place).exists()) {
        return Some("bcache-tools' udev rule is not installed".into());
    }
    let loops = Command::new("losetup").arg("--find").output();
    (!loops.is_ok_and(|output| output.status.success())).then(|| "no loop devices".into())
}

/// Returns what udev reports about a fresh bcache device at `action`, if `list` is our list.
fn udev_says(action: &str, list: &str) -> String {
    let directory = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(directory.path().join("list"), list).expect("a small file");
    let rule = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/udev/68-bcached.rules");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "timeout", "60", "sh", "-c", SCRIPT])
        .env("DIRECTORY", directory.path())
        .env("RULE", rule)
        .env("ACTION", action)
        .output()
        .expect("unshare is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("68-bcached.rules"), "our rule was read: {text}");
    text
}

#[test]
fn the_kernel_gets_what_is_not_on_the_list_and_nothing_else() {
    if let Some(reason) = obstacle() {
        return println!("skipped: {reason}");
    }
    let mut ours = [0; 16];
    ours[15] = 1;
    for action in ["add", "change"] {
        // The script replaces the UUID ending in 1 by the device's.
        let said = udev_says(action, &owned_rules(&[[7; 16], ours]));
        assert!(!said.contains(REGISTERS), "{said}");
        assert!(said.contains("ID_FS_TYPE=bcached_member\n") && said.contains("SYSTEMD_READY=0\n"), "{said}");

        let said = udev_says(action, &owned_rules(&[[7; 16]]));
        assert!(said.contains(REGISTERS), "it is not ours: {said}");
        assert!(said.contains("ID_FS_TYPE=bcache\n") && !said.contains("SYSTEMD_READY"), "{said}");
    }
}
