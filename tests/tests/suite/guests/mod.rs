//! Tests in qemu with Debian's kernels. They form one program, so that as many guests run at a time
//! as there are processors: each guest needs one.

mod blocks;
mod cache_pulled;
mod counted;
mod dev;
mod file_systems;
mod full_table;
mod little_memory;
mod machine;
mod nbd_client;
mod numbered;
mod ublk;
mod ublk_moves;
mod ublk_take_over;
mod ublk_user;
mod udev;
mod vm;
