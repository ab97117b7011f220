//! What programs have open, by the handles that the kernel has for it.

use crate::control_file::TextFile;
use crate::open_limit::{Place, Places};
use crate::ranges::Ranges;
use crate::server::Client;
use crate::volume_file::VolumeFile;
use bcached_port::{Uuid, loop_devices};
use fuser::{Errno, FileHandle, FileType, INodeNo};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

#[derive(Clone)]
pub(crate) enum OpenFile {
    Volume(Arc<VolumeFile>),
    Text(Arc<TextFile>),
    Listing(Arc<Mutex<Vec<Listed>>>),
}

/// A line of a directory.
#[derive(Clone)]
pub(crate) struct Listed {
    pub(crate) number: INodeNo,
    pub(crate) kind: FileType,
    pub(crate) name: String,
}

pub(crate) struct OpenFiles {
    table: RwLock<Table>,
    /// Of all but volumes.
    others: Arc<Places>,
    /// Of each volume that is open; all its files share it.
    ranges: Mutex<BTreeMap<Uuid, Weak<Ranges>>>,
}

#[derive(Default)]
struct Table {
    next: u64,
    files: BTreeMap<u64, (OpenFile, Option<Place>)>,
    /// Nothing is opened any more.
    is_closed: bool,
}

/// Control files and directories that can be open at once.
const OTHERS_MAX: usize = 4096;

impl Default for OpenFiles {
    fn default() -> Self {
        let others = Places::new("control files and directories", OTHERS_MAX);
        Self { table: RwLock::default(), others, ranges: Mutex::default() }
    }
}

impl OpenFiles {
    /// A handle for it, unless the mount is gone or too much is open. A volume has its place already.
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

    /// The program has closed it.
    pub(crate) fn remove(&self, handle: FileHandle) {
        let removed = self.table.write().unwrap_or_else(PoisonError::into_inner).files.remove(&handle.0);
        if let Some((OpenFile::Volume(file), _)) = removed {
            file.close();
        }
    }

    /// The mount is gone, and what was open with it.
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

    /// What of a volume is being changed.
    pub(crate) fn ranges(&self, volume: Uuid) -> Arc<Ranges> {
        let mut all = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, ranges| ranges.strong_count() > 0);
        if let Some(ranges) = all.get(&volume).and_then(Weak::upgrade) {
            return ranges;
        }
        let ranges = Arc::new(Ranges::default());
        all.insert(volume, Arc::downgrade(&ranges));
        ranges
    }

    /// Who has what open below `mount`; listings are not told of.
    pub(crate) fn clients(&self, mount: &Path) -> Vec<Client> {
        let files: Vec<_> = {
            let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
            table.files.values().map(|(file, _)| file.clone()).collect()
        };
        // Names of processes are read without the lock.
        files.into_iter().filter_map(|file| client(&file, mount)).collect()
    }
}

fn client(file: &OpenFile, mount: &Path) -> Option<Client> {
    match file {
        OpenFile::Volume(file) => {
            let path = format!("{}/{}", crate::nodes::VOLUMES, file.export.name);
            Some(Client {
                peer: opener(file.opener, &mount.join(&path), loop_devices::over),
                path,
                export: Some(file.export.name.clone()),
                writing: file.is_writing(),
            })
        }
        OpenFile::Text(file) => Some(Client {
            peer: process(file.opener),
            path: file.shown.clone(),
            export: None,
            writing: false,
        }),
        OpenFile::Listing(_) => None,
    }
}

/// Who has the volume `file` open, for people: a process, or the loop device that one has left it to which has ended. `over` tells of those.
fn opener(number: u32, file: &Path, over: impl Fn(&Path) -> Vec<PathBuf>) -> String {
    let is_there = number > 0 && Path::new(&format!("/proc/{number}")).exists();
    let device = if is_there { None } else { over(file).into_iter().next() };
    device.map_or_else(|| process(number), |device| device.display().to_string())
}

/// A process, for people. It may have ended since, and another have the file open that it was given to.
fn process(number: u32) -> String {
    if number == 0 {
        // A thread of the kernel, as a loop device has one, or somebody in a namespace that we cannot see.
        return "the kernel, or a process that cannot be seen from here".to_owned();
    }
    match std::fs::read_to_string(format!("/proc/{number}/comm")) {
        Ok(name) => format!("process {number} ({})", name.trim_end()),
        Err(_) => format!("whoever has it of process {number}, which has ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `losetup` has ended when the device is there, and was named as the one who uses the volume.
    #[test]
    fn who_has_left_the_volume_to_a_loop_device_is_not_named() {
        let over = |file: &Path| match file.ends_with("tank") {
            true => vec![PathBuf::from("/dev/loop1")],
            false => Vec::new(),
        };
        let named = |number, file: &str| opener(number, Path::new(file), over);
        assert!(named(std::process::id(), "tank").starts_with("process "), "it is there");
        // No process has such a number.
        assert_eq!(named(u32::MAX, "tank"), "/dev/loop1");
        assert_eq!(named(0, "tank"), "/dev/loop1");
        assert!(named(u32::MAX, "pond").contains("has ended"));
    }
}
