//! Tests in qemu with Debian's kernels. They form one program, so that as many guests run at a time
//! as there are processors: each guest needs one.

mod allocations;
mod block_size;
mod cache_pulled;
mod dev;
mod device_limit;
mod file_systems;
mod low_memory;
mod machine;
mod nbd_client;
mod ublk;
mod ublk_moves;
mod ublk_take_over;
mod ublk_user;
mod udev;
mod vm;
mod volume_numbers;
