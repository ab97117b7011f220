//! Volumes as NBD exports.
//!
//! [`proto`] is the protocol without any I/O: bytes in, decisions and bytes out; it is what the fuzzer attacks. The
//! rest moves bytes between sockets, that codec and the engine's port:
//!
//! ```text
//!   socket ──► reader thread ── handshake, then requests ──► port ──► engine
//!   socket ◄── writer thread ◄──────────── replies ◄──────── port ◄──┘
//! ```
//!
//! Between two requests there is nothing to wait for but the next, and a thread that has to be woken for it costs more than it: what needs
//! no waiting is done on the ring of the volume's engine, if it has one (`lane`).
//!
//! - **Bounded.** A connection has at most so many requests outstanding and so many bytes of payload in memory, and
//!   all connections together too ([`Limits`]); at a bound the reader stops reading its socket, and the peer waits.
//! - **No client can hold anything for ever** but an idle connection: the handshake has a deadline, and so has a
//!   payload; replies that nobody reads end the connection after [`Limits::stall`].
//! - **No client stops the others** by what it holds: memory is given out so that something is left
//!   ([`bcached_port::budget`]), and who is too slow to give it back goes when others wait ([`Limits::give_way`]).
//! - **A lost connection loses no request**: what was received whole is carried out, and the right to write (see
//!   [`server`]) is given up only after the last of it is done.
//! - **TLS** ([`Tls`]) is for TCP, and demanded there or not there at all.
//! - Threads sleep in the kernel whenever there is nothing to do.

mod accept;
mod channel;
mod connection;
mod credentials;
mod endpoint;
mod handoff;
mod limits;
mod peer_timeouts;
pub mod proto;
mod ring_path;
pub mod server;
mod socket;
mod source;
mod tls;
mod writer;

pub use accept::{Handed, NotHanded};
pub use bcached_uring::Rings;
pub use endpoint::{Bound, Endpoint, ListenError, Place};
pub use handoff::{Leaving, Left, LeftSocket, Right, State};
pub use limits::{Limits, memory};
pub use server::{Client, NbdServer, Options, StartError, StillBusy};
pub use tls::{Part, Tls, TlsError};
