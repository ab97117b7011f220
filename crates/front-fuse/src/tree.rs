//! Trees of control files, provided by the daemon: small texts that are read and written as a
//! whole, as in sysfs.

pub use rustix::io::Errno;

/// A tree of control files. Paths are relative to it, without a slash at either end; the empty path
/// is the tree itself.
///
/// All methods are called on dedicated threads and may wait. If a few calls wait forever, however,
/// all trees stop answering.
pub trait ControlTree: Send + Sync {
    /// Returns the entry at a path, or `None` if there is none.
    fn entry(&self, path: &str) -> Option<TreeEntry>;

    /// Returns the entries of a directory with their names, or `None` if there is no such
    /// directory.
    fn list(&self, path: &str) -> Option<Vec<(String, TreeEntry)>>;

    /// Returns the text of a file. A program that reads it in pieces gets pieces of one text;
    /// reading from the start again calls this again.
    ///
    /// # Errors
    /// The error that the program gets.
    fn read(&self, path: &str) -> Result<Vec<u8>, Errno>;

    /// Writes a text, exactly as a program of the given user has written it in one call, at most
    /// [`TEXT_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// The error that the program gets.
    fn write(&self, path: &str, text: &[u8], user: u32) -> Result<(), Errno>;
}

/// An entry of a tree.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum TreeEntry {
    /// A directory.
    Directory,
    /// A text.
    File {
        /// Its permissions (0444, 0644, 0200), which also apply to root, as in sysfs.
        mode: u16,
    },
    /// A symbolic link.
    Link {
        /// Its target, relative to the link's directory.
        target: String,
    },
}

/// The size that each file reports, and the longest text that can be written: a page, as in sysfs.
pub const TEXT_BYTES_MAX: usize = 4096;
