//! Opening files: permission checks and their outcome.

use crate::control_file::ControlFile;
use crate::filesystem::is_durable;
use crate::nodes::{NamedTree, Node};
use crate::open_files::OpenFile;
use crate::open_limit::OpenSlot;
use crate::server::ServerShared;
use crate::tree::TreeEntry;
use crate::volume_file::{self, OpenParams, VolumeFile};
use bcached_port::{Peer, Uuid, WriterGeneration};
use fuser::{Errno, FopenFlags, OpenAccMode, OpenFlags, ReplyOpen};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a program that opens for writing waits for another writer to leave. The kernel reports
/// the last close of a file some time after `close` has returned. So of two programs that write one
/// after another, the second may open before the first is seen to close.
const GOING: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The opener and its flags.
#[derive(Clone, Copy)]
pub(crate) struct Opener {
    /// The kernel reports the thread, not the process.
    pub(crate) thread: u32,
    pub(crate) flags: OpenFlags,
}

impl Opener {
    fn writes(self) -> bool {
        self.flags.acc_mode() != OpenAccMode::O_RDONLY
    }

    fn reads(self) -> bool {
        self.flags.acc_mode() != OpenAccMode::O_WRONLY
    }
}

impl ServerShared {
    /// Opens a volume. While another client is writing to it, it can be opened for reading only;
    /// NBD offers it the same way.
    pub(crate) fn open_volume(self: &Arc<Self>, uuid: Uuid, opener: Opener, reply: ReplyOpen) {
        let place = match self.open_limit.take() {
            Ok(place) => place,
            Err(error) => return reply.error(error),
        };
        let number = volume_file::next_number();
        match self.since(uuid, number, opener) {
            Ok(Some(since)) => self.open_now(uuid, (opener, place), (number, since), reply),
            Err(error) => reply.error(error),
            Ok(None) => {
                let shared = Arc::clone(self);
                let wait = move || shared.open_when_free(uuid, (opener, place), number, reply);
                if let Err(error) = self.lifecycle.spawn("fuse-open".to_owned(), wait) {
                    // The reply was dropped with the closure, which answers the program.
                    tracing::warn!(event = "fuse-no-thread", %error, "could not start a thread for an open file");
                }
            }
        }
    }

    /// Returns the moment of the open in the history of the volume's writers, or `None` while
    /// another client is writing.
    fn since(&self, uuid: Uuid, number: u64, opener: Opener) -> Result<Option<WriterGeneration>, Errno> {
        let export = self.nodes.served(uuid).ok_or(Errno::ENOENT)?;
        if opener.writes() && export.read_only {
            return Err(Errno::EROFS);
        }
        let (now, taken) = self.nodes.exports.writing().look(uuid, Peer::File(number));
        Ok((!taken || export.shared || !opener.writes()).then_some(now))
    }

    fn open_when_free(
        self: &Arc<Self>,
        uuid: Uuid,
        (opener, place): (Opener, OpenSlot),
        number: u64,
        reply: ReplyOpen,
    ) {
        self.nodes
            .exports
            .writing()
            .await_leavers(uuid, Peer::File(number), || !self.lifecycle.is_stopping());
        let deadline = Instant::now() + GOING;
        loop {
            match self.since(uuid, number, opener) {
                Ok(Some(since)) => return self.open_now(uuid, (opener, place), (number, since), reply),
                Err(error) => return reply.error(error),
                Ok(None) if self.lifecycle.is_stopping() => return reply.error(Errno::ESHUTDOWN),
                Ok(None) if Instant::now() >= deadline => return reply.error(Errno::EROFS),
                Ok(None) => thread::sleep(LOOK_AGAIN),
            }
        }
    }

    fn open_now(
        &self,
        uuid: Uuid,
        (opener, place): (Opener, OpenSlot),
        client: (u64, WriterGeneration),
        reply: ReplyOpen,
    ) {
        let Some(export) = self.nodes.served(uuid) else { return reply.error(Errno::ENOENT) };
        let Some(route) = export.served.clone() else { return reply.error(Errno::ENOENT) };
        let opening = OpenParams {
            exports: &self.nodes.exports,
            ranges: self.open.ranges(uuid),
            memory: Arc::clone(&self.memory),
            stock: Arc::clone(&self.stock),
            lifecycle: Arc::clone(&self.lifecycle),
            place,
            window: usize::from(self.limits.requests),
            bytes_max: self.limits.file_bytes,
            opener: process_of(opener.thread),
            is_durable: is_durable(opener.flags),
        };
        match VolumeFile::open(opening, export, route, client) {
            Ok(file) => self.opened(OpenFile::Volume(file), reply),
            Err(error) => {
                tracing::warn!(event = "fuse-no-thread", %error, "could not start a thread for an open file");
                reply.error(Errno::ENOMEM);
            }
        }
    }

    /// Opens a control file. Its permissions also apply to root, as in sysfs.
    pub(crate) fn open_text(&self, place: (&NamedTree, String), opener: Opener, reply: ReplyOpen) {
        let (named, path) = place;
        let mode = match named.1.entry(&path) {
            Some(TreeEntry::File { mode }) => mode,
            Some(TreeEntry::Directory) => return reply.error(Errno::EISDIR),
            Some(TreeEntry::Link { .. }) => return reply.error(Errno::ELOOP),
            None => return reply.error(Errno::ENOENT),
        };
        if (opener.writes() && mode & 0o222 == 0) || (opener.reads() && mode & 0o444 == 0) {
            return reply.error(Errno::EACCES);
        }
        let file = ControlFile::new(named, path, process_of(opener.thread));
        self.opened(OpenFile::Text(Arc::new(file)), reply);
    }

    /// Answers an open. Each read and write of a program has to arrive here unchanged, so files use
    /// direct I/O.
    pub(crate) fn opened(&self, file: OpenFile, reply: ReplyOpen) {
        let flags = match &file {
            OpenFile::Listing(_) => FopenFlags::empty(),
            OpenFile::Text(_) => FopenFlags::FOPEN_DIRECT_IO,
            // The engine orders writes, so programs need not wait for each other.
            OpenFile::Volume(_) => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
        };
        match self.open.insert(file) {
            Ok(handle) => reply.opened(handle, flags),
            Err(error) => reply.error(error),
        }
    }

    /// Returns the tree that a node belongs to, and its path in it.
    pub(crate) fn tree_of(&self, node: &Node) -> Option<(&NamedTree, String)> {
        let Node::InTree { tree, path } = node else { return None };
        self.nodes.trees.get(*tree).map(|named| (named, path.clone()))
    }
}

/// Returns the process of a thread, or the given number if it cannot be determined. Threads end, so
/// this is resolved at open time. 0 means that the process is not visible from here.
fn process_of(thread: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    process.and_then(|number| number.trim().parse().ok()).unwrap_or(thread)
}
