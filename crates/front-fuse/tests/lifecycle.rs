//! Tests the start and the end of a mount.

mod support;

use bcached_front_fuse::tree::Errno;
use bcached_front_fuse::{
    ControlTree, FuseServer, Limits, MountError, Options, ShutdownTimeout, StartError, TreeEntry,
};
use bcached_port::ram::{RamServer, Verdict};
use bcached_port::{Budget, BudgetPool, Operation};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use support::{
    ENOTCONN, ESHUTDOWN, LIMIT, TANK, TANK_SECTORS, can_mount, errno, is_mounted, program, serve,
    serve_hooked, serve_sharing, serve_with, skip, wait_until,
};

/// Environment variable with the directory at which a child process serves.
const CHILD: &str = "BCACHED_TEST_SERVE_AT";

fn start(directory: &Path, ram: &RamServer) -> Result<FuseServer, StartError> {
    let options = Options { directory: directory.to_owned(), allow_other: false, limits: Limits::default() };
    FuseServer::start(options, support::table(ram), Vec::new())
}

fn refusal(directory: &Path) -> MountError {
    let ram = RamServer::start(&[(TANK, TANK_SECTORS)]);
    let refused = start(directory, &ram).map(drop).expect_err("it will not do");
    let StartError::Mount(error) = refused else { unreachable!("{refused}") };
    error
}

/// Not a test: the process that [`child`] starts. It serves until its standard input ends.
#[test]
fn serves_in_a_child() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let ram = RamServer::start(&[(TANK, TANK_SECTORS)]);
    match start(Path::new(&directory), &ram) {
        Ok(server) => {
            println!("\nserving");
            let _: std::io::Result<usize> = std::io::stdin().read(&mut [0]);
            server.shutdown(LIMIT).expect("nobody is busy");
        }
        Err(error) => println!("\nrefused: {error}"),
    }
}

/// Starts a process that serves at `directory`. Returns it with its output and its first message.
fn child(directory: &Path, user: Option<u32>) -> (Child, impl Iterator<Item = String> + use<>, String) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "serves_in_a_child", "--nocapture"]).env(CHILD, directory);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    let mut child = command.spawn().expect("starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let said = lines.find(|line| line == "serving" || line.starts_with("refused"));
    (child, lines, said.expect("it says so"))
}

#[test]
fn a_mount_that_nobody_uses_is_gone_at_once() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let before = Instant::now();
    assert!(!served.server().has_ended());
    std::fs::read(served.tank()).map(drop).expect("is read");
    served.end();
    assert!(before.elapsed() < LIMIT / 2, "nothing was waited for");
}

#[test]
fn a_dropped_server_leaves_no_mount() {
    if !can_mount() {
        return;
    }
    let mut served = serve();
    let directory = served.server().directory().to_owned();
    let file = served.open();
    drop(served.server.take());
    assert!(!is_mounted(&directory));
    assert!(file.read_at(&mut [0; 512], 0).is_err());
    assert_eq!(std::fs::read_dir(&directory).expect("a directory").count(), 0);
}

/// A tree that is slow to answer, and reports each lookup of `slow`.
struct SlowTree(Mutex<mpsc::Sender<()>>);

const TAKES: Duration = Duration::from_millis(60);

impl ControlTree for SlowTree {
    fn entry(&self, path: &str) -> Option<TreeEntry> {
        if path == "slow" {
            let _nobody_listens_any_more = self.0.lock().expect("no panic").send(());
            std::thread::sleep(TAKES);
        }
        Some(if path.is_empty() { TreeEntry::Directory } else { TreeEntry::File { mode: 0o444 } })
    }

    fn list(&self, _: &str) -> Option<Vec<(String, TreeEntry)>> {
        None
    }

    fn read(&self, _: &str) -> Result<Vec<u8>, Errno> {
        Ok(Vec::new())
    }

    fn write(&self, _: &str, _: &[u8], _: u32) -> Result<(), Errno> {
        Ok(())
    }
}

/// A shutdown waits for a lookup that is under way, and refuses no other request. (Such requests
/// used to fail with ESHUTDOWN, and the log reported a user of the mount.)
#[test]
fn who_only_looks_at_a_name_is_waited_for_and_nobody_is_refused() {
    if !can_mount() {
        return;
    }
    let (tell, asked) = mpsc::channel();
    let trees: Vec<(String, Arc<dyn ControlTree>)> =
        vec![("sys".to_owned(), Arc::new(SlowTree(Mutex::new(tell))))];
    let mut served = serve_with(Limits::default(), Box::new(|_, _: &Operation| Verdict::Serve), trees);
    let server = served.server.take().expect("runs");
    let directory = server.directory().to_owned();
    let slow = directory.join("sys/slow");
    let looks = std::thread::spawn(move || std::fs::metadata(slow).map(drop));
    asked.recv_timeout(LIMIT).expect("it has begun to look");
    let shutdown = std::thread::spawn(move || server.shutdown(LIMIT));
    std::thread::sleep(TAKES / 4);
    // On a slow machine the mount may already be gone: then the path does not exist.
    for name in ["sys/quick", "sys"] {
        let found = std::fs::metadata(directory.join(name));
        let error = found.err().map(|error| error.kind());
        assert!(error.is_none_or(|kind| kind == std::io::ErrorKind::NotFound), "{name}: {error:?}");
    }
    assert_eq!(shutdown.join().expect("no panic"), Ok(()));
    assert!(looks.join().expect("no panic").is_ok(), "it was asked before");
    assert!(!is_mounted(&directory));
}

/// In-flight requests are answered, later ones are refused, and open files are cut off.
#[test]
fn a_busy_mount_is_taken_away_after_its_last_answer() {
    if !can_mount() {
        return;
    }
    let mut served = serve_hooked(Box::new(|_, operation: &Operation| match operation {
        Operation::Write { .. } => Verdict::Hold,
        _ => Verdict::Serve,
    }));
    let directory = served.server().directory().to_owned();
    let (file, held) = (File::open(served.tank()).expect("opens"), served.open());
    let writer = std::thread::spawn(move || {
        let written = held.write_all_at(&[7; 512], 0);
        (held, written)
    });
    wait_until("the write", || served.server().clients().iter().any(|client| client.writing));
    let clients = served.server().clients();
    assert_eq!(clients.len(), 2);
    let own = format!("process {}", std::process::id());
    assert!(
        clients.iter().all(|client| client.path == "volumes/tank" && client.peer.starts_with("process "))
    );
    assert!(clients.iter().any(|client| client.peer.starts_with(&own)), "{clients:?}");
    let server = served.server.take().expect("runs");
    let shutdown = std::thread::spawn(move || server.shutdown(LIMIT));
    wait_until("the end to begin", || errno_of(&file) == Some(ESHUTDOWN));
    assert!(!writer.is_finished() && !shutdown.is_finished());
    wait_until("the engine's reply", || {
        served.ram.release();
        writer.is_finished()
    });
    let (held, written) = writer.join().expect("no panic");
    written.expect("what was asked is answered");
    assert_eq!(shutdown.join().expect("no panic"), Ok(()));
    assert!(!is_mounted(&directory));
    assert_eq!(errno(held.write_at(&[0; 512], 0)), ENOTCONN);
    assert_eq!(served.ram.content(TANK, 0, 1), [7; 512]);
}

fn errno_of(file: &File) -> Option<i32> {
    file.read_at(&mut [0; 512], 0).err().and_then(|error| error.raw_os_error())
}

#[test]
fn an_engine_that_does_not_answer_is_told_of() {
    if !can_mount() {
        return;
    }
    let (asks, asked) = std::sync::mpsc::channel();
    let mut served = serve_hooked(Box::new(move |_, operation: &Operation| match operation {
        Operation::Flush => {
            asks.send(()).expect("somebody waits");
            Verdict::Hold
        }
        _ => Verdict::Serve,
    }));
    let directory = served.server().directory().to_owned();
    let file = served.open();
    let syncs = std::thread::spawn(move || file.sync_all());
    asked.recv_timeout(LIMIT).expect("the flush is with the engine");
    let server = served.server.take().expect("runs");
    assert_eq!(server.shutdown(Duration::from_millis(100)), Err(ShutdownTimeout { requests: 1 }));
    assert!(!is_mounted(&directory));
    syncs.join().expect("no panic").expect_err("it was cut off");
    served.ram.release();
}

#[test]
fn a_directory_that_will_not_do_is_refused_in_a_sentence() {
    if !can_mount() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (missing, file, full) = (folder.path().join("none"), folder.path().join("file"), folder.path());
    std::fs::write(&file, "").expect("a file");
    let told = refusal(&missing).to_string();
    assert_eq!(
        told,
        format!("the directory {} for the FUSE mount does not exist; create it first", missing.display())
    );
    assert!(matches!(refusal(&missing.join("deeper")), MountError::Missing(_)));
    assert!(matches!(refusal(&file), MountError::NotDirectory(_)));
    assert!(matches!(refusal(&file.join("x")), MountError::NotDirectory(_)));
    assert!(matches!(refusal(full), MountError::NotEmpty(_)));
    assert!(!is_mounted(full));
}

#[test]
fn a_link_and_a_name_with_blanks_will_do() {
    if !can_mount() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (place, link) = (folder.path().join("a b\\c"), folder.path().join("link"));
    std::fs::create_dir(&place).expect("a directory");
    std::os::unix::fs::symlink(&place, &link).expect("a link");
    let ram = RamServer::start(&[(TANK, TANK_SECTORS)]);
    let server = start(&link, &ram).expect("starts");
    assert!(place.join("volumes/tank").is_file());
    server.shutdown(LIMIT).expect("nobody is busy");
    assert!(!place.join("volumes").exists());
}

#[test]
fn a_mount_of_another_daemon_that_lives_is_left_alone() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let directory = served.server().directory();
    let refused = refusal(directory);
    assert!(matches!(refused, MountError::InUse(_)), "{refused}");
    let wanted = "is the FUSE mount of another running bcached; name another directory, or stop that bcached";
    assert!(refused.to_string().ends_with(wanted));
    assert!(served.tank().is_file());
    served.end();
}

/// A dead mount of a killed daemon is replaced, although a program still has a file of it open.
#[test]
fn what_a_killed_daemon_left_is_replaced() {
    if !can_mount() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (mut killed, _, said) = child(folder.path(), None);
    assert_eq!(said, "serving");
    let tank = folder.path().join("volumes/tank");
    let file = support::open(&tank).expect("opens");
    file.write_all_at(&[1; 512], 0).expect("is written");
    killed.kill().expect("runs");
    killed.wait().expect("ran");
    wait_until("the kernel to notice", || errno_of(&file) == Some(ENOTCONN));
    assert_eq!(errno(std::fs::metadata(folder.path())), ENOTCONN);

    let ram = RamServer::start(&[(TANK, TANK_SECTORS)]);
    let server = start(folder.path(), &ram).expect("replaces it");
    support::open(&tank).expect("opens").write_all_at(&[2; 512], 0).expect("is written");
    assert_eq!(errno_of(&file), Some(ENOTCONN), "who had the old one open has it still");
    server.shutdown(LIMIT).expect("nobody is busy");
    assert!(!is_mounted(folder.path()), "neither is left");
}

/// If ours was unmounted and another mount is at the directory, a shutdown leaves that one alone.
#[test]
fn what_is_not_ours_is_not_unmounted() {
    if !can_mount() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return skip("only root can unmount without the helper");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let ram = RamServer::start(&[(TANK, TANK_SECTORS)]);
    let first = start(folder.path(), &ram).expect("starts");
    rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::empty()).expect("nobody uses it");
    wait_until("the server to notice", || first.has_ended());
    let second = start(folder.path(), &ram).expect("the place is free");
    first.shutdown(LIMIT).expect("nothing is left of it");
    assert!(folder.path().join("volumes/tank").is_file(), "the second still serves");
    second.shutdown(LIMIT).expect("nobody is busy");
    assert!(!is_mounted(folder.path()));
}

#[test]
fn an_ordinary_user_mounts_with_the_helper() {
    if !can_mount() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return skip("this user is an ordinary one: all tests mount with the helper");
    }
    if program("fusermount3").is_none() {
        return skip("not installed: fusermount3 (package fuse3)");
    }
    const NOBODY: u32 = 65_534;
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("ours");
    // The user owns the mount point; the build directory may be inaccessible to it.
    let place = folder.path().join("mount");
    std::fs::create_dir(&place).expect("a directory");
    std::os::unix::fs::chown(&place, Some(NOBODY), Some(NOBODY)).expect("we are root");
    let (mut child, rest, said) = child(&place, Some(NOBODY));
    assert_eq!(said, "serving");
    assert!(is_mounted(&place));
    drop(child.stdin.take());
    rest.for_each(drop);
    assert!(child.wait().expect("ran").success());
    assert!(!is_mounted(&place), "it has taken it away");
}

/// At most `open_volumes` volumes can be open, since each takes a thread and memory: six thousand
/// took 160 MiB.
#[test]
fn no_more_volumes_are_open_than_may_be() {
    if !can_mount() {
        return;
    }
    const ENFILE: i32 = 23;
    let limits = Limits { open_volumes: 3, ..Limits::default() };
    let served = serve_with(limits, Box::new(|_, _| Verdict::Serve), Vec::new());
    let archive = served.path("volumes/archive");
    let mut open: Vec<_> = (0..3).map(|_| File::open(&archive).expect("there is a place")).collect();
    for _ in 0..10 {
        assert_eq!(errno(File::open(&archive)), ENFILE);
    }
    assert_eq!(std::fs::read_dir(served.path("volumes")).expect("a folder").count(), 2, "all else goes on");
    drop(open.pop());
    wait_until("its place to be free", || File::open(&archive).map(|file| open.push(file)).is_ok());
    assert_eq!(errno(File::open(&archive)), ENFILE);
    drop(open);
    served.end();
}

/// Memory that another front end holds of the shared pool is not available to files until it is
/// returned.
#[test]
fn memory_is_shared_with_other_front_ends() {
    if !can_mount() {
        return;
    }
    let memory = Arc::new(BudgetPool::new(4 << 20));
    let other = Arc::new(Budget::new(4 << 20, Arc::clone(&memory)));
    let served = serve_sharing(Arc::clone(&memory));
    let held = other.acquire(4 << 20);
    let has_given_back = Arc::new(AtomicBool::new(false));
    let (file, before) = (served.open(), Arc::clone(&has_given_back));
    let writer = std::thread::spawn(move || {
        let written = file.write_all_at(&vec![1; 1 << 20], 0);
        (written, before.load(Ordering::SeqCst))
    });
    // The holder is told that another client waits for its memory.
    wait_until("the write to wait", || other.keeps_waiting().is_some() || writer.is_finished());
    has_given_back.store(true, Ordering::SeqCst);
    drop(held);
    let (written, was_after) = writer.join().expect("no panic");
    written.expect("it is taken");
    assert!(was_after, "it had no memory to be written with");
    served.end();
}
