//! Lays out a foreign bcached installation, next to which all test programs run.
//!
//! A test that uses the machine's own places passes on its author's machine and fails on an
//! administrator's. So each run provides such a machine: a configuration, notes that a killed
//! daemon has left, and sockets on which a busy daemon listens. Environment variables point to some
//! of it. If the run can have a mount namespace of its own, the rest lies in `/etc`, `/run` and
//! `/dev/shm` of that namespace, so that the machine itself is not changed. Any access to one of
//! these files or sockets is reported, and fails the run.

use anyhow::{Context as _, Result, bail};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

/// A UUID that no set of a test has.
const SET: &str = "dec0dec0-5afe-4bad-9bad-dec0dec0dec0";
/// A configuration with a volume that never appears. The file beside it is not a valid
/// configuration at all.
const CONFIG: &str = "version = 1\n[cache.decoy]\ndevice = \"/nonexistent/decoy-ssd\"\n\
    [volume.decoy]\nbacking = \"/nonexistent/decoy-hdd\"\n";
/// The reply of a busy daemon.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy";
/// The file whose creation marks the end: all earlier events have been read by then.
const END: &str = "end";
/// The events on a file that mean that a test has found it. (The decoy's own files are created
/// before the watch begins.)
const FOUND: WatchFlags = WatchFlags::OPEN
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::ATTRIB);

/// Restarts this process in a mount namespace of its own, with the option `--apart`, if that is
/// permitted; otherwise returns why not.
pub fn move_apart() -> Result<String> {
    let temporary = fs::canonicalize(std::env::temp_dir()).context("TMPDIR")?;
    if ["/etc", "/run", "/dev/shm"].iter().any(|place| temporary.starts_with(place)) {
        return Ok(format!("TMPDIR, {}, is in one of them", temporary.display()));
    }
    let may = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"])
        .stdin(Stdio::null())
        .output();
    match may {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            return Ok(format!("cannot create a mount namespace (needs root with CAP_SYS_ADMIN): {said}"));
        }
        Err(error) => return Ok(format!("cannot start unshare (util-linux): {error}")),
    }
    let mut words = std::env::args_os().skip(1);
    let chore = words.next().context("this is `cargo xtask test`")?;
    let mut again = Command::new("unshare");
    again.args(["--mount", "--propagation", "private"]).arg(std::env::current_exe()?);
    again.arg(chore).arg("--apart").args(words);
    Err(again.exec()).context("cannot start unshare")
}

/// The decoy, which exists until it is dropped.
pub struct Decoy {
    /// Declared before the folder, because it is mounted from what is in the folder, and must be
    /// dropped first.
    overlaid: Option<OverlayMounts>,
    /// The files to which environment variables point.
    folder: tempfile::TempDir,
    watched: WatchedFolders,
    sockets: Vec<PathBuf>,
    found: Receiver<String>,
    /// The mounts before any test ran.
    mounts: Vec<String>,
}

impl Decoy {
    /// Lays out the decoy. With `is_apart` it also uses the places of the machine, which must be
    /// those of a namespace of this process alone.
    ///
    /// # Errors
    /// A mount or a file that cannot be made.
    pub fn lay(is_apart: bool) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("bt-")
            .tempdir()
            .context("cannot create a folder for the decoy")?;
        let at = |name: &str| folder.path().join(name);
        let mut bcacheds = vec![at("named"), at("runtime/bcached")];
        let mut folders = vec![at("state/bcached")];
        let overlaid = if is_apart { Some(OverlayMounts::over_machine(folder.path())?) } else { None };
        if overlaid.is_some() {
            bcacheds.extend(["/run/bcached", "/dev/shm/bcached-0"].map(PathBuf::from));
            folders.extend(["/etc/bcached", "/etc/bcached/config.d", "/etc/udev/rules.d"].map(PathBuf::from));
        }
        let (tell, found) = mpsc::channel();
        let mut sockets = Vec::new();
        for place in &bcacheds {
            fs::create_dir_all(place)?;
            fs::write(place.join(format!("{SET}.note")), [0x5a; 8192])?;
            for name in ["control.sock", "monitor.sock", "nbd.sock"] {
                sockets.push(place.join(name));
            }
        }
        for place in &folders {
            fs::create_dir_all(place)?;
        }
        for socket in &sockets {
            listen(socket, tell.clone())?;
        }
        let watched = WatchedFolders::new(&[bcacheds, folders].concat(), tell)?;
        Ok(Self { overlaid, folder, watched, sockets, found, mounts: mounts()? })
    }

    /// Returns the folder with everything that is not mounted.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    /// Returns variables that an administrator may have exported, and those of a login session.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let at = |name: &str| self.folder.path().join(name).into_os_string();
        vec![
            ("BCACHED_CONTROL", at("named/control.sock")),
            ("BCACHED_NOTES", at("named")),
            ("BCACHED_STATE", at("state/bcached")),
            ("XDG_RUNTIME_DIR", at("runtime")),
            ("XDG_STATE_HOME", at("state")),
        ]
    }

    /// Returns each part of the decoy that a test has found, once. Prints what was left mounted.
    ///
    /// # Errors
    /// The end of the events cannot be marked.
    pub fn found(self) -> Result<Vec<String>> {
        self.watched.end()?;
        for socket in &self.sockets {
            // A socket that is gone has been reported already.
            let _answer = UnixStream::connect(socket).and_then(|mut asks| asks.read_to_end(&mut Vec::new()));
        }
        let mut all: Vec<String> = self.found.iter().take_while(|told| told != END).collect();
        // Listeners reply after they have reported.
        all.extend(self.found.try_iter());
        if self.overlaid.is_some() {
            let left = mounts()?.into_iter().filter(|mount| !self.mounts.contains(mount));
            // This is printed and nothing more: it disappears with this namespace, and the process
            // that uses it may still be ending.
            left.for_each(|mount| println!("left mounted by a test: {mount}"));
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }
}

/// File systems of this namespace that are mounted over the machine's places. What is there remains
/// visible.
#[derive(Default)]
struct OverlayMounts(Vec<PathBuf>);

impl OverlayMounts {
    /// Mounts them, with a configuration and udev rules in them.
    fn over_machine(folder: &Path) -> Result<Self> {
        let own = folder.join("over");
        fs::create_dir(&own)?;
        // If something fails, what has been mounted so far is unmounted.
        let mut all = Self::default();
        all.mount(&["-t", "tmpfs", "-o", "size=64m,mode=755"], &own)?;
        for place in ["etc", "run"] {
            let (upper, work) = (own.join(place), own.join(format!("{place}-work")));
            fs::create_dir(&upper)?;
            fs::create_dir(&work)?;
            let layers = format!("lowerdir=/{place},upperdir={},workdir={}", upper.display(), work.display());
            all.mount(&["-t", "overlay", "-o", &layers], &Path::new("/").join(place))?;
        }
        // With a size limit of its own: what tests keep there cannot fill the machine's memory.
        all.mount(&["-t", "tmpfs", "-o", "size=2g,mode=1777"], Path::new("/dev/shm"))?;
        for folder in ["/etc/bcached/config.d", "/etc/udev/rules.d"] {
            fs::create_dir_all(folder)?;
        }
        fs::write("/etc/bcached/config.toml", CONFIG)?;
        fs::write("/etc/bcached/config.d/50-broken.toml", "this is no configuration [\n")?;
        fs::write("/etc/udev/rules.d/67-bcached-owned.rules", "# a list that a person wrote\n")?;
        fs::write("/etc/udev/rules.d/69-bcache.rules", "# the rule of bcache-tools\n")?;
        Ok(all)
    }

    fn mount(&mut self, words: &[&str], place: &Path) -> Result<()> {
        let mut command = Command::new("mount");
        let output = command.args(words).arg("bcached-decoy").arg(place).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            bail!("cannot mount at {}: {}", place.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        self.0.push(place.to_owned());
        Ok(())
    }
}

/// Unmounts everything that is mounted in `folder`, so that it can be removed.
pub fn unmount(folder: &Path) {
    let all = mounts().unwrap_or_default();
    let places = all.iter().rev().filter_map(|mount| mount.split(' ').next());
    for place in places.filter(|place| Path::new(place).starts_with(folder)) {
        let _gone_already = Command::new("umount").args(["--quiet", "--lazy", place]).status();
    }
}

impl Drop for OverlayMounts {
    fn drop(&mut self) {
        for place in self.0.iter().rev() {
            let _gone_with_the_namespace = Command::new("umount").arg("--lazy").arg(place).status();
        }
    }
}

/// Returns the mounts of this namespace: place and type of each, with repetitions.
fn mounts() -> Result<Vec<String>> {
    let all = fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
    let of = |line: &str| {
        let words: Vec<_> = line.split(' ').skip(1).take(2).collect();
        words.join(" ")
    };
    Ok(all.lines().map(of).collect())
}

/// Listens on a socket as a busy daemon, and reports each process that connects.
fn listen(socket: &Path, tell: Sender<String>) -> Result<()> {
    let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
    let name = socket.display().to_string();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let who =
                rustix::net::sockopt::socket_peercred(&stream).map(|who| who.pid.as_raw_nonzero().get());
            if who.is_ok_and(|pid| u32::try_from(pid) != Ok(std::process::id())) {
                let who = who.map(named).unwrap_or_default();
                let _the_run_is_over = tell.send(format!("{name}: connection from {who}"));
            }
            let mut stream = stream;
            let _it_has_gone = stream.write_all(BUSY);
        }
    });
    Ok(())
}

/// Returns the command line of a process.
fn named(pid: i32) -> String {
    let called = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = String::from_utf8_lossy(&called).trim_end_matches('\0').replace('\0', " ");
    format!("process {pid} ({words})")
}

/// Folders in which each access to a file is reported.
struct WatchedFolders {
    first: PathBuf,
}

impl WatchedFolders {
    fn new(folders: &[PathBuf], tell: Sender<String>) -> Result<Self> {
        let notify = inotify::init(CreateFlags::CLOEXEC).context("inotify")?;
        let mut names = BTreeMap::new();
        for folder in folders {
            let watch = inotify::add_watch(&notify, folder, FOUND);
            names.insert(watch.with_context(|| folder.display().to_string())?, folder.clone());
        }
        let first = folders.first().context("no folder to watch")?.clone();
        thread::spawn(move || told(&notify, &names, &tell));
        Ok(Self { first })
    }

    /// Causes [`END`] to be reported after all earlier events.
    fn end(&self) -> Result<()> {
        fs::write(self.first.join(END), "").context("cannot mark the end of the decoy")
    }
}

fn told(notify: &OwnedFd, names: &BTreeMap<i32, PathBuf>, tell: &Sender<String>) {
    let mut space = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(notify, &mut space);
    while let Ok(event) = reader.next() {
        let name = event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let is_end = name == END && event.events().contains(ReadFlags::CREATE);
        let place = names.get(&event.wd()).map(|folder| folder.join(&name)).unwrap_or_default();
        let beside = super::pool::running().join(", ");
        let what = match event.events() {
            events if events.contains(ReadFlags::OPEN) => "opened",
            events if events.contains(ReadFlags::CREATE) => "created",
            events if events.contains(ReadFlags::DELETE) => "removed",
            _ => "changed",
        };
        let told = format!("{}: {what} while these ran: {beside}", place.display());
        if tell.send(if is_end { END.to_owned() } else { told }).is_err() || is_end {
            return;
        }
    }
}
