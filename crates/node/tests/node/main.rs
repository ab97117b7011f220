//! The node as its users see it: against a model that knows each sector, against sets as kernels write them, and
//! against damaged bytes.

mod children;
mod damage;
mod kernel_sets;
mod model;
mod replace;
mod sample;
mod splits;
