//! Makes a disk from which a machine boots in the ordinary way: firmware, boot sector, boot loader,
//! kernel and initramfs from a FAT file system, data on an ext4.
//!
//! The disk is composed as a file, without privileges: syslinux and mtools write into files. The
//! machine has no other disk and no kernel loaded by qemu. It shares only its disk's socket with
//! the host.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{COMMAND_LINE, Vm, initramfs};
use crate::guest::{Console, GuestError, Job, Report};
use crate::requires;

/// The programs needed to make a bootable disk, besides those that each guest needs.
const PROGRAMS: [&str; 5] = ["syslinux", "mcopy", "mkfs.fat", "mkfs.ext4", "qemu-img"];
/// The boot sector, in real mode, at 0x7c00. It moves itself to 0x600, reads the first sector of
/// the first partition to 0x9000, copies it to 0x7c00 and jumps to it. The copy is made by the
/// processor for a reason: an emulated processor caches its translation of 0x7c00 and invalidates
/// it only for its own stores. It does not see the stores of another process, such as the one that
/// serves the disk.
#[rustfmt::skip]
const BOOT: &[u8] = &[
    // cli; zero segments and stack; sti
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfb,
    // cld; 512 bytes from 0x7c00 to 0x600
    0xfc, 0xbe, 0x00, 0x7c, 0xbf, 0x00, 0x06, 0xb9, 0x00, 0x01, 0xf3, 0xa5,
    0xea, 0x1e, 0x06, 0x00, 0x00,             // jmp 0:there
    // there:
    0xbe, 0x3d, 0x06, 0xb4, 0x42, 0xcd, 0x13, // mov si, packet; mov ah, 0x42; int 0x13
    0x72, 0x13,                               // jc failed
    // 512 bytes from 0x9000 to 0x7c00
    0xbe, 0x00, 0x90, 0xbf, 0x00, 0x7c, 0xb9, 0x00, 0x01, 0xf3, 0xa5,
    0xbe, 0xbe, 0x07,                         // mov si, entry: the entry of the partition in the table
    0xea, 0x00, 0x7c, 0x00, 0x00,             // jmp 0:0x7c00
    // failed:
    0xf4, 0xeb, 0xfd,                         // hlt, forever
    // packet: 16 bytes; one sector, to 0x9000; the sector number follows:
    16, 0, 1, 0, 0x00, 0x90, 0, 0,
];
const MIB: u64 = 1 << 20;
/// Start and length of the FAT file system, and below of the ext4 behind it, in MiB. The initramfs
/// determines the size of the FAT.
const FAT: (u64, u64) = (1, 62);
const EXT4: (u64, u64) = (63, 64);
/// Size of the whole disk, in MiB.
pub const DISK: u64 = 128;
/// Memory of the machine, in MiB; it is shared with the process that serves the disk.
const MEMORY: u32 = 512;

impl Vm {
    /// Makes a disk image that boots into the job `script`, with an empty ext4 on its `/dev/vda2`.
    /// Where that is not possible, returns `None`, and the test counts as skipped.
    ///
    /// # Errors
    /// One of the programs failed.
    pub fn bootable(&self, directory: &Path, script: &str) -> Result<Option<PathBuf>, GuestError> {
        if !requires::programs(&PROGRAMS) {
            return Ok(None);
        }
        let initramfs = initramfs::build(directory, &self.modules, &self.also, script)?;
        let (disk, fat, ext4) = (directory.join("disk"), directory.join("fat"), directory.join("ext4"));
        let config = directory.join("syslinux.cfg");
        let text = format!("DEFAULT it\nLABEL it\nKERNEL linux\nINITRD initrd\nAPPEND {COMMAND_LINE}\n");
        fs::write(&config, text).map_err(GuestError::host("write the boot loader's configuration"))?;
        for (path, mebibytes) in [(&disk, DISK), (&fat, FAT.1), (&ext4, EXT4.1)] {
            File::create(path)
                .and_then(|file| file.set_len(mebibytes * MIB))
                .map_err(GuestError::host("make a disk"))?;
        }
        let hidden = (FAT.0 * MIB / 512).to_string();
        let run = |command: &mut Command| initramfs::run(command).map(drop);
        // The boot sector of the partition must know the number of sectors before it.
        run(Command::new(tool("mkfs.fat")).args(["-F", "32", "-h", &hidden]).arg(&fat))?;
        run(Command::new(tool("syslinux")).arg("--install").arg(&fat))?;
        for (from, name) in
            [(&self.kernel, "::/linux"), (&initramfs, "::/initrd"), (&config, "::/syslinux.cfg")]
        {
            run(Command::new(tool("mcopy")).arg("-i").arg(&fat).arg(from).arg(name))?;
        }
        run(Command::new(tool("mkfs.ext4")).arg("-q").arg(&ext4))?;
        compose(&disk, &fat, &ext4).map_err(GuestError::host("put the disk together"))?;
        Ok(Some(disk))
    }

    /// Boots from the disk that a vhost-user socket serves, and follows the job on it. `hear`
    /// receives each line. When the socket's server goes away, the machine waits for the next one.
    ///
    /// # Errors
    /// [`GuestError`]; the guest is gone in every case.
    pub fn boot(
        &self,
        socket: &Path,
        job: &Job<'_>,
        hear: &mut dyn FnMut(&str),
    ) -> Result<Report, GuestError> {
        let directory = tempfile::Builder::new()
            .prefix("bcached-machine-")
            .tempdir()
            .map_err(GuestError::host("make a directory"))?;
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-M",
            "q35,memory-backend=mem",
            "-nodefaults",
            "-no-reboot",
            "-m",
            &format!("{MEMORY}M"),
        ]);
        command.args(["-display", "none", "-monitor", "none", "-serial", "stdio"]).args(self.accelerator);
        command.args(["-object", &format!("memory-backend-memfd,id=mem,size={MEMORY}M,share=on")]);
        command.arg("-chardev").arg(format!("socket,id=disk,path={},reconnect=1", socket.display()));
        command.args(["-device", "vhost-user-blk-pci,chardev=disk,bootindex=0,num-queues=2"]);
        // Distinguishes this machine's processes from all others.
        command.arg("-pidfile").arg(directory.path().join("pid"));
        Console::start(command, directory.path())?.follow_aloud(job, hear)
    }
}

fn tool(name: &str) -> PathBuf {
    requires::program(name).expect("looked for before")
}

/// Writes both file systems to their places, and the partition table with the boot code for the
/// first partition.
fn compose(disk: &Path, fat: &Path, ext4: &Path) -> io::Result<()> {
    let disk = File::options().write(true).open(disk)?;
    for (file, (begins, mebibytes)) in [(fat, FAT), (ext4, EXT4)] {
        let mut file = File::open(file)?;
        let mut piece = vec![0; 1 << 20];
        for mebibyte in 0..mebibytes {
            file.read_exact(&mut piece)?;
            disk.write_all_at(&piece, (begins + mebibyte) * MIB)?;
        }
    }
    let mut table = [0; 512];
    table[..BOOT.len()].copy_from_slice(BOOT);
    table[BOOT.len()..BOOT.len() + 8].copy_from_slice(&(FAT.0 * MIB / 512).to_le_bytes());
    for (entry, (active, kind, (begins, mebibytes))) in
        [(0x80, 0x0c, FAT), (0, 0x83, EXT4)].into_iter().enumerate()
    {
        let at = 446 + 16 * entry;
        // These cylinder addresses are placeholders; only the sector addresses count.
        table[at..at + 8].copy_from_slice(&[active, 0xfe, 0xff, 0xff, kind, 0xfe, 0xff, 0xff]);
        for (at, mebibytes) in [(at + 8, begins), (at + 12, mebibytes)] {
            let sectors = u32::try_from(mebibytes * MIB / 512).expect("a small disk");
            table[at..at + 4].copy_from_slice(&sectors.to_le_bytes());
        }
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.write_all_at(&table, 0)?;
    disk.sync_all()
}

/// Checks the ext4 of a disk that is no longer in use. Returns the output of `e2fsck` if it is
/// damaged.
///
/// # Errors
/// The disk cannot be read, or `e2fsck` does not start.
pub fn ext4_is_in_order(disk: &Path, directory: &Path) -> Result<Option<String>, GuestError> {
    let alone = directory.join("ext4");
    let copy = || -> io::Result<()> {
        let mut piece = vec![0; usize::try_from(EXT4.1 * MIB).expect("small")];
        File::open(disk)?.read_exact_at(&mut piece, EXT4.0 * MIB)?;
        fs::write(&alone, piece)
    };
    copy().map_err(GuestError::host("copy the ext4"))?;
    let checked = Command::new(requires::program("e2fsck").unwrap_or_else(|| "e2fsck".into()))
        .arg("-fn")
        .arg(&alone)
        .output()
        .map_err(GuestError::host("start e2fsck"))?;
    Ok((!checked.status.success()).then(|| String::from_utf8_lossy(&checked.stdout).into_owned()))
}
