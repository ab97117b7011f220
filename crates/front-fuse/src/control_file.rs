//! A control file that a program has open.

use crate::nodes::NamedTree;
use crate::tree::{ControlTree, Errno, TEXT_BYTES_MAX};
use fuser::{ReplyData, ReplyWrite};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) struct ControlFile {
    tree: Arc<dyn ControlTree>,
    path: String,
    /// Its path in the mount, for messages.
    pub(crate) shown: String,
    pub(crate) opener: u32,
    /// The text being read. It is fetched when a read starts at offset 0, so that all pieces are of
    /// one text.
    text: Mutex<Option<Vec<u8>>>,
}

impl ControlFile {
    pub(crate) fn new((name, tree): &NamedTree, path: String, opener: u32) -> Self {
        Self { tree: Arc::clone(tree), shown: format!("{name}/{path}"), path, opener, text: Mutex::new(None) }
    }

    /// Returns a piece of the text. May wait for the daemon.
    pub(crate) fn read(&self, offset: u64, bytes: u32) -> Result<Vec<u8>, Errno> {
        let mut text = self.lock();
        if offset == 0 || text.is_none() {
            *text = Some(self.tree.read(&self.path)?);
        }
        let text = text.as_deref().unwrap_or_default();
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
        let end = start.saturating_add(bytes as usize).min(text.len());
        Ok(text[start..end].to_vec())
    }

    /// Writes a whole text on behalf of a user. The file offset is ignored, as in sysfs. May wait
    /// for the daemon.
    pub(crate) fn write(&self, text: &[u8], user: u32) -> Result<(), Errno> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(Errno::TOOBIG);
        }
        self.tree.write(&self.path, text, user)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        // The value is consistent between any two statements, so a poisoned lock is usable.
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers a program's read with a piece of the text.
pub(crate) fn read_text(file: &ControlFile, (offset, size): (u64, u32), reply: ReplyData) {
    match file.read(offset, size) {
        Ok(text) => reply.data(&text),
        Err(error) => reply.error(fuser::Errno::from_i32(error.raw_os_error())),
    }
}

/// Writes a text for a program of the given user.
pub(crate) fn write_text(file: &ControlFile, (text, user): (&[u8], u32), reply: ReplyWrite) {
    match file.write(text, user) {
        Ok(()) => reply.written(u32::try_from(text.len()).unwrap_or(0)),
        Err(error) => reply.error(fuser::Errno::from_i32(error.raw_os_error())),
    }
}
