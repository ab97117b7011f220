//! `bcached status`: asks the daemon. The answer is no (exit status 1) if something is not served
//! as configured, or is unhealthy.

use super::name_lookup::called;
use crate::failure::Failure;
use crate::flags;
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::names::refusal;
use bcached_control::status::Status;

/// Asks the daemon and reports.
pub fn run(flags: &flags::StatusArgs) -> Result<Report, Failure> {
    let path = if flags.full { "/v1/status?full=true" } else { "/v1/status" };
    let status: Status = client::understood(&client::get(&flags.control.socket(), path)?)?;
    let status = match &flags.name {
        None => status,
        Some(name) => {
            let mut names: Vec<_> = status.caches.iter().map(|cache| cache.name.clone()).collect();
            names.extend(status.volumes.iter().map(|volume| volume.name.clone()));
            called(name, |name| {
                status.clone().only(name).map_err(|meant| {
                    refusal(name, meant.iter().map(String::as_str), names.iter().map(String::as_str))
                })
            })?
        }
    };
    let report = Report::of(&status)?;
    Ok(if status.is_healthy() { report } else { report.answering_no() })
}

impl Printable for Status {
    const SCHEMA: &'static str = "bcached.status";

    fn text(&self) -> String {
        Self::text(self)
    }
}
