//! A virtual machine of QEMU as the client. Its firmware, SeaBIOS, has a virtio-blk driver and
//! boots from the volume. The boot program, which is defined here, reads and writes the volume
//! through the firmware and reports the result on the serial line. This needs neither a kernel nor
//! KVM.

#[path = "support/machine.rs"]
mod machine;
mod support;

use machine::{QemuMachine, boot_sector, has_qemu};
use std::time::Duration;
use support::{TANK, TestServer, pattern, serve, wait_until};

/// Writes the program and sector 1 to the volume.
fn install(served: &TestServer, sector: &[u8]) {
    let mut guest = support::guest::TestGuest::new(1);
    let mut vmm = support::vmm::TestVmm::connect_again(&served.socket("tank"));
    vmm.run(&mut guest, support::vmm::USUAL);
    guest.queues[0].write(0, &boot_sector());
    guest.queues[0].write(1, sector);
    drop(vmm);
    served.wait_for_clients(0);
}

/// A machine boots, reads and writes. It continues after its server stops and starts again. It is
/// killed while it writes, and the next machine boots.
#[test]
fn a_machine_boots_from_a_volume_and_outlives_its_server() {
    if !has_qemu() {
        return;
    }
    let served = serve();
    let mut sector = pattern(512, 1);
    sector[0] = b'!';
    install(&served, &sector);
    let machine = QemuMachine::start(&served.socket("tank"));
    assert_eq!(machine.says(), b'!', "it has read");
    assert_eq!((machine.says(), machine.says()), (b'.', b'.'), "it has written");
    assert_eq!(served.ram.content(TANK, 2, 1), sector);
    wait_until("the write over and over", || served.ram.content(TANK, 3, 1) == sector);
    assert!(served.server().clients()[0].is_writing);

    for _ in 0..2 {
        served.server().stop("tank", support::LIMIT).expect("stops");
        while machine.said.recv_timeout(Duration::from_millis(500)).is_ok() {}
        served.server().serve("tank", support::volume_options()).expect("serves again");
        for _ in 0..20 {
            assert_eq!(machine.says(), b'.', "it hears of no error");
        }
    }
    drop(machine);
    served.wait_for_clients(0);
    let next = QemuMachine::start(&served.socket("tank"));
    assert_eq!((next.says(), next.says()), (b'!', b'.'));
}
