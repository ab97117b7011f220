//! `bcached serve`: the daemon, in the foreground.

use super::name_lookup::device;
use crate::failure::Failure;
use crate::flags::ServeArgs;
use crate::output::Report;
use bcached_config::CommandLine;

/// Serves until a signal ends the daemon.
pub fn run(flags: ServeArgs) -> Result<Report, Failure> {
    let control = flags.control.named();
    // Absolute paths, so that clients find them from any working directory.
    let devices = |typed: Vec<String>| typed.iter().map(|typed| device(typed)).collect();
    bcached_daemon::serve(CommandLine {
        config: flags.config,
        caches: devices(flags.cache),
        backings: devices(flags.backing),
        exports: flags.export,
        control,
        stop_timeout: flags.stop_timeout,
    })?;
    Ok(Report::silent())
}
