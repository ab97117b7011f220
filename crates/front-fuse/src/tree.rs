//! Trees of control files, as the daemon brings them: small texts that are read and written whole, as sysfs has them.

pub use rustix::io::Errno;

/// A tree of control files. Paths are relative to it, without a slash at either end; the empty path is the tree itself.
///
/// All methods are called on threads of their own and may wait, but a few of them that wait for ever stop all trees.
pub trait Tree: Send + Sync {
    /// What is there; `None` if nothing is.
    fn entry(&self, path: &str) -> Option<Entry>;

    /// What a directory holds, by name; `None` if there is no such directory.
    fn list(&self, path: &str) -> Option<Vec<(String, Entry)>>;

    /// The text of a file. A program that reads it in pieces gets pieces of one text; reading from the start again asks
    /// again.
    ///
    /// # Errors
    /// What the program is to be told.
    fn read(&self, path: &str) -> Result<Vec<u8>, Errno>;

    /// Takes a text, in whole as a program of that user has written it in one call, at most [`TEXT_BYTES_MAX`].
    ///
    /// # Errors
    /// What the program is to be told.
    fn write(&self, path: &str, text: &[u8], user: u32) -> Result<(), Errno>;
}

/// What lies under a name of a tree.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Entry {
    /// A directory.
    Directory,
    /// A text.
    File {
        /// Its permissions (0444, 0644, 0200); they are kept also to root, as in sysfs.
        mode: u16,
    },
    /// A symbolic link.
    Link {
        /// Where it leads, relative to where it lies.
        target: String,
    },
}

/// The size that each file claims to have, and the longest text that can be written: a page, as in sysfs.
pub const TEXT_BYTES_MAX: usize = 4096;
