//! `bcached explain`: shows where the data of an offset is. The answer is no (exit status 1) if the
//! cache does not have it.

use super::name_lookup::called;
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::explain::ExplainReport;
use bcached_control::sizes::{self, DefaultUnit};

/// Asks the daemon and reports.
pub fn run(flags: &flags::ExplainArgs) -> Result<Report, Failure> {
    let offset = sizes::parse(&flags.offset, DefaultUnit::Bytes)
        .map_err(|error| Failure::new(Kind::Usage, error.to_string()).option("OFFSET"))?;
    let socket = flags.control.socket();
    let answer = called(&flags.volume, |volume| {
        client::get(&socket, &format!("/v1/volumes/{}/explain?offset={offset}", client::encoded(volume)))
    })?;
    let explained: ExplainReport = client::understood(&answer)?;
    let report = Report::of(&explained)?;
    Ok(if explained.cached { report } else { report.answering_no() })
}

impl Printable for ExplainReport {
    const SCHEMA: &'static str = "bcached.explain";

    fn text(&self) -> String {
        Self::text(self)
    }
}
