//! The command line of the commands that add, remove and change volumes: long jobs of the daemon.

use super::Control;
use std::path::PathBuf;

/// `bcached flush`.
#[derive(clap::Args, Debug)]
pub struct Flush {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device [default: all that
    /// have a cache]
    pub volume: Option<String>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached detach`.
#[derive(clap::Args, Debug)]
pub struct Detach {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached attach`.
#[derive(clap::Args, Debug)]
pub struct Attach {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// A cache's name, the UUID of its set, or its device [default: the only one]
    #[arg(long, value_name = "SET")]
    pub cache: Option<String>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached add`.
#[derive(clap::Args, Debug)]
pub struct Add {
    /// What it is to be called; one that was removed is served again
    pub name: String,
    /// Its backing device: a path or UUID=
    #[arg(long, value_name = "DEV")]
    pub backing: Option<String>,
    /// Its cache's name, or none
    #[arg(long, value_name = "SET")]
    pub cache: Option<String>,
    /// How large it is to be: a volume without a backing device, that lives in the cache alone; a
    /// bare number is bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Option<String>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached remove`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A block device /dev/ublkbN whose daemon is gone is taken from the kernel; no daemon need run for that."
)]
pub struct Remove {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device; or a block device
    /// (ublk) that nobody serves any more
    pub volume: String,
    /// Take away a block device that nobody serves though it is in use: what waits there fails
    #[arg(long)]
    pub in_use: bool,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached stop`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Dirty data is never written back by a stop: it is named, and stays on its cache device. The daemon ends as after SIGTERM: it \
                        waits for clients up to its stop_timeout. With --timeout only this command ends early."
)]
pub struct Stop {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device: only that is served
    /// no more, until the next start or `bcached add` [default: the whole daemon]
    pub volume: Option<String>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached take-over`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The daemon starts the program with its own arguments and gives it all it has once that has read the configuration. NBD \
                        clients and block devices (ublk) notice a pause; virtual machines and NBD clients in TLS connect again. If the \
                        program cannot serve all that was served, the daemon goes on. Refused while files of a FUSE mount are open."
)]
pub struct TakeOver {
    /// The program that is to go on [default: this one]
    #[arg(long, value_name = "FILE")]
    pub program: Option<std::path::PathBuf>,
    /// How long to wait at most: 30s, 5m, 2h; then it goes on, and the exit status is 6 [default:
    /// 3m]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<String>,
    /// Check what can be checked and say what would be, but do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: Control,
}

/// `bcached forget`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "All that the cache holds of it is given up, its buckets are used again, and the cache knows it no more. Where dirty \
                        data was lost is written to a file before anything is given up. Repeated after a crash, it does the rest."
)]
pub struct Forget {
    /// UUID of a volume that is not served (or its first 8 digits), its label, or the name it had
    #[arg(value_name = "UUID")]
    pub volume: String,
    /// How much dirty data may be lost; a bare number is bytes [default: none]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub accept_loss: Option<String>,
    /// The new file, on the daemon's machine, that is to say what was lost [default:
    /// lost-UUID-TIME.json in /var/lib/bcached; of a daemon that is not root's, in
    /// ~/.local/state/bcached]
    #[arg(long, value_name = "FILE")]
    pub lost_ranges: Option<PathBuf>,
    /// The cache that is to forget it: a name, the UUID of its set, or its device [default: the one
    /// that knows it]
    #[arg(long, value_name = "SET")]
    pub cache: Option<String>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached grow`.
#[derive(clap::Args, Debug)]
pub struct Grow {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// How large one is to be that lives in the cache alone; a bare number is bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Option<String>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached shrink`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "First make what is on the volume smaller (its file system). What is dirty behind the new end is written back; when this \
                        command has ended, the backing device may be cut behind its data offset and that size, also while it is served."
)]
pub struct Shrink {
    /// A volume's name, label, UUID (or its first 8 digits) or backing device
    pub volume: String,
    /// How large it is to be, in whole blocks; a bare number is bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: String,
    /// How much may be lost behind its new end of one that lives in the cache alone; a bare number
    /// is bytes [default: nothing]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub accept_loss: Option<String>,
    /// The new file, on the daemon's machine, that is to say what was lost [default: as `forget`'s]
    #[arg(long, value_name = "FILE")]
    pub lost_ranges: Option<PathBuf>,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached replace`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each volume is written back, leaves the cache, and comes to the new device; clients stay connected. Repeated after a \
                        crash, a stop or a cancel, it does the rest. A device that `bcached make --cache` has made and nobody has used is taken as it is."
)]
pub struct Replace {
    /// A cache's name, the UUID of its set (or its first 8 digits), or its device
    #[arg(value_name = "SET")]
    pub cache: String,
    /// The new cache device
    #[arg(long, value_name = "DEV")]
    pub with: PathBuf,
    /// What is marked so on the new device is not needed any more; repeat it for each
    #[arg(long, value_name = "TYPE")]
    pub wipe_signature: Vec<String>,
    /// The new device is a bcache device that is not needed any more, with nothing dirty behind it
    #[arg(long)]
    pub wipe_bcache: bool,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached release`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Nobody may be connected to its volumes. What is dirty stays on the cache. It is not served again before `bcached import`, \
                        over restarts too."
)]
pub struct Release {
    /// A cache's name, the UUID of its set (or its first 8 digits), or its device
    #[arg(value_name = "SET")]
    pub cache: String,
    /// Give its devices to the kernel's bcache
    #[arg(long)]
    pub register: bool,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached import`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Nobody may use its volumes: they are unmounted first. What is dirty stays on the cache. Repeated after a failure in between, \
                        it does the rest; `bcached release SET --register` is the way back."
)]
pub struct Import {
    /// The UUID of a set of the kernel (or its first 8 digits), one of its devices, or bcacheN; or
    /// what was released here
    #[arg(value_name = "SET")]
    pub set: String,
    #[command(flatten)]
    pub watch: Watch,
}

/// `bcached cancel`.
#[derive(clap::Args, Debug)]
pub struct Cancel {
    /// Its number, as `status` shows it
    #[arg(value_name = "ID")]
    pub job: String,
    /// Say whether it can be given up, but leave it
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: Control,
}

/// How long work is waited for.
#[derive(clap::Args, Clone, Debug)]
pub struct Watch {
    /// Wait for it, as is done anyway
    #[arg(long, hide = true, conflicts_with = "no_wait")]
    pub wait: bool,
    /// Do not wait: print its number, and leave it
    #[arg(long)]
    pub no_wait: bool,
    /// How long to wait at most: 30s, 5m, 2h; then it goes on, and the exit status is 6
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<String>,
    /// Check everything and say what would be, but do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub control: Control,
}
