//! What lies where, and what directories hold.

use crate::nodes::{Node, VOLUMES, block_bytes, kind_of};
use crate::open_files::Listed;
use crate::server::Shared;
use crate::tree::{Entry, Tree};
use fuser::{Errno, FileAttr, FileType, Generation, ReplyData, ReplyDirectory, ReplyEntry, ReplyStatfs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Nothing is cached: sizes change, and so do volumes.
pub(crate) const NOT_AT_ALL: Duration = Duration::ZERO;
const NAME_BYTES_MAX: u32 = 255;

impl Shared {
    /// What the kernel is told of it.
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

    /// What lies there, if something does.
    pub(crate) fn look_up_in_tree(&self, node: &Node, reply: ReplyEntry) {
        match self.entry_of(node) {
            Ok(attributes) => {
                self.nodes.remember(node, None);
                reply.entry(&NOT_AT_ALL, &attributes, Generation(0));
            }
            Err(error) => reply.error(error),
        }
    }

    /// What a directory holds; `None` if it is gone.
    fn list(&self, node: &Node) -> Option<Vec<Listed>> {
        let listed =
            |node: &Node, kind, name: &str| Listed { number: node.number(), kind, name: name.to_owned() };
        let mut lines = vec![
            listed(node, FileType::Directory, "."),
            // Of no use to anybody; the kernel knows better.
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

    /// The next lines of a listing.
    pub(crate) fn read_directory(
        &self,
        node: &Node,
        lines: &Mutex<Vec<Listed>>,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        // From the start it is looked at anew; what follows is of one look.
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

    /// How much there is: of a volume, or of all.
    pub(crate) fn room(&self, node: Option<&Node>, reply: ReplyStatfs) {
        let one = match node {
            Some(Node::Volume(uuid)) => self.nodes.served_or_seen(*uuid),
            _ => None,
        };
        let count = self.nodes.exports.served().len() as u64;
        // A loop device takes the block of the file system for the least that is worth a discard.
        let block = one.as_ref().map_or(4096, |export| block_bytes(export));
        let bytes = one.map_or_else(
            || self.nodes.exports.served().iter().map(|export| export.bytes()).sum(),
            |export| export.bytes(),
        );
        reply.statfs(bytes / u64::from(block), 0, 0, count, 0, block, NAME_BYTES_MAX, block);
    }
}

/// Where a link leads.
pub(crate) fn read_link(tree: &Arc<dyn Tree>, path: &str, reply: ReplyData) {
    match tree.entry(path) {
        Some(Entry::Link { target }) => reply.data(target.as_bytes()),
        Some(_) => reply.error(Errno::EINVAL),
        None => reply.error(Errno::ENOENT),
    }
}
