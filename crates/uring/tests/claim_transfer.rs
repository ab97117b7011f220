//! The hand-over of a claim to another process, and of the right to write after it. Inherited
//! claims belong to the whole process: one test, one process.

mod common;

use bcached_uring::device::claim::{self, DeviceClaim};
use bcached_uring::{Access, Device, DeviceErrorKind};
use common::{image, own, skip};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// The same claim as another process has it.
fn passed(claim: &DeviceClaim) -> Arc<DeviceClaim> {
    let descriptors =
        claim.descriptors().into_iter().map(|fd| fd.try_clone_to_owned().expect("some are left"));
    DeviceClaim::from_descriptors(descriptors.collect()).expect("of a device")
}

fn refused(path: &Path) -> DeviceErrorKind {
    Device::open(path, Access::Own).expect_err("somebody has it").kind
}

/// Hands the device from the first owner to the second, and to a third: there are never two owners,
/// and never none.
fn goes_from_hand_to_hand(path: &Path) {
    let first = own(path);
    let [claim] = claim::live().try_into().expect("one device is open");

    // A process that has the claim cannot open the device as long as another one may write.
    claim::inherit(vec![passed(&claim)]).expect("it is a device");
    assert!(matches!(refused(path), DeviceErrorKind::StillWritten));
    claim::settle();

    drop(first);
    assert!(
        matches!(refused(path), DeviceErrorKind::Twice),
        "whoever does not have the claim finds it claimed"
    );
    claim::inherit(vec![passed(&claim)]).expect("it is a device");
    let second = own(path);
    assert!(matches!(refused(path), DeviceErrorKind::Twice), "one process has it once");
    claim::settle();
    drop(claim);
    assert!(matches!(refused(path), DeviceErrorKind::Twice), "the second has it alone");

    // No process has taken it: it returns to its former owner.
    let second = (0..2).fold(second, |second, _| {
        let back = claim::live();
        assert_eq!(back.len(), 1, "the claim is the second's");
        drop(second);
        claim::inherit(back).expect("it is a device");
        let again = own(path);
        claim::settle();
        again
    });

    // It returns to its former owner, whose last operation does not end.
    let back = claim::live();
    claim::inherit(back).expect("it is a device");
    assert!(matches!(refused(path), DeviceErrorKind::StillWritten), "it is only not over yet");
    claim::settle();
    assert!(matches!(refused(path), DeviceErrorKind::StillWritten), "nor later");
    drop(second);
    let second = own(path);
    assert!(matches!(refused(path), DeviceErrorKind::Twice), "now it has been opened again");

    // The same twice in a row: it ends when the last operation has ended, not when everything else
    // has been opened.
    claim::inherit(claim::live()).expect("it is a device");
    claim::settle();
    claim::inherit(claim::live()).expect("it is a device");
    assert!(matches!(refused(path), DeviceErrorKind::StillWritten));
    drop(second);
    let second = own(path);
    claim::settle();

    // The same twice in a row while another device is waited for, so nothing is settled in between.
    let second = (0..2).fold(second, |second, _| {
        let back = claim::live();
        drop(second);
        claim::inherit(back).expect("it is a device");
        own(path)
    });
    assert!(matches!(refused(path), DeviceErrorKind::Twice), "one process has it once");
    claim::settle();

    let [claim] = claim::live().try_into().expect("the claim is the second's");
    claim::inherit(vec![passed(&claim)]).expect("it is a device");
    drop(claim);
    drop(second);
    assert_eq!(claim::live().len(), 1, "what is not opened yet can be passed on, too");
    let third = own(path);
    claim::settle();
    drop(third);
    own(path);
    assert!(claim::live().is_empty(), "nobody has it any more");
}

#[test]
fn a_device_is_never_without_an_owner_and_never_has_two() {
    goes_from_hand_to_hand(image(1 << 20).path());

    let file = image(1 << 20);
    match Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output() {
        Ok(output) if output.status.success() => {
            let device = String::from_utf8(output.stdout).expect("a path");
            goes_from_hand_to_hand(Path::new(device.trim()));
            assert!(
                Command::new("losetup").args(["-d", device.trim()]).status().expect("it is there").success()
            );
        }
        Ok(output) => {
            skip(&format!("no loop device: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        Err(error) => skip(&format!("losetup cannot be run: {error}")),
    }
}

#[test]
fn what_is_no_device_is_no_claim() {
    let (one, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
    assert!(DeviceClaim::from_descriptors(vec![one.into()]).is_err());
    assert!(DeviceClaim::from_descriptors(Vec::new()).is_err());
}
