//! Client requests to callgrind. A request is a sequence of instructions that does nothing outside
//! Valgrind (Valgrind's manual, *The Client Request mechanism*).
#![allow(unsafe_code, reason = "a request of Valgrind is a sequence of instructions")]

/// The first number of callgrind's requests: "CT" in the upper bytes.
const BASE: u64 = 0x4354_0000;
const ZERO: u64 = BASE + 1;
const DUMP_AT: u64 = BASE + 3;
const START: u64 = BASE + 4;
const STOP: u64 = BASE + 5;

/// Runs `work` and has callgrind count its instructions. Callgrind writes the counts of each call
/// to a separate file, in the order of the calls. If callgrind was started with
/// `--instr-atstart=no`, it counts nothing else.
pub fn counted<T>(name: &std::ffi::CStr, work: impl FnOnce() -> T) -> T {
    request(START, 0);
    request(ZERO, 0);
    let result = work();
    request(DUMP_AT, name.as_ptr().addr() as u64);
    request(STOP, 0);
    result
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn request(number: u64, argument: u64) {
    let words: [u64; 6] = [number, argument, 0, 0, 0, 0];
    // SAFETY: The rotations add up to 128 bits, so `rdi` keeps its value, and exchanging a register
    // with itself does nothing. Under Valgrind, the sequence reads the six words and the text at
    // the address in the second word, which both outlive it, and changes `rdx`.
    unsafe {
        core::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            inout("rdx") 0_u64 => _,
            in("rax") words.as_ptr(),
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn request(_number: u64, _argument: u64) {}
