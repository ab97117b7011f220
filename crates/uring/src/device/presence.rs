//! Remembers which device a path has led to, to tell later whether it is still there. The
//! descriptor does not tell: when a disk was pulled, its descriptor stays open and every operation
//! fails, as on a failing disk.
//!
//! The kernel removes a pulled disk from sysfs at once, and does not reuse its device number while
//! a descriptor is open. If the number is reused (another medium in the same drive), the disk
//! sequence number differs (Linux 5.15).

use super::{Device, DeviceIdentity, limits};
use std::path::Path;

/// The identity of a device that was opened, without the claim on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DevicePresence {
    identity: DeviceIdentity,
    /// What sysfs reported about it. `None`: nothing at all, as on a system without sysfs.
    listed: Option<SysfsEntry>,
}

/// A block device as listed in sysfs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SysfsEntry {
    /// The disk sequence number of the disk, or of the partition's disk. `None`: the kernel assigns
    /// none.
    sequence: Option<u64>,
}

impl Device {
    /// Returns the device's presence, which can be asked later whether the device is gone.
    #[must_use]
    pub const fn presence(&self) -> DevicePresence {
        self.presence
    }
}

impl DevicePresence {
    /// For a device that is open: while it is, its number is not reused.
    pub(super) fn of(identity: DeviceIdentity) -> Self {
        Self { identity, listed: listed(identity) }
    }

    /// Returns which device it is, by whatever path.
    #[must_use]
    pub const fn identity(&self) -> DeviceIdentity {
        self.identity
    }

    /// Returns whether `path` leads to it. The target of the path is not opened.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        super::identify(path).is_ok_and(|(_, identity)| identity == self.identity)
    }

    /// Returns true if the device is gone from the system, so open descriptors of it never work
    /// again. Always false for files.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let Some(then) = self.listed else { return false };
        listed(self.identity) != Some(then)
    }
}

fn listed(identity: DeviceIdentity) -> Option<SysfsEntry> {
    let DeviceIdentity::Block { major, minor } = identity else { return None };
    let place = limits::sysfs(major, minor);
    let is_there = place.exists();
    is_there.then(|| SysfsEntry { sequence: limits::disk_sequence(&place) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Access;
    use crate::counters::Counters;
    use crate::prepared_op::PreparedOp;
    use bcached_env::{Buffer, IoErrorKind, Op, Token};
    use std::sync::Arc;

    /// A device is gone if it was listed in sysfs and is no longer, or has another sequence number;
    /// one that was never listed is not.
    #[test]
    fn a_device_is_gone_when_the_system_has_it_no_more() {
        let nobody = DeviceIdentity::Block { major: 511, minor: 99_999 };
        let known = |sequence| DevicePresence { identity: nobody, listed: Some(SysfsEntry { sequence }) };
        assert!(known(None).is_gone() && known(Some(7)).is_gone());
        assert!(!DevicePresence { identity: nobody, listed: None }.is_gone(), "a system without sysfs");

        let all = std::fs::read_dir("/sys/dev/block").into_iter().flatten().flatten();
        let names = all.filter_map(|entry| entry.file_name().into_string().ok());
        for identity in names.filter_map(|name| DeviceIdentity::of_block(&name)) {
            let here = DevicePresence { identity, listed: listed(identity) };
            assert!(here.listed.is_some() && !here.is_gone(), "{here:?}");
            let sequence = Some(u64::MAX);
            assert!(
                DevicePresence { listed: Some(SysfsEntry { sequence }), ..here }.is_gone(),
                "another medium"
            );
        }
    }

    #[test]
    fn a_file_is_where_its_name_leads_and_never_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        for path in [&one, &other] {
            std::fs::write(path, [0; 4096]).expect("a file");
        }
        let here = Device::open(&one, Access::Look).expect("it is there").presence();
        assert!(here.is_at(&one) && !here.is_at(&other) && !here.is_at(&folder.path().join("none")));
        std::fs::rename(&other, &one).expect("another file");
        assert!(!here.is_at(&one) && !here.is_gone());
    }

    /// The kernel ends operations in flight on a pulled disk with the same error as on a failing
    /// one.
    #[test]
    fn an_operation_that_fails_on_a_device_that_is_gone_says_so_and_nothing_is_tried_on_it_any_more() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("a size");
        let mut device = Device::open(file.path(), Access::Own).expect("it is there");
        let end = |device: &Arc<Device>, result| {
            let op = Op::Read { sector: 0, buffer: Buffer::zeroed(4096) };
            match PreparedOp::new(Some(device), Token(1), op, &Counters::default()) {
                Ok(work) => work.finish(result).result,
                Err(refused) => refused.result.map_err(|kind| match kind {
                    IoErrorKind::Gone => kind,
                    _ => panic!("it is refused for {kind}"),
                }),
            }
        };
        let failed = Err(IoErrorKind::Io);
        let ill = Arc::new(device);
        assert_eq!((end(&ill, failed), end(&ill, Ok(()))), (failed, Ok(())), "it is ill, not gone");
        device = Arc::into_inner(ill).expect("nothing is under way");
        device.presence = DevicePresence {
            identity: DeviceIdentity::Block { major: 511, minor: 99_999 },
            listed: Some(SysfsEntry { sequence: None }),
        };
        let pulled = Arc::new(device);
        let gone = Err(IoErrorKind::Gone);
        assert_eq!(end(&pulled, Ok(())), Ok(()), "what has succeeded has");
        assert_eq!((end(&pulled, failed), end(&pulled, Ok(()))), (gone, gone));
    }
}
