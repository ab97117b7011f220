//! `bcached version`.

use crate::failure::Failure;
use crate::output::{Report, Show};
use serde::Serialize;

/// The running program. Its version is in every report's envelope.
#[derive(Serialize)]
struct Version {
    architecture: &'static str,
    debug_build: bool,
}

impl Show for Version {
    const SCHEMA: &'static str = "bcached.version";

    fn text(&self) -> String {
        format!("bcached {}\n", env!("CARGO_PKG_VERSION"))
    }
}

/// Reports the version.
pub fn run() -> Result<Report, Failure> {
    Report::of(&Version { architecture: std::env::consts::ARCH, debug_build: cfg!(debug_assertions) })
}
