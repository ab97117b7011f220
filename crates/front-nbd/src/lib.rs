//! Serves volumes as NBD exports.
//!
//! [`proto`] is the protocol without any I/O: bytes in, decisions and bytes out. It is the target
//! of the fuzzer. The rest moves bytes between sockets, that codec and the engine's port:
//!
//! ```text
//!   socket ──► reader thread ── handshake, then requests ──► port ──► engine
//!   socket ◄── writer thread ◄──────────── replies ◄──────── port ◄──┘
//! ```
//!
//! Between two requests there is nothing to wait for except the next request, and waking a thread
//! for it costs more than the request itself. So requests that need no waiting are handled on the
//! ring of the volume's engine, if it has one (`ring_path`).
//!
//! - **Bounded.** Each connection has limits on its pending requests and on its bytes of payload in
//!   memory, and so have all connections together ([`Limits`]). At a limit the reader stops reading
//!   its socket, and the peer waits.
//! - **No client can hold a resource forever**, except an idle connection. The handshake has a
//!   deadline, and so has a payload. If a client does not read its replies, its connection ends
//!   after [`Limits::stall`].
//! - **No client stops the others** by what it holds. Memory is granted such that some is left
//!   ([`bcached_port::budget`]). A client that is too slow to return it is disconnected when others
//!   wait ([`Limits::give_way`]).
//! - **A lost connection loses no request**: a request that was received completely is carried out.
//!   The write claim (see [`server`]) is released only after the last request is complete.
//! - **TLS** ([`TlsConfig`]) is for TCP, where it is either required or not available.
//! - Threads sleep in the kernel whenever there is nothing to do.

mod accept;
mod channel;
mod client_catalog;
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

pub use accept::{LocalConnection, LocalConnectionError};
pub use bcached_uring::VolumeRings;
pub use endpoint::{BoundAddress, Endpoint, EndpointAddress, ListenError};
pub use handoff::{ConnectionState, Handoff, HandoffConnection, HandoffSocket, WriterStatus};
pub use limits::{Limits, memory};
pub use server::{ClientInfo, NbdServer, Options, ShutdownTimeout, StartError};
pub use tls::{TlsConfig, TlsError, TlsFile};
