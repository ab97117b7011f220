//! The NBD protocol as a server speaks it, without I/O: the baseline protocol of the NetworkBlockDevice project's
//! `doc/proto.md`, fixed newstyle, with structured replies and block status.
//!
//! A connection goes through [`handshake::Handshake`], which says how many bytes it wants next and turns them into
//! answers, and ends with what was agreed on ([`handshake::Agreed`]). From then on every request is a
//! [`request::Header`] that [`request::Session::decide`] turns into one decision, and [`reply`] makes the bytes of the
//! answer. Everything from the peer is checked here; nothing here allocates more than [`wire::OPTION_BYTES_MAX`]
//! because a peer said so, and nothing panics.

pub mod handshake;
pub mod loopback;
pub mod option;
pub mod reply;
pub mod request;
pub mod wire;
