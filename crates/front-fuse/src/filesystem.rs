//! The file system operations that the kernel requests. All of this runs on the session threads.
//! Anything that may take time is handed to the volume's open file or to the workers that call
//! trees.

use crate::answer::ReplyTarget;
use crate::control_file::{read_text, write_text};
use crate::file_thread::{FileTask, is_whole, sectors_around};
use crate::lookup::{NOT_AT_ALL, read_link};
use crate::nodes::{Node, VOLUMES};
use crate::open_files::OpenFile;
use crate::opening::Opener;
use crate::server::ServerShared;
use crate::shutdown::RequestGuard;
use crate::volume_file::VolumeFile;
use bcached_port::{Operation, SECTOR_BYTES};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, Filesystem, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{FallocateFlags, OFlags};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

pub(crate) struct FuseFilesystem {
    shared: Arc<ServerShared>,
}

/// The largest read or write request: the kernel's maximum, unless its limit is raised.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

/// A byte range of a volume, clipped to its end.
fn clipped(file: &VolumeFile, offset: u64, bytes: u64) -> std::ops::Range<u64> {
    let end = file.bytes();
    offset.min(end)..offset.saturating_add(bytes).min(end)
}

/// Whether a write must be durable when it completes.
pub(crate) const fn is_durable(flags: OpenFlags) -> bool {
    // O_SYNC includes O_DSYNC; the kernel also sets the flag for a single write with RWF_DSYNC.
    flags.0.cast_unsigned() & OFlags::DSYNC.bits() != 0
}

impl FuseFilesystem {
    pub(crate) const fn new(shared: Arc<ServerShared>) -> Self {
        Self { shared }
    }

    /// Begins a request, unless the server is stopping.
    fn begin(&self) -> Result<RequestGuard, Errno> {
        self.shared.lifecycle.begin().ok_or(Errno::ESHUTDOWN)
    }

    fn volume(&self, handle: FileHandle) -> Result<(Arc<VolumeFile>, RequestGuard), Errno> {
        let file = self.shared.open.volume(handle).ok_or(Errno::EBADF)?;
        Ok((file, self.begin()?))
    }

    /// Runs a call to a tree on a worker thread, which may wait.
    fn ask_tree(&self, ticket: RequestGuard, ask: impl FnOnce(&Arc<ServerShared>) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.shared.workers.run_soon(move || {
            ask(&shared);
            drop(ticket);
        });
    }

    /// Answers on a worker thread if a ticket is given, that is, if a tree is involved; otherwise
    /// immediately.
    fn answer_from(
        &self,
        ticket: Option<RequestGuard>,
        answer: impl FnOnce(&Arc<ServerShared>) + Send + 'static,
    ) {
        match ticket {
            Some(ticket) => self.ask_tree(ticket, answer),
            None => answer(&self.shared),
        }
    }

    fn read_volume(
        &self,
        file: &Arc<VolumeFile>,
        ticket: RequestGuard,
        (offset, size): (u64, u32),
        reply: ReplyData,
    ) {
        let bytes = clipped(file, offset, u64::from(size));
        if bytes.is_empty() {
            return reply.data(&[]);
        }
        let sectors = sectors_around(&bytes);
        let skip = usize::try_from(bytes.start - sectors.start * SECTOR_BYTES).unwrap_or(0);
        let length = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
        file.ask(FileTask::Read {
            sectors,
            answer: ReplyTarget::Read { reply, skip, bytes: length, ticket },
        });
    }

    /// Writes the part of the data that is inside the volume. A program whose write was short
    /// retries with the rest, and then gets the error.
    fn write_volume(
        &self,
        (file, ticket): (&Arc<VolumeFile>, RequestGuard),
        (offset, data): (u64, &[u8]),
        fua: bool,
        reply: ReplyWrite,
    ) {
        let bytes = clipped(file, offset, data.len() as u64);
        if bytes.is_empty() {
            return if data.is_empty() { reply.written(0) } else { reply.error(Errno::ENOSPC) };
        }
        if !file.may_write() {
            return reply.error(Errno::EPERM);
        }
        let length = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
        let data = &data[..length];
        let answer = ReplyTarget::Write { reply, bytes: u32::try_from(length).unwrap_or(0), ticket };
        let sectors = sectors_around(&bytes);
        if is_whole(&bytes) {
            let permit = Some(file.memory_for(length));
            let payload = file.copy_of(data);
            let operation = Operation::Write { sector: sectors.start, payload, fua };
            file.ask(FileTask::Change { operation, sectors, permit, answer });
        } else {
            // The data exists twice; add the sectors at both ends.
            let around = usize::try_from(2 * SECTOR_BYTES).unwrap_or(0);
            let permit = file.memory_for(2 * length + around);
            file.ask(FileTask::WriteBytes { offset, bytes: data.to_vec(), fua, permit, answer });
        }
    }

    /// Zeroes a range. A request to allocate space does nothing, because a volume always has all of
    /// its space.
    fn allocate(
        &self,
        (file, ticket): (&Arc<VolumeFile>, RequestGuard),
        (offset, length): (u64, u64),
        mode: FallocateFlags,
        reply: ReplyEmpty,
    ) {
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !known.contains(mode) || mode.contains(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let keeps_size = mode.contains(FallocateFlags::KEEP_SIZE);
        if !keeps_size && offset.saturating_add(length) > file.bytes() {
            return reply.error(Errno::ENOSPC);
        }
        let may_discard = mode.contains(FallocateFlags::PUNCH_HOLE);
        let bytes = clipped(file, offset, length);
        if bytes.is_empty() || !(may_discard || mode.contains(FallocateFlags::ZERO_RANGE)) {
            return reply.ok();
        }
        if !file.may_write() {
            return reply.error(Errno::EPERM);
        }
        let answer = ReplyTarget::Done { reply, ticket };
        let fua = file.is_durable;
        if is_whole(&bytes) {
            let sectors = sectors_around(&bytes);
            let (sector, count) = (sectors.start, sectors.end - sectors.start);
            let operation = Operation::WriteZeroes { sector, sectors: count, fua, may_discard };
            file.ask(FileTask::Change { operation, sectors, permit: None, answer });
        } else {
            file.ask(FileTask::ZeroBytes { bytes, fua, may_discard, answer });
        }
    }
}

/// Whether the requested attributes equal the current ones. Programs cannot change attributes,
/// except times, which are not stored.
fn is_as_before(now: &FileAttr, (mode, user, group): (Option<u32>, Option<u32>, Option<u32>)) -> bool {
    mode.is_none_or(|mode| mode & 0o7777 == u32::from(now.perm))
        && user.is_none_or(|user| user == now.uid)
        && group.is_none_or(|group| group == now.gid)
}

macro_rules! or_refuse {
    ($result:expr, $reply:expr) => {
        match $result {
            Ok(value) => value,
            Err(error) => return $reply.error(error),
        }
    };
}

impl Filesystem for FuseFilesystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // If the kernel lacks a capability, it reports that, and we do without.
        let _: Result<_, _> = config.set_max_write(REQUEST_BYTES_MAX);
        if let Err(most) = config.set_max_readahead(REQUEST_BYTES_MAX) {
            let _: Result<_, _> = config.set_max_readahead(most);
        }
        for wanted in [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_PARALLEL_DIROPS] {
            let _: Result<_, _> = config.add_capabilities(wanted);
        }
        let _: Result<_, _> = config.set_max_background(self.shared.limits.requests);
        let _: Result<_, _> = config.set_congestion_threshold(self.shared.limits.requests);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some(name) = name.to_str() else { return reply.error(Errno::ENOENT) };
        let nodes = &self.shared.nodes;
        let node = match nodes.node(parent) {
            Some(Node::Root) if name == VOLUMES => {
                let attributes = nodes.directory(&Node::Volumes);
                nodes.remember(&Node::Volumes, None);
                return reply.entry(&NOT_AT_ALL, &attributes, Generation(0));
            }
            Some(Node::Root) => match nodes.trees.iter().position(|(tree, _)| tree == name) {
                Some(tree) => Node::InTree { tree, path: String::new() },
                None => return reply.error(Errno::ENOENT),
            },
            Some(Node::Volumes) => {
                let Some(export) = nodes.exports.by_name(name) else { return reply.error(Errno::ENOENT) };
                let attributes = nodes.volume(&export);
                nodes.remember(&Node::Volume(export.uuid), Some(export));
                return reply.entry(&NOT_AT_ALL, &attributes, Generation(0));
            }
            Some(Node::InTree { tree, path }) => Node::child(tree, &path, name),
            Some(Node::Volume(_)) | None => return reply.error(Errno::ENOENT),
        };
        let ticket = or_refuse!(self.begin(), reply);
        self.ask_tree(ticket, move |shared| shared.look_up_in_tree(&node, reply));
    }

    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        self.shared.nodes.forget(number, lookups);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let node = or_refuse!(self.shared.nodes.node(number).ok_or(Errno::ENOENT), reply);
        let in_tree = matches!(node, Node::InTree { .. });
        let ticket = or_refuse!(in_tree.then(|| self.begin()).transpose(), reply);
        self.answer_from(ticket, move |shared| match shared.entry_of(&node) {
            Ok(attributes) => reply.attr(&NOT_AT_ALL, &attributes),
            Err(error) => reply.error(error),
        });
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let node = or_refuse!(self.shared.nodes.node(number).ok_or(Errno::ENOENT), reply);
        let in_tree = matches!(node, Node::InTree { .. });
        let ticket = or_refuse!(in_tree.then(|| self.begin()).transpose(), reply);
        self.answer_from(ticket, move |shared| {
            let now = or_refuse!(shared.entry_of(&node), reply);
            // A text has no size to set, but `echo > FILE` first sets the size to 0, as in sysfs.
            let keeps_size = in_tree || size.is_none_or(|size| size == now.size);
            if keeps_size && is_as_before(&now, (mode, user, group)) {
                reply.attr(&NOT_AT_ALL, &now);
            } else {
                reply.error(Errno::EPERM);
            }
        });
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        let node = or_refuse!(self.shared.nodes.node(number).ok_or(Errno::ENOENT), reply);
        let ticket = or_refuse!(self.begin(), reply);
        self.ask_tree(ticket, move |shared| match shared.tree_of(&node) {
            Some(((_, tree), path)) => read_link(tree, &path, reply),
            None => reply.error(Errno::EINVAL),
        });
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let node = or_refuse!(self.shared.nodes.node(number).ok_or(Errno::ENOENT), reply);
        let ticket = or_refuse!(self.begin(), reply);
        let opener = Opener { thread: request.pid(), flags };
        match node {
            Node::Volume(uuid) => self.shared.open_volume(uuid, opener, reply),
            Node::Root | Node::Volumes => reply.error(Errno::EISDIR),
            Node::InTree { .. } => self.ask_tree(ticket, move |shared| match shared.tree_of(&node) {
                Some(place) => shared.open_text(place, opener, reply),
                None => reply.error(Errno::ENOENT),
            }),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let ticket = or_refuse!(self.begin(), reply);
        match self.shared.open.get(handle) {
            Some(OpenFile::Volume(file)) => self.read_volume(&file, ticket, (offset, size), reply),
            Some(OpenFile::Text(file)) => {
                self.ask_tree(ticket, move |_| read_text(&file, (offset, size), reply));
            }
            Some(OpenFile::Listing(_)) | None => reply.error(Errno::EBADF),
        }
    }

    fn write(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let ticket = or_refuse!(self.begin(), reply);
        match self.shared.open.get(handle) {
            Some(OpenFile::Volume(file)) => {
                self.write_volume((&file, ticket), (offset, data), is_durable(flags), reply);
            }
            Some(OpenFile::Text(file)) => {
                // One byte more than the maximum is enough to refuse the text.
                let text = data[..data.len().min(crate::tree::TEXT_BYTES_MAX + 1)].to_vec();
                let user = request.uid();
                self.ask_tree(ticket, move |_| write_text(&file, (&text, user), reply));
            }
            Some(OpenFile::Listing(_)) | None => reply.error(Errno::EBADF),
        }
    }

    /// Closing has nothing to wait for. After ENOSYS the kernel does not ask again.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.shared.open.remove(handle);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        if matches!(self.shared.open.get(handle), Some(OpenFile::Text(_))) {
            return reply.ok();
        }
        let (file, ticket) = or_refuse!(self.volume(handle), reply);
        file.ask(FileTask::Flush { answer: ReplyTarget::Done { reply, ticket } });
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (file, ticket) = or_refuse!(self.volume(handle), reply);
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        self.allocate((&file, ticket), (offset, length), mode, reply);
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let (file, ticket) = or_refuse!(self.volume(handle), reply);
        // The kernel handles all other values itself.
        let data = match whence {
            SEEK_DATA => true,
            SEEK_HOLE => false,
            _ => return reply.error(Errno::EINVAL),
        };
        let offset = or_refuse!(u64::try_from(offset).map_err(|_| Errno::ENXIO), reply);
        file.ask(FileTask::Seek { offset, data, answer: ReplyTarget::Seek { reply, ticket } });
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.shared.opened(OpenFile::Listing(Arc::default()), reply);
    }

    fn readdir(&self, _: &Request, number: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        let Some(OpenFile::Listing(lines)) = self.shared.open.get(handle) else {
            return reply.error(Errno::EBADF);
        };
        let node = or_refuse!(self.shared.nodes.node(number).ok_or(Errno::ENOENT), reply);
        if !matches!(node, Node::InTree { .. }) {
            return self.shared.read_directory(&node, &lines, offset, reply);
        }
        let ticket = or_refuse!(self.begin(), reply);
        self.ask_tree(ticket, move |shared| shared.read_directory(&node, &lines, offset, reply));
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.shared.open.remove(handle);
        reply.ok();
    }

    fn statfs(&self, _: &Request, number: INodeNo, reply: ReplyStatfs) {
        self.shared.room(self.shared.nodes.node(number).as_ref(), reply);
    }

    // Volumes are added and removed by the daemon, not by programs in this mount.

    fn create(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        reply.error(Errno::EPERM);
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EPERM);
    }

    fn link(&self, _: &Request, _: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }
}
