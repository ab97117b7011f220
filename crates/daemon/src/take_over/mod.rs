//! The hand-over from a running daemon to a new one: the new program runs while the old one still
//! serves, and clients notice only a pause.
//!
//! ```text
//!   the old process                                     the new process
//!   starts it ──────────────────────────────────────►   reads the configuration
//!                       ◄──────────────── hello ─────   waits
//!   clients are between two requests, sets are closed
//!   ── claims of devices, sockets, connections ─────►   keeps them
//!   ── yours ───────────────────────────────────────►   opens the sets, no former client yet
//!                       ◄──────────────── ready ─────   waits
//!   ── gone ────────────────────────────────────────►   goes on with the clients
//!   ends
//! ```
//!
//! **Ownership of the devices.** Before *yours* the old process owns them, from *ready* on the new
//! one. In between the new process has them, and the old one can take them back: when the new one
//! sends *cannot*, ends, or does not send *ready* in time. To be sure, the old process ends the new
//! one, then opens the sets as after a crash, with the clients that it still has. No process has
//! read a client's stream meanwhile, because the new process touches it only after *gone*, or after
//! the old process's end. Should both processes believe that they own a device, the kernel decides
//! which one writes: [`bcached_uring::device::claim`].
//!
//! **If one of them dies**, the other one serves. The old process takes everything back, as above.
//! The new process, which sees the link closed, goes on with what it has received so far (claims,
//! sockets, connections that were between two requests), and opens the sets as after a crash; other
//! clients connect again. It waits until the old process is gone before it opens a device.
//!
//! **What is not handed over.** TLS connections, whose keys are in the old process; virtual
//! machines, whose VMM connects again; and the FUSE mount, in which no file may be open. A block
//! device (ublk) stays in the kernel, which holds its requests meanwhile.

mod descriptor_channel;
mod new_process;
mod old_process;

pub use descriptor_channel::DaemonState;
pub use new_process::{InheritedState, Predecessor, begun};
pub use old_process::{ReleasedState, Successor};

use std::time::Duration;

/// Between two checks of a process that ends.
const LOOK: Duration = Duration::from_millis(5);

/// Tells a new process that its standard input is its end of the link.
const VARIABLE: &str = "BCACHED_TAKES_OVER";

/// Set for a trial: the process takes nothing over, even if the process that started it dies.
const TRIAL: &str = "BCACHED_TAKES_OVER_TRIAL";

/// The version of the protocol of the link. Another one is refused before anything is touched.
const PROTOCOL: u32 = 2;

/// How long a new process may take until it has read its configuration.
const HELLO_LIMIT: Duration = Duration::from_secs(30);

/// How long it may take until everything that was served is served again: it only opens sets, but a
/// disk may be slow.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// How long the other process may take to end after it was told to, or killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How long a killed process may take to be gone: a moment on a busy machine, without limit in a
/// device that does not answer.
const KILLED_LIMIT: Duration = Duration::from_secs(3);
