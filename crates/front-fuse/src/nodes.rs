//! What there is in the mount, by number, and what the kernel is told of it.
//!
//! A number is made of what it stands for, so that it is the same each time without a table of all that was ever seen; the
//! table holds only what the kernel knows at present. Nothing of this is cached by the kernel: each look asks again, so that
//! volumes appear, grow and vanish at once.

use crate::tree::{Entry, TEXT_BYTES_MAX, Tree};
use bcached_port::{Export, ExportTable, SECTOR_BYTES, Uuid};
use fuser::{FileAttr, FileType, INodeNo};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Something in the mount.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Node {
    /// The mount itself.
    Root,
    /// The directory of the volumes.
    Volumes,
    /// A volume.
    Volume(Uuid),
    /// Something in a tree.
    InTree {
        /// Which, in the order of the options.
        tree: usize,
        /// Where in it.
        path: String,
    },
}

/// A tree and its name in the mount.
pub(crate) type NamedTree = (String, Arc<dyn Tree>);

pub(crate) struct Nodes {
    pub(crate) exports: ExportTable,
    pub(crate) trees: Vec<NamedTree>,
    owner: Owner,
    known: Mutex<BTreeMap<u64, Known>>,
}

/// Whose everything is, and since when.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) since: SystemTime,
}

/// What the kernel knows.
struct Known {
    node: Node,
    /// How often it has been told of it, less what it has forgotten.
    lookups: u64,
    /// Of a volume: as it was seen last.
    export: Option<Arc<Export>>,
}

pub(crate) const VOLUMES: &str = "volumes";
const ROOT: u64 = 1;

impl Node {
    pub(crate) fn number(&self) -> INodeNo {
        if *self == Self::Root {
            return INodeNo(ROOT);
        }
        // Without a key of chance: the same in each call.
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        INodeNo(hasher.finish().max(ROOT + 1))
    }

    /// What lies under a name in a directory of a tree.
    pub(crate) fn child(tree: usize, path: &str, name: &str) -> Self {
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        Self::InTree { tree, path }
    }
}

impl Nodes {
    pub(crate) const fn new(exports: ExportTable, trees: Vec<NamedTree>, owner: Owner) -> Self {
        Self { exports, trees, owner, known: Mutex::new(BTreeMap::new()) }
    }

    /// What has that number, if the kernel has been told of it.
    pub(crate) fn node(&self, number: INodeNo) -> Option<Node> {
        if number.0 == ROOT {
            return Some(Node::Root);
        }
        self.lock().get(&number.0).map(|known| known.node.clone())
    }

    /// The kernel is about to be told of it.
    pub(crate) fn remember(&self, node: &Node, export: Option<Arc<Export>>) {
        let mut table = self.lock();
        let known = table.entry(node.number().0).or_insert_with(|| Known {
            node: node.clone(),
            lookups: 0,
            export: None,
        });
        known.lookups += 1;
        known.export = export.or(known.export.take());
    }

    /// The kernel has forgotten that it was told of it so often.
    pub(crate) fn forget(&self, number: INodeNo, lookups: u64) {
        let mut table = self.lock();
        if let Some(known) = table.get_mut(&number.0) {
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups == 0 {
                table.remove(&number.0);
            }
        }
    }

    /// The volume as it is served now.
    pub(crate) fn served(&self, uuid: Uuid) -> Option<Arc<Export>> {
        let seen = self.last_seen(uuid);
        let by_name =
            seen.and_then(|seen| self.exports.by_name(&seen.name)).filter(|export| export.uuid == uuid);
        // Renamed, if not.
        by_name.or_else(|| self.exports.served().into_iter().find(|export| export.uuid == uuid))
    }

    /// The volume as it is served now, or was when it was seen last: an open file outlives its volume.
    pub(crate) fn served_or_seen(&self, uuid: Uuid) -> Option<Arc<Export>> {
        self.served(uuid).or_else(|| self.last_seen(uuid))
    }

    fn last_seen(&self, uuid: Uuid) -> Option<Arc<Export>> {
        self.lock().get(&Node::Volume(uuid).number().0)?.export.clone()
    }

    /// The volumes whose names can be a file's.
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
            // What room it takes on its devices is nobody's business here: it has all of it.
            blocks: export.sectors,
            blksize: block_bytes(export),
            ..self.attributes(&node, FileType::RegularFile, (mode, export.bytes()))
        }
    }

    pub(crate) fn entry(&self, node: &Node, entry: &Entry) -> FileAttr {
        match entry {
            Entry::Directory => self.directory(node),
            Entry::File { mode } => {
                self.attributes(node, FileType::RegularFile, (mode & 0o777, TEXT_BYTES_MAX as u64))
            }
            Entry::Link { target } => self.attributes(node, FileType::Symlink, (0o777, target.len() as u64)),
        }
    }

    fn attributes(&self, node: &Node, kind: FileType, (perm, size): (u16, u64)) -> FileAttr {
        let Owner { user, group, since } = self.owner;
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Known>> {
        // Whole between any two statements.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The volume's block.
pub(crate) fn block_bytes(export: &Export) -> u32 {
    u32::try_from(SECTOR_BYTES).map_or(u32::MAX, |sector| export.block_sectors.max(1).saturating_mul(sector))
}

/// The kind of an entry, for a listing.
pub(crate) const fn kind_of(entry: &Entry) -> FileType {
    match entry {
        Entry::Directory => FileType::Directory,
        Entry::File { .. } => FileType::RegularFile,
        Entry::Link { .. } => FileType::Symlink,
    }
}

/// Whether a file can be called that.
pub(crate) fn is_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']) && name.len() <= 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_has_forgotten_takes_no_room() {
        let owner = Owner { user: 0, group: 0, since: SystemTime::UNIX_EPOCH };
        let nodes = Nodes::new(ExportTable::new(), Vec::new(), owner);
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
