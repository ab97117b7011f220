//! The command line of `bcached config`, and the options that name configuration files.

use super::{Control, Scan};
use clap::Subcommand;
use std::path::PathBuf;

/// `bcached config`.
#[derive(Subcommand, Debug)]
pub enum ConfigVerb {
    /// Check whether a start would accept the files; exit status 1 if not
    Check(ConfigFile),
    /// Print all files merged into one, and the place of each value
    Show(ConfigFile),
    /// Show how the running daemon differs from its files; exit status 1 if it does
    Diff(ConfigDiff),
    /// Print a configuration for the devices found
    Scan(Scan),
}

/// Which files.
#[derive(clap::Args, Debug)]
pub struct ConfigFile {
    /// Configuration file [default: /etc/bcached/config.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// `bcached config diff`.
#[derive(clap::Args, Debug)]
pub struct ConfigDiff {
    #[command(flatten)]
    pub control: Control,
}
