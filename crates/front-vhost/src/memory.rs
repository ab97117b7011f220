//! A guest's memory: it is mapped as its VMM says, and copied to and from the buffers of requests.
//!
//! This is the only place where bytes of a guest are accessed. They are copied when a request is
//! taken and when it has been answered, so changes by the guest in between do not matter. A request
//! keeps the mapping with which it began until its reply has arrived. Memory that may block,
//! because its file is on a disk or served by another process, is accessed only by the volume's own
//! thread (`ring_path.rs`).
//!
//! The file must be as long as the VMM says. If it can be sealed against shrinking (memfd), it is
//! sealed. A file that cannot (in `/dev/shm`, of huge pages, on a disk) may still be truncated, or
//! the system may have no room for it. Then its client is cut off, see `memory_fault.rs`.

use crate::chain::ChainError;
use crate::memory_fault::WatchedMapping;
use bcached_port::{Buffer, BufferPool};
use rustix::fs::{FileType, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs};
use std::fs::File;
use std::ops::Deref;
use std::sync::Arc;
use thiserror::Error;
use vhost::vhost_user::message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestRegionMmap, MmapRegion};

/// A guest's memory, for reading and writing.
pub(crate) type GuestMemory = vm_memory::GuestMemoryMmap<()>;

/// Everything that is mapped of a guest.
#[derive(Default)]
pub(crate) struct MappedMemory {
    all: GuestMemory,
    /// Its regions.
    watched: Vec<Arc<WatchedMapping>>,
}

impl MappedMemory {
    /// Whether some of it was taken away. To be checked after reading from it, before the data is
    /// used.
    pub(crate) fn is_cut(&self) -> bool {
        self.watched.iter().any(|region| region.is_cut())
    }
}

impl Deref for MappedMemory {
    type Target = GuestMemory;

    fn deref(&self) -> &GuestMemory {
        &self.all
    }
}

/// The most regions of a guest: as many as the kernel's vhost accepts.
pub(crate) const REGIONS_MAX: usize = 509;

/// Why a VMM's memory is refused.
#[derive(Debug, Error)]
pub(crate) enum MemoryError {
    #[error("guest memory must be a file, and this is not one")]
    NotFile,
    #[error("the file of guest memory has {has} bytes, but the region ends at byte {needs}")]
    Short { has: u64, needs: u64 },
    #[error("a guest's memory may have at most {REGIONS_MAX} regions")]
    TooMany,
    #[error("no such region")]
    Unknown,
    #[error("the region cannot be mapped: {0}")]
    Map(String),
}

/// The memory of a guest as described by its VMM.
#[derive(Default)]
pub(crate) struct MemoryTable {
    regions: Vec<MemoryRegion>,
    mapped: Arc<MappedMemory>,
    /// Some of it is, or once was, of a kind that may block. A request may still use former memory.
    has_waited: bool,
}

/// The addresses of a region for the VMM, which uses them for rings, and for the guest.
#[derive(Clone, Copy)]
struct MemoryRegion {
    user: u64,
    guest: u64,
    bytes: u64,
}

impl MemoryTable {
    /// The current mapping. Requests keep it as it is.
    pub(crate) const fn mapped(&self) -> &Arc<MappedMemory> {
        &self.mapped
    }

    /// Replaces all regions with these.
    pub(crate) fn replace(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
    ) -> Result<(), MemoryError> {
        let mut table = Self { has_waited: self.has_waited, ..Self::default() };
        for (region, file) in regions.iter().zip(files) {
            let place = (region.user_addr, region.guest_phys_addr, region.memory_size);
            table.insert(place, file, region.mmap_offset)?;
        }
        *self = table;
        Ok(())
    }

    /// Adds a region.
    pub(crate) fn add(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
    ) -> Result<(), MemoryError> {
        let place = (region.user_addr, region.guest_phys_addr, region.memory_size);
        self.insert(place, file, region.mmap_offset)
    }

    /// Removes a region. It is unmapped when the last request that may access it is done.
    pub(crate) fn remove(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<(), MemoryError> {
        let (all, gone) = self
            .mapped
            .remove_region(GuestAddress(region.guest_phys_addr), region.memory_size)
            .map_err(|_| MemoryError::Unknown)?;
        let mut watched = self.mapped.watched.clone();
        watched.retain(|region| !Arc::ptr_eq(region.mapped(), &gone));
        self.mapped = Arc::new(MappedMemory { all, watched });
        self.regions.retain(|known| known.guest != region.guest_phys_addr);
        Ok(())
    }

    /// Whether all of the memory, now and before, is system memory: then accessing it never blocks
    /// on a disk or another process.
    pub(crate) const fn never_waits(&self) -> bool {
        !self.has_waited
    }

    /// Whether no memory is shared.
    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The guest's address for the VMM's address `user`.
    pub(crate) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user).filter(|offset| *offset < region.bytes)?;
            Some(GuestAddress(region.guest + offset))
        })
    }

    fn insert(
        &mut self,
        (user, guest, bytes): (u64, u64, u64),
        file: File,
        offset: u64,
    ) -> Result<(), MemoryError> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let region = MemoryRegion { user, guest, bytes };
        let never_waits = is_memory(&file);
        let mapped = map(file, offset, (region.guest, region.bytes))?;
        let all = self
            .mapped
            .insert_region(Arc::clone(mapped.mapped()))
            .map_err(|error| MemoryError::Map(error.to_string()))?;
        let watched = self.mapped.watched.iter().cloned().chain([Arc::new(mapped)]).collect();
        self.mapped = Arc::new(MappedMemory { all, watched });
        self.has_waited |= !never_waits;
        self.regions.push(region);
        Ok(())
    }
}

/// Maps `bytes` of a file that another process may also write, and truncate. `guest` is its guest
/// address.
pub(crate) fn map(
    file: File,
    offset: u64,
    (guest, bytes): (u64, u64),
) -> Result<WatchedMapping, MemoryError> {
    let failed = |error: &dyn std::fmt::Display| MemoryError::Map(error.to_string());
    let stat = fstat(&file).map_err(|error| failed(&error))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(MemoryError::NotFile);
    }
    let has = u64::try_from(stat.st_size).unwrap_or(0);
    let needs = offset.checked_add(bytes).ok_or(MemoryError::Short { has, needs: u64::MAX })?;
    if has < needs {
        return Err(MemoryError::Short { has, needs });
    }
    // Seal first, then check the length: it was sufficient just now, but may be short already.
    if seal(&file) {
        let has = fstat(&file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        if has < needs {
            return Err(MemoryError::Short { has, needs });
        }
    }
    let bytes = usize::try_from(bytes).map_err(|error| failed(&error))?;
    let mapping =
        MmapRegion::from_file(FileOffset::new(file, offset), bytes).map_err(|error| failed(&error))?;
    let mapped = GuestRegionMmap::new(mapping, GuestAddress(guest))
        .ok_or_else(|| MemoryError::Map("it ends beyond the last address".to_owned()))?;
    Ok(WatchedMapping::new(Arc::new(mapped)))
}

/// Whether the file is on a file system that consists of memory only (memfd, `/dev/shm`, huge
/// pages).
pub(crate) fn is_memory(file: &File) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const HUGETLBFS: u64 = 0x9584_58f6;
    fstatfs(file).is_ok_and(|found| {
        // The type's width depends on the architecture; the constants have 32 bits.
        u64::try_from(found.f_type).is_ok_and(|kind| matches!(kind & 0xffff_ffff, TMPFS | HUGETLBFS))
    })
}

/// Ensures that the file cannot shrink. Returns whether that is so.
fn seal(file: &File) -> bool {
    let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    sealed || fcntl_add_seals(file, SealFlags::SHRINK).is_ok()
}

/// Pieces of a guest's memory, in order. The addresses come from the guest and may be anything; see
/// [`Segments::are_in`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Segments {
    pieces: Vec<Segment>,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Segment {
    at: GuestAddress,
    bytes: u32,
}

impl Segments {
    /// Their total length in bytes.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn push(&mut self, at: GuestAddress, bytes: u32) {
        self.bytes += u64::from(bytes);
        self.pieces.push(Segment { at, bytes });
    }

    /// Whether all of them are memory of the guest.
    pub(crate) fn are_in(&self, memory: &GuestMemory) -> bool {
        self.pieces.iter().all(|piece| memory.check_range(piece.at, piece.bytes as usize))
    }

    /// Removes the last byte, and returns its address.
    pub(crate) fn take_last_byte(&mut self) -> Option<GuestAddress> {
        let last = self.pieces.last_mut()?;
        last.bytes = last.bytes.checked_sub(1)?;
        let at = last.at.0.checked_add(u64::from(last.bytes))?;
        if last.bytes == 0 {
            self.pieces.pop();
        }
        self.bytes -= 1;
        Some(GuestAddress(at))
    }

    /// Removes the first `N` bytes and returns a copy of them. Returns `None` if there are fewer,
    /// or they are not in memory.
    pub(crate) fn take_front<const N: usize>(&mut self, memory: &GuestMemory) -> Option<[u8; N]> {
        let mut front = [0; N];
        let mut filled = 0;
        let mut used = 0;
        for piece in &mut self.pieces {
            let step = (N - filled).min(piece.bytes as usize);
            memory.read_slice(&mut front[filled..filled + step], piece.at).ok()?;
            filled += step;
            let step = u32::try_from(step).ok()?;
            piece.bytes -= step;
            if piece.bytes > 0 {
                // The sum cannot overflow: the bytes were read from there.
                piece.at = GuestAddress(piece.at.0 + u64::from(step));
                break;
            }
            used += 1;
        }
        if filled < N {
            return None;
        }
        self.pieces.drain(..used);
        self.bytes -= N as u64;
        Some(front)
    }

    /// Returns a buffer with a copy of all of it.
    pub(crate) fn gather(&self, memory: &GuestMemory, stock: &mut BufferPool) -> Result<Buffer, ChainError> {
        let bytes = usize::try_from(self.bytes).map_err(|_| ChainError::Long)?;
        let mut buffer = stock.take(bytes);
        let mut rest = buffer.as_mut_slice();
        for piece in &self.pieces {
            let (part, next) = rest.split_at_mut(piece.bytes as usize);
            memory.read_slice(part, piece.at).map_err(|_| ChainError::Unmapped)?;
            rest = next;
        }
        Ok(buffer)
    }

    /// Copies `content` to its start, as much as fits. Returns how much that was.
    pub(crate) fn scatter(&self, memory: &GuestMemory, content: &[u8]) -> Result<u32, ChainError> {
        let mut rest = content;
        let mut copied = 0;
        for piece in &self.pieces {
            let (part, next) = rest.split_at(rest.len().min(piece.bytes as usize));
            memory.write_slice(part, piece.at).map_err(|_| ChainError::Unmapped)?;
            copied += u32::try_from(part.len()).map_err(|_| ChainError::Long)?;
            rest = next;
        }
        Ok(copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0x1000), 0x1000), (GuestAddress(0x2000), 0x1000)]).unwrap()
    }

    fn segments(pieces: &[(u64, u32)]) -> Segments {
        let mut segments = Segments::default();
        pieces.iter().for_each(|(at, bytes)| segments.push(GuestAddress(*at), *bytes));
        segments
    }

    #[test]
    fn bytes_come_out_in_the_order_in_which_they_were_put_in() {
        let memory = memory();
        // The second lies across two regions.
        let mut pieces = segments(&[(0x1100, 7), (0x1ff0, 32), (0x1000, 1)]);
        assert!(pieces.are_in(&memory));
        let content: Vec<u8> = (1..=40).collect();
        assert_eq!(pieces.scatter(&memory, &content), Ok(40));
        assert_eq!(pieces.gather(&memory, &mut BufferPool::new(0)).unwrap().as_slice(), content);
        assert_eq!(pieces.take_last_byte(), Some(GuestAddress(0x1000)));
        assert_eq!(pieces.take_front::<9>(&memory).unwrap(), content[..9]);
        assert_eq!(
            (pieces.bytes(), pieces.gather(&memory, &mut BufferPool::new(0)).unwrap().as_slice()),
            (30, &content[9..39])
        );
        assert_eq!(pieces.take_front::<31>(&memory), None, "there are 30");
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        let memory = memory();
        for (at, bytes) in [(0xfff, 2), (0x2fff, 2), (u64::MAX, 1), (u64::MAX - 3, 100), (0x5000, 512)] {
            let pieces = segments(&[(at, bytes)]);
            assert!(!pieces.are_in(&memory), "{at:x}");
            assert_eq!(
                pieces.gather(&memory, &mut BufferPool::new(0)).map(drop),
                Err(ChainError::Unmapped),
                "{at:x}"
            );
            assert_eq!(pieces.clone().take_front::<1>(&memory).is_some(), at == 0x2fff, "{at:x}");
        }
        assert!(!segments(&[(0x1000, 1), (0x5000, 1)]).are_in(&memory));
        assert_eq!(segments(&[(u64::MAX, 5)]).take_last_byte(), None);
        assert_eq!(segments(&[(0x1000, 0)]).take_last_byte(), None);
        assert_eq!(segments(&[]).take_last_byte(), None);
    }

    #[test]
    fn memory_is_sealed_against_getting_shorter_and_must_be_there() {
        let file =
            || File::from(memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
        let long = file();
        ftruncate(&long, 0x2000).unwrap();
        let kept = long.try_clone().unwrap();
        map(long, 0x1000, (0, 0x1000)).unwrap();
        assert!(ftruncate(&kept, 0x1000).is_err(), "it would end us");
        let short = file();
        ftruncate(&short, 0x1fff).unwrap();
        assert!(matches!(
            map(short, 0x1000, (0, 0x1000)),
            Err(MemoryError::Short { has: 0x1fff, needs: 0x2000 })
        ));
        let device = File::open("/dev/zero").unwrap();
        assert!(matches!(map(device, 0, (0, 0x1000)), Err(MemoryError::NotFile)));
        assert!(matches!(map(file(), u64::MAX, (0, 2)), Err(MemoryError::Short { .. })));
    }

    #[test]
    fn a_ring_is_found_where_its_vmm_has_it() {
        let mut table = MemoryTable::default();
        let region = |user, guest| VhostUserSingleMemoryRegion::new(guest, 0x1000, user, 0);
        let file = || {
            let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&file, 0x1000).unwrap();
            file
        };
        table.add(&region(0x7000_0000, 0x2000), file()).unwrap();
        table.add(&region(u64::MAX - 0x1000, 0x1000), file()).unwrap();
        assert!(table.add(&region(1, 0x2800), file()).is_err(), "it overlaps");
        assert_eq!(table.guest_address(0x7000_0010), Some(GuestAddress(0x2010)));
        assert_eq!(table.guest_address(u64::MAX - 2), Some(GuestAddress(0x1ffe)));
        assert_eq!((table.guest_address(0x7000_1000), table.guest_address(5)), (None, None));
        table.remove(&region(0x7000_0000, 0x2000)).unwrap();
        assert!(table.remove(&region(0x7000_0000, 0x2000)).is_err());
        assert_eq!(table.guest_address(0x7000_0010), None);
    }
}
