//! One daemon takes over from another that runs: the new program is there when the old one still serves, and clients notice a pause.
//!
//! ```text
//!   the old one                                            the new one
//!   starts it ─────────────────────────────────────────►   reads the configuration
//!                          ◄──────────────── hello ─────   waits
//!   clients are between two requests, sets are closed
//!   ── claims of devices, sockets, connections ────────►   keeps them
//!   ── yours ──────────────────────────────────────────►   opens the sets, serves no client of before
//!                          ◄──────────────── ready ─────   waits
//!   ── gone ───────────────────────────────────────────►   goes on with the clients
//!   ends
//! ```
//!
//! **Who owns the devices.** Before *yours* the old one; from *ready* on the new one. Between the two the new one has them, and the old one
//! can take them back: when the new one says *cannot*, ends, or does not say *ready* in time. It makes sure of that by ending the process,
//! and then opens the sets as after a crash, with the clients that it still has. A client's stream has been read by nobody meanwhile,
//! because the new one touches it only after *gone*, or after the old one's end. Should both think that a device is theirs, then the
//! kernel says who writes: [`bcached_uring::device::claim`].
//!
//! **If one of them dies**, the other one serves. The old one takes everything back, as above. The new one, which sees the link end, goes on with what
//! has come so far (claims, sockets, connections that were between two requests), and opens the sets as after a crash; clients that had not
//! come along connect again. It waits until the old process is gone before it opens a device.
//!
//! **What does not go along.** Connections in TLS, whose keys are in the old process; virtual machines, whose VMM connects again; and the
//! mount of FUSE, which must have no file open. A block device (ublk) stays in the kernel, which keeps what is asked of it meanwhile.

mod giving;
mod link;
mod taking;

pub use giving::{Heritage, Successor};
pub use link::Yours;
pub use taking::{Predecessor, Taken, begun};

use std::time::Duration;

/// Between two looks at a process that ends.
const LOOK: Duration = Duration::from_millis(5);

/// Where a new process finds its end of the link: it is its standard input then.
const VARIABLE: &str = "BCACHED_TAKES_OVER";

/// Set for one that is only to be tried: it goes on with nothing, whatever becomes of who started it.
const TRIAL: &str = "BCACHED_TAKES_OVER_TRIAL";

/// What is said on the link. Another one is refused before anything is touched.
const PROTOCOL: u32 = 2;

/// How long a new process may take until it has read its configuration.
const HELLO_LIMIT: Duration = Duration::from_secs(30);

/// How long it may take until all is served that was: sets are opened and no more, but a disk may be slow.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// How long the other process may take to end after it was told to, or killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How long one that was killed may take to be gone: on a busy machine it takes a moment, in a device that does not answer any time.
const KILLED_LIMIT: Duration = Duration::from_secs(3);
