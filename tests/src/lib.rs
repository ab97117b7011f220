//! Library of the tests at the level of processes and against real kernels.
//!
//! The authority on an on-disk format is the kernel that defines it. This package boots real
//! kernels on image files, makes them write, crash and read, and compares what they and our
//! programs see with one model of what was written.
//!
//! | module | duty |
//! |---|---|
//! | [`workload`] | seeded verified writes, and the model of what must be there |
//! | [`guest`] | a job for a kernel, its report, the list of allowed log lines |
//! | [`uml`] | kernel 6.1 in User-Mode Linux |
//! | [`vm`] | kernel 6.12, or a later one, in qemu |
//! | [`set`] | a cache set in image files |
//! | [`side`] | the two sides that take turns with a set: a kernel and our daemon |
//! | [`kernel_image`] | cache sets that a real kernel brought into a named state |
//! | [`nbd`] | a small NBD client |
//! | [`ready`] | waiting until a started daemon is ready |
//! | [`offline`] | checking a set with the offline checker |
//! | [`recording`] | power cuts at any moment of a recorded run, judged by the simulator's oracle |
//! | [`apart`] | isolating our programs from a bcached installed on the machine |
//! | [`scope`] | how many tests the environment requests |
//! | [`failure`] | what a failing test prints |
//! | [`requires`] | skipping a test with a reason that the summary line counts |
//!
//! This library does not use the engine: it handles only images and processes.

pub mod apart;
pub mod failure;
pub mod guest;
pub mod kernel_image;
pub mod nbd;
pub mod offline;
pub mod ready;
pub mod recording;
pub mod requires;
pub mod scope;
pub mod set;
pub mod side;
pub mod uml;
pub mod vm;
pub mod workload;
