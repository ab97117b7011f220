//! The command line of the commands that add, remove and change volumes: long jobs of the daemon.

use super::ControlArgs;
use std::path::PathBuf;

/// `bcached flush`.
#[derive(clap::Args, Debug)]
pub struct FlushArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device [default: all
    /// volumes that have a cache]
    pub volume: Option<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached detach`.
#[derive(clap::Args, Debug)]
pub struct DetachArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached attach`.
#[derive(clap::Args, Debug)]
pub struct AttachArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// A cache's name, the UUID of its set, or its device [default: the only one]
    #[arg(long, value_name = "SET")]
    pub cache: Option<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached add`.
#[derive(clap::Args, Debug)]
pub struct AddArgs {
    /// Name of the new volume, or of a volume that was removed, which is served again
    pub name: String,
    /// Its backing device: a path or UUID=
    #[arg(long, value_name = "DEV")]
    pub backing: Option<String>,
    /// Name of its cache, or none
    #[arg(long, value_name = "SET")]
    pub cache: Option<String>,
    /// Size of a flash-only volume, which has no backing device; a bare number is bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Option<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached remove`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A block device /dev/ublkbN that no daemon serves is removed from the kernel. This needs no running daemon."
)]
pub struct RemoveArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device; or a block device
    /// (ublk) that no daemon serves any more
    pub volume: String,
    /// Remove a block device that no daemon serves even if it is in use: its pending requests fail
    #[arg(long)]
    pub in_use: bool,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached stop`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A stop never writes back dirty data: it stays on its cache device, and is reported. The daemon ends as after SIGTERM: it \
                        waits for clients up to its stop_timeout. With --timeout, only this command ends early."
)]
pub struct StopArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device: only this volume
    /// is stopped, until the next start or `bcached add` [default: the whole daemon]
    pub volume: Option<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached take-over`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The daemon starts the program with its own arguments, and hands over everything when the program has read the \
                        configuration. NBD clients and block devices (ublk) notice a pause; virtual machines and NBD clients with TLS \
                        reconnect. If the program cannot serve everything that was served, the old daemon continues. Refused while files \
                        of a FUSE mount are open."
)]
pub struct TakeOverArgs {
    /// The program that takes over [default: this one]
    #[arg(long, value_name = "FILE")]
    pub program: Option<std::path::PathBuf>,
    /// How long to wait at most: 30s, 5m, 2h; then the take-over goes on, and the exit status is 6
    /// [default: 3m]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<String>,
    /// Check what can be checked and print what would be done, but do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// `bcached forget`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The cache deletes all data of the volume, reuses its buckets, and no longer lists the volume. The ranges of lost dirty \
                        data are written to a file before anything is deleted. After a crash, the same command completes the work."
)]
pub struct ForgetArgs {
    /// UUID of a volume that is not served (or its first 8 digits), its label, or the name it had
    #[arg(value_name = "UUID")]
    pub volume: String,
    /// How much dirty data may be lost; a bare number is bytes [default: none]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub accept_loss: Option<String>,
    /// A new file, on the daemon's machine, for the list of what was lost [default:
    /// lost-UUID-TIME.json in /var/lib/bcached; if the daemon does not run as root, in
    /// ~/.local/state/bcached]
    #[arg(long, value_name = "FILE")]
    pub lost_ranges: Option<PathBuf>,
    /// The cache that is to forget the volume: a name, the UUID of its set, or its device [default:
    /// the one that lists it]
    #[arg(long, value_name = "SET")]
    pub cache: Option<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached grow`.
#[derive(clap::Args, Debug)]
pub struct GrowArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// New size of a flash-only volume; a bare number is bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Option<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached shrink`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "First shrink the file system on the volume. Dirty data behind the new end is written back. When this command has ended, \
                        the backing device may be cut to its data offset plus that size, also while the volume is served."
)]
pub struct ShrinkArgs {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// New size, in whole blocks; a bare number is bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: String,
    /// For a flash-only volume: how much data past its new end may be lost; a bare number is bytes
    /// [default: none]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub accept_loss: Option<String>,
    /// A new file on the daemon's machine for the list of what was lost [default: as for `forget`]
    #[arg(long, value_name = "FILE")]
    pub lost_ranges: Option<PathBuf>,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached replace`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each volume is written back, leaves the cache, and joins the new device; clients stay connected. After a crash, a stop or \
                        a cancel, the same command completes the move. A device that was made with `bcached make --cache` and never used is \
                        taken as it is."
)]
pub struct ReplaceArgs {
    /// A cache's name, the UUID of its set (or its first 8 digits), or its device
    #[arg(value_name = "SET")]
    pub cache: String,
    /// The new cache device
    #[arg(long, value_name = "DEV")]
    pub with: PathBuf,
    /// Overwrite this signature on the new device; repeat the option for each signature
    #[arg(long, value_name = "TYPE")]
    pub wipe_signature: Vec<String>,
    /// Overwrite a bcache superblock on the new device that has no dirty data behind it
    #[arg(long)]
    pub wipe_bcache: bool,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached release`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "No client may be connected to its volumes. Dirty data stays on the cache. The cache is not served again until \
                        `bcached import`, also after restarts."
)]
pub struct ReleaseArgs {
    /// A cache's name, the UUID of its set (or its first 8 digits), or its device
    #[arg(value_name = "SET")]
    pub cache: String,
    /// Give its devices to the kernel's bcache
    #[arg(long)]
    pub register: bool,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached import`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Its volumes must not be in use: unmount them first. Dirty data stays on the cache. After a failure midway, the same \
                        command completes the import; `bcached release SET --register` undoes it."
)]
pub struct ImportArgs {
    /// The UUID of a set of the kernel (or its first 8 digits), one of its devices, or bcacheN; or
    /// a set that was released here
    #[arg(value_name = "SET")]
    pub set: String,
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// `bcached cancel`.
#[derive(clap::Args, Debug)]
pub struct CancelArgs {
    /// Number of the job, as `status` shows it
    #[arg(value_name = "ID")]
    pub job: String,
    /// Check whether the job can be cancelled, but leave it running
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}

/// How long work is waited for.
#[derive(clap::Args, Clone, Debug)]
pub struct WatchArgs {
    /// Wait for the end of the work, which is the default
    #[arg(long, hide = true, conflicts_with = "no_wait")]
    pub wait: bool,
    /// Do not wait: print the number of the job, and leave it running
    #[arg(long)]
    pub no_wait: bool,
    /// How long to wait at most: 30s, 5m, 2h; then the work continues, and the exit status is 6
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<String>,
    /// Check everything and print what would be done, but do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: ControlArgs,
}
