//! Lookups in the mount, and the contents of directories.

use crate::nodes::{Node, VOLUMES, block_bytes, kind_of};
use crate::open_files::ListingEntry;
use crate::server::ServerShared;
use crate::tree::{ControlTree, TreeEntry};
use fuser::{Errno, FileAttr, FileType, Generation, ReplyData, ReplyDirectory, ReplyEntry, ReplyStatfs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The kernel caches no entries or attributes: volumes appear and vanish, and their sizes change.
pub(crate) const NOT_AT_ALL: Duration = Duration::ZERO;
const NAME_BYTES_MAX: u32 = 255;

impl ServerShared {
    /// Returns the attributes that the kernel gets for a node.
    pub(crate) fn entry_of(&self, node: &Node) -> Result<FileAttr, Errno> {
        match node {
            Node::Root | Node::Volumes => Ok(self.nodes.directory(node)),
            Node::Volume(uuid) => {
                self.nodes.served_or_seen(*uuid).map(|export| self.nodes.volume(&export)).ok_or(Errno::ENOENT)
            }
            Node::InTree { .. } => {
                let ((_, tree), path) = self.tree_of(node).ok_or(Errno::ENOENT)?;
                tree.entry(&path).map(|entry| self.nodes.entry(node, &entry)).ok_or(Errno::ENOENT)
            }
        }
    }

    /// Answers a lookup in a tree.
    pub(crate) fn look_up_in_tree(&self, node: &Node, reply: ReplyEntry) {
        match self.entry_of(node) {
            Ok(attributes) => {
                self.nodes.remember(node, None);
                reply.entry(&NOT_AT_ALL, &attributes, Generation(0));
            }
            Err(error) => reply.error(error),
        }
    }

    /// Lists a directory. Returns `None` if it no longer exists.
    fn list(&self, node: &Node) -> Option<Vec<ListingEntry>> {
        let listed = |node: &Node, kind, name: &str| ListingEntry {
            number: node.number(),
            kind,
            name: name.to_owned(),
        };
        let mut lines = vec![
            listed(node, FileType::Directory, "."),
            // Unused: the kernel knows the parent directory.
            listed(node, FileType::Directory, ".."),
        ];
        match node {
            Node::Root => {
                lines.push(listed(&Node::Volumes, FileType::Directory, VOLUMES));
                for (index, (name, _)) in self.nodes.trees.iter().enumerate() {
                    let node = Node::InTree { tree: index, path: String::new() };
                    lines.push(listed(&node, FileType::Directory, name));
                }
            }
            Node::Volumes => lines.extend(
                self.nodes
                    .volumes()
                    .iter()
                    .map(|export| listed(&Node::Volume(export.uuid), FileType::RegularFile, &export.name)),
            ),
            Node::InTree { tree: index, .. } => {
                let ((_, tree), path) = self.tree_of(node)?;
                for (name, entry) in tree.list(&path)? {
                    lines.push(listed(&Node::child(*index, &path, &name), kind_of(&entry), &name));
                }
            }
            Node::Volume(_) => return None,
        }
        Some(lines)
    }

    /// Answers with the next entries of a directory.
    pub(crate) fn read_directory(
        &self,
        node: &Node,
        lines: &Mutex<Vec<ListingEntry>>,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        // Reading from offset 0 takes a new snapshot; later reads continue that one.
        if offset == 0 {
            match self.list(node) {
                Some(now) => *lines = now,
                None => return reply.error(Errno::ENOENT),
            }
        }
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, line) in (1..).zip(lines.iter()).skip(first) {
            if reply.add(line.number, index, line.kind, &line.name) {
                break;
            }
        }
        reply.ok();
    }

    /// Answers `statfs` with the size of one volume, or of all of them.
    pub(crate) fn room(&self, node: Option<&Node>, reply: ReplyStatfs) {
        let one = match node {
            Some(Node::Volume(uuid)) => self.nodes.served_or_seen(*uuid),
            _ => None,
        };
        let count = self.nodes.exports.served().len() as u64;
        // A loop device takes the file system's block size as its discard granularity.
        let block = one.as_ref().map_or(4096, |export| block_bytes(export));
        let bytes = one.map_or_else(
            || self.nodes.exports.served().iter().map(|export| export.bytes()).sum(),
            |export| export.bytes(),
        );
        reply.statfs(bytes / u64::from(block), 0, 0, count, 0, block, NAME_BYTES_MAX, block);
    }
}

/// Answers with the target of a link.
pub(crate) fn read_link(tree: &Arc<dyn ControlTree>, path: &str, reply: ReplyData) {
    match tree.entry(path) {
        Some(TreeEntry::Link { target }) => reply.data(target.as_bytes()),
        Some(_) => reply.error(Errno::EINVAL),
        None => reply.error(Errno::ENOENT),
    }
}
