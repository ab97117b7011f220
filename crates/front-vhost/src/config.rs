//! What a guest is told of its disk: features and the configuration space of virtio-blk.
//!
//! `VIRTIO_BLK_F_CONFIG_WCE`, by which a guest makes its disk write-through, is not offered: a VMM does not repeat that
//! setting when it connects again, and the guest, which then sends no flushes, would lose what it takes for durable.

use bcached_port::Export;
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The block that a guest must keep to. A disk's partition table and file systems are made for one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GuestBlock {
    /// The volume's own block, up to 4 KiB: no guest takes more. So a file system or partition table that is made by one way in
    /// is found by any other. (SeaBIOS boots from disks with blocks of 512 bytes only: a volume for that is made with such.)
    #[default]
    Volume,
    /// 512 bytes, whatever is below. The volume's block is announced as the better one to use.
    Sector,
}

/// Segments of a request's data, at most: a queue of 128 without indirect descriptors holds these, a header and a status.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// Bytes of a segment, at most.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 256 << 10;
/// Bytes of a request's data, at most.
pub(crate) const REQUEST_BYTES_MAX: u64 = 32 << 20;
/// No request that keeps to what was announced is too large.
const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64 <= REQUEST_BYTES_MAX, "bounded by both");
/// Sectors of one discard or write of zeroes: 2 GiB, as QEMU has it. A request stays short enough to be waited for.
const RANGE_SECTORS_MAX: u32 = 1 << 22;
/// The configuration space up to and with what write-zeroes needs.
pub(crate) const SPACE_BYTES: usize = 60;
/// The largest logical block that guests take: a page.
const BLOCK_SECTORS_MAX: u32 = 8;

/// What a VMM may choose from.
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

/// Whether the driver says when its writes are to be durable. One that does not wants it of each write.
pub(crate) const fn flushes(features: u64) -> bool {
    features & 1 << blk::VIRTIO_BLK_F_FLUSH != 0
}

/// Whether notifications are suppressed by index.
pub(crate) const fn has_event_index(features: u64) -> bool {
    features & 1 << VIRTIO_RING_F_EVENT_IDX != 0
}

/// The configuration space, `virtio_blk_config` in little-endian bytes.
pub(crate) fn space(export: &Export, block: GuestBlock, queues: u16) -> [u8; SPACE_BYTES] {
    let preferred = if export.block_sectors.is_power_of_two() { export.block_sectors } else { 1 };
    let logical = match block {
        GuestBlock::Volume => preferred.min(BLOCK_SECTORS_MAX),
        GuestBlock::Sector => 1,
    };
    // How many logical blocks are one of the volume's, as a power of two; at most 31.
    let exponent = (preferred / logical).trailing_zeros();
    let physical_exponent = u8::try_from(exponent).unwrap_or(0);
    let io_blocks_min = u16::try_from(preferred / logical).unwrap_or(0);
    let mut space = Space { bytes: [0; SPACE_BYTES], at: 0 };
    space.put(export.sectors.to_le_bytes());
    space.put(SEGMENT_BYTES_MAX.to_le_bytes());
    space.put(SEGMENTS_MAX.to_le_bytes());
    // Cylinders, heads and sectors: not offered.
    space.put([0; 4]);
    space.put((logical * 512).to_le_bytes());
    // Alignment offset and optimal size of requests: none.
    space.put([physical_exponent, 0]);
    space.put(io_blocks_min.to_le_bytes());
    space.put(0_u32.to_le_bytes());
    // The cache is write-back; then a byte that nobody uses.
    space.put([1, 0]);
    space.put(queues.to_le_bytes());
    // Discard: sectors, ranges in a request, alignment.
    space.put(RANGE_SECTORS_MAX.to_le_bytes());
    space.put(1_u32.to_le_bytes());
    space.put(preferred.to_le_bytes());
    // Write zeroes: sectors, ranges in a request, whether space may be given up.
    space.put(RANGE_SECTORS_MAX.to_le_bytes());
    space.put(1_u32.to_le_bytes());
    space.put([1, 0, 0, 0]);
    space.bytes
}

/// Filled from front to end.
struct Space {
    bytes: [u8; SPACE_BYTES],
    at: usize,
}

impl Space {
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
            ways: bcached_port::Ways::default(),
            served: None,
        }
    }

    fn u32_at(space: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(space[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn fields_lie_where_the_header_of_linux_has_them() {
        let space = space(&export(8), GuestBlock::Sector, 5);
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
        assert_eq!(told(1, GuestBlock::Volume), (512, 0));
        assert_eq!(told(8, GuestBlock::Volume), (4096, 0));
        assert_eq!(told(128, GuestBlock::Volume), (4096, 4), "no guest takes a block of 64 KiB");
        assert_eq!(told(128, GuestBlock::Sector), (512, 7));
        assert_eq!(told(0, GuestBlock::Volume), (512, 0), "no block is no reason to panic");
        assert_eq!(told(7, GuestBlock::Volume), (512, 0));
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
