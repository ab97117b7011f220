//! A VMM does not share the guest's memory, which is a common mistake: the log says what to
//! configure.

#[path = "support/log_lines.rs"]
mod log_lines;
mod support;

use support::guest::{SIZE, TestGuest};
use support::vmm::{TestVmm, USUAL, places};
use support::{serve, wait_until};
use vhost::VhostBackend as _;

#[test]
fn memory_that_is_not_shared_is_called_so() {
    let lines = log_lines::listen();
    let served = serve();
    let guest = TestGuest::new(1);
    let vmm = TestVmm::connect_again(&served.socket("tank"));
    vmm.frontend.set_features(USUAL).expect("features that were offered");
    vmm.frontend.set_vring_num(0, SIZE).expect("a size");
    // Memory without a file is not announced in a table.
    let _refused = vmm.frontend.set_vring_addr(0, &places(&guest.queues[0]));
    served.wait_for_clients(0);
    wait_until("the line", || !lines.lock().expect("no panic").is_empty());
    let told = lines.lock().expect("no panic").clone();
    assert_eq!(told[0]["event"], "\"vhost-broke-off\"");
    let error = &told[0]["error"];
    assert!(error.starts_with("the VMM does not share the guest's memory with bcached"), "{error}");
    assert!(
        error.contains("memory-backend-memfd,id=mem,size=SIZE,share=on -numa node,memdev=mem"),
        "{error}"
    );
}
