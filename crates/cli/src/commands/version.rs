//! `bcached version`.

use crate::failure::Failure;
use crate::output::{Printable, Report};
use serde::Serialize;

/// The running program. Its version is in every report's envelope.
#[derive(Serialize)]
struct VersionReport {
    architecture: &'static str,
    debug_build: bool,
}

impl Printable for VersionReport {
    const SCHEMA: &'static str = "bcached.version";

    fn text(&self) -> String {
        format!("bcached {}\n", env!("CARGO_PKG_VERSION"))
    }
}

/// Reports the version.
pub fn run() -> Result<Report, Failure> {
    Report::of(&VersionReport { architecture: std::env::consts::ARCH, debug_build: cfg!(debug_assertions) })
}
