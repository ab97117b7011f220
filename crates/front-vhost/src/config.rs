//! The virtio-blk features and configuration space of a guest's disk.
//!
//! `VIRTIO_BLK_F_CONFIG_WCE`, by which a guest switches its disk to write-through, is not offered.
//! A VMM does not repeat that setting when it reconnects. The guest, which then sends no flushes,
//! would lose data that it considers durable.

use bcached_port::Export;
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The logical block size of a guest's disk. The disk's partition table and file systems are made
/// for one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GuestBlockSize {
    /// The volume's own block size, up to 4 KiB, the most that guests accept. So a file system or
    /// partition table that is created through one front end is found through any other. (SeaBIOS
    /// boots only from disks with blocks of 512 bytes, so a volume for that has to be created with
    /// that block size.)
    #[default]
    Volume,
    /// 512 bytes, whatever the volume has. The volume's block is announced as the preferred size.
    Sector,
}

/// The most data segments of a request: with a header and a status they fill a queue of 128 without
/// indirect descriptors.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// The most bytes of a segment.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 256 << 10;
/// The most bytes of a request's data.
pub(crate) const REQUEST_BYTES_MAX: u64 = 32 << 20;
/// A request within the announced limits is never too large.
const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64 <= REQUEST_BYTES_MAX, "bounded by both");
/// The most sectors of one discard or zeroing request: 2 GiB, as in QEMU. So a request stays short
/// enough to be waited for.
const RANGE_SECTORS_MAX: u32 = 1 << 22;
/// Bytes of the configuration space, up to and including the write-zeroes fields.
pub(crate) const SPACE_BYTES: usize = 60;
/// The largest logical block, in sectors, that guests accept: a page.
const BLOCK_SECTORS_MAX: u32 = 8;

/// The features that a VMM may choose from.
pub(crate) fn features(read_only: bool, queues: u16) -> u64 {
    let mut bits = vec![
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        blk::VIRTIO_BLK_F_SIZE_MAX,
        blk::VIRTIO_BLK_F_SEG_MAX,
        blk::VIRTIO_BLK_F_BLK_SIZE,
        blk::VIRTIO_BLK_F_TOPOLOGY,
        blk::VIRTIO_BLK_F_FLUSH,
    ];
    if read_only {
        bits.push(blk::VIRTIO_BLK_F_RO);
    } else {
        bits.extend([blk::VIRTIO_BLK_F_DISCARD, blk::VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    if queues > 1 {
        bits.push(blk::VIRTIO_BLK_F_MQ);
    }
    let device = bits.into_iter().fold(0, |all, bit| all | 1 << bit);
    device | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
}

/// Whether the driver sends flushes. If it does not, each of its writes has to be durable.
pub(crate) const fn flushes(features: u64) -> bool {
    features & 1 << blk::VIRTIO_BLK_F_FLUSH != 0
}

/// Whether notifications are suppressed by event index.
pub(crate) const fn has_event_index(features: u64) -> bool {
    features & 1 << VIRTIO_RING_F_EVENT_IDX != 0
}

/// The configuration space, `virtio_blk_config` in little-endian bytes.
pub(crate) fn space(export: &Export, block: GuestBlockSize, queues: u16) -> [u8; SPACE_BYTES] {
    let preferred = if export.block_sectors.is_power_of_two() { export.block_sectors } else { 1 };
    let logical = match block {
        GuestBlockSize::Volume => preferred.min(BLOCK_SECTORS_MAX),
        GuestBlockSize::Sector => 1,
    };
    // The volume's block in logical blocks, as a power of two; at most 31.
    let exponent = (preferred / logical).trailing_zeros();
    let physical_exponent = u8::try_from(exponent).unwrap_or(0);
    let io_blocks_min = u16::try_from(preferred / logical).unwrap_or(0);
    let mut space = ConfigSpace { bytes: [0; SPACE_BYTES], at: 0 };
    space.put(export.sectors.to_le_bytes());
    space.put(SEGMENT_BYTES_MAX.to_le_bytes());
    space.put(SEGMENTS_MAX.to_le_bytes());
    // Cylinders, heads and sectors: not offered.
    space.put([0; 4]);
    space.put((logical * 512).to_le_bytes());
    // Alignment offset: none. The optimal request size below is 0, too.
    space.put([physical_exponent, 0]);
    space.put(io_blocks_min.to_le_bytes());
    space.put(0_u32.to_le_bytes());
    // The cache is write-back; then an unused byte.
    space.put([1, 0]);
    space.put(queues.to_le_bytes());
    // Discard: sectors, ranges per request, alignment.
    space.put(RANGE_SECTORS_MAX.to_le_bytes());
    space.put(1_u32.to_le_bytes());
    space.put(preferred.to_le_bytes());
    // Write zeroes: sectors, ranges per request, whether space may be deallocated.
    space.put(RANGE_SECTORS_MAX.to_le_bytes());
    space.put(1_u32.to_le_bytes());
    space.put([1, 0, 0, 0]);
    space.bytes
}

/// Fills the space from front to back.
struct ConfigSpace {
    bytes: [u8; SPACE_BYTES],
    at: usize,
}

impl ConfigSpace {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        self.bytes[self.at..self.at + N].copy_from_slice(&field);
        self.at += N;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_port::Uuid;
    use std::mem::offset_of;
    use virtio_bindings::virtio_blk::virtio_blk_config as Layout;

    fn export(block_sectors: u32) -> Export {
        Export {
            name: "tank".to_owned(),
            uuid: Uuid([1; 16]),
            label: String::new(),
            sectors: 0x1234_5678_9abc,
            block_sectors,
            read_only: false,
            shared: false,
            frontends: bcached_port::FrontendSet::default(),
            served: None,
        }
    }

    fn u32_at(space: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(space[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn fields_lie_where_the_header_of_linux_has_them() {
        let space = space(&export(8), GuestBlockSize::Sector, 5);
        assert_eq!(offset_of!(Layout, max_secure_erase_sectors), SPACE_BYTES);
        assert_eq!(&space[..8], &0x1234_5678_9abc_u64.to_le_bytes());
        assert_eq!(u32_at(&space, offset_of!(Layout, size_max)), SEGMENT_BYTES_MAX);
        assert_eq!(u32_at(&space, offset_of!(Layout, seg_max)), SEGMENTS_MAX);
        assert_eq!(u32_at(&space, offset_of!(Layout, blk_size)), 512);
        assert_eq!(space[offset_of!(Layout, physical_block_exp)], 3);
        assert_eq!(space[offset_of!(Layout, min_io_size)], 8);
        assert_eq!(space[offset_of!(Layout, wce)], 1);
        assert_eq!(space[offset_of!(Layout, num_queues)], 5);
        assert_eq!(u32_at(&space, offset_of!(Layout, max_discard_sectors)), RANGE_SECTORS_MAX);
        assert_eq!(u32_at(&space, offset_of!(Layout, max_discard_seg)), 1);
        assert_eq!(u32_at(&space, offset_of!(Layout, discard_sector_alignment)), 8);
        assert_eq!(u32_at(&space, offset_of!(Layout, max_write_zeroes_sectors)), RANGE_SECTORS_MAX);
        assert_eq!(u32_at(&space, offset_of!(Layout, max_write_zeroes_seg)), 1);
        assert_eq!(space[offset_of!(Layout, write_zeroes_may_unmap)], 1);
    }

    #[test]
    fn a_guest_is_told_the_volumes_block_or_sectors_with_a_hint() {
        let told = |sectors, block| {
            let space = space(&export(sectors), block, 1);
            let blocks = u32_at(&space, offset_of!(Layout, blk_size));
            (blocks, space[offset_of!(Layout, physical_block_exp)])
        };
        assert_eq!(told(1, GuestBlockSize::Volume), (512, 0));
        assert_eq!(told(8, GuestBlockSize::Volume), (4096, 0));
        assert_eq!(told(128, GuestBlockSize::Volume), (4096, 4), "no guest takes a block of 64 KiB");
        assert_eq!(told(128, GuestBlockSize::Sector), (512, 7));
        assert_eq!(told(0, GuestBlockSize::Volume), (512, 0), "no block is no reason to panic");
        assert_eq!(told(7, GuestBlockSize::Volume), (512, 0));
    }

    #[test]
    fn a_read_only_disk_says_so_and_offers_nothing_that_changes_it() {
        let has = |features: u64, bit: u32| features >> bit & 1 == 1;
        let (writable, frozen) = (features(false, 1), features(true, 4));
        assert!(has(writable, blk::VIRTIO_BLK_F_DISCARD) && !has(writable, blk::VIRTIO_BLK_F_RO));
        assert!(has(frozen, blk::VIRTIO_BLK_F_RO) && !has(frozen, blk::VIRTIO_BLK_F_WRITE_ZEROES));
        assert!(has(frozen, blk::VIRTIO_BLK_F_MQ) && !has(writable, blk::VIRTIO_BLK_F_MQ));
        assert!(flushes(writable) && !has(writable, blk::VIRTIO_BLK_F_CONFIG_WCE));
    }
}
