//! Shared by the process tests: running `bcached` and its predecessors' tools under a time limit,
//! image files, skipping.
#![allow(clippy::panic, reason = "helpers of tests fail like tests")]

pub mod exits;
pub mod nbdkit;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No command here takes a second. One that hangs must fail and not block the run.
const LIMIT: Duration = Duration::from_secs(60);

/// The result of a command.
#[derive(Debug)]
pub struct CommandResult {
    pub exit: i32,
    pub out: String,
    pub err: String,
}

/// Runs `bcached` with `words` and an open standard input that never delivers anything.
pub fn bcached(words: &[&str]) -> CommandResult {
    run(program().args(words))
}

/// The path of `bcached`. A test that starts it by this path calls [`isolated`], too.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_bcached");

/// Returns `bcached`, isolated from the machine's own bcache.
pub fn program() -> Command {
    let mut command = Command::new(PROGRAM);
    isolated(&mut command);
    command
}

/// Isolates what `command` starts from the machine's own bcache: its sockets, notes, configuration,
/// udev rules and links to devices, and this process's environment variables for them.
pub fn isolated(command: &mut Command) -> &mut Command {
    for variable in ["CONTROL", "NOTES", "STATE", "SYSFS", "UDEV_RULES", "LOG"] {
        command.env_remove(format!("BCACHED_{variable}"));
    }
    // This directory does not exist. Daemons have a root of their own, which is removed with their
    // images.
    command.env("BCACHED_ROOT", concat!(env!("CARGO_TARGET_TMPDIR"), "/nowhere"))
}

/// Runs `command`, for at most [`LIMIT`].
pub fn run(command: &mut Command) -> CommandResult {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    // Kept open: a command that reads standard input hangs, and fails at the time limit.
    let input = child.stdin.take();
    // Read concurrently: a command that prints more than a pipe holds would block forever.
    let (out, err) = (read_on(child.stdout.take()), read_on(child.stderr.take()));
    let started = Instant::now();
    while child.try_wait().expect("waits").is_none() {
        if started.elapsed() > LIMIT {
            child.kill().expect("kills");
            panic!("{command:?} took more than {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(input);
    let text = |reader: std::thread::JoinHandle<Vec<u8>>| {
        String::from_utf8(reader.join().expect("it is read")).expect("text")
    };
    let status = child.wait().expect("it has ended");
    CommandResult { exit: status.code().expect("ended by itself"), out: text(out), err: text(err) }
}

/// Reads everything from the pipe on a thread of its own, while the caller waits for the process.
fn read_on(pipe: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        pipe.expect("a pipe").read_to_end(&mut all).expect("it is read");
        all
    })
}

/// Returns true if `tool` is installed; otherwise the test counts as skipped, and should return.
#[must_use]
pub fn requires(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let found = std::env::split_paths(&path).chain(extra).any(|folder| folder.join(tool).is_file());
    if !found {
        println!("skipped: not installed: {tool}");
    }
    found
}

/// Returns whether volumes can be mounted here; if not, the test is skipped.
#[must_use]
pub fn has_fuse() -> bool {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        Ok(_) if rustix::process::geteuid().is_root() => true,
        Ok(_) => requires("fusermount3"),
        Err(error) => {
            println!("skipped: /dev/fuse cannot be opened: {error}");
            false
        }
    }
}

/// A tool that may live outside an ordinary user's `PATH`.
pub fn tool(name: &str) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(name);
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

/// Returns a client that runs a script. It would run under the first Python in the path, but its
/// module belongs to the system's Python.
pub fn nbdsh(uri: &str, script: &str) -> Command {
    let mut command = tool("nbdsh");
    let connect = format!("h.set_uri_allow_local_file(True)\nh.connect_uri({uri:?})");
    command.env("PATH", "/usr/bin:/bin").args(["--command", &connect, "--command", script]);
    command
}

/// Returns whether a flush of the volume, by a separate client, succeeds.
pub fn flushes(daemon: &Daemon, volume: &str) -> bool {
    run(&mut nbdsh(&daemon.uri(volume), "h.flush()")).exit == 0
}

/// A temporary directory of image files. It is removed after every [`Daemon`] in it: a running one
/// would put files back.
pub struct Images(Arc<ImageFolder>);

struct ImageFolder(tempfile::TempDir);

impl Drop for ImageFolder {
    /// Unmounts first: a killed daemon has left its file system mounted, which blocks the removal.
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let places = mounts.lines().rev().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| Path::new(place).starts_with(self.0.path())) {
            let _ = tool("umount").args(["--lazy", place]).stderr(Stdio::null()).status();
        }
    }
}

impl Images {
    pub fn new() -> Self {
        Self(Arc::new(ImageFolder(tempfile::tempdir().expect("a folder"))))
    }

    /// Creates a sparse file of `bytes` zeroes, and returns its name as an argument.
    pub fn blank(&self, name: &str, bytes: u64) -> String {
        let path = self.path(name);
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("an image");
        path.to_str().expect("temporary names are text").to_owned()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.0.path().join(name)
    }

    /// Returns the root directory that daemons of these images use instead of the machine's.
    pub fn root(&self) -> PathBuf {
        self.path("machine")
    }

    /// Makes a cache `fast`, and a backing device `tank` with that label in writeback mode, of
    /// these sizes.
    pub fn pair(&self, fast_bytes: u64, tank_bytes: u64) -> (String, String) {
        self.pair_of_blocks("4k", (fast_bytes, tank_bytes))
    }

    /// The same with this block size.
    pub fn pair_of_blocks(&self, block: &str, (fast_bytes, tank_bytes): (u64, u64)) -> (String, String) {
        let (fast, tank) = (self.blank("fast", fast_bytes), self.blank("tank", tank_bytes));
        assert_eq!(bcached(&["make", "-b", "64k", "-w", block, "-C", &fast]).exit, 0);
        assert_eq!(bcached(&["make", "--writeback", "-w", block, "--label", "tank", "-B", &tank]).exit, 0);
        (fast, tank)
    }

    /// Writes the configuration of [`Daemon::configured`].
    pub fn configure(&self, text: &str) {
        std::fs::write(self.path("config.toml"), text).expect("a file");
    }

    /// Makes a cache `fast` and its volume `tank` as [`Images::pair`] does, and configures them;
    /// `of_tank` is added to the volume's section.
    pub fn configure_pair(&self, fast_bytes: u64, tank_bytes: u64, of_tank: &str) -> (String, String) {
        self.configure_blocks("4k", (fast_bytes, tank_bytes), of_tank)
    }

    /// The same with this block size.
    pub fn configure_blocks(&self, block: &str, bytes: (u64, u64), of_tank: &str) -> (String, String) {
        let (fast, tank) = self.pair_of_blocks(block, bytes);
        self.configure(&format!(
            "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.tank]\nbacking = {tank:?}\n{of_tank}"
        ));
        (fast, tank)
    }

    /// Sets the default `wait` of the configuration's volumes.
    pub fn configure_wait(&self, wait: &str) {
        let text = std::fs::read_to_string(self.path("config.toml")).expect("configured");
        let defaults = format!("version = 1\n[defaults]\nwait = \"{wait}\"\n");
        self.configure(&text.replace("version = 1\n", &defaults));
    }

    /// Returns what `set` and the like have stored beside the configuration; empty: nothing yet.
    pub fn kept(&self) -> String {
        std::fs::read_to_string(self.path("config.d/99-set.toml")).unwrap_or_default()
    }
}

/// Returns the content of a file.
pub fn bytes(path: impl AsRef<Path>) -> Vec<u8> {
    std::fs::read(path).expect("readable")
}

/// Overwrites part of a file.
pub fn patch(path: impl AsRef<Path>, offset: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::File::options().write(true).open(path).expect("opens");
    file.write_all_at(bytes, offset).expect("writes");
}

/// The offset, in a backing device's superblock, of the byte with the state in its upper bits, and
/// some values of it.
pub const STATE: u64 = 111;
pub const CLEAN: u8 = 1 << 5;
pub const DIRTY: u8 = 2 << 5;
pub const STALE: u8 = 3 << 5;

/// Changes a byte of a superblock and corrects its checksum.
pub fn reseal(image: &str, offset: u64, value: u8) {
    patch(image, 4096 + offset, &[value]);
    let shown = json(&bcached(&["show", "-f", "--json", image]).out);
    let sum = shown["checksum"]["expected"].as_str().expect("a sum");
    patch(image, 4096, &u64::from_str_radix(sum, 16).expect("hexadecimal").to_le_bytes());
}

/// Parses `text`, which must be one JSON value.
pub fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A file locked as by a running owner.
pub struct FileLock(#[expect(dead_code, reason = "the lock goes with it")] std::fs::File);

impl FileLock {
    pub fn new(path: impl AsRef<Path>) -> Self {
        let file = std::fs::File::options().read(true).write(true).open(path).expect("opens");
        // A POSIX lock conflicts with the locks of open file descriptions, and needs no unsafe code
        // here.
        rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("locks");
        Self(file)
    }
}

/// A loop device, detached at the end.
pub struct LoopDevice(pub String);

impl LoopDevice {
    /// Returns `None`, and prints why, if there are no loop devices.
    pub fn over(path: &str) -> Option<Self> {
        let made = run(tool("losetup").args(["--find", "--show", path]));
        if made.exit != 0 {
            println!("skipped: no loop device: {}", made.err.trim().replace('\n', " "));
            return None;
        }
        Some(Self(made.out.trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _gone_already = tool("losetup").args(["--detach", &self.0]).status();
    }
}

/// A running `bcached serve`, killed when this is dropped.
pub struct Daemon {
    child: std::process::Child,
    control: PathBuf,
    errors: PathBuf,
    _folder: Arc<ImageFolder>,
}

impl Daemon {
    /// Returns the command that starts a daemon with its sockets in the directory `run` of
    /// `images`. All daemons of `images` share one place for their notes, and none touches the
    /// machine's own files.
    pub fn command(images: &Images, run: &str, words: &[&str]) -> Command {
        let mut command = program();
        command.arg("serve").args(words).arg("--control").arg(images.path(run).join("control.sock"));
        command.env("BCACHED_ROOT", images.root());
        command.env("BCACHED_NOTES", images.path("run"));
        command.env("BCACHED_STATE", images.path("state"));
        command
    }

    /// Starts a daemon with its sockets in a directory of `images`, and waits for `ready`.
    pub fn start(images: &Images, words: &[&str]) -> Self {
        Self::start_command(images, Self::command(images, "run", words))
    }

    /// The same with the configuration of `images`.
    pub fn configured(images: &Images) -> Self {
        Self::start(images, &["--config", images.path("config.toml").to_str().expect("text")])
    }

    /// The same with a command from [`Daemon::command`] for the directory `run`.
    pub fn start_command(images: &Images, mut command: Command) -> Self {
        use std::io::BufRead as _;
        let control = images.path("run").join("control.sock");
        let errors = images.path("errors");
        let log = std::fs::File::create(&errors).expect("a log");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("starts");
        let out = child.stdout.take().expect("piped");
        let daemon = Self { child, control, errors, _folder: images.0.clone() };
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = std::io::BufReader::new(out).read_line(&mut line);
            let _receiver_gone = send.send(read.map(|_| line));
        });
        let line = receive.recv_timeout(LIMIT).expect("says something in time").expect("readable");
        assert_eq!(line, "ready\n", "{}", daemon.log());
        daemon
    }

    /// Returns what it has logged.
    pub fn log(&self) -> String {
        // An answer arrives after the lines that were logged before it.
        let _ended_already = self.ask_anything();
        std::fs::read_to_string(&self.errors).expect("readable")
    }

    /// Makes the daemon answer a request, or waits a while.
    fn ask_anything(&self) -> std::io::Result<()> {
        use std::io::{Read as _, Write as _};
        let mut stream = std::os::unix::net::UnixStream::connect(&self.control)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        stream.read_to_end(&mut Vec::new()).map(drop)
    }

    pub fn control(&self) -> &str {
        self.control.to_str().expect("text")
    }

    /// Returns the NBD URI of a volume.
    pub fn uri(&self, volume: &str) -> String {
        format!("nbd+unix:///{volume}?socket={}", self.control.with_file_name("nbd.sock").display())
    }

    pub fn status(&self) -> serde_json::Value {
        json(&bcached(&["status", "--json", "--control", self.control()]).out)
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.process(), signal).expect("signals");
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The same, in the form needed to change its limits.
    pub fn process(&self) -> rustix::process::Pid {
        let id = i32::try_from(self.id()).expect("a process id");
        rustix::process::Pid::from_raw(id).expect("not zero")
    }

    /// From now on its writes to files past `offset` fail, as on a failing device.
    pub fn fail_writes_beyond(&self, offset: u64) {
        use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
        let limit = Rlimit { current: Some(offset), maximum: getrlimit(Resource::Fsize).maximum };
        prlimit(Some(self.process()), Resource::Fsize, limit).expect("its own process");
    }

    /// From now on its writes succeed again.
    pub fn writes_succeed(&self) {
        use rustix::process::{Resource, getrlimit, prlimit};
        prlimit(Some(self.process()), Resource::Fsize, getrlimit(Resource::Fsize)).expect("its own process");
    }

    /// Waits until the status is as wanted.
    pub fn wait_for(&self, what: &str, wanted: impl Fn(&serde_json::Value) -> bool) {
        let started = Instant::now();
        while !wanted(&self.status()) {
            assert!(started.elapsed() < LIMIT, "{what}: {}\n{}", self.status(), self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Stops it cleanly; returns its exit status and its log.
    pub fn stop(mut self) -> (i32, String) {
        self.signal(rustix::process::Signal::TERM);
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("waits") {
                let (code, log) = (status.code().expect("ended by itself"), self.log());
                // Every log line needs a stable event id, whatever the test is about. The last line
                // of a failing daemon comes from the program, not from the log.
                let lines = log.lines().count() - usize::from(code != 0);
                let bare: Vec<_> = log.lines().take(lines).filter(|line| !line.contains("[event=")).collect();
                assert!(bare.is_empty(), "lines without a stable id: {bare:?}");
                return (code, log);
            }
            assert!(started.elapsed() < LIMIT, "does not stop: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it without warning.
    pub fn kill(mut self) {
        self.child.kill().expect("kills");
        self.child.wait().expect("waits");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

/// Returns the control socket of its daemon.
pub fn control(images: &Images) -> String {
    images.path("run/control.sock").to_str().expect("text").to_owned()
}

/// Returns the id of the process that answers, if one does.
pub fn pid(images: &Images) -> Option<i32> {
    let status = bcached(&["status", "--json", "--control", &control(images)]);
    // 1: something is not as it should be.
    let status = matches!(status.exit, 0 | 1).then(|| json(&status.out))?;
    status["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok())
}

/// Ends whichever process answers for these images last.
pub struct StopOnDrop<'a>(pub &'a Images);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        let Some(id) = pid(self.0) else { return };
        let process = rustix::process::Pid::from_raw(id).expect("not zero");
        let _ended_already = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        // It is not a child of this process, so it cannot be waited for. Once ended it has no `exe`
        // link, whether reaped or not.
        let started = Instant::now();
        while std::fs::read_link(format!("/proc/{id}/exe")).is_ok() && started.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns a command that starts the daemon from a shell, which sets its limits first.
pub fn limited(command: &Command, limits: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{limits}; exec \"$0\" \"$@\"")).arg(command.get_program());
    shell.args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            shell.env(name, value);
        }
    }
    shell
}

/// Returns a program that runs `before` and then becomes bcached.
pub fn wrapped(images: &Images, before: &str) -> String {
    let path = images.path("wrapped");
    std::fs::write(&path, format!("#!/bin/sh\n{before}\nexec {PROGRAM} \"$@\"\n")).expect("a script");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("ours");
    path.to_str().expect("text").to_owned()
}

/// Runs `bcached` with `words` against the daemon.
pub fn ask(daemon: &Daemon, words: &[&str]) -> CommandResult {
    bcached(&[words, &["--control", daemon.control()]].concat())
}

/// The same, must succeed; returns its output.
#[track_caller]
pub fn done(daemon: &Daemon, words: &[&str]) -> String {
    let ran = ask(daemon, words);
    assert_eq!(ran.exit, 0, "{words:?}: {ran:?}\n{}", daemon.log());
    ran.out
}

/// The command must be refused, in one line that contains `sentence`.
#[track_caller]
pub fn refused(daemon: &Daemon, words: &[&str], exit: i32, sentence: &str) {
    let ran = ask(daemon, words);
    assert_eq!((ran.exit, ran.err.contains(sentence)), (exit, true), "{words:?}: {ran:?}");
    assert_eq!(ran.err.lines().count(), 1, "one sentence: {ran:?}");
}

/// The same, with `--dry-run` as well.
#[track_caller]
pub fn refused_also_dry(daemon: &Daemon, words: &[&str], exit: i32, sentence: &str) {
    refused(daemon, &[words, &["--dry-run"]].concat(), exit, sentence);
    refused(daemon, words, exit, sentence);
}

/// Returns bytes that depend on their position and on `seed`.
pub fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|n| seed ^ (n / 512).to_le_bytes()[0] ^ (n % 251).to_le_bytes()[0]).collect()
}

/// Writes `data` to the start of the volume, and flushes.
#[track_caller]
pub fn fill(images: &Images, daemon: &Daemon, volume: &str, data: &[u8]) {
    let path = images.path("data");
    std::fs::write(&path, data).expect("a file");
    let ran = run(tool("nbdcopy").arg("--flush").arg(&path).arg(daemon.uri(volume)));
    assert_eq!(ran.exit, 0, "{ran:?}\n{}", daemon.log());
}

/// Returns all of the volume, as a client reads it.
#[track_caller]
pub fn content(images: &Images, daemon: &Daemon, volume: &str) -> Vec<u8> {
    let path = images.path("found");
    drop(std::fs::remove_file(&path));
    let ran = run(tool("nbdcopy").arg(daemon.uri(volume)).arg(&path));
    assert_eq!(ran.exit, 0, "{ran:?}\n{}", daemon.log());
    bytes(path)
}
