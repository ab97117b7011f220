//! Finds marks that need more than a fixed offset: those at a device's end, those of two bytes,
//! those that several types share, and copies.

use super::{MDADM, SignatureClass, SignatureScan};
use crate::device;
use bcached_control::failure::Failure;
use bcached_format::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, units::bytes_of};

use SignatureClass::Content;

/// Finds all of them. Those that others may hide come last.
pub(super) fn find(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    ext(found)?;
    swap(found)?;
    md(found)?;
    firmware_raid(found)?;
    drbd(found)?;
    zfs(found)?;
    gfs(found)?;
    squashfs(found)?;
    ufs_and_sysv(found)?;
    small_marks(found)?;
    nilfs_at_end(found)?;
    xfs_log(found)?;
    bare_fat(found)?;
    bcachefs(found)?;
    copies(found)
}

fn le16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    le16(bytes, at).swap_bytes()
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    le32(bytes, at).swap_bytes()
}

/// The ext family shares a magic; the features tell which one it is, as for a mount.
fn ext(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const SUPERBLOCK: u64 = 0x400;
    const MAGIC: usize = 0x38;
    const HAS_JOURNAL: u32 = 0x4;
    const JOURNAL_DEVICE: u32 = 0x8;
    const TEST_FILESYSTEM: u32 = 0x4;
    // What ext3 supports: filetype, recover, meta_bg; sparse_super, large_file, btree_dir.
    const EXT3_INCOMPAT: u32 = 0x16;
    const EXT3_RO_COMPAT: u32 = 0x7;
    let bytes = device::read(found.device, SUPERBLOCK, 0x200)?;
    if bytes.get(MAGIC..MAGIC + 2) != Some(&[0x53, 0xEF]) {
        return Ok(());
    }
    let [compat, incompat, ro_compat] = [0x5C, 0x60, 0x64].map(|at| le32(&bytes, at));
    let kind = if incompat & JOURNAL_DEVICE != 0 {
        "jbd"
    } else if le32(&bytes, 0x160) & TEST_FILESYSTEM != 0 {
        "ext4dev"
    } else if incompat & !EXT3_INCOMPAT != 0 || ro_compat & !EXT3_RO_COMPAT != 0 {
        "ext4"
    } else if compat & HAS_JOURNAL != 0 {
        "ext3"
    } else {
        "ext2"
    };
    found.mark(kind, Content, SUPERBLOCK + MAGIC as u64, 2);
    Ok(())
}

/// The mark is in the last ten bytes of the first page, whatever page size the machine had.
fn swap(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    for page in [4096, 8192, 16384, 32768, 65536] {
        for magic in [b"SWAPSPACE2", b"SWAP-SPACE"] {
            found.mark_if("swap", Content, page - 10, magic)?;
        }
        found.mark_if("swsuspend", Content, page - 10, b"LINHIB0001")?;
        for magic in [b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND"] {
            found.mark_if("swsuspend", Content, page - 10, magic)?;
        }
    }
    Ok(())
}

/// md has four places for its superblock; the oldest kind is in the byte order of its machine.
fn md(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const KIND: &str = "linux_raid_member";
    const MAGIC: &[u8] = b"\xfc\x4e\x2b\xa9";
    const SWAPPED: &[u8] = b"\xa9\x2b\x4e\xfc";
    found.mark_if(KIND, MDADM, 0, MAGIC)?;
    found.mark_if(KIND, MDADM, 0x1000, MAGIC)?;
    let sectors = found.device.info().sectors;
    if sectors < 128 {
        return Ok(());
    }
    for magic in [MAGIC, SWAPPED] {
        found.mark_if(KIND, MDADM, (sectors / 128 - 1) * 128 * 512, magic)?;
    }
    found.mark_if(KIND, MDADM, ((sectors - 16) & !7) * 512, MAGIC)
}

/// Firmware RAIDs keep their metadata in the last sectors.
fn firmware_raid(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const VIA: usize = 51;
    const PROMISE: [u64; 13] = [16, 63, 255, 256, 399, 591, 675, 735, 911, 951, 974, 991, 3087];
    found.mark_before_end("ddf_raid_member", MDADM, 512, b"\xde\x11\xde\x11")?;
    found.mark_before_end("ddf_raid_member", MDADM, 257 * 512, b"\xde\x11\xde\x11")?;
    for block in [512, 4096] {
        found.mark_before_end("isw_raid_member", MDADM, 2 * block, b"Intel Raid ISM Cfg Sig. ")?;
    }
    found.mark_before_end("lsi_mega_raid_member", Content, 512, b"$XIDE$")?;
    found.mark_before_end("jmicron_raid_member", Content, 512, b"JM")?;
    found.mark_before_end("nvidia_raid_member", Content, 1024, b"NVIDIA  ")?;
    found.mark_before_end("adaptec_raid_member", Content, 512, b"\x37\xfc\x4d\x1e")?;
    found.mark_before_end("silicon_medley_raid_member", Content, 512 - 0x60, b"\0\0\0\x2f")?;
    for magic in [b"\xf3\x16\x78\x5a", b"\xfd\x16\x78\x5a"] {
        found.mark_before_end("hpt45x_raid_member", Content, 11 * 512, magic)?;
    }
    for sectors in PROMISE {
        let at = sectors * 512;
        found.mark_before_end("promise_fasttrack_raid_member", Content, at, b"Promise Technology, Inc.")?;
    }
    let Some(at) = device::length(found.device).checked_sub(512) else { return Ok(()) };
    let via = device::read(found.device, at, VIA)?;
    // The mark is that of a boot sector: a version and a checksum distinguish it.
    let is_via = |via: &[u8; VIA]| {
        let sum = via[..VIA - 1].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        via[..2] == [0x55, 0xAA] && via[2] <= 2 && sum == via[VIA - 1]
    };
    if <&[u8; VIA]>::try_from(&via[..]).is_ok_and(is_via) {
        found.mark("via_raid_member", Content, at, 2);
    }
    Ok(())
}

/// DRBD's internal metadata is the last block of 4 KiB.
fn drbd(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const BLOCK: u64 = 4096;
    const MAGIC: u64 = 60;
    let end = device::length(found.device);
    let mut ends = vec![end, end / BLOCK * BLOCK];
    ends.dedup();
    for end in ends {
        // Of 0.7, of 8, of 8.4 that was not taken down in order, of 9.
        for last in [0x6a, 0x6b, 0x6c, 0x6d] {
            let Some(at) = end.checked_sub(BLOCK - MAGIC) else { continue };
            found.mark_if("drbd", Content, at, &[0x83, 0x74, 0x02, last])?;
        }
    }
    Ok(())
}

/// ZFS has four labels, two at each end, whose only mark is the ring of uberblocks. Any one label
/// is enough to import a pool. So all four are erased together and entirely: nothing but the name
/// of what was there is left.
fn zfs(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const KIND: &str = "zfs_member";
    const LABEL: u64 = 256 << 10;
    const RING: u64 = 128 << 10;
    const MAGIC: u64 = 0x00BA_B10C;
    let end = device::length(found.device) / LABEL * LABEL;
    if end < 4 * LABEL {
        return Ok(());
    }
    let labels = [0, LABEL, end - 2 * LABEL, end - LABEL];
    let mut is_there = false;
    for label in labels {
        let ring = device::read(found.device, label + RING, usize::try_from(RING).expect("128 KiB"))?;
        for (index, uberblock) in ring.chunks_exact(1024).enumerate() {
            let Some(word) = uberblock.first_chunk().copied().map(u64::from_le_bytes) else { continue };
            if word == MAGIC || word.swap_bytes() == MAGIC {
                is_there = true;
                found.mark(KIND, Content, label + RING + index as u64 * 1024, 8);
            }
        }
    }
    if is_there {
        let length = usize::try_from(LABEL).expect("256 KiB");
        labels.into_iter().for_each(|label| found.mark(KIND, Content, label, length));
    }
    Ok(())
}

/// The two share a magic; the format number distinguishes them.
fn gfs(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const AT: u64 = 0x10000;
    let bytes = device::read(found.device, AT, 32)?;
    if bytes.starts_with(b"\x01\x16\x19\x70") {
        let kind = if be32(&bytes, 24) == 1309 { "gfs" } else { "gfs2" };
        found.mark(kind, Content, AT, 4);
    }
    Ok(())
}

/// Its fourth version has another name.
fn squashfs(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    let bytes = device::read(found.device, 0, 32)?;
    if bytes.starts_with(b"hsqs") && le16(&bytes, 28) > 3 {
        found.mark("squashfs", Content, 0, 4);
    } else if bytes.starts_with(b"hsqs") || bytes.starts_with(b"sqsh") {
        found.mark("squashfs3", Content, 0, 4);
    }
    Ok(())
}

/// Superblocks at several places, with several magics, in both byte orders.
fn ufs_and_sysv(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const UFS: [u32; 6] = [0x0001_1954, 0x1954_0119, 0x0019_5612, 0x0009_5014, 0x0061_2195, 0x0523_1994];
    for place in [0, 8, 64, 256] {
        let at = (place << 10) + 0x55C;
        for magic in UFS {
            found.mark_if("ufs", Content, at, &magic.to_le_bytes())?;
            found.mark_if("ufs", Content, at, &magic.to_be_bytes())?;
        }
    }
    for place in [0, 9, 15, 18] {
        let at = (place << 10) + 0x3F8;
        found.mark_if("sysv", Content, at, &0xFD18_7E20_u32.to_le_bytes())?;
        found.mark_if("sysv", Content, at, &0xFD18_7E20_u32.to_be_bytes())?;
    }
    Ok(())
}

/// Marks of two bytes, which also occur by chance: the fields around them must be plausible.
fn small_marks(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    let start = device::read(found.device, 0, 512)?;
    if start.starts_with(b"HM") && matches!(le16(&start, 2), 1 | 2) {
        found.mark("LVM1_member", Content, 0, 2);
    }
    let second = device::read(found.device, 1024, 32)?;
    let allocation = be32(&second, 20);
    if second.starts_with(b"BD") && allocation != 0 && allocation.is_multiple_of(512) {
        found.mark("hfs", Content, 1024, 2);
    }
    minix(found, &second);
    Ok(())
}

/// The place of the magic depends on the version, and the byte order is that of the machine.
fn minix(found: &mut SignatureScan<'_>, superblock: &[u8]) {
    const OLD: [u16; 4] = [0x137F, 0x138F, 0x2468, 0x2478];
    // The magic, the blocks of both bit maps, and the logarithm of the zone's size, which is always
    // 0.
    let mut look = |magics: &[u16], [magic, maps, more_maps, zone]: [usize; 4]| {
        for read in [le16, be16] {
            let is_sane = read(superblock, maps) != 0 && read(superblock, more_maps) != 0;
            if magics.contains(&read(superblock, magic)) && is_sane && read(superblock, zone) == 0 {
                found.mark("minix", Content, 1024 + magic as u64, 2);
            }
        }
    };
    look(&OLD, [16, 4, 6, 10]);
    look(&[0x4D5A], [24, 6, 8, 12]);
}

/// Its second superblock, with the revision and the size that such a superblock has.
fn nilfs_at_end(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const BLOCK: u64 = 4096;
    let blocks = device::length(found.device) / BLOCK;
    let Some(at) = blocks.checked_sub(1).map(|block| block * BLOCK).filter(|at| *at >= BLOCK) else {
        return Ok(());
    };
    let bytes = device::read(found.device, at, 16)?;
    if le32(&bytes, 0) == 2 && le16(&bytes, 6) == 0x3434 && (0x100..=1024).contains(&le16(&bytes, 8)) {
        found.mark("nilfs2", Content, at + 6, 2);
    }
    Ok(())
}

/// A log has no fixed place: one of its records begins at some sector near the start.
fn xfs_log(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const LOOKED_AT: usize = 256 << 10;
    let bytes = device::read(found.device, 0, LOOKED_AT)?;
    for (sector, record) in bytes.chunks_exact(512).enumerate() {
        if be32(record, 0) == 0xFEED_BABE && matches!(be32(record, 8), 1 | 2) {
            found.mark("xfs_external_log", Content, bytes_of(sector as u64), 4);
        }
    }
    Ok(())
}

/// A FAT without the name of its type: a jump, the mark of a boot sector, and a plausible geometry.
fn bare_fat(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    let bytes = device::read(found.device, 0, 512)?;
    let is_fat = matches!(bytes.first(), Some(0xEB | 0xE9))
        && bytes.get(510..512) == Some(&[0x55, 0xAA])
        && matches!(le16(&bytes, 11), 512 | 1024 | 2048 | 4096)
        && bytes.get(13).is_some_and(|cluster| cluster.is_power_of_two())
        && le16(&bytes, 14) != 0
        && bytes.get(16).is_some_and(|fats| *fats != 0)
        && bytes.get(21).is_some_and(|media| *media == 0xF0 || *media >= 0xF8);
    if is_fat && !found.has_any(&["ntfs", "exfat", "vfat", "BitLocker", "hpfs"]) {
        found.mark("vfat", Content, 0, 3);
    }
    Ok(())
}

/// The superblock is at the same place as bcache's, and beside its own magic it may have one in
/// common with it. What distinguishes them is the list of the superblock's copies, which is within
/// it and in the sector before.
fn bcachefs(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const KIND: &str = "bcachefs";
    const LAYOUT_SECTOR: u64 = 7;
    const LAYOUT_BYTES: usize = 512;
    const MAGIC: u64 = 24;
    // In a list of copies: how many there are, and their sectors.
    const COUNT: usize = 18;
    const LIST: usize = 24;
    const END: u64 = 1 << 20;
    let at = bytes_of(SUPERBLOCK_SECTOR);
    let bytes = device::read(found.device, at, SUPERBLOCK_BYTES)?;
    let before = device::read(found.device, bytes_of(LAYOUT_SECTOR), LAYOUT_BYTES)?;
    let mut layouts = Vec::new();
    if RawSuperblock::begins_with_magic_of_bcachefs(&before) {
        found.mark(KIND, Content, bytes_of(LAYOUT_SECTOR), 16);
        layouts.push(before);
    }
    if let Ok(raw) = RawSuperblock::from_bytes(&bytes)
        && raw.is_bcachefs()
    {
        found.mark(KIND, Content, at + MAGIC, 16);
        layouts.push(bytes[RawSuperblock::LAYOUT_OF_BCACHEFS..][..LAYOUT_BYTES].to_vec());
    }
    // The default places of the copies.
    let mut copies = vec![2 << 20, device::length(found.device).saturating_sub(END)];
    for layout in &layouts {
        let listed = layout.get(LIST..).unwrap_or_default().chunks_exact(8);
        let listed = listed.take(layout.get(COUNT).copied().map_or(0, usize::from));
        let sectors = listed.filter_map(|word| word.first_chunk().copied().map(u64::from_le_bytes));
        copies.extend(sectors.filter_map(|sector| sector.checked_mul(512)).filter(|copy| *copy != at));
    }
    copies.sort_unstable();
    copies.dedup();
    for copy in copies.into_iter().filter(|copy| *copy > at) {
        let Some(place) = copy.checked_add(MAGIC) else { continue };
        let magic = device::read(found.device, place, 16)?;
        let is_one = RawSuperblock::begins_with_magic_of_bcachefs(&magic);
        if is_one && (found.has_any(&[KIND]) || found.signatures.is_empty()) {
            found.mark(KIND, Content, place, 16);
        }
    }
    Ok(())
}

/// Second superblocks count with the first one. Alone they count only if nothing else was found on
/// the device: a program that formatted it later may have left them behind.
fn copies(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const COPIES: &[(&str, u64, &[u8])] = &[
        ("f2fs", 0x1400, b"\x10\x20\xf5\xf2"),
        ("btrfs", (64 << 20) + 0x40, b"_BHRfS_M"),
        ("btrfs", (256 << 30) + 0x40, b"_BHRfS_M"),
    ];
    for (kind, offset, magic) in COPIES {
        if found.has_any(&[kind]) || found.signatures.is_empty() {
            found.mark_if(kind, Content, *offset, magic)?;
        }
    }
    Ok(())
}
