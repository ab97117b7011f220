//! What else may live on a device: file systems, partition tables, members of arrays, disk images. A device that
//! carries one of these is not overwritten unasked.
//!
//! A table of our own rather than libblkid: it needs no library or tool at run time, and it is about marks, not about
//! valid file systems. A damaged file system is still somebody's.

use super::device::{self, Device};
use crate::failure::Failure;

/// How a signature is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// `--wipe-signature=TYPE` overrides the refusal.
    Content,
    /// Part of an array or volume group: nothing overrides; its own tool removes it.
    Member {
        /// The command that removes the mark, without the device.
        removed_by: &'static str,
    },
}

impl Class {
    /// The command that removes the mark of a member.
    #[must_use]
    pub const fn removed_by(self) -> Option<&'static str> {
        match self {
            Self::Member { removed_by } => Some(removed_by),
            Self::Content => None,
        }
    }
}

/// One signature found on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Name, as `blkid` prints it.
    pub kind: &'static str,
    /// How it is treated.
    pub class: Class,
    /// Byte offset and length of every mark that must be erased for it to be gone.
    pub marks: Vec<(u64, usize)>,
}

const MDADM: Class = Class::Member { removed_by: "mdadm --zero-superblock" };
const PVREMOVE: Class = Class::Member { removed_by: "pvremove" };

/// Marks at fixed offsets from the start: type, class, offset, bytes.
const FIXED: &[(&str, Class, u64, &[u8])] = &[
    ("xfs", Class::Content, 0, b"XFSB"),
    ("squashfs", Class::Content, 0, b"hsqs"),
    ("crypto_LUKS", Class::Content, 0, b"LUKS\xba\xbe"),
    ("crypto_LUKS", Class::Content, 0x4000, b"SKUL\xba\xbe"),
    ("DM_integrity", Class::Content, 0, b"integrt\0"),
    ("DM_verity_hash", Class::Content, 0, b"verity\0\0"),
    ("DM_snapshot_cow", Class::Content, 0, b"SnAp"),
    ("vdo", Class::Content, 0, b"dmvdo001"),
    ("ceph_bluestore", Class::Content, 0, b"bluestore block device"),
    ("qcow2", Class::Content, 0, b"QFI\xfb"),
    ("vmdk", Class::Content, 0, b"KDMV"),
    ("vhdx", Class::Content, 0, b"vhdxfile"),
    ("vdi", Class::Content, 0x40, b"\x7f\x10\xda\xbe"),
    ("BitLocker", Class::Content, 3, b"-FVE-FS-"),
    ("ntfs", Class::Content, 3, b"NTFS    "),
    ("exfat", Class::Content, 3, b"EXFAT   "),
    ("vfat", Class::Content, 54, b"FAT12   "),
    ("vfat", Class::Content, 54, b"FAT16   "),
    ("vfat", Class::Content, 82, b"FAT32   "),
    ("apfs", Class::Content, 32, b"NXSB"),
    ("stratis", Class::Content, 516, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("f2fs", Class::Content, 0x400, b"\x10\x20\xf5\xf2"),
    ("erofs", Class::Content, 0x400, b"\xe2\xe1\xf5\xe0"),
    ("hfsplus", Class::Content, 0x400, b"H+"),
    ("hfsplus", Class::Content, 0x400, b"HX"),
    ("nilfs2", Class::Content, 0x406, b"\x34\x34"),
    ("bcachefs", Class::Content, 0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("ocfs2", Class::Content, 0x2000, b"OCFSV2"),
    ("jfs", Class::Content, 0x8000, b"JFS1"),
    ("iso9660", Class::Content, 0x8001, b"CD001"),
    ("udf", Class::Content, 0x8001, b"BEA01"),
    ("gfs2", Class::Content, 0x10000, b"\x01\x16\x19\x70"),
    ("reiserfs", Class::Content, 0x10034, b"ReIsEr"),
    ("btrfs", Class::Content, 0x10040, b"_BHRfS_M"),
    ("linux_raid_member", MDADM, 0, b"\xfc\x4e\x2b\xa9"),
    ("linux_raid_member", MDADM, 0x1000, b"\xfc\x4e\x2b\xa9"),
    ("LVM2_member", PVREMOVE, 0, b"LABELONE"),
    ("LVM2_member", PVREMOVE, 0x200, b"LABELONE"),
    ("LVM2_member", PVREMOVE, 0x400, b"LABELONE"),
    ("LVM2_member", PVREMOVE, 0x600, b"LABELONE"),
];

/// The signatures on `device`, bcache's own excepted; each type once.
///
/// # Errors
/// The device's.
pub fn find(device: &Device) -> Result<Vec<Signature>, Failure> {
    let mut found = Found { device, signatures: Vec::new() };
    for (kind, class, offset, magic) in FIXED {
        found.mark_if(kind, *class, *offset, magic)?;
    }
    find_ext(&mut found)?;
    find_swap(&mut found)?;
    find_raid_at_end(&mut found)?;
    find_zfs(&mut found)?;
    find_partition_table(&mut found)?;
    Ok(found.signatures)
}

struct Found<'a> {
    device: &'a Device,
    signatures: Vec<Signature>,
}

impl Found<'_> {
    fn mark(&mut self, kind: &'static str, class: Class, offset: u64, length: usize) {
        match self.signatures.iter_mut().find(|signature| signature.kind == kind) {
            Some(signature) => signature.marks.push((offset, length)),
            None => self.signatures.push(Signature { kind, class, marks: vec![(offset, length)] }),
        }
    }

    fn mark_if(
        &mut self,
        kind: &'static str,
        class: Class,
        offset: u64,
        magic: &[u8],
    ) -> Result<(), Failure> {
        if device::read(self.device, offset, magic.len())? == magic {
            self.mark(kind, class, offset, magic.len());
        }
        Ok(())
    }
}

/// ext2, ext3 and ext4 share a magic; which one it is follows from the features, as the mount would see it.
fn find_ext(found: &mut Found<'_>) -> Result<(), Failure> {
    const MAGIC_AT: u64 = 0x438;
    const HAS_JOURNAL: u32 = 0x4;
    // What ext3 understands: filetype, recover, meta_bg; sparse_super, large_file, btree_dir.
    const EXT3_INCOMPAT: u32 = 0x16;
    const EXT3_RO_COMPAT: u32 = 0x7;
    if device::read(found.device, MAGIC_AT, 2)? != [0x53, 0xEF] {
        return Ok(());
    }
    let words = device::read(found.device, 0x45C, 12)?;
    let word = |index: usize| {
        let bytes = words.get(index * 4..index * 4 + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    let kind = if word(1) & !EXT3_INCOMPAT != 0 || word(2) & !EXT3_RO_COMPAT != 0 {
        "ext4"
    } else if word(0) & HAS_JOURNAL != 0 {
        "ext3"
    } else {
        "ext2"
    };
    found.mark(kind, Class::Content, MAGIC_AT, 2);
    Ok(())
}

/// The mark stands in the last ten bytes of the first page, whatever page size the machine had.
fn find_swap(found: &mut Found<'_>) -> Result<(), Failure> {
    for page in [4096, 8192, 16384, 32768, 65536] {
        for magic in [b"SWAPSPACE2", b"SWAP-SPACE", b"LINHIB0001"] {
            found.mark_if("swap", Class::Content, page - 10, magic)?;
        }
        for magic in [b"S1SUSPEND", b"ULSUSPEND"] {
            found.mark_if("swsuspend", Class::Content, page - 10, magic)?;
        }
    }
    Ok(())
}

/// md keeps its two older superblocks at the end, and firmware RAIDs do as well.
fn find_raid_at_end(found: &mut Found<'_>) -> Result<(), Failure> {
    const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
    let sectors = found.device.info().sectors;
    if sectors < 128 {
        return Ok(());
    }
    found.mark_if("linux_raid_member", MDADM, (sectors / 128 - 1) * 128 * 512, MD)?;
    found.mark_if("linux_raid_member", MDADM, ((sectors - 16) & !7) * 512, MD)?;
    let end = sectors * 512;
    found.mark_if("isw_raid_member", MDADM, end - 1024, b"Intel Raid ISM Cfg Sig. ")?;
    found.mark_if("ddf_raid_member", MDADM, end - 512, b"\xde\x11\xde\x11")
}

/// ZFS has no mark but the ring of uberblocks in each of four labels; the first two lie at the start.
fn find_zfs(found: &mut Found<'_>) -> Result<(), Failure> {
    const LABEL: u64 = 256 << 10;
    const RING: u64 = 128 << 10;
    const MAGIC: u64 = 0x00BA_B10C;
    for label in [0, LABEL] {
        let ring = device::read(found.device, label + RING, usize::try_from(RING).expect("128 KiB"))?;
        for (index, uberblock) in ring.chunks_exact(1024).enumerate() {
            let Some(word) = uberblock.first_chunk().copied().map(u64::from_le_bytes) else { continue };
            if word == MAGIC || word.swap_bytes() == MAGIC {
                found.mark("zfs_member", Class::Content, label + RING + index as u64 * 1024, 8);
            }
        }
    }
    Ok(())
}

/// GPT with its copy and its protective MBR, or an MBR alone. The MBR's two bytes stand in FAT boot sectors as well.
fn find_partition_table(found: &mut Found<'_>) -> Result<(), Failure> {
    const BOOT_MARK_AT: u64 = 510;
    const GPT: &[u8] = b"EFI PART";
    let end = device::length(found.device);
    for block in [512, 4096] {
        found.mark_if("gpt", Class::Content, block, GPT)?;
        if end > 2 * block {
            found.mark_if("gpt", Class::Content, end - block, GPT)?;
        }
    }
    if device::read(found.device, BOOT_MARK_AT, 2)? != [0x55, 0xAA] {
        return Ok(());
    }
    let boot_sector_of = |signature: &&mut Signature| {
        matches!(signature.kind, "gpt" | "vfat" | "ntfs" | "exfat" | "BitLocker")
    };
    match found.signatures.iter_mut().find(boot_sector_of) {
        Some(signature) => signature.marks.push((BOOT_MARK_AT, 2)),
        None => found.mark("dos", Class::Content, BOOT_MARK_AT, 2),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offline::device::Access;
    use std::io::{Seek as _, SeekFrom, Write as _};

    /// The types found on a 4 MiB file that holds `marks`.
    fn types(marks: &[(u64, &[u8])]) -> Vec<&'static str> {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(4 << 20).expect("a size");
        for (offset, bytes) in marks {
            file.seek(SeekFrom::Start(*offset)).expect("seek");
            file.write_all(bytes).expect("write");
        }
        let device = device::open(file.path(), Access::Look).expect("opens");
        find(&device).expect("reads").into_iter().map(|signature| signature.kind).collect()
    }

    #[test]
    fn every_fixed_mark_is_found_at_its_place_only() {
        assert_eq!(types(&[]), [""; 0]);
        for (kind, _, offset, magic) in FIXED {
            assert_eq!(types(&[(*offset, magic)]), [*kind], "{kind} at {offset:#x}");
        }
    }

    #[test]
    fn marks_at_the_end_are_found() {
        let end = 4 << 20;
        assert_eq!(types(&[(end - (64 << 10), b"\xfc\x4e\x2b\xa9")]), ["linux_raid_member"]);
        assert_eq!(types(&[(end - 8192, b"\xfc\x4e\x2b\xa9")]), ["linux_raid_member"]);
        assert_eq!(
            types(&[(end - 512, b"EFI PART")]),
            ["gpt"],
            "a partition table whose start was overwritten"
        );
        assert_eq!(types(&[((128 << 10) + 2048, &0x00BA_B10C_u64.to_le_bytes())]), ["zfs_member"]);
    }

    #[test]
    fn boot_sectors_and_partition_tables_are_told_apart() {
        assert_eq!(types(&[(510, b"\x55\xaa")]), ["dos"]);
        assert_eq!(types(&[(510, b"\x55\xaa"), (82, b"FAT32   ")]), ["vfat"]);
        assert_eq!(types(&[(510, b"\x55\xaa"), (512, b"EFI PART")]), ["gpt"]);
    }

    #[test]
    fn the_ext_family_is_named_by_its_features() {
        let with = |compat: u32, incompat: u32| {
            types(&[(0x438, b"\x53\xef"), (0x45C, &compat.to_le_bytes()), (0x460, &incompat.to_le_bytes())])
        };
        assert_eq!(with(0, 0), ["ext2"]);
        assert_eq!(with(4, 2), ["ext3"]);
        assert_eq!(with(4, 0x40), ["ext4"]);
    }

    #[test]
    fn a_file_too_short_for_any_mark_is_blank() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(512).expect("a size");
        let device = device::open(file.path(), Access::Look).expect("opens");
        assert_eq!(find(&device), Ok(Vec::new()));
    }
}
