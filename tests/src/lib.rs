//! Tests at the level of processes, and against real kernels.
//!
//! The judge of an on-disk format is the kernel that defines it. This package boots real kernels on image files, makes them write, crash and
//! read, and compares what they and our programs see with one model of what was written.
//!
//! | module | duty |
//! |---|---|
//! | [`requires`] | skipping a test with a reason that the closing line counts |
//!
//! Nothing here knows bcached's inside: images and processes only.

pub mod requires;
