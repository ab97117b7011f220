//! Tests of the offline checker, with images built by hand, images written by a kernel, and
//! arbitrary bytes.
//!
//! One program contains all of them, so that they are linked once; `cargo xtask test` starts it
//! once for each module.

mod common;
mod corpora;
mod hand_built;
mod kernel;
mod kernel_images;
mod unknown_values;
