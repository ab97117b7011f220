//! Tests at the level of processes, and against real kernels.
//!
//! A single program contains all of them, so that they are linked once; `cargo xtask test` runs it
//! once for each module.

mod coming_and_going;
mod counted;
mod device_traffic;
mod ext4;
mod forgotten;
mod guests;
mod judged_by_kernel;
mod kernel_check;
mod kernel_start;
mod kernel_to_us;
mod ping_pong;
mod power_cut;
mod settings;
mod sigkill;
mod sizes;
mod summary;
mod taken;
mod ten_machines;
mod uml;
mod us_to_kernel;
mod write_back_model;
mod write_back_rate;
