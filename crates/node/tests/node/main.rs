//! Tests of the node's public interface: against a model that knows each sector, against sets as
//! the kernel writes them, and against damaged bytes.

mod children;
mod damage;
mod kernel_sets;
mod model;
mod replace;
mod sample;
mod splits;
