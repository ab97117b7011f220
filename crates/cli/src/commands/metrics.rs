//! `bcached metrics`: prints the daemon's metrics in the text format of Prometheus, as the daemon
//! wrote them, or as JSON.

mod json;

use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::Report;
use bcached_control::atomic_file;
use bcached_control::client;

/// Asks the daemon, and prints the text or writes it to a file.
pub fn run(flags: &flags::MetricsArgs, as_json: bool) -> Result<Report, Failure> {
    let socket = flags.control.socket();
    let Some(file) = &flags.textfile else {
        return json::report(client::get(&socket, "/v1/metrics")?);
    };
    if as_json && file.as_os_str() != "-" {
        return Err(Failure::new(Kind::Usage, "--textfile=FILE writes text, and prints nothing")
            .next("leave out --json, or leave out the name of the file")
            .option("--textfile"));
    }
    let text = client::get(&socket, "/v1/metrics?names=node")?;
    if file.as_os_str() == "-" {
        return json::report(text);
    }
    // The collector reads names that end in `.prom`; the temporary file's name does not.
    atomic_file::write(file, &text).map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Kind::Permission,
            _ => Kind::Io,
        };
        Failure::new(kind, format!("cannot write {}", file.display())).why(error.to_string())
    })?;
    Ok(Report::silent())
}
