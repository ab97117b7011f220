//! Recipes for minimal devices: as little of each type as `blkid` needs to name it.

use super::super::device;

/// Size of the devices that they are for.
pub(super) const BYTES: u64 = 256 << 20;

/// Bytes at their offsets; a negative offset counts from the end.
type BytesAtOffsets = Vec<(i64, Vec<u8>)>;

/// A structure whose fields are set one by one.
struct StructBuilder(Vec<u8>);

impl StructBuilder {
    fn new(length: usize) -> Self {
        Self(vec![0; length])
    }

    fn put(mut self, at: usize, bytes: &[u8]) -> Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn le16(self, at: usize, value: u16) -> Self {
        self.put(at, &value.to_le_bytes())
    }

    fn le32(self, at: usize, value: u32) -> Self {
        self.put(at, &value.to_le_bytes())
    }

    fn le64(self, at: usize, value: u64) -> Self {
        self.put(at, &value.to_le_bytes())
    }

    fn be16(self, at: usize, value: u16) -> Self {
        self.put(at, &value.to_be_bytes())
    }

    fn be32(self, at: usize, value: u32) -> Self {
        self.put(at, &value.to_be_bytes())
    }

    /// Puts a checksum over `range` of the block at `at`.
    fn summed(self, at: usize, range: std::ops::Range<usize>, polynomial: u32, start: u32, end: u32) -> Self {
        let sum = crc(&self.0[range], polynomial, start) ^ end;
        self.le32(at, sum)
    }
}

const CRC32: u32 = 0xEDB8_8320;
const CRC32C: u32 = 0x82F6_3B78;

fn crc(bytes: &[u8], polynomial: u32, start: u32) -> u32 {
    bytes.iter().fold(start, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ if sum & 1 == 1 { polynomial } else { 0 })
    })
}

fn mark(at: i64, bytes: &[u8]) -> BytesAtOffsets {
    vec![(at, bytes.to_vec())]
}

/// Returns each type with its pieces; a type may have several recipes.
pub(super) fn all() -> Vec<(&'static str, BytesAtOffsets)> {
    [plain(), raids(), file_systems(), fat_and_windows(), at_the_end(), tables()].concat()
}

fn plain() -> Vec<(&'static str, BytesAtOffsets)> {
    let luks =
        StructBuilder::new(512).put(0, b"SKUL\xba\xbe").be16(6, 2).put(0x100, &0x4000_u64.to_be_bytes()).0;
    let stratis = StructBuilder::new(512).put(4, b"!Stra0tis\x86\xff\x02^\x41rh").put(28, &[1]);
    let stratis = stratis.summed(0, 4..512, CRC32C, !0, !0).0;
    let lvm = |sector: u64| {
        let label =
            StructBuilder::new(512).put(0, b"LABELONE").le64(8, sector).le32(20, 32).put(24, b"LVM2 001");
        label.put(32, &[b'a'; 32]).summed(16, 20..512, CRC32, 0xF597_A6CF, 0).0
    };
    let drbdmanage = StructBuilder::new(64).put(0, b"$DRBDmgr=q").put(11, &[b'a'; 32]).put(43, b"\n").0;
    let mut all = vec![
        ("ceph_bluestore", mark(0, b"bluestore block device")),
        ("crypto_LUKS", mark(0, b"LUKS\xba\xbe\0\x01")),
        ("crypto_LUKS", mark(0x4000, &luks)),
        ("DM_integrity", mark(0, b"integrt\0\x01")),
        ("DM_verity_hash", mark(0, b"verity\0\0\x01\0\0\0")),
        ("DM_snapshot_cow", mark(0, b"SnAp\x01\0\0\0\x01\0\0\0")),
        ("drbdproxy_datalog", mark(0, b"DRBDdlh*")),
        (
            "drbdmanage_control_volume",
            [mark(0, &drbdmanage), mark(4096, b"\x1a\xdb\x98\xa2\0\0\0\x01")].concat(),
        ),
        ("stratis", mark(512, &stratis)),
        ("stratis", mark(4608, &stratis)),
        ("ubi", mark(0, b"UBI#\x01")),
        ("vdo", mark(0, b"dmvdo001")),
        ("VMFS", mark(0x20_0000, b"\x5e\xf1\xab\x2f")),
        ("VMFS_volume_member", mark(0x10_0000, b"\x0d\xd0\x01\xc0")),
        ("swsuspend", mark(0, b"\xed\xc3\x02\xe9\x98\x56\xe5\x0c")),
        (
            "xfs_external_log",
            mark(
                512 * 7,
                &StructBuilder::new(304)
                    .be32(0, 0xFEED_BABE)
                    .be32(4, 1)
                    .be32(8, 2)
                    .be32(12, 512)
                    .be32(300, 1)
                    .0,
            ),
        ),
        ("LVM1_member", mark(0, b"HM\x01\0")),
    ];
    all.extend((0..4).map(|sector| ("LVM2_member", mark(sector * 512, &lvm(sector.unsigned_abs())))));
    for end in [0x1000, 0x2000, 0x4000, 0x8000, 0x1_0000] {
        let header = mark(1024, &[1_u32, 100].map(u32::to_le_bytes).concat());
        for magic in [b"SWAPSPACE2", b"SWAP-SPACE"] {
            all.push(("swap", [header.clone(), mark(end - 10, magic)].concat()));
        }
        for magic in [&b"S1SUSPEND"[..], b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001"] {
            all.push(("swsuspend", [header.clone(), mark(end - 10, magic)].concat()));
        }
    }
    all
}

fn raids() -> Vec<(&'static str, BytesAtOffsets)> {
    const MD: u32 = 0xA92B_4EFC;
    let sectors = BYTES / 512;
    let md = |place: u64| StructBuilder::new(0x100).le32(0, MD).le32(4, 1).le64(0x90, place).0;
    let ddf = StructBuilder::new(512).put(0, b"\xde\x11\xde\x11").put(0x60, &(sectors - 1).to_be_bytes()).0;
    let via = StructBuilder::new(51).put(0, b"\x55\xaa\x01").put(50, &[0]);
    let sum = via.0.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    let mut all = vec![
        ("linux_raid_member", mark(0, &md(0))),
        ("linux_raid_member", mark(4096, &md(8))),
        ("linux_raid_member", mark(-8192, &md(sectors - 16))),
        ("linux_raid_member", mark(-65536, &StructBuilder::new(64).le32(0, MD).le32(8, 90).0)),
        ("linux_raid_member", mark(-65536, &StructBuilder::new(64).be32(0, MD).be32(8, 90).0)),
        ("ddf_raid_member", mark(-512, &ddf)),
        ("ddf_raid_member", mark(-512 * 257, &ddf)),
        ("isw_raid_member", mark(-1024, b"Intel Raid ISM Cfg Sig. 1.1.00")),
        ("lsi_mega_raid_member", mark(-512, b"$XIDE$")),
        ("via_raid_member", mark(-512, &via.put(50, &[sum]).0)),
        (
            "silicon_medley_raid_member",
            mark(-512, &StructBuilder::new(512).le32(0x60, 0x2F00_0000).le16(0x10A, 2).0),
        ),
        (
            "nvidia_raid_member",
            mark(-1024, &StructBuilder::new(64).put(0, b"NVIDIA  ").le32(8, 0x78).le16(16, 0x64).0),
        ),
        (
            "adaptec_raid_member",
            mark(-512, &StructBuilder::new(512).put(0, b"\x37\xfc\x4d\x1e").put(0x100, b"DPTM").0),
        ),
        ("jmicron_raid_member", mark(-512, b"JM\x02\0")),
        ("hpt37x_raid_member", mark(0x1220, b"\xf0\x16\x78\x5a")),
        ("hpt37x_raid_member", mark(0x1220, b"\xfd\x16\x78\x5a")),
        ("hpt45x_raid_member", mark(-512 * 11, b"\xf3\x16\x78\x5a")),
        ("hpt45x_raid_member", mark(-512 * 11, b"\xfd\x16\x78\x5a")),
    ];
    for sector in [63, 255, 256, 16, 399, 591, 675, 735, 911, 974, 991, 951, 3087] {
        all.push(("promise_fasttrack_raid_member", mark(-512 * sector, b"Promise Technology, Inc.")));
    }
    all
}

fn ext(compat: u32, incompat: u32, flags: u32) -> BytesAtOffsets {
    mark(
        0x400,
        &StructBuilder::new(0x200)
            .le16(0x38, 0xEF53)
            .le32(0x5C, compat)
            .le32(0x60, incompat)
            .le32(0x160, flags)
            .0,
    )
}

fn xfs(magic: &[u8]) -> BytesAtOffsets {
    let sizes =
        StructBuilder::new(264).put(0, magic).be32(4, 4096).be32(12, 65536).be32(52, 32772).be32(80, 1);
    let groups = sizes.be32(84, 16384).be32(88, 4).be32(96, 2560).be16(100, 0xB4B5);
    let units = groups.be16(102, 512).be16(104, 512).be16(106, 8).put(120, &[12, 9, 9, 3, 14, 0, 0, 25]);
    mark(0, &units.0)
}

fn file_systems() -> Vec<(&'static str, BytesAtOffsets)> {
    [of_disks(), of_others(), of_flash_and_new(), of_many_places(), minix()].concat()
}

fn of_disks() -> Vec<(&'static str, BytesAtOffsets)> {
    let reiser = |at: i64, magic: &[u8]| {
        mark(at, &StructBuilder::new(128).le32(0, 60000).le32(12, 8210).le16(44, 4096).put(52, magic).0)
    };
    let jfs = StructBuilder::new(64)
        .put(0, b"JFS1")
        .le32(4, 1)
        .le64(8, 1000)
        .le32(16, 4096)
        .le16(20, 12)
        .le16(22, 3);
    vec![
        ("xfs", xfs(b"XFSB")),
        ("exfs", xfs(b"EXFS")),
        ("ext2", ext(0, 0, 0)),
        ("ext3", ext(4, 2, 0)),
        ("ext4", ext(4, 0x40, 0)),
        ("ext4dev", ext(4, 0x40, 4)),
        ("jbd", ext(0, 8, 0)),
        ("reiserfs", reiser(0x2000, b"ReIsErFs")),
        ("reiserfs", reiser(0x10000, b"ReIsErFs")),
        ("reiserfs", reiser(0x10000, b"ReIsEr2Fs")),
        ("reiserfs", reiser(0x10000, b"ReIsEr3Fs")),
        ("reiser4", mark(0x10000, b"ReIsEr4")),
        ("jfs", mark(0x8000, &jfs.le32(24, 512).le16(28, 9).0)),
        ("iso9660", [mark(0x8000, b"\x01CD001\x01"), mark(0x8800, b"\xffCD001\x01")].concat()),
        ("iso9660", mark(0x8008, b"\x01CDROM")),
        (
            "udf",
            [
                mark(0x8000, b"\0BEA01\x01"),
                mark(0x8800, b"\0NSR02\x01"),
                mark(0x9000, b"\0TEA01\x01"),
                mark(256 * 2048, &StructBuilder::new(16).le16(0, 2).le16(2, 2).le32(12, 256).0),
            ]
            .concat(),
        ),
    ]
}

fn of_others() -> Vec<(&'static str, BytesAtOffsets)> {
    let gfs = |format: u32, multihost: u32| {
        mark(
            0x10000,
            &StructBuilder::new(64)
                .put(0, b"\x01\x16\x19\x70")
                .be32(24, format)
                .be32(28, multihost)
                .be32(36, 4096)
                .0,
        )
    };
    vec![
        ("hfsplus", mark(1024, &StructBuilder::new(64).put(0, b"H+\0\x04").be32(40, 4096).0)),
        ("hfsplus", mark(1024, &StructBuilder::new(64).put(0, b"HX\0\x05").be32(40, 4096).0)),
        ("hfs", mark(1024, &StructBuilder::new(64).put(0, b"BD").be32(20, 4096).0)),
        (
            "hpfs",
            [
                mark(0x2000, b"\x49\xe8\x95\xf9\xc5\xe9\x53\xfa"),
                mark(17 * 512, b"\x49\x18\x91\xf9\x29\x58\xbd\xfa"),
            ]
            .concat(),
        ),
        (
            "xenix",
            mark(1024, &StructBuilder::new(1100).put(1016, &0x2B_5544_u32.to_le_bytes()).put(1024, b"+UD").0),
        ),
        ("cramfs", mark(0, &StructBuilder::new(64).put(0, b"\x28\xcd\x3d\x45").be32(4, 4096).0)),
        ("romfs", mark(0, b"-rom1fs-")),
        ("gfs", gfs(1309, 1401)),
        ("gfs2", gfs(1801, 1900)),
        ("ocfs", [mark(0, &[0, 0, 0, 2, 0, 0, 0, 2]), mark(0x2000, b"OracleCFS")].concat()),
        ("oracleasm", mark(32, b"ORCLDISK")),
        ("vxfs", mark(0x400, b"\xf5\xfc\x01\xa5")),
        ("vxfs", mark(0x2000, b"\xa5\x01\xfc\xf5")),
    ]
}

fn of_flash_and_new() -> Vec<(&'static str, BytesAtOffsets)> {
    let nilfs = StructBuilder::new(0x118)
        .le32(0, 2)
        .le16(6, 0x3434)
        .le16(8, 0x118)
        .le32(12, 0x1234)
        .le64(0x20, BYTES);
    let nilfs = nilfs.le32(0x14, 2).summed(16, 0..0x118, CRC32, 0x1234, 0).0;
    let squash = |magic: &[u8], major: u16| mark(0, &StructBuilder::new(64).put(0, magic).le16(28, major).0);
    vec![
        ("squashfs", squash(b"hsqs", 4)),
        ("squashfs3", squash(b"hsqs", 3)),
        ("squashfs3", squash(b"sqsh", 3 << 8)),
        ("nss", mark(0x1000, b"SPB5")),
        ("btrfs", [mark(0x10040, b"_BHRfS_M"), mark((64 << 20) + 0x40, b"_BHRfS_M")].concat()),
        ("ubifs", mark(0, b"\x31\x18\x10\x06")),
        ("bfs", mark(0, b"\xce\xfa\xad\x1b")),
        ("nilfs2", mark(1024, &nilfs)),
        ("nilfs2", mark(-4096, &nilfs)),
        (
            "f2fs",
            [mark(0x400, b"\x10\x20\xf5\xf2\x01\0\0\0"), mark(0x1400, b"\x10\x20\xf5\xf2\x01\0\0\0")]
                .concat(),
        ),
        ("mpool", mark(0, b"mpoolDev")),
        (
            "apfs",
            mark(
                0,
                &StructBuilder::new(64).le64(8, 1).le32(24, 0x8000_0001).put(32, b"NXSB").le32(36, 4096).0,
            ),
        ),
        ("zonefs", mark(0, &StructBuilder::new(4096).put(0, b"SFOZ").0)),
        ("erofs", mark(0x400, &StructBuilder::new(64).put(0, b"\xe2\xe1\xf5\xe0").put(12, &[12]).0)),
    ]
}

fn minix() -> Vec<(&'static str, BytesAtOffsets)> {
    let minix = |magic: u16| {
        StructBuilder::new(32)
            .le16(0, 100)
            .le16(4, 1)
            .le16(6, 1)
            .le16(8, 20)
            .le32(12, 0x7FFF_FFFF)
            .le16(16, magic)
    };
    let swapped = |magic: u16| {
        StructBuilder::new(32)
            .be16(0, 100)
            .be16(4, 1)
            .be16(6, 1)
            .be16(8, 20)
            .be32(12, 0x7FFF_FFFF)
            .be16(16, magic)
    };
    let minix3 = StructBuilder::new(32)
        .le32(0, 100)
        .le16(6, 1)
        .le16(8, 1)
        .le16(10, 20)
        .le32(16, 0x7FFF_FFFF)
        .le32(20, 1000);
    let mut all = vec![("minix", mark(1024, &minix3.le16(24, 0x4D5A).le16(28, 4096).0))];
    for magic in [0x137F, 0x138F, 0x2468, 0x2478] {
        all.extend([("minix", mark(1024, &minix(magic).0)), ("minix", mark(1024, &swapped(magic).0))]);
    }
    all
}

fn of_many_places() -> Vec<(&'static str, BytesAtOffsets)> {
    let mut all = Vec::new();
    for place in [0x400, 0x800, 0x1000, 0x2000] {
        all.push(("ocfs2", mark(place, b"OCFSV2")));
    }
    for place in [0, 9, 15, 18] {
        all.push(("sysv", mark((place << 10) + 0x3F8, &[0xFD18_7E20_u32, 2].map(u32::to_le_bytes).concat())));
    }
    for (place, magic) in [0, 8, 64, 256].into_iter().flat_map(|place| UFS.map(|magic| (place << 10, magic)))
    {
        all.push(("ufs", mark(place, &StructBuilder::new(0x600).le32(0x30, 4096).le32(0x55C, magic).0)));
        all.push(("ufs", mark(place, &StructBuilder::new(0x600).be32(0x30, 4096).be32(0x55C, magic).0)));
    }
    for place in [0, 512] {
        all.extend([("befs", befs(place, u32::to_le_bytes)), ("befs", befs(place, u32::to_be_bytes))]);
    }
    all
}

const UFS: [u32; 6] = [0x0001_1954, 0x1954_0119, 0x0019_5612, 0x0009_5014, 0x0061_2195, 0x0523_1994];

/// Includes the first node of its root, which would hold the name of the volume.
fn befs(place: i64, bytes: fn(u32) -> [u8; 4]) -> BytesAtOffsets {
    let fields = [
        (32, 0x4246_5331),
        (36, 0x4249_4745),
        (40, 4096),
        (44, 12),
        (64, 2048),
        (0x44, 0xDD12_1031_u32),
        (72, 1),
        (76, 15),
        (80, 1),
    ];
    let block = fields.into_iter().chain([(0x54, 0x434C_454E), (0x70, 0x15B6_830E)]);
    let block = block.fold(StructBuilder::new(512), |block, (at, value)| block.put(at, &bytes(value)));
    // The root is block 1: two halves of a word, in the byte order of the machine.
    let root =
        if bytes(1)[0] == 1 { block.le16(0x78, 1).le16(0x7A, 1) } else { block.be16(0x78, 1).be16(0x7A, 1) };
    [mark(place, &root.0), mark(4096, &bytes(0x3BBE_0AD9))].concat()
}

fn fat(name_at: usize, name: &[u8]) -> StructBuilder {
    let geometry = StructBuilder::new(512)
        .put(0, b"\xeb\x3c\x90mkfs.fat")
        .le16(11, 512)
        .put(13, &[8])
        .le16(14, 1)
        .put(16, &[2]);
    geometry
        .le16(17, 512)
        .put(21, &[0xF8])
        .le16(22, 200)
        .le32(32, 400_000)
        .put(name_at, name)
        .put(510, b"\x55\xaa")
}

fn fat_and_windows() -> Vec<(&'static str, BytesAtOffsets)> {
    let fat32 = |name: &[u8]| {
        mark(0, &fat(82, name).le16(17, 0).le16(22, 0).le32(36, 3000).le32(44, 2).le16(48, 1).0)
    };
    let ntfs =
        StructBuilder::new(512).put(0, b"\xeb\x52\x90NTFS    ").le16(11, 512).put(13, &[8]).put(21, &[0xF8]);
    let ntfs =
        ntfs.le64(40, 400_000).le64(48, 4).le64(56, 8).put(64, &[0xF6]).put(68, &[1]).put(510, b"\x55\xaa").0;
    let fve = |jump: &[u8], guid_at: usize| {
        const GUID: &[u8] = b"\x3b\xd6\x67\x49\x29\x2e\xd8\x4a\x83\x99\xf6\xa3\x39\xe3\xd0\x01";
        let boot = StructBuilder::new(512).put(0, jump).put(guid_at, GUID).le64(guid_at + 16, 65536).0;
        [mark(0, &boot), mark(65536, b"-FVE-FS-\x40\0\x02\0")].concat()
    };
    vec![
        ("vfat", mark(0, &fat(54, b"FAT16   ").0)),
        ("vfat", mark(0, &fat(54, b"FAT12   ").0)),
        ("vfat", mark(0, &fat(54, b"FAT     ").0)),
        ("vfat", mark(0, &fat(54, b"MSDOS").0)),
        ("vfat", mark(0, &fat(54, b"").0)),
        ("vfat", fat32(b"FAT32   ")),
        ("vfat", fat32(b"MSWIN4.1")),
        ("ntfs", [mark(0, &ntfs), mark(4 * 4096, b"FILE"), mark(4 * 4096 + 3072, b"FILE")].concat()),
        ("exfat", mark(3, b"EXFAT   ")),
        ("ReFS", mark(0, b"\0\0\0ReFS\0")),
        ("BitLocker", mark(0, b"\xeb\x52\x90-FVE-FS-")),
        ("BitLocker", fve(b"\xeb\x58\x90-FVE-FS-", 160)),
        ("BitLocker", fve(b"\xeb\x58\x90MSWIN4.1", 424)),
    ]
}

/// Rings of uberblocks in these of the four labels.
pub(super) fn zfs(labels: &[i64]) -> BytesAtOffsets {
    let starts = [0, 256 << 10, -(512 << 10), -(256 << 10)];
    let uberblock = [0x00BA_B10C_u64, 5000].map(u64::to_le_bytes).concat();
    let rings =
        labels.iter().map(|label| starts[usize::try_from(*label).expect("one of four")] + (128 << 10));
    rings
        .flat_map(|ring| (0..8).map(move |index| ring + index * 1024))
        .flat_map(|at| mark(at, &uberblock))
        .collect()
}

fn at_the_end() -> Vec<(&'static str, BytesAtOffsets)> {
    let mut all = vec![("zfs_member", zfs(&[0, 1, 2, 3]))];
    all.extend((0..4).map(|label| ("zfs_member", zfs(&[label]))));
    for last in [0x6B, 0x6C, 0x6D] {
        all.push(("drbd", mark(-4096 + 60, &[0x83, 0x74, 0x02, last])));
    }
    all
}

fn gpt(at: u64, other: u64) -> Vec<u8> {
    let entries = crc(&[0; 128 * 128], CRC32, !0) ^ !0;
    let first = if at == 1 { 2 } else { at - 32 };
    let header =
        StructBuilder::new(92).put(0, b"EFI PART").le32(8, 0x10000).le32(12, 92).le64(24, at).le64(32, other);
    let header = header.le64(40, 34).le64(48, BYTES / 512 - 34).put(56, &[b'g'; 16]).le64(72, first);
    header.le32(80, 128).le32(84, 128).le32(88, entries).summed(16, 0..92, CRC32, !0, !0).0
}

fn tables() -> Vec<(&'static str, BytesAtOffsets)> {
    let last = BYTES / 512 - 1;
    let boot = |kind: u8| {
        mark(
            0,
            &StructBuilder::new(512)
                .put(0x1BE + 4, &[kind])
                .le32(0x1BE + 8, 1)
                .le32(0x1BE + 12, 2048)
                .put(510, b"\x55\xaa")
                .0,
        )
    };
    let primary = mark(512, &gpt(1, last));
    let backup = mark(-512, &gpt(last, 1));
    let mac = b"ER\x02\0".to_vec();
    let map =
        StructBuilder::new(64).put(0, b"PM").be32(4, 2).be32(8, 1).be32(12, 1).put(48, b"Apple_partition").0;
    let sun = StructBuilder::new(512).put(508, b"\xda\xbe\xda\xbe").0;
    let label =
        StructBuilder::new(404).le32(0, 0x8256_4557).le32(132, 0x8256_4557).le32(40, 512).le16(138, 8);
    let sum = label
        .0
        .chunks_exact(2)
        .take((148 + 8 * 16) / 2)
        .fold(0, |sum, word| sum ^ u16::from_le_bytes([word[0], word[1]]));
    let mut all = vec![
        ("dos", boot(0x83)),
        ("dos", mark(510, b"\x55\xaa")),
        ("gpt", [boot(0xEE), primary.clone(), backup.clone()].concat()),
        ("gpt", primary),
        ("gpt", backup),
        ("mac", [mark(0, &mac), mark(512, &map)].concat()),
        (
            "sgi",
            mark(
                0,
                &StructBuilder::new(512)
                    .put(0, b"\x0b\xe5\xa9\x41")
                    .be32(508, 0x0BE5_A941_u32.wrapping_neg())
                    .0,
            ),
        ),
        ("sun", mark(0, &sun)),
        ("aix", mark(0, b"\xc9\xc2\xd4\xc1")),
        ("bsd", mark(512, &label.le16(136, sum).0)),
        ("ultrix", mark(16384 - 72, b"\x57\x29\x03\0\x01\0\0\0")),
    ];
    for entry in 0..4 {
        let disk = StructBuilder::new(512).be32(0x1C2, u32::try_from(BYTES / 512).expect("few"));
        let at = 0x1C6 + entry * 12;
        all.push(("atari", mark(0, &disk.put(at, b"\x01GEM").be32(at + 4, 2).be32(at + 8, 1000).0)));
    }
    all
}

/// A sparse file of [`BYTES`] that holds `pieces`, open as a writable device.
pub(super) fn device(pieces: &BytesAtOffsets) -> (tempfile::NamedTempFile, device::Device) {
    use std::os::unix::fs::FileExt as _;
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(BYTES).expect("a size");
    for (at, bytes) in pieces {
        let at = if *at < 0 { BYTES - at.unsigned_abs() } else { at.unsigned_abs() };
        file.as_file().write_all_at(bytes, at).expect("writes");
    }
    let opened = device::open(file.path(), device::Access::Own).expect("opens");
    (file, opened)
}
