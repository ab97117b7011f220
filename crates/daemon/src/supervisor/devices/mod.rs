//! Devices before they are part of a set: read, opened and claimed without waiting for one that
//! hangs.

pub mod claims;
pub mod liveness;
pub mod open_timeout;
pub mod probe;
