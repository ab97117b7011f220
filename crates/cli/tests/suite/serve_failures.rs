//! `bcached serve` and `status` when something is wrong: something is in use, is missing, or does
//! not answer.

use crate::common::{
    self, Daemon, FileLock, Images, ask, bcached, bytes, done, json, patch, requires, reseal, run, tool,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Makes a cache and a backing device that were never served.
fn set(images: &Images) -> (String, String) {
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("backing", 20 << 20));
    let made =
        bcached(&["make", "-b", "64k", "--writeback", "--label", "tank", "-C", &cache, "-B", &backing]);
    assert_eq!(made.exit, 0, "{made:?}");
    (cache, backing)
}

/// Writes sevens over the first megabyte of the volume, and flushes.
fn fill(daemon: &Daemon, images: &Images) {
    let data = images.path("data");
    std::fs::write(&data, vec![7; 1 << 20]).expect("data");
    let data = data.to_str().expect("text");
    assert_eq!(run(tool("nbdcopy").args(["--flush", data, &daemon.uri("tank")])).exit, 0);
}

/// A regression: the engine had begun to write before the daemon found that it could not serve
/// clients.
#[test]
fn a_socket_in_use_is_found_before_a_device_is_written() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let before = (bytes(&cache), bytes(&backing));
    std::fs::create_dir(images.path("run")).expect("a folder");
    let _somebody = UnixListener::bind(images.path("run/nbd.sock")).expect("a socket");
    // The second has no device that could be opened: it fails because of the socket only if that is
    // checked first.
    for devices in [&["--cache", cache.as_str(), "--backing", &backing][..], &["--cache", "/nonexistent"]] {
        let ran = run(&mut Daemon::command(&images, "run", devices));
        assert_eq!(
            (ran.exit, ran.err.contains("nbd.sock is in use by another server")),
            (3, true),
            "{ran:?}"
        );
    }
    assert!((bytes(&cache), bytes(&backing)) == before, "a device was written");
}

/// A regression: every reason for which a set does not open was reported as an I/O error.
#[test]
fn a_set_that_is_served_already_is_in_use() {
    let images = Images::new();
    let (cache, _) = set(&images);
    let copy = images.path("copy");
    std::fs::copy(&cache, &copy).expect("a copy");
    let _daemon = Daemon::start(&images, &["--cache", &cache]);
    let mut second = Daemon::command(&images, "other", &["--cache", copy.to_str().expect("text")]);
    let ran = run(&mut second);
    let sentence = "another daemon serves this cache set; stop the other daemon";
    assert_eq!((ran.exit, ran.err.contains(sentence)), (3, true), "{ran:?}");
}

/// A regression: "Acknowledged writes may be lost" was logged as information, and not as a warning.
#[test]
fn a_damaged_note_is_a_warning() {
    let images = Images::new();
    let (cache, _) = set(&images);
    Daemon::start(&images, &["--cache", &cache]).kill();
    let shown = json(&bcached(&["show", "--json", &cache]).out);
    let note = format!("run/{}.note", shown["set_uuid"].as_str().expect("a uuid"));
    patch(images.path(&note), 0, b"nonsense");
    let daemon = Daemon::start(&images, &["--cache", &cache]);
    let log = daemon.log();
    assert!(log.contains("bcached: warning: the note is damaged"), "{log}");
}

/// A regression: a stopped daemon was reported as "no daemon", and one with a full backlog blocked
/// its clients forever.
#[test]
fn a_daemon_that_does_not_answer_is_no_missing_daemon() {
    let images = Images::new();
    let (cache, _) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache]);
    daemon.signal(Signal::STOP);
    let waiting = std::thread::scope(|scope| {
        let text = bcached(&["status", "--control", daemon.control()]);
        // More than fit the backlog: from here on connecting blocks.
        let crowd: Vec<_> = (0..40).map(|_| knock(daemon.control())).collect();
        let object = scope.spawn(|| bcached(&["--json", "status", "--control", daemon.control()]));
        let second = run(&mut Daemon::command(&images, "run", &["--cache", &cache]));
        assert_eq!((second.exit, second.err.contains("another daemon answers")), (3, true), "{second:?}");
        let object = object.join().expect("no panic");
        drop(crowd);
        (text, object)
    });
    daemon.signal(Signal::CONT);
    let (text, object) = waiting;
    assert!(text.err.contains("has not answered for 10 s: its process is stopped"), "{text:?}");
    assert!(text.err.contains("kill -CONT"), "{text:?}");
    assert_eq!((text.exit, text.err.lines().count()), (6, 1), "{text:?}");
    assert_eq!((object.exit, json(&object.err)["error"]["kind"].as_str()), (6, Some("time-limit")));
    assert_eq!(daemon.status()["state"], "ready", "it goes on");
}

/// Connects if that does not block.
fn knock(path: &str) -> Option<OwnedFd> {
    let address = SocketAddrUnix::new(path).expect("a path");
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.expect("a socket");
    rustix::net::connect(&socket, &address).is_ok().then_some(socket)
}

/// A regression: a missing device was not logged, and a volume that waits for its dirty data was
/// only "not open yet".
#[test]
fn what_is_waited_for_is_named() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    reseal(&backing, common::STATE, common::DIRTY);
    let plugged = images.path("plugged in later");
    std::fs::rename(&cache, &plugged).expect("out of sight");
    let gone = images.path("gone");
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[defaults]\nwait = \"1s\"\n[cache.fast]\ndevice = {cache:?}\n\
         [volume.dirty]\nbacking = {backing:?}\n[volume.gone]\nbacking = {gone:?}\n"
    );
    std::fs::write(&config, text).expect("a file");
    let daemon = Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    let set = json(&bcached(&["show", "--json", &backing]).out)["set_uuid"].clone();
    let wanted =
        format!("its newest data is in the cache set {}, which is missing", set.as_str().expect("a uuid"));
    let status = daemon.status();
    assert!(status["volumes"][0]["reason"].as_str().is_some_and(|why| why.contains(&wanted)), "{status}");
    let log = daemon.log();
    assert!(log.contains(&format!("bcached: warning: volume dirty is waiting: {wanted}")), "{log}");
    assert!(log.contains("bcached: warning: cache fast is waiting: "), "{log}");
    assert!(log.contains("bcached: warning: volume gone is waiting: "), "{log}");
    assert_eq!(log.matches("event=not-served-yet").count(), 3, "{log}");
    assert!(log.find("event=not-served-yet") < log.find("event=ready"), "{log}");
    std::fs::rename(&plugged, &cache).expect("back");
    daemon.wait_for("the cache is open", |status| status["caches"][0]["state"] == "open");
    let log = daemon.log();
    assert_eq!(log.matches("event=cache-waits").count(), 1, "told once: {log}");
    assert_eq!(log.matches("volume gone is waiting: ").count(), 1, "told once: {log}");
}

/// A regression: the daemon ended at the first log line that its full file system did not accept.
#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    let before = daemon.log();
    daemon.fail_writes_beyond(before.len() as u64);
    for percent in ["11", "12", "13"] {
        let option = format!("writeback_percent={percent}");
        let set = bcached(&["set", "tank", &option, "--runtime", "--control", daemon.control()]);
        assert_eq!(set.exit, 0, "{set:?}");
    }
    assert_eq!(daemon.log(), before, "nothing could be written");
    daemon.writes_succeed();
    assert_eq!(
        bcached(&["set", "tank", "writeback_percent=14", "--runtime", "--control", daemon.control()]).exit,
        0
    );
    daemon.wait_for("it is written again", |_| daemon.log().contains("writeback_percent=14"));
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A regression: a volume that refuses writes was reported as "served".
#[test]
fn a_volume_whose_cache_stopped_writing_is_degraded_and_can_be_read() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    fill(&daemon, &images);
    let uri = daemon.uri("tank");
    assert_eq!(daemon.status()["volumes"][0]["state"], "served");
    let now = ["set", "tank", "on_cache_error=fail", "--runtime", "--control", daemon.control()];
    assert_eq!(bcached(&now).exit, 0);

    // Writes past a file size limit fail as on a bad device: the signal for them is caught. The log
    // is shorter than the limit; of the devices everything but the superblocks lies past it.
    daemon.fail_writes_beyond(48 << 10);
    let _it_fails = run(tool("qemu-io").args(["-f", "raw", "-c", "discard 0 64k", "-c", "flush", &uri]));
    daemon.wait_for("it is degraded", |status| status["volumes"][0]["state"] == "degraded");
    let status = bcached(&["status", "--control", daemon.control()]);
    assert_eq!(status.exit, 1, "not as it should be: {status:?}");
    assert!(status.out.contains("volume tank: degraded"), "{status:?}");
    assert!(status.out.contains("stopped writing: reads continue, writes are refused"), "{status:?}");
    // Its set could not be closed cleanly, so a hand-over is refused: it would end the clients that
    // can still read.
    for asked in [&["take-over", "--dry-run"][..], &["take-over"]] {
        let refused = bcached(&[asked, &["--control", daemon.control()]].concat());
        assert!(refused.exit == 6 && refused.err.contains("has stopped writing"), "{refused:?}");
    }
    let back = images.path("back");
    assert_eq!(run(tool("nbdcopy").args([uri.as_str(), back.to_str().expect("text")])).exit, 0);
    assert!(bytes(&back)[64 << 10..1 << 20].iter().all(|byte| *byte == 7), "reads go on");
    daemon.wait_for("it is logged", |_| daemon.log().contains("event=cache-stopped-writing"));
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 4, "{log}");
}

/// A regression: a cache alone was served without a message about its dirty data of an unnamed
/// volume.
#[test]
fn dirty_data_of_a_volume_that_nobody_named_is_told() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    fill(&daemon, &images);
    daemon.kill();
    let daemon = Daemon::start(&images, &["--cache", &cache]);
    // On a slow machine all of it has been written back by now; what is left stays.
    let is_dirty = daemon.status()["caches"][0]["dirty_bytes"] != 0;
    let wanted = format!("dirty of tank ({}), which is not served", uuid_of(&backing));
    let status = bcached(&["status", "--control", daemon.control()]);
    let shown = format!("tank ({}) is not served: ", uuid_of(&backing));
    let is_shown = status.out.lines().any(|line| line.contains(&shown) && line.ends_with(" dirty"));
    assert_eq!(is_shown, is_dirty, "{status:?}");
    if is_dirty {
        daemon.wait_for("it is logged", |_| daemon.log().contains(&wanted));
    }
    let (exit, log) = daemon.stop();
    assert_eq!((exit, log.matches("event=dirty-not-served").count()), (0, usize::from(is_dirty)), "{log}");
}

fn uuid_of(image: &str) -> String {
    let shown = json(&bcached(&["show", "--json", image]).out);
    shown["uuid"].as_str().expect("a uuid").to_owned()
}

/// A regression: udev's list of configured devices existed only in the documentation.
#[test]
fn udev_learns_which_devices_are_configured() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let (more, later) = (images.path("more"), images.blank("later", 20 << 20));
    assert_eq!(bcached(&["make", "-B", &later]).exit, 0);
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[defaults]\nwait = \"1s\"\n[cache.fast]\ndevice = {cache:?}\n\
         [volume.slow]\nbacking = {backing:?}\n[volume.more]\nbacking = {more:?}\n"
    );
    std::fs::write(&config, text).expect("a file");
    std::fs::create_dir(images.path("rules.d")).expect("a folder");
    let list = images.path("rules.d/67-bcached-owned.rules");
    let former = "12345678-1234-1234-1234-123456789abc";
    let header = "# Made by bcached from its configuration; see 68-bcached.rules.\n";
    let line = |uuid: &str| format!("ENV{{ID_FS_UUID}}==\"{uuid}\", ENV{{BCACHED_OWNED}}=\"1\"\n");
    std::fs::write(&list, header.to_owned() + &line(former)).expect("a list");
    let mut command = Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]);
    command.env("BCACHED_UDEV_RULES", images.path("rules.d"));
    let daemon = Daemon::start_command(&images, command);

    let listed = || std::fs::read_to_string(&list).expect("a list");
    let sorted = |mut uuids: Vec<String>| {
        uuids.sort();
        header.to_owned() + &uuids.iter().map(|uuid| line(uuid)).collect::<String>()
    };
    let known = vec![uuid_of(&cache), uuid_of(&backing)];
    assert_eq!(
        listed(),
        sorted([known.clone(), vec![former.to_owned()]].concat()),
        "one may be missing only"
    );
    let last = uuid_of(&later);
    std::fs::rename(&later, &more).expect("plugged in");
    let all = sorted([known, vec![last]].concat());
    daemon.wait_for("all are known", |_| listed() == all);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    assert_eq!(listed(), all, "a stop leaves the devices ours");
}

/// After a SIGKILL the kernel completes the process's requests, and until then its devices are in
/// use. A regression: for a daemon started right then the volume failed permanently.
#[test]
fn a_device_in_use_is_taken_up_when_it_is_free() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[defaults]\nwait = \"1s\"\n[cache.fast]\ndevice = {cache:?}\n\
         [volume.slow]\nbacking = {backing:?}\n"
    );
    std::fs::write(&config, text).expect("a file");
    let holders = [FileLock::new(&cache), FileLock::new(&backing)];
    let daemon = Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    let status = daemon.status();
    assert_eq!(status["caches"][0]["state"], "waiting", "{status}");
    assert!(status["caches"][0]["reason"].as_str().is_some_and(|why| why.contains("in use by process")));
    let why = "its cache fast is in use: it is in use by process";
    assert!(status["volumes"][0]["reason"].as_str().is_some_and(|said| said.starts_with(why)), "{status}");
    let [of_cache, of_backing] = holders;
    drop(of_cache);
    daemon.wait_for("the cache is open", |status| status["caches"][0]["state"] == "open");
    daemon.wait_for("the volume waits for its own device", |status| {
        status["volumes"][0]["reason"].as_str().is_some_and(|why| why.contains("/backing"))
    });
    drop(of_backing);
    daemon.wait_for("the volume is served", |status| status["volumes"][0]["state"] == "served");
    let log = daemon.log();
    assert_eq!(log.matches("event=cache-waits").count(), 1, "told once: {log}");
    assert_eq!((log.contains("cache-failed"), log.contains("volume-failed")), (false, false), "{log}");
}

/// A regression: "No space left at sector 1641" named neither the device nor a remedy.
#[test]
fn a_cache_without_room_below_it_is_named() {
    let images = Images::new();
    let (cache, _) = set(&images);
    // The note already has its full size: at the next start only the cache needs space.
    Daemon::start(&images, &["--cache", &cache]).kill();
    // A file size limit simulates a full file system; the first superblock lies within it.
    let serve = Daemon::command(&images, "run", &["--cache", &cache]);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -f 96; exec \"$0\" \"$@\""]).arg(serve.get_program()).args(serve.get_args());
    limited.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let ran = run(&mut limited);
    let sentence = format!("cannot open the cache set on {cache}: ");
    assert!(ran.err.contains(&sentence) && ran.err.contains("no space left at sector"), "{ran:?}");
    let next = format!("free space on the file system below {cache}, then start the daemon again");
    assert_eq!((ran.exit, ran.err.contains(&next)), (4, true), "{ran:?}");
}

/// A regression: a backing file that was truncated while served returned as a smaller volume,
/// silently.
#[test]
fn a_backing_device_that_was_longer_is_told_of() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("backing", 20 << 20));
    assert_eq!(bcached(&["make", "-b", "64k", "--label", "tank", "-C", &cache, "-B", &backing]).exit, 0);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    fill(&daemon, &images);
    assert_eq!(daemon.stop().0, 0);
    let cut = |bytes| {
        let file = std::fs::File::options().write(true).open(&backing);
        file.and_then(|file| file.set_len(bytes)).expect("another size");
        let (exit, log) = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).stop();
        assert_eq!(exit, 0, "{log}");
        log.contains("warning: volume tank: the cache has data beyond the end of")
    };
    assert!(!cut(20 << 20), "it is whole");
    assert!(cut(512 << 10));
    assert!(!cut(20 << 20), "it is whole again");
}

/// Makes processes that open a file wait, for as long as the system allows (by default 45 s), or
/// until this ends.
const HOLD: &str = "import fcntl, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = open(sys.argv[1], 'r+b')
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('held', flush=True)
time.sleep(600)
";

/// A process that is killed in the end.
struct HolderProcess(std::process::Child);

impl HolderProcess {
    /// Returns `None`, and prints why, if the lease is unavailable.
    fn of(path: &str) -> Option<Self> {
        use std::io::BufRead as _;
        let mut command = Command::new("python3");
        let child = command.args(["-c", HOLD, path]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut holder = Self(child.expect("starts"));
        let out = holder.0.stdout.take().expect("piped");
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = std::io::BufReader::new(out).read_line(&mut line);
            let _receiver_gone = send.send(read.is_ok() && line == "held\n");
        });
        let is_held = receive.recv_timeout(Duration::from_secs(60)).expect("it says something in time");
        if !is_held {
            println!("skipped: a file system without leases");
        }
        is_held.then_some(holder)
    }
}

impl Drop for HolderProcess {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped_already = self.0.wait();
    }
}

/// A regression: a device that hung while it was being added blocked the whole daemon: no option
/// could be set, and it could not be stopped.
#[test]
fn a_device_that_hangs_when_it_is_asked_for_keeps_nobody_else() {
    if !requires("python3") {
        return;
    }
    let images = Images::new();
    let (fast, tank) = images.pair(36 << 20, 20 << 20);
    let hung = images.blank("hung", 20 << 20);
    assert_eq!(bcached(&["make", "-B", &hung]).exit, 0);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    let Some(_holder) = HolderProcess::of(&hung) else { return };
    for words in [&["add", "hung", "--backing", &hung][..], &["import", &hung], &["release", &hung]] {
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&daemon, words));
            let mut percent = 1;
            while !asks.is_finished() {
                percent = percent % 40 + 1;
                done(&daemon, &["set", "media", &format!("writeback_percent={percent}")]);
            }
            let ran = asks.join().expect("no panic");
            assert!(ran.exit == 6 && ran.err.contains("does not answer"), "{words:?}: {ran:?}");
        });
    }
    let status = daemon.status();
    assert_eq!(status["volumes"].as_array().map(Vec::len), Some(1), "nothing was added: {status}");
    assert_eq!(daemon.stop().0, 0, "it still hangs");
}
