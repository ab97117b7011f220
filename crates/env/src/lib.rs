//! What the engine needs from the world, and nothing else: owned I/O operations down, owned
//! completions up, time, random numbers, tasks. `no_std`, so that files, threads, clocks and
//! randomly ordered maps are not in scope.
//!
//! Two drivers implement it: `bcached-uring` on real devices and `bcached-sim` on simulated ones.
//! The same executor runs both; in simulation it picks the next item by seed.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod buffer;
pub mod buffer_pool;
pub mod disk;
pub mod driver;
pub mod exec;
pub mod foreign_buffer;
pub mod join;
pub mod note;
pub mod rng;
pub mod sync;
pub mod time;

pub use buffer::{Buffer, BufferUnavailable, Payload};
pub use buffer_pool::BufferPool;
pub use disk::{CompletionListener, Disk, DiskHealth};
pub use driver::{Completion, DiskId, DiskInfo, Driver, Event, IoError, IoErrorKind, Op, Token};
pub use exec::{Env, Executor, RunOrder, RunOutcome, TASKS_MAX};
pub use foreign_buffer::{BufferSlot, Lender, LentBuffer};
pub use join::{join_all, join_two};
pub use note::{Note, NoteRecord};
pub use time::Time;
