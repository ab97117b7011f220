//! The table of open files, by the handles that the kernel has for them.

use crate::control_file::ControlFile;
use crate::open_limit::{OpenLimit, OpenSlot};
use crate::ranges::RangeLocks;
use crate::server::ClientInfo;
use crate::volume_file::VolumeFile;
use bcached_port::{Uuid, loop_devices};
use fuser::{Errno, FileHandle, FileType, INodeNo};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

#[derive(Clone)]
pub(crate) enum OpenFile {
    Volume(Arc<VolumeFile>),
    Text(Arc<ControlFile>),
    Listing(Arc<Mutex<Vec<ListingEntry>>>),
}

/// An entry of a directory listing.
#[derive(Clone)]
pub(crate) struct ListingEntry {
    pub(crate) number: INodeNo,
    pub(crate) kind: FileType,
    pub(crate) name: String,
}

pub(crate) struct OpenFiles {
    table: RwLock<OpenTable>,
    /// Places for everything except volumes.
    others: Arc<OpenLimit>,
    /// The ranges of each open volume, which all its open files share.
    ranges: Mutex<BTreeMap<Uuid, Weak<RangeLocks>>>,
}

#[derive(Default)]
struct OpenTable {
    next: u64,
    files: BTreeMap<u64, (OpenFile, Option<OpenSlot>)>,
    /// Nothing can be opened any more.
    is_closed: bool,
}

/// How many control files and directories can be open at the same time.
const OTHERS_MAX: usize = 4096;

impl Default for OpenFiles {
    fn default() -> Self {
        let others = OpenLimit::new("control files and directories", OTHERS_MAX);
        Self { table: RwLock::default(), others, ranges: Mutex::default() }
    }
}

impl OpenFiles {
    /// Returns a handle for an open file, unless the mount is gone or too many are open. A volume
    /// already has its place.
    pub(crate) fn insert(&self, file: OpenFile) -> Result<FileHandle, Errno> {
        let is_volume = matches!(file, OpenFile::Volume(_));
        let place = if is_volume { None } else { Some(self.others.take()?) };
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        if table.is_closed {
            return Err(Errno::ESHUTDOWN);
        }
        let handle = table.next;
        table.next += 1;
        table.files.insert(handle, (file, place));
        Ok(FileHandle(handle))
    }

    pub(crate) fn get(&self, handle: FileHandle) -> Option<OpenFile> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.files.get(&handle.0).map(|(file, _)| file.clone())
    }

    pub(crate) fn volume(&self, handle: FileHandle) -> Option<Arc<VolumeFile>> {
        match self.get(handle) {
            Some(OpenFile::Volume(file)) => Some(file),
            _ => None,
        }
    }

    /// Removes a file that its program has closed.
    pub(crate) fn remove(&self, handle: FileHandle) {
        let removed = self.table.write().unwrap_or_else(PoisonError::into_inner).files.remove(&handle.0);
        if let Some((OpenFile::Volume(file), _)) = removed {
            file.close();
        }
    }

    /// Closes everything when the mount is gone.
    pub(crate) fn close_all(&self) {
        let files = {
            let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
            table.is_closed = true;
            std::mem::take(&mut table.files)
        };
        for (file, _) in files.into_values() {
            if let OpenFile::Volume(file) = file {
                file.close();
            }
        }
    }

    /// Returns the ranges of a volume that are being changed.
    pub(crate) fn ranges(&self, volume: Uuid) -> Arc<RangeLocks> {
        let mut all = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, ranges| ranges.strong_count() > 0);
        if let Some(ranges) = all.get(&volume).and_then(Weak::upgrade) {
            return ranges;
        }
        let ranges = Arc::new(RangeLocks::default());
        all.insert(volume, Arc::downgrade(&ranges));
        ranges
    }

    /// Returns the clients that have files open below `mount`, without directory listings.
    pub(crate) fn clients(&self, mount: &Path) -> Vec<ClientInfo> {
        let files: Vec<_> = {
            let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
            table.files.values().map(|(file, _)| file.clone()).collect()
        };
        // Process names are read without holding the lock.
        files.into_iter().filter_map(|file| client(&file, mount)).collect()
    }
}

fn client(file: &OpenFile, mount: &Path) -> Option<ClientInfo> {
    match file {
        OpenFile::Volume(file) => {
            let path = format!("{}/{}", crate::nodes::VOLUMES, file.export.name);
            Some(ClientInfo {
                peer: opener(file.opener, &mount.join(&path), loop_devices::over),
                path,
                export: Some(file.export.name.clone()),
                writing: file.is_writing(),
            })
        }
        OpenFile::Text(file) => Some(ClientInfo {
            peer: process(file.opener),
            path: file.shown.clone(),
            export: None,
            writing: false,
        }),
        OpenFile::Listing(_) => None,
    }
}

/// Names, for people, what has the volume `file` open: a process, or, if that process has ended,
/// the loop device that it set up. `over` returns the loop devices over a file.
fn opener(number: u32, file: &Path, over: impl Fn(&Path) -> Vec<PathBuf>) -> String {
    let is_there = number > 0 && Path::new(&format!("/proc/{number}")).exists();
    let device = if is_there { None } else { over(file).into_iter().next() };
    device.map_or_else(|| process(number), |device| device.display().to_string())
}

/// Names a process, for people. It may have ended since, after passing the open file to another
/// process.
fn process(number: u32) -> String {
    if number == 0 {
        // A kernel thread, as a loop device has one, or a process in a namespace that is not
        // visible from here.
        return "the kernel, or a process that is not visible from here".to_owned();
    }
    match std::fs::read_to_string(format!("/proc/{number}/comm")) {
        Ok(name) => format!("process {number} ({})", name.trim_end()),
        Err(_) => format!("an unknown process (process {number}, which opened it, has ended)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loop device is named as the user of its volume, not `losetup`, which set it up and has
    /// ended. (It used to be named.)
    #[test]
    fn who_has_left_the_volume_to_a_loop_device_is_not_named() {
        let over = |file: &Path| match file.ends_with("tank") {
            true => vec![PathBuf::from("/dev/loop1")],
            false => Vec::new(),
        };
        let named = |number, file: &str| opener(number, Path::new(file), over);
        assert!(named(std::process::id(), "tank").starts_with("process "), "it is there");
        // No process has this number.
        assert_eq!(named(u32::MAX, "tank"), "/dev/loop1");
        assert_eq!(named(0, "tank"), "/dev/loop1");
        assert!(named(u32::MAX, "pond").contains("has ended"));
    }
}
