//! A virtual machine of QEMU whose firmware boots from a vhost-user disk, and the program that it
//! boots.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Generous, because a virtual machine is slow when the processors are busy.
const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// Real mode, at 0x7c00. Sector 1 is read to 0x8000 and its first byte is printed. It is written to
/// sector 2, and then repeatedly to sector 3, with a dot printed each time. An error prints an `E`.
#[rustfmt::skip]
const BOOT: &[u8] = &[
    // cli; zero segments and stack; sti
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfb,
    0x88, 0x16, 0x00, 0x7e,                   // mov [0x7e00], dl: the drive
    0xb4, 0x42, 0xbe, 0x60, 0x7c, 0xcd, 0x13, // mov ah, 0x42; mov si, packet; int 0x13
    0x72, 0x2e,                               // jc failed
    0xa0, 0x00, 0x80, 0xe8, 0x30, 0x00,       // mov al, [0x8000]; call say
    0xc6, 0x06, 0x68, 0x7c, 0x02,             // mov byte [packet + 8], 2
    // again:
    0x8a, 0x16, 0x00, 0x7e,                   // mov dl, [0x7e00]
    0xb8, 0x00, 0x43, 0xbe, 0x60, 0x7c, 0xcd, 0x13, // mov ax, 0x4300; mov si, packet; int 0x13
    0x72, 0x15,                               // jc failed
    0xb0, 0x2e, 0xe8, 0x18, 0x00,             // mov al, '.'; call say
    0xc6, 0x06, 0x68, 0x7c, 0x03,             // mov byte [packet + 8], 3
    0xb9, 0xff, 0xff,                         // mov cx, 0xffff
    0xf3, 0x90, 0xe2, 0xfc,                   // rest: pause; loop rest
    0xeb, 0xdf,                               // jmp again
    0x90, 0x90,
    // failed:
    0xb0, 0x45, 0xe8, 0x03, 0x00,             // mov al, 'E'; call say
    0xf4, 0xeb, 0xfd,                         // hlt, forever
    // say:
    0xba, 0xf8, 0x03, 0xee, 0xc3,             // mov dx, 0x3f8; out dx, al; ret
];
const PACKET_AT: usize = 0x60;
/// 16 bytes long, one sector, to 0x8000, from sector 1 on.
const PACKET: [u8; 16] = [16, 0, 1, 0, 0x00, 0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// Whether QEMU is installed; otherwise the test is skipped.
pub fn has_qemu() -> bool {
    let has = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status();
    let has = has.is_ok_and(|status| status.success());
    if !has {
        println!("skipped: qemu-system-x86_64 is not there");
    }
    has
}

pub struct QemuMachine {
    child: Child,
    /// The output on the serial line.
    pub said: mpsc::Receiver<u8>,
}

impl QemuMachine {
    pub fn start(socket: &Path) -> Self {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-M",
            "pc,accel=kvm:tcg,memory-backend=mem",
            "-m",
            "64",
            "-nodefaults",
            "-display",
            "none",
        ]);
        qemu.args(["-object", "memory-backend-memfd,id=mem,size=64M,share=on", "-serial", "stdio"]);
        qemu.arg("-chardev").arg(format!("socket,id=disk,path={},reconnect=1", socket.display()));
        qemu.args(["-device", "vhost-user-blk-pci,chardev=disk,bootindex=0,num-queues=2"]);
        let mut child = qemu
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("starts");
        let mut serial = BufReader::new(child.stdout.take().expect("a pipe"));
        let (says, said) = mpsc::channel();
        std::thread::spawn(move || {
            while let Ok(bytes) = serial.fill_buf().map(<[u8]>::to_vec)
                && !bytes.is_empty()
            {
                if !bytes.iter().all(|byte| says.send(*byte).is_ok()) {
                    return;
                }
                serial.consume(bytes.len());
            }
        });
        Self { child, said }
    }

    pub fn says(&self) -> u8 {
        self.said.recv_timeout(BOOT_LIMIT).expect("the machine says something")
    }
}

impl Drop for QemuMachine {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// The program, as the first sector of a disk.
pub fn boot_sector() -> [u8; 512] {
    let mut boot = [0; 512];
    assert!(BOOT.len() <= PACKET_AT);
    boot[..BOOT.len()].copy_from_slice(BOOT);
    boot[PACKET_AT..PACKET_AT + PACKET.len()].copy_from_slice(&PACKET);
    boot[510..].copy_from_slice(&[0x55, 0xaa]);
    boot
}
