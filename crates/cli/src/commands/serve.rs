//! `bcached serve`: the daemon, in the foreground.

use crate::failure::Failure;
use crate::flags::Serve;
use crate::output::Report;
use bcached_daemon::config::CommandLine;

/// Serves until a signal ends it.
pub fn run(flags: Serve) -> Result<Report, Failure> {
    let control = flags.control.named();
    bcached_daemon::serve(CommandLine {
        config: flags.config,
        caches: flags.cache,
        backings: flags.backing,
        exports: flags.export,
        control,
        stop_timeout: flags.stop_timeout,
    })?;
    Ok(Report::silent())
}
