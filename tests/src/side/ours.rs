//! A leg on our daemon: `bcached serve` as a process, accessed over NBD on a Unix socket.
//!
//! The daemon's runtime directory stays with the set from leg to leg, as on a user's machine. After
//! a crash, the daemon finds its own notes there, even if a kernel has had the set in between and
//! the notes are no longer valid.

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bcached_check::{Options, check};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Pid, Signal, kill_process};

use super::{Ending, LegError, Side};
use crate::apart;
use crate::guest::GuestError;
use crate::nbd::Client;
use crate::ready;
use crate::set::CacheSet;
use crate::uml::built_program;
use crate::workload::{Fate, Mismatch, Model, Random, RunError, Target, Workload, run};

/// Time limit from the start to the line `ready`, and from SIGTERM to the end.
const LIMIT: Duration = Duration::from_secs(200);
/// Settings for [`Daemon::configured`] under which dirty data stays dirty and no request bypasses
/// the cache.
pub const KEEP_DIRTY: &str = "sequential_cutoff = 0\nwriteback_running = false";
/// Upper bound, exclusive, of the number of requests that are answered between the flush that a
/// crash waits for and the kill.
const LATE_REQUESTS_MAX: u64 = 64;
/// Position of the device's UUID in a backing superblock, in bytes from the device's start.
const UUID_OFFSET: u64 = 4096 + 40;

/// Our daemon.
#[derive(Debug)]
pub struct Ours {
    program: PathBuf,
}

impl Ours {
    /// Finds the daemon that was built for these tests.
    ///
    /// # Errors
    /// It was not built: run the tests of the whole workspace, or `cargo build` first.
    pub fn find() -> Result<Self, GuestError> {
        built_program("bcached").map(|program| Self { program })
    }

    /// Returns the path of the binary, for `bcached make` and other commands.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }
}

impl Side for Ours {
    fn name(&self) -> &'static str {
        "bcached"
    }

    fn leg(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError> {
        let daemon = Daemon::start(&self.program, set)?;
        set.left_by_kernel = false;
        let mut clients = Vec::new();
        for index in 0..set.models.len() {
            clients.push((set.models[index].volume(), daemon.prove(set, index)?));
        }
        for (index, workload) in workloads.iter().enumerate() {
            let last = index + 1 == workloads.len();
            let ending = if last { ending } else { Ending::CleanStop };
            let (_, client) = clients
                .iter_mut()
                .find(|(volume, _)| *volume == workload.volume)
                .expect("a workload is for one of the set's volumes");
            daemon.write(set, workload, client, ending)?;
        }
        drop(clients);
        daemon.end(set, ending)
    }
}

/// A running `bcached serve`; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    /// Starts the daemon on the set's images and waits until it is ready.
    ///
    /// # Errors
    /// [`LegError::Daemon`] with the daemon's output.
    pub fn start(program: &Path, set: &CacheSet) -> Result<Self, LegError> {
        let mut arguments = vec![OsString::from("--cache"), set.cache.clone().into()];
        for backing in &set.backings {
            arguments.extend(["--backing".into(), backing.clone().into()]);
        }
        Self::serve(program, set, &arguments)
    }

    /// Starts the daemon from a configuration file, so that settings made at run time can persist.
    /// The cache is called `fast`, the volumes `v0`, `v1` and so on, and the section of each volume
    /// also contains `more`. Settings made during an earlier start apply, if that was from a
    /// configuration, too.
    ///
    /// # Errors
    /// [`LegError::Daemon`] with the daemon's output.
    pub fn configured(program: &Path, set: &CacheSet, more: &str) -> Result<Self, LegError> {
        // A machine that is busy with other tests must not cause requests to bypass the cache.
        let patient = "congested_read_threshold_us = 0\ncongested_write_threshold_us = 0";
        let mut text = format!("version = 1\n[cache.fast]\ndevice = {:?}\n{patient}\n", set.cache);
        for (n, backing) in set.backings.iter().enumerate() {
            let _ = write!(text, "[volume.v{n}]\nbacking = {backing:?}\n{more}\n");
        }
        let path = set.directory().join("config.toml");
        fs::write(&path, text).map_err(LegError::host("write the configuration"))?;
        Self::serve(program, set, &["--config".into(), path.into()])
    }

    fn serve(program: &Path, set: &CacheSet, arguments: &[OsString]) -> Result<Self, LegError> {
        let runtime = set.directory().join("run");
        fs::create_dir_all(&runtime).map_err(LegError::host("make the runtime directory"))?;
        let (socket, log) = (runtime.join("nbd.sock"), runtime.join("log"));
        let log_file = File::create(&log).map_err(LegError::host("make the log"))?;
        let mut command = Command::new(program);
        apart::isolated(&mut command, set.directory());
        command
            .arg("serve")
            .args(arguments)
            .arg("--control")
            .arg(runtime.join("control.sock"))
            .env("BCACHED_NOTES", &runtime);
        command.env("BCACHED_STATE", set.directory().join("state"));
        command.arg("--export").arg(format!("nbd:{}", socket.display()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file);
        let child = command.spawn().map_err(LegError::host("start bcached"))?;
        let mut daemon = Self { child, socket, log };
        match ready::wait(&mut daemon.child, LIMIT) {
            Ok(()) => Ok(daemon),
            Err(why) => Err(daemon.failed(&why)),
        }
    }

    /// Connects to the export of the set's n-th volume, and checks its size.
    ///
    /// # Errors
    /// There is no such export, or it has another size.
    pub fn connect(&self, set: &CacheSet, index: usize) -> Result<Client, LegError> {
        let uuid = match set.backings.get(index) {
            Some(backing) => backing_uuid(backing),
            None => flash_only_uuid(&set.cache, index - set.backings.len()),
        };
        let uuid = uuid.map_err(LegError::host("read a UUID"))?;
        // `ready` covers the volumes on the command line; flash-only volumes appear when the cache
        // is open.
        let deadline = Instant::now() + LIMIT;
        let mut client = Client::connect(&self.socket, &uuid);
        while client.is_err() && index >= set.backings.len() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(50));
            client = Client::connect(&self.socket, &uuid);
        }
        let client = client.map_err(|error| self.failed(&format!("export {uuid}: {error}")))?;
        if client.bytes() == set.models[index].sectors() * 512 {
            return Ok(client);
        }
        Err(self.failed(&format!("export {uuid} has {} bytes", client.bytes())))
    }

    /// Runs a workload as far as `ending` allows, and records in its volume's model what was
    /// written.
    ///
    /// # Errors
    /// Those of [`Daemon::run`], or the workload has no such flush.
    pub fn write(
        &self,
        set: &mut CacheSet,
        workload: &Workload,
        client: &mut Client,
        ending: Ending,
    ) -> Result<(), LegError> {
        let fate = match ending {
            Ending::CleanStop => self.run(workload, client)?,
            Ending::CrashAfterFlush(flush) => self.run_and_kill(workload, client, flush)?,
        };
        super::apply(set, workload, fate);
        Ok(())
    }

    /// Ends the daemon as [`Daemon::write`] was told: stops it cleanly, or waits until nothing of a
    /// killed daemon is left.
    ///
    /// # Errors
    /// Those of [`Daemon::stop`] and [`Daemon::crash`].
    pub fn end(self, set: &CacheSet, ending: Ending) -> Result<(), LegError> {
        if ending == Ending::CleanStop { self.stop() } else { self.crash(set) }
    }

    /// Runs a workload to its end.
    ///
    /// # Errors
    /// A request failed, or a read returned wrong data.
    pub fn run(&self, workload: &Workload, client: &mut Client) -> Result<Fate, LegError> {
        run(workload, client, &mut |_| {}).map_err(|error| self.workload_failed(&error))?;
        Ok(Fate::Finished)
    }

    /// Runs a workload until its flush number `flush` and some further requests were answered, then
    /// kills the daemon with a request in flight. Flushed data must be there for any reader; data
    /// that was only acknowledged must be there for the next daemon.
    ///
    /// # Errors
    /// A read returned wrong data, or the workload has no such flush.
    fn run_and_kill(&self, workload: &Workload, client: &mut Client, flush: u64) -> Result<Fate, LegError> {
        let late_requests = Random::new(workload.seed).below(LATE_REQUESTS_MAX);
        let left = Cell::new(None);
        let mut last_flush = 0;
        let mut doom = || {
            let now = left.get() == Some(0);
            left.set(left.get().map(|left: u64| left.saturating_sub(1)));
            now
        };
        let mut doomed = Doomed { client, pid: self.pid(), doom: &mut doom, writes: 0 };
        let result = run(workload, &mut doomed, &mut |number| {
            last_flush = number;
            if number == flush {
                left.set(Some(late_requests));
            }
        });
        match result {
            Ok(()) | Err(RunError::Io { .. }) if last_flush >= flush => {
                Ok(Fate::CrashedAfterFlush(last_flush))
            }
            Ok(()) => Err(self.failed(&format!("the workload has no flush {flush}"))),
            Err(error) => Err(self.workload_failed(&error)),
        }
    }

    /// Runs a workload, possibly concurrently with others, until the daemon is killed. `doom` is
    /// called before each request and returns true for the one at which to kill. Returns how many
    /// writes were acknowledged.
    ///
    /// # Errors
    /// A read returned wrong data, or the workload reached its end.
    pub fn run_until_killed(
        &self,
        workload: &Workload,
        client: &mut Client,
        doom: &mut dyn FnMut() -> bool,
    ) -> Result<u64, LegError> {
        let mut doomed = Doomed { client, pid: self.pid(), doom, writes: 0 };
        match run(workload, &mut doomed, &mut |_| {}) {
            Err(RunError::Io { .. }) => Ok(doomed.writes),
            Err(error) => Err(self.workload_failed(&error)),
            Ok(()) => Err(self.failed("the workload ended before the daemon did")),
        }
    }

    /// Runs a command of the program against this daemon and returns its output.
    ///
    /// # Errors
    /// The command failed.
    pub fn command(&self, program: &Path, words: &[&str]) -> Result<String, LegError> {
        let mut command = Command::new(program);
        command.args(words).arg("--control").arg(self.socket.with_file_name("control.sock"));
        apart::isolated(&mut command, &self.log.with_file_name(""));
        let output = command.stdin(Stdio::null()).output().map_err(LegError::host("run a command"))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(self.failed(&format!("`bcached {}` ended with {}: {said}", words.join(" "), output.status)))
    }

    /// Returns the daemon's status.
    ///
    /// # Errors
    /// The command failed, or its output is not JSON.
    pub fn status(&self, program: &Path) -> Result<serde_json::Value, LegError> {
        let said = self.command(program, &["status", "--json"])?;
        serde_json::from_str(&said).map_err(|error| self.failed(&format!("status: {error}: {said}")))
    }

    /// Compares the content of the set's n-th volume with its model, which settles what was open.
    ///
    /// # Errors
    /// The content differs, or there is no such export.
    pub fn prove(&self, set: &mut CacheSet, index: usize) -> Result<Client, LegError> {
        let mut client = self.connect(set, index)?;
        let path = set.directory().join("content");
        let model = &mut set.models[index];
        let volume = model.volume();
        compare(model, &mut client, &path).map_err(|source| LegError::Content {
            side: "bcached",
            volume,
            source,
            said: self.said(),
        })?;
        Ok(client)
    }

    /// Kills the daemon with SIGKILL and waits until nothing of it is left: requests that it had
    /// submitted to the kernel complete after its death, and keep the images locked until then.
    ///
    /// # Errors
    /// The images stay locked.
    pub fn crash(self, set: &CacheSet) -> Result<(), LegError> {
        drop(self);
        let deadline = Instant::now() + LIMIT;
        for image in set.images() {
            let file = File::options().read(true).write(true).open(image);
            let file = file.map_err(LegError::host("open an image"))?;
            while let Err(error) = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
                if Instant::now() > deadline {
                    return Err(LegError::host("lock an image of a killed daemon")(error.into()));
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// Stops the daemon cleanly with SIGTERM.
    ///
    /// # Errors
    /// It failed, or did not end in time.
    pub fn stop(mut self) -> Result<(), LegError> {
        kill_process(self.pid(), Signal::TERM)
            .map_err(|error| LegError::host("stop bcached")(error.into()))?;
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            match self.child.try_wait().map_err(LegError::host("wait for bcached"))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.failed(&format!("bcached ended with {status}"))),
                None => thread::sleep(Duration::from_millis(10)),
            }
        }
        Err(self.failed("bcached did not stop"))
    }

    /// Returns the daemon's process.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the daemon's log.
    #[must_use]
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn failed(&self, what: &str) -> LegError {
        LegError::Daemon { what: what.to_owned(), said: self.said() }
    }

    fn workload_failed(&self, error: &RunError) -> LegError {
        self.failed(&format!("{error}: {:?}", io_source(error)))
    }
}

/// A client whose server is killed at one of its requests.
struct Doomed<'a> {
    client: &'a mut Client,
    pid: Pid,
    /// Called before each request; returns true if the server is to be killed at this one.
    doom: &'a mut dyn FnMut() -> bool,
    /// Number of writes, including discards, that were acknowledged.
    writes: u64,
}

impl Doomed<'_> {
    fn client(&mut self) -> &mut Client {
        if (self.doom)() {
            self.client.kill_at_next_request(self.pid);
        }
        self.client
    }
}

impl Target for Doomed<'_> {
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.client().read(sector, bytes)
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
        self.client().write(sector, bytes)?;
        self.writes += 1;
        Ok(())
    }

    fn discard(&mut self, sector: u64, sectors: u64) -> io::Result<()> {
        self.client().discard(sector, sectors)?;
        self.writes += 1;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.client().flush()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a whole volume into a file and compares it with the model.
fn compare(model: &mut Model, client: &mut Client, path: &Path) -> Result<(), Mismatch> {
    let failed = |source: io::Error| Mismatch::Read { sector: 0, source };
    let mut content = File::create(path).map_err(failed)?;
    client.read_whole(|bytes| content.write_all(bytes)).map_err(failed)?;
    let content = File::open(path).map_err(failed)?;
    model.check(BufReader::with_capacity(1 << 20, content))
}

/// Returns a backing device's UUID as text, which is one of its export's names.
///
/// # Errors
/// It cannot be read.
pub fn backing_uuid(path: &Path) -> io::Result<String> {
    let mut bytes = [0; 16];
    std::os::unix::fs::FileExt::read_exact_at(&File::open(path)?, &mut bytes, UUID_OFFSET)?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

/// Returns the UUID of a set's n-th flash-only volume, which is one of its export's names. It may
/// be read from the image at any time, because the table changes only with the volumes.
fn flash_only_uuid(cache: &Path, index: usize) -> io::Result<String> {
    let report = check(&File::open(cache)?, &[], Options::default()).report;
    let mut volumes = report.volumes.iter().filter(|volume| volume.flash_only && !volume.invalidated);
    let volume = volumes.nth(index).ok_or_else(|| io::Error::other("no such flash-only volume"))?;
    Ok(volume.uuid.to_string())
}

fn io_source(error: &RunError) -> Option<&io::Error> {
    if let RunError::Io { source, .. } = error { Some(source) } else { None }
}
