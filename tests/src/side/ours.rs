//! A leg on our daemon: `bcached serve` as a process, reached over NBD on a unix socket.
//!
//! The daemon's runtime directory stays with the set from leg to leg, as on a user's machine: after a crash of the daemon it finds its own
//! notes there, also when a kernel has had the set in between and they no longer count.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Ending, LegError, Side};
use crate::guest::GuestError;
use crate::nbd::Client;
use crate::set::CacheSet;
use crate::uml::built_program;
use crate::workload::{Fate, Mismatch, Model, RunError, Workload, run};

/// From start to the line `ready`, and from SIGTERM to the end.
const LIMIT: Duration = Duration::from_secs(200);
/// Between the flush that a crash waits for and the kill: some writes more.
const KILL_DELAY: Duration = Duration::from_millis(10);
/// Where a backing superblock holds the device's UUID, in bytes from the device's start.
const UUID_OFFSET: u64 = 4096 + 40;

/// Our daemon.
#[derive(Debug)]
pub struct Ours {
    program: PathBuf,
}

impl Ours {
    /// The daemon as it was built for these tests.
    ///
    /// # Errors
    /// It was not built: the tests of the whole workspace have to be run, or `cargo build` first.
    pub fn find() -> Result<Self, GuestError> {
        built_program("bcached").map(|program| Self { program })
    }

    /// The binary, for `bcached make` and the like.
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
        let directory = set.directory().to_owned();
        let daemon = Daemon::start(&self.program, set)?;
        let mut clients = Vec::new();
        for (index, model) in set.models.iter().enumerate() {
            clients.push((model.volume(), daemon.connect(set, index)?));
        }
        for (model, (volume, client)) in set.models.iter_mut().zip(&mut clients) {
            let content = directory.join("content");
            compare(model, client, &content).map_err(|source| LegError::Content {
                side: "bcached",
                volume: *volume,
                source,
            })?;
        }
        for (index, workload) in workloads.iter().enumerate() {
            let last = index + 1 == workloads.len();
            let (_, client) = clients
                .iter_mut()
                .find(|(volume, _)| *volume == workload.volume)
                .expect("a workload is for one of the set's volumes");
            let crash =
                if let (true, Ending::CrashAfterFlush(flush)) = (last, ending) { Some(flush) } else { None };
            let fate = daemon.run(workload, client, crash)?;
            super::apply(set, workload, fate);
        }
        drop(clients);
        if ending == Ending::CleanStop { daemon.stop() } else { Ok(()) }
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
    /// Starts it on the set's images and waits until it is ready.
    ///
    /// # Errors
    /// [`LegError::Daemon`] with its own words.
    pub fn start(program: &Path, set: &CacheSet) -> Result<Self, LegError> {
        let runtime = set.directory().join("run");
        fs::create_dir_all(&runtime).map_err(LegError::host("make the runtime directory"))?;
        let (socket, log) = (runtime.join("nbd.sock"), runtime.join("log"));
        let log_file = File::create(&log).map_err(LegError::host("make the log"))?;
        let mut command = Command::new(program);
        command.arg("serve").arg("--cache").arg(&set.cache);
        for backing in &set.backings {
            command.arg("--backing").arg(backing);
        }
        command.arg("--control").arg(runtime.join("control.sock"));
        command.arg("--export").arg(format!("nbd:{}", socket.display()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file);
        let mut child = command.spawn().map_err(LegError::host("start bcached"))?;
        let output = child.stdout.take().expect("piped above");
        let daemon = Self { child, socket, log };
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        match lines.recv_timeout(LIMIT) {
            Ok(line) if line == "ready" => Ok(daemon),
            other => Err(daemon.failed(&format!("bcached serve is not ready: {other:?}"))),
        }
    }

    /// A connection to the export of the set's n-th backing device, whose size is checked.
    ///
    /// # Errors
    /// There is no such export, or it has another size.
    pub fn connect(&self, set: &CacheSet, index: usize) -> Result<Client, LegError> {
        let uuid = backing_uuid(&set.backings[index]).map_err(LegError::host("read a superblock"))?;
        let client = Client::connect(&self.socket, &uuid);
        let client = client.map_err(|error| self.failed(&format!("export {uuid}: {error}")))?;
        if client.bytes() == set.models[index].sectors() * 512 {
            return Ok(client);
        }
        Err(self.failed(&format!("export {uuid} has {} bytes", client.bytes())))
    }

    /// Runs a workload; with `crash`, kills the daemon shortly after that flush, while the workload goes on.
    fn run(&self, workload: &Workload, client: &mut Client, crash: Option<u64>) -> Result<Fate, LegError> {
        let mut last_flush = 0;
        let mut killer = None;
        let pid = self.pid();
        let result = run(workload, client, &mut |number| {
            last_flush = number;
            if crash == Some(number) {
                killer = Some(thread::spawn(move || {
                    thread::sleep(KILL_DELAY);
                    let _ = kill_process(pid, Signal::KILL);
                }));
            }
        });
        let Some(killer) = killer else {
            return match (result, crash) {
                (Ok(()), None) => Ok(Fate::Finished),
                (Ok(()), Some(flush)) => Err(self.failed(&format!("the workload has no flush {flush}"))),
                (Err(error), _) => Err(self.failed(&format!("{error}: {:?}", io_source(&error)))),
            };
        };
        let _ = killer.join();
        match result {
            // The workload ended before the kill, or was cut off by it: both are the crash that was asked for.
            Ok(()) | Err(RunError::Io { .. }) => Ok(Fate::CrashedAfterFlush(last_flush)),
            Err(error) => Err(error.into()),
        }
    }

    /// SIGTERM, and an orderly end.
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

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn failed(&self, what: &str) -> LegError {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        LegError::Daemon { what: what.to_owned(), said }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a volume whole into a file and compares that with the model.
fn compare(model: &mut Model, client: &mut Client, path: &Path) -> Result<(), Mismatch> {
    let failed = |source: io::Error| Mismatch::Read { sector: 0, source };
    let mut content = File::create(path).map_err(failed)?;
    client.read_whole(|bytes| content.write_all(bytes)).map_err(failed)?;
    let content = File::open(path).map_err(failed)?;
    model.check(BufReader::with_capacity(1 << 20, content))
}

/// A backing device's UUID as text: one of its export's names.
fn backing_uuid(path: &Path) -> io::Result<String> {
    let mut bytes = [0; 16];
    std::os::unix::fs::FileExt::read_exact_at(&File::open(path)?, &mut bytes, UUID_OFFSET)?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

fn io_source(error: &RunError) -> Option<&io::Error> {
    if let RunError::Io { source, .. } = error { Some(source) } else { None }
}
