//! The command line. One definition feeds the parser and `--help`; the commands are in `commands`.

use crate::failure::{Failure, Kind};
use crate::{commands::make::DeviceRole, future_commands};
use bcached_config::CONTROL_DEFAULT;
use bcached_config::options;
use bcached_control::paths;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

mod config;
mod usage_errors;
mod volume_jobs;

pub use config::{ConfigCommand, ConfigFileArgs};
use usage_errors::wrong_use;
pub use volume_jobs::{
    AddArgs, AttachArgs, CancelArgs, DetachArgs, FlushArgs, ForgetArgs, GrowArgs, ImportArgs, ReleaseArgs,
    RemoveArgs, ReplaceArgs, ShrinkArgs, StopArgs, TakeOverArgs, WatchArgs,
};

/// Represents `-C` or `-B` with no device after it. No argument of a process can contain a NUL, so
/// it cannot be typed. An empty string, as an unset shell variable produces, stays distinct, and
/// the parser refuses it.
const NO_DEVICE: &str = "\0";

/// The command line.
#[derive(Parser, Debug)]
#[command(
    name = "bcached",
    version,
    about = "Linux bcache in user space, in the kernel's own on-disk format",
    after_help = future_commands::help()
)]
struct CommandLine {
    /// Print JSON: a report on standard output, an error on standard error
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// A command with what was typed for it.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Write superblocks, as make-bcache does
    Make(Box<MakeArgs>),
    /// Serve volumes, in the foreground
    Serve(ServeArgs),
    /// Show the state of the running daemon, its caches and its volumes
    Status(StatusArgs),
    /// Show what has happened, in the words of the log
    Events(EventsArgs),
    /// Show where the data at an offset of a volume is; exit status 1 if the cache does not have it
    Explain(ExplainArgs),
    /// Show the status repeatedly
    Top(TopArgs),
    /// Print the metrics of a running daemon, in the format of Prometheus
    Metrics(MetricsArgs),
    /// Show the options of a volume or a cache, or the value of one
    Get(GetArgs),
    /// Change options of a volume or a cache, at once and permanently
    Set(SetArgs),
    /// Undo `set`: remove the values that it has given to options
    Unset(UnsetArgs),
    /// Write back the dirty data of a volume, or of all volumes
    Flush(FlushArgs),
    /// Detach a volume from its cache: it stays served, without a cache
    Detach(DetachArgs),
    /// Attach a volume to a cache
    Attach(AttachArgs),
    /// Start to serve one more volume, now and after restarts
    Add(AddArgs),
    /// Stop serving a volume permanently; its dirty data stays in its cache
    Remove(RemoveArgs),
    /// Stop the daemon cleanly, or stop serving one volume until the next start
    Stop(StopArgs),
    /// Replace the running daemon, for example by a new version, and take over its devices and
    /// clients
    TakeOver(TakeOverArgs),
    /// Delete all data that a cache holds of a volume that is gone, or of a flash-only volume
    Forget(ForgetArgs),
    /// Grow a volume to the present size of its backing device
    Grow(GrowArgs),
    /// Shrink a volume, so that its backing device can be shrunk
    Shrink(ShrinkArgs),
    /// Move all volumes of a cache to another cache device
    Replace(ReplaceArgs),
    /// Stop serving a cache and all of its volumes, and release their devices, for example to the
    /// kernel
    Release(ReleaseArgs),
    /// Take a set from the kernel, with its dirty data, and serve it
    Import(ImportArgs),
    /// Cancel a running job
    Cancel(CancelArgs),
    /// Wait until a volume is served, clean or detached
    Wait(WaitArgs),
    /// List caches and volumes
    List(ListArgs),
    /// List bcache devices, grouped by set
    Scan(ScanArgs),
    /// Check, show or compare the configuration, or propose one for the devices found
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a device's superblock, as bcache-super-show does
    Show(ShowArgs),
    /// Check a cache set, read-only
    Check(CheckArgs),
    /// Print a cache set's metadata, record by record
    Dump(DumpArgs),
    /// Show what this machine offers, and whether devices are fit to be served
    Doctor(DoctorArgs),
    /// List the JSON outputs, or print the JSON Schema of one
    Schema(SchemaArgs),
    /// Print the version
    Version,
    /// Help or the version, as the parser wrote it.
    #[command(skip)]
    Print(String),
    /// A first word that is none of these.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

/// `bcached make`.
#[derive(clap::Args, Debug)]
#[command(after_help = "A device takes the role of the last -C or -B before it, as with make-bcache.")]
pub struct MakeArgs {
    /// The devices that follow become cache devices
    #[arg(short = 'C', long, value_name = "DEV", num_args = 0.., default_missing_value = NO_DEVICE)]
    cache: Vec<PathBuf>,
    /// The devices that follow become backing devices
    #[arg(short = 'B', long, visible_alias = "bdev", value_name = "DEV", num_args = 0..,
          default_missing_value = NO_DEVICE)]
    backing: Vec<PathBuf>,
    /// More devices, in the role of the last -C or -B before them
    #[arg(value_name = "DEV")]
    devices: Vec<PathBuf>,
    /// Bucket size: a power of two, 4k to 16M; a bare number is bytes [default: 512k]
    #[arg(short = 'b', long, value_name = "SIZE")]
    pub bucket: Option<String>,
    /// Block size: a power of two, 512 to 4k; a bare number is bytes [default: 4k, or what --for
    /// needs]
    #[arg(short = 'w', long, value_name = "SIZE")]
    pub block: Option<String>,
    /// Where a backing device's data starts; a bare number is sectors of 512 bytes [default: 16]
    #[arg(short = 'o', long, alias = "data_offset", value_name = "SECTORS")]
    pub data_offset: Option<String>,
    /// UUID of the cache set [default: random]
    #[arg(long, value_name = "UUID")]
    pub cset_uuid: Option<String>,
    /// Label of the backing device, up to 32 bytes
    #[arg(long, value_name = "LABEL")]
    pub label: Option<String>,
    /// Backing devices start in writeback mode
    #[arg(long)]
    pub writeback: bool,
    /// Set the cache's discard flag; nothing is discarded now
    #[arg(long)]
    pub discard: bool,
    /// Which bucket is reused first: lru, fifo or random [default: lru]
    #[arg(long, alias = "cache_replacement_policy", value_name = "POLICY")]
    pub cache_replacement_policy: Option<String>,
    /// Match this device: the backing device that the new cache will serve (its block size), or the
    /// cache that the new backing device will use (its set)
    #[arg(long = "for", value_name = "DEV")]
    pub serves: Option<PathBuf>,
    /// Overwrite a device that carries this signature; the refusal names the type
    #[arg(long, value_name = "TYPE")]
    pub wipe_signature: Vec<String>,
    /// Overwrite a bcache superblock that has no dirty data behind it
    #[arg(long)]
    pub wipe_bcache: bool,
    /// Also serve the devices in the running daemon (not in this version)
    #[arg(long)]
    pub add: bool,
    /// Check everything and print what would be written, but write nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub configuration: ConfigFileArgs,
    /// Accepted and ignored, as make-bcache does
    #[arg(short = 'U', hide = true)]
    _ignored: bool,
    /// The devices with their roles, in the order of the command line.
    #[arg(skip)]
    pub roles: Vec<(DeviceRole, PathBuf)>,
}

/// `bcached show`.
#[derive(clap::Args, Debug)]
pub struct ShowArgs {
    /// The device or image file
    pub device: PathBuf,
    /// Continue if the magic number or the checksum is wrong
    #[arg(short = 'f')]
    pub ignore_checksum: bool,
}

/// `bcached serve`.
#[derive(clap::Args, Debug)]
pub struct ServeArgs {
    /// Configuration file [default: /etc/bcached/config.toml, unless devices are named]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A cache device to serve without a configuration; can be repeated
    #[arg(long, value_name = "DEV")]
    pub cache: Vec<String>,
    /// A backing device to serve without a configuration; can be repeated. A device that belongs to
    /// no set is attached
    #[arg(long, value_name = "DEV")]
    pub backing: Vec<String>,
    /// How volumes are exported: nbd, nbd:/path/to/socket, nbd:127.0.0.1:10809, dev, ublk,
    /// vhost-user[:DIR], fuse[:DIR]; can be repeated
    #[arg(long, value_name = "WAY")]
    pub export: Vec<String>,
    /// How long a stop waits for clients: 30s, 5m [default: 20s]
    #[arg(long, value_name = "TIME")]
    pub stop_timeout: Option<String>,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached status`.
#[derive(clap::Args, Debug)]
pub struct StatusArgs {
    /// Show only this volume and its cache, or this cache and its volumes
    pub name: Option<String>,
    /// Also show how long ago the data in each cache was used, which examines every bucket
    #[arg(long)]
    pub full: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached metrics`.
#[derive(clap::Args, Debug)]
pub struct MetricsArgs {
    /// Use node_exporter's names for the kernel's bcache, for its textfile collector; with FILE,
    /// write to that file, which is replaced atomically
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub textfile: Option<PathBuf>,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached explain`.
#[derive(clap::Args, Debug)]
pub struct ExplainArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// Offset from the start of the volume; a bare number is bytes
    pub offset: String,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached top`.
#[derive(clap::Args, Debug)]
pub struct TopArgs {
    /// Time between two updates [default: 2s]
    #[arg(long, value_name = "TIME")]
    pub interval: Option<String>,
    /// Number of updates [default: until Ctrl-C on a terminal, else 1]
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub count: Option<u64>,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached schema`.
#[derive(clap::Args, Debug)]
pub struct SchemaArgs {
    /// Name of an output, as in its field `schema`, with or without `bcached.` [default: list all]
    pub name: Option<String>,
}

/// `bcached scan`.
#[derive(clap::Args, Debug)]
pub struct ScanArgs {
    /// Devices and image files [default: all block devices]
    #[arg(value_name = "DEV")]
    pub devices: Vec<PathBuf>,
}

/// `bcached events`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The daemon keeps its newest 1024 events; the journal has all of them. With --json, each line is an object \
                  (NDJSON)."
)]
pub struct EventsArgs {
    /// Continue with new events, until the daemon ends
    #[arg(short = 'f', long)]
    pub follow: bool,
    /// Only events since then: how long ago (30s, 5m, 2h), or a date and time
    /// (2026-07-01T12:00:00Z)
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Of the past events, only the newest COUNT
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub lines: Option<usize>,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached get`.
#[derive(clap::Args, Debug)]
#[command(after_help = options::help())]
pub struct GetArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device; or a cache's name,
    /// the UUID of its set, or its device
    pub volume: String,
    /// Print only the value of this option
    pub option: Option<String>,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached set`.
#[derive(clap::Args, Debug)]
#[command(after_help = format!(
    "Saved in config.d/99-set.toml beside the configuration, unless --runtime is given. All values are checked before \
     the first is changed.\nSizes: 4M or 4MiB. Times: 500ms, 30s, 5m, 2h.\n\n{}", options::help()
))]
pub struct SetArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device; or a cache's name,
    /// the UUID of its set, or its device
    pub volume: String,
    /// Options and their new values
    #[arg(value_name = "OPTION=VALUE", required = true)]
    pub settings: Vec<String>,
    /// Only until the daemon stops: nothing is saved
    #[arg(long)]
    pub runtime: bool,
    /// Check everything and print what would be changed, but change nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached unset`.
#[derive(clap::Args, Debug)]
#[command(after_help = options::help())]
pub struct UnsetArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device; or a cache's name,
    /// the UUID of its set, or its device
    pub volume: String,
    /// Options to reset to the value in the configuration, in the superblock or by default
    #[arg(value_name = "OPTION", required = true)]
    pub options: Vec<String>,
    /// Check everything and print what would be changed, but change nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached wait`.
#[derive(clap::Args, Debug)]
pub struct WaitArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// The state to wait for
    #[arg(long = "for", value_name = "STATE")]
    pub wanted: WaitFor,
    /// How long to wait at most: 30s, 5m, 2h; then the exit status is 6
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<String>,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// What can be waited for.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitFor {
    /// The volume is served
    Served,
    /// The volume has no dirty data, and its backing device is not marked dirty
    Clean,
    /// The volume is served without a cache
    Detached,
}

/// `bcached list`.
#[derive(clap::Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    pub control: ControlArgs,
}

/// Where the daemon answers.
#[derive(clap::Args, Clone, Debug)]
pub struct ControlArgs {
    /// The daemon's control socket [default: $BCACHED_CONTROL, else /run/bcached/control.sock];
    /// monitor.sock beside it suffices for commands that only read
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl ControlArgs {
    /// Returns the socket to connect to.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.named().unwrap_or_else(|| paths::of_machine(CONTROL_DEFAULT))
    }

    /// Returns the socket named on the command line or in the environment.
    #[must_use]
    pub fn named(&self) -> Option<PathBuf> {
        let variable = || std::env::var_os("BCACHED_CONTROL").filter(|path| !path.is_empty());
        self.control.clone().or_else(|| variable().map(PathBuf::from))
    }
}

/// `bcached check`.
#[derive(clap::Args, Debug)]
pub struct CheckArgs {
    /// Cache devices, and backing devices to compare them with
    #[arg(value_name = "DEV", required = true)]
    pub devices: Vec<PathBuf>,
    /// Backing devices of the set
    #[arg(long, value_name = "DEV")]
    pub backing: Vec<PathBuf>,
    /// List each finding, with its place on the device
    #[arg(short, long)]
    pub verbose: bool,
}

/// `bcached dump`.
#[derive(clap::Args, Debug)]
pub struct DumpArgs {
    /// The cache device
    pub device: PathBuf,
    /// Print only this part
    pub part: Option<DumpPart>,
}

/// A part of a set's metadata.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum DumpPart {
    /// The superblock
    Superblock,
    /// Journal entries
    Journal,
    /// Nodes of the B-tree, and their keys
    Tree,
    /// Generations and priorities of buckets
    Prios,
    /// The table of volumes
    Uuids,
}

/// `bcached doctor`.
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    /// Devices to examine
    #[arg(value_name = "DEV")]
    pub devices: Vec<PathBuf>,
    #[command(flatten)]
    pub configuration: ConfigFileArgs,
}

/// Returns true if `--json` was typed before a `--`. Determined apart from the parser, because the
/// parser's errors are printed as JSON too.
#[must_use]
pub fn wants_json(words: &[OsString]) -> bool {
    words.iter().skip(1).take_while(|word| *word != "--").any(|word| word == "--json")
}

/// Parses `words` (the program's name first) into a command.
///
/// # Errors
/// Wrong use, as a failure. Help and version are commands that print text.
pub fn parse(words: &[OsString]) -> Result<Command, Failure> {
    use clap::error::ErrorKind::{DisplayHelp, DisplayVersion};
    let asks_for_help =
        words.iter().skip(1).find(|word| *word != "--json").is_some_and(|word| word == "help");
    // Help is always text.
    let is_typed = |word: &&OsString| !asks_for_help || *word != "--json";
    let words: Vec<_> = words.iter().filter(is_typed).collect();
    let wrong = |error: clap::Error| wrong_use(&error, &words);
    let matches = match CommandLine::command().try_get_matches_from(&words) {
        Ok(matches) => matches,
        Err(error) if matches!(error.kind(), DisplayHelp | DisplayVersion) => {
            return Ok(Command::Print(error.render().to_string()));
        }
        Err(error) => return Err(wrong(error)),
    };
    let mut line = CommandLine::from_arg_matches(&matches).map_err(wrong)?;
    if let (Command::Make(make), Some(matches)) = (&mut line.command, matches.subcommand_matches("make")) {
        make.roles = roles(matches)?;
    }
    Ok(line.command)
}

/// Returns each device with its role, in the order of the command line.
fn roles(matches: &ArgMatches) -> Result<Vec<(DeviceRole, PathBuf)>, Failure> {
    let mut typed: Vec<(usize, Option<DeviceRole>, &OsStr)> = Vec::new();
    for (name, role) in
        [("cache", Some(DeviceRole::Cache)), ("backing", Some(DeviceRole::Backing)), ("devices", None)]
    {
        let indices = matches.indices_of(name).into_iter().flatten();
        let values = matches.get_raw(name).into_iter().flatten();
        typed.extend(indices.zip(values).map(|(index, value)| (index, role, value)));
    }
    typed.sort_by_key(|(index, ..)| *index);
    let mut current = None;
    let mut devices = Vec::new();
    for (_, role, value) in typed {
        current = role.or(current);
        if value == NO_DEVICE {
            continue;
        }
        let role = current.ok_or_else(|| {
            Failure::new(Kind::Usage, format!("`{}` has no role", value.display()))
                .next("put --cache (-C) or --backing (-B) before it")
        })?;
        devices.push((role, PathBuf::from(value)));
    }
    Ok(devices)
}

#[cfg(test)]
mod tests;
