//! Tests the table against itself, and against the installed `blkid`.

use super::recipes;
use super::table::FIXED;
use super::*;
use crate::device::Access;
use crate::lost_sets::LostSets;
use crate::overwrite;
use crate::superblock;
use bcached_control::jobs::Overrides;
use std::collections::BTreeSet;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::process::Command;

/// Returns the types found on a file of 8 MiB that holds `marks`.
fn types(marks: &[(u64, &[u8])]) -> Vec<String> {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(8 << 20).expect("a size");
    for (offset, bytes) in marks {
        file.seek(SeekFrom::Start(*offset)).expect("seek");
        file.write_all(bytes).expect("write");
    }
    let device = device::open(file.path(), Access::Look).expect("opens");
    own(&device).expect("reads").signatures.into_iter().map(|signature| signature.kind.into()).collect()
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
    let end = 8 << 20;
    assert_eq!(types(&[(end - (64 << 10), b"\xfc\x4e\x2b\xa9")]), ["linux_raid_member"]);
    assert_eq!(types(&[(end - 8192, b"\xfc\x4e\x2b\xa9")]), ["linux_raid_member"]);
    assert_eq!(types(&[(end - 512, b"EFI PART")]), ["gpt"], "a partition table whose start was overwritten");
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

#[test]
fn bcachefs_is_no_bcache_though_it_once_had_its_magic() {
    let old = bcached_format::superblock::MAGIC.0;
    let new = *b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef";
    for magic in [old, new] {
        // The list of copies: two of them, one at an unusual place.
        let mut layout = magic.to_vec();
        layout.extend([0, 11, 2, 0, 0, 0, 0, 0]);
        layout.extend([8_u64, 5000].map(u64::to_le_bytes).concat());
        let pieces = vec![
            (7 * 512, layout.clone()),
            (0x1018, magic.to_vec()),
            (0x1000 + 240, layout),
            (5000 * 512 + 24, magic.to_vec()),
            ((2 << 20) + 24, magic.to_vec()),
            (-(1 << 20) + 24, magic.to_vec()),
        ];
        let (_file, device) = recipes::device(&pieces);
        let found = superblock::read(&device).expect("reads");
        assert!(matches!(found, superblock::SuperblockProbe::Absent), "{found:?}");
        let all = own(&device).expect("reads").signatures;
        assert_eq!(all.iter().map(|signature| signature.kind.as_ref()).collect::<Vec<_>>(), ["bcachefs"]);
        assert_eq!(all[0].marks.len(), 5, "all copies: {:x?}", all[0].marks);
        let (_file, device) = recipes::device(&pieces[5..].to_vec());
        assert_eq!(own(&device).expect("reads").signatures.len(), 1, "a copy alone");
    }
}

#[test]
fn copies_go_with_the_first_one_and_count_alone_only_where_nothing_else_is() {
    let mirror = ((64 << 20) + 0x40, b"_BHRfS_M".to_vec());
    let kinds = |pieces: &[(i64, Vec<u8>)]| {
        let (_file, device) = recipes::device(&pieces.to_vec());
        let all = own(&device).expect("reads").signatures;
        all.iter().map(|signature| (signature.kind.to_string(), signature.marks.len())).collect::<Vec<_>>()
    };
    assert_eq!(kinds(std::slice::from_ref(&mirror)), [("btrfs".to_owned(), 1)]);
    assert_eq!(kinds(&[mirror.clone(), (0, b"XFSB".to_vec())]), [("xfs".to_owned(), 1)]);
    assert_eq!(kinds(&[mirror, (0x10040, b"_BHRfS_M".to_vec())]), [("btrfs".to_owned(), 2)]);
}

#[test]
fn what_is_of_no_known_kind_is_told_from_nothing() {
    for (at, holds) in [(0, true), (-1, true), (1 << 20, false)] {
        let (_file, device) = recipes::device(&vec![(at, vec![7])]);
        assert_eq!(own(&device).expect("reads").signatures, []);
        assert_eq!(holds_unknown(&device), Ok(holds), "{at}");
    }
}

#[test]
fn every_type_is_found_wherever_it_stands() {
    for (kind, pieces) in recipes::all() {
        let (_file, device) = recipes::device(&pieces);
        let found = own(&device).expect("reads").signatures;
        let kinds: Vec<_> = found.iter().map(|signature| signature.kind.as_ref()).collect();
        assert_eq!(kinds, [kind], "{pieces:x?}");
    }
}

/// A tool of util-linux; `None`, with a line of output, if it is not installed.
fn tool(name: &str) -> Option<Command> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    if !std::env::split_paths(&path).any(|folder| folder.join(name).is_file()) {
        println!("skipped: not installed: {name}");
        return None;
    }
    let mut command = Command::new(name);
    command.env("PATH", path).env("LC_ALL", "C");
    Some(command)
}

/// Returns the words that a tool prints.
fn words(mut command: Command, arguments: &[&str], path: Option<&Path>) -> BTreeSet<String> {
    let ran = command.args(arguments).args(path).output().expect("runs");
    String::from_utf8_lossy(&ran.stdout).split_whitespace().map(str::to_owned).collect()
}

/// Returns what the installed libblkid names on a device, including the types of several programs.
fn named_by_blkid(path: &Path) -> Option<BTreeSet<String>> {
    let mut named = words(tool("wipefs")?, &["--noheadings", "--output", "TYPE"], Some(path));
    named.extend(words(tool("blkid")?, &["-p", "-o", "value", "-s", "TYPE", "-s", "PTTYPE"], Some(path)));
    // The protective part of a GPT.
    named.remove("PMBR");
    Some(named)
}

/// The table has whatever `blkid` names. A device is made for each type that the installed `blkid`
/// knows.
#[test]
fn the_table_has_what_the_installed_blkid_names() {
    let Some(known) = tool("blkid").map(|blkid| words(blkid, &["-k"], None)) else { return };
    let mut seen = BTreeSet::from(["bcache".to_owned()]);
    for (kind, pieces) in recipes::all() {
        let (file, device) = recipes::device(&pieces);
        let Some(named) = named_by_blkid(file.path()) else { return };
        let found = own(&device).expect("reads").signatures;
        // For some, the boot sector of an NTFS is that of a partition table as well: its mark
        // belongs to the file system.
        let is_found =
            |name: &String| found.iter().any(|has| has.kind == *name) || name == "dos" && kind == "ntfs";
        let missing: Vec<_> = named.iter().filter(|name| !is_found(name)).collect();
        assert!(missing.is_empty(), "{kind}: blkid names {missing:?}, the table {found:x?}");
        seen.extend(named);
    }
    let newer = known.difference(&seen).collect::<Vec<_>>();
    // A newer `blkid` knows more, and is asked for that where it is installed.
    println!("known to the installed blkid alone: {newer:?}");
    let ours: BTreeSet<_> = recipes::all().into_iter().map(|(kind, _)| kind.to_owned()).collect();
    let unmade: Vec<_> = ours.intersection(&known).filter(|kind| !seen.contains(*kind)).collect();
    assert!(unmade.is_empty(), "blkid knows these and does not name what is made here: {unmade:?}");
}

/// Without the option each type is refused. With it every mark is erased: `blkid` then names
/// nothing but bcache.
#[test]
fn what_may_go_is_gone_as_blkid_sees_it() {
    use bcached_format::{BackingFormat, BackingSuperblock, CacheMode, Uuid};
    let superblock = BackingSuperblock::format(BackingFormat {
        uuid: Uuid([1; 16]),
        set_uuid: Uuid([2; 16]),
        block_sectors: 8,
        bucket_sectors: 1024,
        data_offset: None,
        cache_mode: CacheMode::Writethrough,
        device_sectors: recipes::BYTES / 512,
    });
    let superblock = superblock.expect("a superblock").seal();
    for (kind, pieces) in recipes::all() {
        let (file, device) = recipes::device(&pieces);
        let refused =
            overwrite::check(&device, &Overrides::default(), &LostSets::default()).expect_err("refused");
        assert_eq!(refused.kind.exit(), 3, "{kind}: {refused}");
        assert!(refused.to_string().contains(kind), "{refused}");
        let mut wipe_signature = vec![kind.to_owned()];
        let members = ["linux_raid_member", "ddf_raid_member", "isw_raid_member", "LVM2_member"];
        let cleared = loop {
            match overwrite::check(
                &device,
                &Overrides { wipe_signature: wipe_signature.clone(), wipe_bcache: false },
                &LostSets::default(),
            ) {
                Ok(cleared) => break Some(cleared),
                Err(refused) if members.contains(&kind) => {
                    assert!(refused.to_string().contains("nothing overrides this"), "{refused}");
                    break None;
                }
                Err(refused) => {
                    let option =
                        refused.option.as_ref().and_then(|option| option.strip_prefix("--wipe-signature="));
                    let more = option.expect("an option").to_owned();
                    assert!(!wipe_signature.contains(&more), "{kind}: {refused}");
                    wipe_signature.push(more);
                }
            }
        };
        let Some(cleared) = cleared else { continue };
        overwrite::write(&device, &cleared.erase, &superblock).expect("writes");
        assert_eq!(own(&device).expect("reads").signatures, [], "{kind}");
        if let Some(named) = named_by_blkid(file.path()) {
            assert_eq!(named, BTreeSet::from(["bcache".to_owned()]), "{kind}");
        }
    }
}
