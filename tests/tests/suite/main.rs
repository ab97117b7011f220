//! Tests at the level of processes, and against real kernels.
//!
//! A single program contains all of them, so that they are linked once; `cargo xtask test` runs it
//! once for each module.

mod allocations;
mod attach_detach;
mod bcached_to_kernel;
mod device_traffic;
mod ext4;
mod forget;
mod guests;
mod import_release;
mod kernel_acceptance;
mod kernel_check;
mod kernel_start;
mod kernel_to_bcached;
mod ping_pong;
mod power_cut;
mod resize;
mod settings;
mod sigkill;
mod summary;
mod ten_machines;
mod uml;
mod write_back_model;
mod write_back_rate;
