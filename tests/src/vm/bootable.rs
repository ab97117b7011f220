//! A disk from which a machine boots as machines do: firmware, boot sector, boot loader, kernel and initramfs from a FAT, files on an ext4.
//!
//! It is put together as a file, without privileges: syslinux and mtools write into files. The machine has no other disk, no kernel by qemu and
//! nothing in common with the host but the socket of its disk.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{COMMAND_LINE, Vm, initramfs};
use crate::guest::{Console, GuestError, Job, Report};
use crate::requires;

/// What it takes to make one, beside what each guest takes.
const PROGRAMS: [&str; 5] = ["syslinux", "mcopy", "mkfs.fat", "mkfs.ext4", "qemu-img"];
/// Real mode, at 0x7c00: it moves to 0x600, reads the first sector of the first partition and goes on with that. The sector is copied to its place
/// by the processor: an emulated one keeps what it has translated of 0x7c00, and learns from its own stores alone that it is stale. Those of
/// another process, which serves the disk, it does not see.
#[rustfmt::skip]
const BOOT: &[u8] = &[
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfb, // cli; zero segments and stack; sti
    0xfc, 0xbe, 0x00, 0x7c, 0xbf, 0x00, 0x06, 0xb9, 0x00, 0x01, 0xf3, 0xa5, // cld; 512 bytes from 0x7c00 to 0x600
    0xea, 0x1e, 0x06, 0x00, 0x00,             // jmp 0:there
    // there:
    0xbe, 0x3d, 0x06, 0xb4, 0x42, 0xcd, 0x13, // mov si, packet; mov ah, 0x42; int 0x13
    0x72, 0x13,                               // jc failed
    0xbe, 0x00, 0x90, 0xbf, 0x00, 0x7c, 0xb9, 0x00, 0x01, 0xf3, 0xa5, // 512 bytes from 0x9000 to 0x7c00
    0xbe, 0xbe, 0x07,                         // mov si, entry: the partition's, of the table
    0xea, 0x00, 0x7c, 0x00, 0x00,             // jmp 0:0x7c00
    // failed:
    0xf4, 0xeb, 0xfd,                         // hlt, for ever
    // packet: of 16 bytes, one sector, to 0x9000, from there on:
    16, 0, 1, 0, 0x00, 0x90, 0, 0,
];
const MIB: u64 = 1 << 20;
/// Where the FAT begins, how long it is, and how long the ext4 behind it, in MiB. Its initramfs is what decides.
const FAT: (u64, u64) = (1, 62);
const EXT4: (u64, u64) = (63, 64);
/// Of the whole disk, in MiB.
pub const DISK: u64 = 128;
/// Memory of the machine, in MiB: it is shared with who serves the disk.
const MEMORY: u32 = 512;

impl Vm {
    /// Makes a file a disk that boots into the job `script`, whose `/dev/vda2` has an empty ext4; `None`, and the test counts as skipped,
    /// where that cannot be done.
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
        // As the boot sector finds itself, it must know how many sectors lie before it.
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

    /// Boots from the disk that a vhost-user socket serves, and follows the job that is on it; `hear` is told each line. When the socket's
    /// server goes, the machine waits for the next one.
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
        // Tells this machine's process from all others.
        command.arg("-pidfile").arg(directory.path().join("pid"));
        Console::start(command, directory.path())?.follow_aloud(job, hear)
    }
}

fn tool(name: &str) -> PathBuf {
    requires::program(name).expect("looked for before")
}

/// Both file systems at their places, and the table of partitions with what boots the first one.
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
        // Places in cylinders say nothing where they say this; those in sectors count.
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

/// Whether the ext4 of a disk that nobody uses any more is in order: what `e2fsck` says if it is not.
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
