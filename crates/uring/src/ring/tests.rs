use super::*;
use crate::device::Access;
use bcached_env::{Lender, Op, Token};

#[derive(Debug)]
struct RingMemory(u64);

impl Lender for RingMemory {
    fn slot(&self) -> BufferSlot {
        BufferSlot { ring: self.0, number: 0 }
    }

    fn read(&self, _: usize, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _: usize, _: &[u8]) -> bool {
        false
    }
}

/// A volume may be served by a ring other than the one its block device lives on: the same slot
/// number refers to different memory there.
#[test]
fn memory_that_is_registered_with_another_ring_is_not_for_this_one() {
    let rings = [IoUring::new(8), IoUring::new(8)];
    let [Ok(first), Ok(second)] = rings else { return eprintln!("SKIPPED: no io_uring here") };
    let counters = Arc::new(Counters::default());
    let [first, second] = [first, second].map(|ring| {
        let signals = Signals::new().expect("an eventfd");
        let inputs = ClientInputs::new(Arc::clone(&signals)).expect("an epoll");
        Ring::new(ring, inputs, signals, Arc::clone(&counters))
    });
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(1 << 20).expect("room");
    let device = Arc::new(Device::open(file.path(), Access::Own).expect("ours"));
    let of = |ring: &Ring| {
        let buffer = LentBuffer::new(Arc::new(RingMemory(ring.number)), 4096).into();
        let op = Op::Read { sector: 0, buffer };
        let Ok(work) = PreparedOp::new(Some(&device), Token(0), op, &counters) else { panic!("it fits") };
        work
    };
    assert!(first.can_do(&of(&first)) && second.can_do(&of(&second)));
    assert!(!first.can_do(&of(&second)) && !second.can_do(&of(&first)));
}
