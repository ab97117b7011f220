//! The command line of `bcached config`, and the options that name configuration files.

use super::{ControlArgs, ScanArgs};
use clap::Subcommand;
use std::path::PathBuf;

/// `bcached config`.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Check whether a start would accept the files; exit status 1 if not
    Check(ConfigFileArgs),
    /// Print all files merged into one, and the place of each value
    Show(ConfigFileArgs),
    /// Show how the running daemon differs from its files; exit status 1 if it does
    Diff(ConfigDiffArgs),
    /// Print a configuration for the devices found
    Scan(ScanArgs),
}

/// Which files.
#[derive(clap::Args, Debug)]
pub struct ConfigFileArgs {
    /// Configuration file [default: /etc/bcached/config.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// `bcached config diff`.
#[derive(clap::Args, Debug)]
pub struct ConfigDiffArgs {
    #[command(flatten)]
    pub control: ControlArgs,
}
