//! The inodes of the mount, and the attributes that the kernel gets for them.
//!
//! An inode number is a hash of what the inode stands for. So it is stable without a table of
//! everything ever seen; the table holds only the inodes that the kernel currently references. The
//! kernel caches none of this: each access asks again, so that volumes appear, grow and vanish
//! immediately.

use crate::tree::{ControlTree, TEXT_BYTES_MAX, TreeEntry};
use bcached_port::{Export, ExportTable, SECTOR_BYTES, Uuid};
use fuser::{FileAttr, FileType, INodeNo};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// An inode of the mount.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Node {
    /// The mount itself.
    Root,
    /// The directory of the volumes.
    Volumes,
    /// A volume.
    Volume(Uuid),
    /// A node of a tree.
    InTree {
        /// The tree's index, in the order of the options.
        tree: usize,
        /// The path within the tree.
        path: String,
    },
}

/// A tree and its name in the mount.
pub(crate) type NamedTree = (String, Arc<dyn ControlTree>);

pub(crate) struct NodeTable {
    pub(crate) exports: ExportTable,
    pub(crate) trees: Vec<NamedTree>,
    owner: NodeOwner,
    known: Mutex<BTreeMap<u64, KnownInode>>,
}

/// The owner of all nodes, and their time stamp.
#[derive(Clone, Copy)]
pub(crate) struct NodeOwner {
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) since: SystemTime,
}

/// An inode that the kernel references.
struct KnownInode {
    node: Node,
    /// The kernel's lookup count: lookups answered minus those forgotten.
    lookups: u64,
    /// For a volume: its export, as last seen.
    export: Option<Arc<Export>>,
}

pub(crate) const VOLUMES: &str = "volumes";
const ROOT: u64 = 1;

impl Node {
    pub(crate) fn number(&self) -> INodeNo {
        if *self == Self::Root {
            return INodeNo(ROOT);
        }
        // Without a random key: the hash is the same in each call.
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        INodeNo(hasher.finish().max(ROOT + 1))
    }

    /// The node with the given name in a directory of a tree.
    pub(crate) fn child(tree: usize, path: &str, name: &str) -> Self {
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        Self::InTree { tree, path }
    }
}

impl NodeTable {
    pub(crate) const fn new(exports: ExportTable, trees: Vec<NamedTree>, owner: NodeOwner) -> Self {
        Self { exports, trees, owner, known: Mutex::new(BTreeMap::new()) }
    }

    /// Returns the node with that inode number, if the kernel references it.
    pub(crate) fn node(&self, number: INodeNo) -> Option<Node> {
        if number.0 == ROOT {
            return Some(Node::Root);
        }
        self.lock().get(&number.0).map(|known| known.node.clone())
    }

    /// Counts a lookup that the kernel is about to be answered.
    pub(crate) fn remember(&self, node: &Node, export: Option<Arc<Export>>) {
        let mut table = self.lock();
        let known = table.entry(node.number().0).or_insert_with(|| KnownInode {
            node: node.clone(),
            lookups: 0,
            export: None,
        });
        known.lookups += 1;
        known.export = export.or(known.export.take());
    }

    /// Takes away as many lookups as the kernel has forgotten.
    pub(crate) fn forget(&self, number: INodeNo, lookups: u64) {
        let mut table = self.lock();
        if let Some(known) = table.get_mut(&number.0) {
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups == 0 {
                table.remove(&number.0);
            }
        }
    }

    /// Returns the volume as currently served.
    pub(crate) fn served(&self, uuid: Uuid) -> Option<Arc<Export>> {
        let seen = self.last_seen(uuid);
        let by_name =
            seen.and_then(|seen| self.exports.by_name(&seen.name)).filter(|export| export.uuid == uuid);
        // If not found by name, it may have been renamed.
        by_name.or_else(|| self.exports.served().into_iter().find(|export| export.uuid == uuid))
    }

    /// Returns the volume as currently served, or else as last seen: an open file outlives its
    /// volume.
    pub(crate) fn served_or_seen(&self, uuid: Uuid) -> Option<Arc<Export>> {
        self.served(uuid).or_else(|| self.last_seen(uuid))
    }

    fn last_seen(&self, uuid: Uuid) -> Option<Arc<Export>> {
        self.lock().get(&Node::Volume(uuid).number().0)?.export.clone()
    }

    /// The volumes whose names are valid file names.
    pub(crate) fn volumes(&self) -> Vec<Arc<Export>> {
        self.exports.served().into_iter().filter(|export| is_name(&export.name)).collect()
    }

    pub(crate) fn directory(&self, node: &Node) -> FileAttr {
        self.attributes(node, FileType::Directory, (0o755, 0))
    }

    pub(crate) fn volume(&self, export: &Export) -> FileAttr {
        let mode = if export.read_only { 0o400 } else { 0o600 };
        let node = Node::Volume(export.uuid);
        FileAttr {
            // The space used on the volume's devices is not shown here: all of the volume counts as
            // allocated.
            blocks: export.sectors,
            blksize: block_bytes(export),
            ..self.attributes(&node, FileType::RegularFile, (mode, export.bytes()))
        }
    }

    pub(crate) fn entry(&self, node: &Node, entry: &TreeEntry) -> FileAttr {
        match entry {
            TreeEntry::Directory => self.directory(node),
            TreeEntry::File { mode } => {
                self.attributes(node, FileType::RegularFile, (mode & 0o777, TEXT_BYTES_MAX as u64))
            }
            TreeEntry::Link { target } => {
                self.attributes(node, FileType::Symlink, (0o777, target.len() as u64))
            }
        }
    }

    fn attributes(&self, node: &Node, kind: FileType, (perm, size): (u16, u64)) -> FileAttr {
        let NodeOwner { user, group, since } = self.owner;
        FileAttr {
            ino: node.number(),
            size,
            blocks: 0,
            atime: since,
            mtime: since,
            ctime: since,
            crtime: since,
            kind,
            perm,
            nlink: 1,
            uid: user,
            gid: group,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, KnownInode>> {
        // The value is consistent between any two statements, so a poisoned lock is usable.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The volume's block size.
pub(crate) fn block_bytes(export: &Export) -> u32 {
    u32::try_from(SECTOR_BYTES).map_or(u32::MAX, |sector| export.block_sectors.max(1).saturating_mul(sector))
}

/// The file type of an entry, for a directory listing.
pub(crate) const fn kind_of(entry: &TreeEntry) -> FileType {
    match entry {
        TreeEntry::Directory => FileType::Directory,
        TreeEntry::File { .. } => FileType::RegularFile,
        TreeEntry::Link { .. } => FileType::Symlink,
    }
}

/// Whether the name is a valid file name.
pub(crate) fn is_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']) && name.len() <= 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_has_forgotten_takes_no_room() {
        let owner = NodeOwner { user: 0, group: 0, since: SystemTime::UNIX_EPOCH };
        let nodes = NodeTable::new(ExportTable::new(), Vec::new(), owner);
        let node = Node::child(0, "fs", "bcache");
        nodes.remember(&node, None);
        nodes.remember(&node, None);
        assert_eq!(nodes.node(node.number()), Some(node.clone()));
        nodes.forget(node.number(), 1);
        assert_eq!(nodes.node(node.number()), Some(node.clone()));
        nodes.forget(node.number(), 1);
        assert_eq!(nodes.node(node.number()), None);
        assert!(nodes.lock().is_empty());
    }

    #[test]
    fn a_name_that_is_a_path_is_none() {
        assert!(["tank", "a b", "ü"].into_iter().all(is_name));
        assert!(!["", ".", "..", "a/b", "a\0"].into_iter().any(is_name));
    }
}
