//! `bcached metrics`: the daemon's numbers in the text format of Prometheus, as the daemon wrote them. They are text, also
//! with `--json`: `status --json` has the same numbers.

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::Report;
use bcached_daemon::control::client;
use bcached_daemon::whole_file;

/// Asks, and prints or writes.
pub fn run(flags: &flags::Metrics) -> Result<Report, Failure> {
    let socket = flags.control.socket();
    let Some(file) = &flags.textfile else {
        return client::get(&socket, "/v1/metrics").map(Report::text_only);
    };
    let text = client::get(&socket, "/v1/metrics?names=node")?;
    if file.as_os_str() == "-" {
        return Ok(Report::text_only(text));
    }
    // The collector looks at names that end in `.prom`: the one that is being written does not.
    whole_file::write(file, &text).map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Kind::Permission,
            _ => Kind::Io,
        };
        Failure::new(kind, format!("cannot write {}", file.display())).why(error.to_string())
    })?;
    Ok(Report::silent())
}
