//! The command line of `bcached config`, and the options that name configuration files.

use super::{Control, Scan};
use clap::Subcommand;
use std::path::PathBuf;

/// `bcached config`.
#[derive(Subcommand, Debug)]
pub enum ConfigVerb {
    /// Say whether a start would take the files; exit status 1 if not
    Check(ConfigFile),
    /// Print what all files say together, and where each value stands
    Show(ConfigFile),
    /// Say how what runs differs from the files; exit status 1 if it does
    Diff(ConfigDiff),
    /// Print a configuration for what the disks hold
    Scan(Scan),
}

/// Which files.
#[derive(clap::Args, Debug)]
pub struct ConfigFile {
    /// Configuration [default: /etc/bcached/config.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// `bcached config diff`.
#[derive(clap::Args, Debug)]
pub struct ConfigDiff {
    #[command(flatten)]
    pub control: Control,
}
