//! The offline checker over images that are built by hand, by a kernel, and of any bytes.
//!
//! One program has all of them, so that they are linked once; `cargo xtask test` starts it once for
//! each module.

mod common;
mod corpora;
mod hand_built;
mod kernel;
mod kernel_images;
mod known;
