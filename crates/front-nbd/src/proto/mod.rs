//! The server side of the NBD protocol, without I/O: the baseline protocol of the
//! NetworkBlockDevice project's `doc/proto.md`, fixed newstyle, with structured replies and block
//! status.
//!
//! A connection starts with a [`handshake::Handshake`], which says how many bytes it needs next and
//! turns them into answers. It ends with the agreed parameters ([`handshake::NegotiatedParams`]).
//! From then on every request is a [`request::RequestHeader`], which [`request::Session::decide`]
//! turns into one decision, and [`reply`] encodes the answer. Everything from the peer is checked
//! here. The peer cannot make this code allocate more than [`wire::OPTION_BYTES_MAX`], and nothing
//! panics.

pub mod handshake;
pub mod loopback;
pub mod option;
pub mod reply;
pub mod request;
pub mod wire;
