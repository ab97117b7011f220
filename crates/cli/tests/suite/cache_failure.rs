//! A cache device fails and recovers: what clients of the daemon notice, depending on their
//! volume's policy.

use crate::common::{CommandResult, Daemon, Images, bcached, bytes, patch, requires, run, tool};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// When the cache fails, nothing past this offset can be written: it is after the superblocks and
/// before the journal. The limit applies to the backing device as well, so tests write meanwhile
/// only to the first 32 KiB of the volume.
const LIMIT: u64 = 48 << 10;

/// A client that should wait has not given up after this time.
const MOMENT: Duration = Duration::from_secs(2);

/// A cache with one volume that keeps a megabyte of dirty sevens.
struct CacheFailureFixture {
    images: Images,
    cache: String,
    backing: String,
    daemon: Daemon,
}

impl CacheFailureFixture {
    /// Starts with these options of the volume.
    fn with_dirty_data(options: &[&str]) -> Self {
        let site = Self::new("writeback");
        site.set(&[&["writeback_running=0"], options].concat());
        let data = site.images.path("data");
        std::fs::write(&data, vec![7; 1 << 20]).expect("data");
        let data = data.to_str().expect("text");
        assert_eq!(run(tool("nbdcopy").args(["--flush", data, &site.daemon.uri("tank")])).exit, 0);
        site
    }

    /// Starts with these options of the volume, and a second volume, `pond`, that is clean.
    fn with_pond(options: &[&str]) -> Self {
        let Self { images, cache, backing, daemon } = Self::with_dirty_data(&[]);
        let pond = images.blank("pond", 20 << 20);
        assert_eq!(bcached(&["make", "--label", "pond", "--for", &cache, "-B", &pond]).exit, 0);
        let (exit, log) = daemon.stop();
        assert_eq!(exit, 0, "{log}");
        let devices = ["--cache", &cache, "--backing", &backing, "--backing", &pond];
        let daemon = Daemon::start(&images, &devices);
        let site = Self { images, cache, backing, daemon };
        site.set(&[&["writeback_running=0"], options].concat());
        site
    }

    /// The clean volume neither waits nor fails.
    fn pond_goes_on(&self) {
        for byte in 1..6 {
            let (write, read) = (format!("write -P {byte} 0 16k"), format!("read -P {byte} 0 16k"));
            let mut client = tool("qemu-io");
            client.args(["-f", "raw", "-t", "none", "-c", &write, "-c", "flush", "-c", &read]);
            let ran = run(client.arg(self.daemon.uri("pond")));
            assert_eq!(ran.exit, 0, "{ran:?}\n{}", self.daemon.log());
            std::thread::sleep(MOMENT / 4);
        }
    }

    /// Starts with a volume in this mode.
    fn new(mode: &str) -> Self {
        let images = Images::new();
        let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("backing", 20 << 20));
        let mut words = vec!["make", "-b", "64k", "--label", "tank", "-C", &cache, "-B", &backing];
        if mode == "writeback" {
            words.push("--writeback");
        }
        assert_eq!(bcached(&words).exit, 0);
        let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
        Self { images, cache, backing, daemon }
    }

    fn set(&self, options: &[&str]) {
        let words = [&["set", "tank", "--runtime", "--control", self.daemon.control()], options].concat();
        let ran = bcached(&words);
        assert_eq!(ran.exit, 0, "{ran:?}");
    }

    /// Returns a client that runs these commands in order.
    fn client(&self, commands: &[&str]) -> std::process::Command {
        let mut client = tool("qemu-io");
        client.args(["-f", "raw", "-t", "none"]);
        for command in commands {
            client.args(["-c", command]);
        }
        client.arg(self.daemon.uri("tank"));
        client
    }

    fn ask(&self, commands: &[&str]) -> CommandResult {
        run(&mut self.client(commands))
    }

    fn begin(&self, commands: &[&str]) -> Child {
        let mut client = self.client(commands);
        client.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        client.spawn().expect("it starts")
    }

    /// The cache device accepts no more writes.
    fn fail(&self) {
        self.daemon.fail_writes_beyond(LIMIT);
    }

    /// The device accepts writes again. Everything is as before, except that the device is not
    /// trusted for another minute.
    fn recover(&self) {
        self.daemon.writes_succeed();
        let works = |_: &serde_json::Value| self.daemon.log().contains("event=cache-works-again");
        self.daemon.wait_for("it works again", works);
    }

    /// Stops cleanly, and checks that everything is sound.
    fn stop(self) -> String {
        let (exit, log) = self.daemon.stop();
        assert_eq!(exit, 0, "{log}");
        let check = bcached(&["check", &self.cache, "--backing", &self.backing]);
        assert_eq!(check.exit, 0, "{check:?}");
        log
    }
}

fn is_running(client: &mut Child) -> bool {
    client.try_wait().expect("waits").is_none()
}

fn end(client: Child) -> CommandResult {
    let ended = client.wait_with_output().expect("it ends");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    CommandResult {
        exit: ended.status.code().expect("by itself"),
        out: text(ended.stdout),
        err: text(ended.stderr),
    }
}

fn tools() -> bool {
    requires("nbdcopy") && requires("qemu-io")
}

/// A regression: one moment in which the cache device refused writes made the volume fail writes
/// until the daemon was restarted.
#[test]
fn what_needs_the_cache_waits_until_it_is_back_and_nothing_is_lost() {
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::with_dirty_data(&[]);
    site.fail();
    let mut client = site.begin(&["write -P 9 0 16k", "flush", "read -P 9 0 16k"]);
    site.daemon.wait_for("it is degraded", |status| status["volumes"][0]["state"] == "degraded");
    let read = run(site.client(&["read -P 7 64k 960k"]).arg("-r"));
    assert_eq!(read.exit, 0, "what can be read is read: {read:?}");
    std::thread::sleep(MOMENT);
    assert!(is_running(&mut client), "it waits: {:?}", end(client));
    assert!(!site.daemon.log().contains("cache-works-again"), "{}", site.daemon.log());
    site.daemon.writes_succeed();
    let wrote = end(client);
    assert_eq!(wrote.exit, 0, "{wrote:?}\n{}", site.daemon.log());
    site.recover();
    let read = site.ask(&["read -P 9 0 16k", "read -P 7 16k 1008k", "write -P 5 2M 64k", "flush"]);
    assert_eq!(read.exit, 0, "{read:?}");
    let status = site.daemon.status();
    assert_eq!(status["volumes"][0]["dirty_bytes"], (1 << 20) + (64 << 10), "{status}");
    let log = site.stop();
    assert!(log.contains("event=cache-works-again"), "{log}");
}

/// A regression: of two failures less than five seconds apart the log reported only the first.
#[test]
fn each_failure_is_told_of() {
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::with_dirty_data(&[]);
    for times in 1..=3 {
        site.fail();
        let mut client = site.begin(&["write -P 9 0 16k", "flush"]);
        let counted = |event: &str| site.daemon.log().matches(&format!("[event={event}]")).count();
        site.daemon.wait_for("it is told", |_| counted("cache-stopped-writing") == times);
        assert!(is_running(&mut client), "{:?}", end(client));
        site.daemon.writes_succeed();
        let wrote = end(client);
        assert_eq!(wrote.exit, 0, "{wrote:?}\n{}", site.daemon.log());
        site.daemon.wait_for("it works again", |_| counted("cache-works-again") == times);
        assert_eq!(counted("cache-writes-again"), times, "{}", site.daemon.log());
    }
    site.stop();
}

/// A volume that waits forever hangs: waiting must end.
#[test]
fn waiting_has_an_end() {
    // Far longer than a request takes that does not wait, on a busy machine too.
    const TIMEOUT: Duration = Duration::from_secs(10);
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::with_dirty_data(&["freeze_timeout=10s"]);
    site.fail();
    let started = Instant::now();
    let wrote = site.ask(&["write -P 9 0 16k", "flush"]);
    assert!(wrote.exit != 0 && started.elapsed() >= TIMEOUT, "{wrote:?}");
    assert!((wrote.out + &wrote.err).contains("Input/output error"));
    let started = Instant::now();
    assert_ne!(site.ask(&["write -P 9 0 16k", "flush"]).exit, 0);
    assert!(started.elapsed() < TIMEOUT, "it does not begin to wait anew");
    // A regression: the status said that writes wait although they failed by then.
    let over = "reads continue, writes fail: it has not worked again within freeze_timeout (10s)";
    let status = bcached(&["status", "--control", site.daemon.control()]);
    assert!(status.out.contains(over) && !status.out.contains("writes wait until"), "{status:?}");
    assert_eq!(site.ask(&["read -P 7 64k 960k"]).exit, 0);
    site.recover();
    let wrote = site.ask(&["write -P 5 0 64k", "flush", "read -P 5 0 64k", "read -P 7 64k 960k"]);
    assert_eq!(wrote.exit, 0, "{wrote:?}");
    site.stop();
}

#[test]
fn who_is_not_to_wait_is_told_at_once_that_it_fails_or_is_read_only() {
    if !tools() {
        return;
    }
    for (policy, sentence) in [("fail", "Input/output error"), ("read-only", "Operation not permitted")] {
        let site = CacheFailureFixture::with_dirty_data(&[&format!("on_cache_error={policy}")]);
        site.fail();
        let _finds_out = site.ask(&["write -P 9 0 16k", "flush"]);
        site.daemon.wait_for("it is degraded", |status| status["volumes"][0]["state"] == "degraded");
        // If it waited, it would do so forever, and fail by the command's time limit.
        let wrote = site.ask(&["write -P 9 16k 16k"]);
        assert!((wrote.out.clone() + &wrote.err).contains(sentence), "{policy}: {wrote:?}");
        let read = site.ask(&["read -P 7 64k 960k"]);
        assert_eq!(read.exit, 0, "{policy}: {read:?}");
        site.recover();
        assert_eq!(site.ask(&["write -P 9 16k 16k", "flush", "read -P 9 16k 16k"]).exit, 0, "{policy}");
        site.stop();
    }
}

/// A volume without dirty data does not notice the cache's failure, and data cached before it does
/// not reappear.
#[test]
fn a_clean_volume_sees_nothing_of_a_cache_that_fails_and_comes_back() {
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::new("writethrough");
    let filled = site.ask(&["write -P 7 0 1M", "flush", "read -P 7 0 1M", "read -P 7 0 1M"]);
    assert_eq!(filled.exit, 0, "{filled:?}");
    site.fail();
    let wrote = site.ask(&["write -P 9 0 16k", "flush", "read -P 9 0 16k", "read -P 7 16k 1008k"]);
    assert_eq!(wrote.exit, 0, "{wrote:?}\n{}", site.daemon.log());
    site.daemon.wait_for("it has failed", |status| !status["caches"][0]["reason"].is_null());
    for byte in 10..14 {
        let write = format!("write -P {byte} 0 16k");
        let wrote = site.ask(&[&write, "flush", &format!("read -P {byte} 0 16k"), "read -P 7 16k 1008k"]);
        assert_eq!(wrote.exit, 0, "{wrote:?}\n{}", site.daemon.log());
        std::thread::sleep(MOMENT / 4);
    }
    site.recover();
    let attached = |status: &serde_json::Value| status["volumes"][0]["attached"] == true;
    site.daemon.wait_for("it has its cache again", attached);
    let again = site.ask(&["read -P 13 0 16k", "read -P 7 16k 1008k", "write -P 5 0 1M", "read -P 5 0 1M"]);
    assert_eq!(again.exit, 0, "{again:?}");
    assert!(bytes(&site.backing)[16 * 512..][..1 << 20].iter().all(|byte| *byte == 5), "all of it is there");
    site.stop();
}

/// A truncated cache may be replaced by another device, so requests that need it wait, whatever
/// finds the truncation first: a read, which the cache survives, or a flush, which it does not.
/// Then they fail: the backing device's old data is never returned in the place of dirty data, and
/// the log does not repeat itself.
#[test]
fn a_cache_that_was_cut_short_is_waited_for_and_then_fails() {
    if !tools() {
        return;
    }
    for first in ["read -P 7 0 64k", "flush"] {
        let site = CacheFailureFixture::with_dirty_data(&["freeze_timeout=3s"]);
        assert_eq!(site.ask(&["write -P 7 0 16k"]).exit, 0, "something to flush");
        let cache = std::fs::File::options().write(true).open(&site.cache).expect("the cache");
        cache.set_len(1 << 20).expect("shorter");
        let mut waiting = site.begin(&[first, "read -P 7 0 64k"]);
        std::thread::sleep(MOMENT / 2);
        assert!(is_running(&mut waiting), "{first}: it waits: {:?}\n{}", end(waiting), site.daemon.log());
        let ended = end(waiting);
        assert!((ended.out.clone() + &ended.err).contains("Input/output error"), "{first}: {ended:?}");
        for _ in 0..2 {
            let read = site.ask(&["read -P 7 0 64k"]);
            assert!((read.out.clone() + &read.err).contains("Input/output error"), "{first}: {read:?}");
        }
        let is_told = |_: &serde_json::Value| site.daemon.log().contains("event=device-trouble");
        site.daemon.wait_for("it is told", is_told);
        let times = site.daemon.log().matches("event=device-trouble").count();
        assert!(times <= 3, "{first}: the same again and again: {}", site.daemon.log());
    }
}

/// A stop does not wait for requests that wait for the cache: they fail, and the next start has all
/// data.
#[test]
fn a_stop_does_not_wait_for_who_waits_for_the_cache() {
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::with_dirty_data(&[]);
    site.fail();
    let mut client = site.begin(&["write -P 9 0 16k", "flush"]);
    site.daemon.wait_for("it is degraded", |status| status["volumes"][0]["state"] == "degraded");
    assert!(is_running(&mut client), "it waits");
    let CacheFailureFixture { images, cache, backing, daemon } = site;
    // The client stays connected, and the stop does not wait for it.
    daemon.signal(rustix::process::Signal::TERM);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 4, "the set is not as a stop leaves it: {log}");
    assert!(!log.contains("no answer"), "the engine itself has nothing to wait for: {log}");
    assert_ne!(end(client).exit, 0);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    let site = CacheFailureFixture { images, cache, backing, daemon };
    let read = site.ask(&["read -P 7 16k 1008k", "write -P 5 0 16k", "flush", "read -P 5 0 16k"]);
    assert_eq!(read.exit, 0, "{read:?}");
    site.stop();
}

/// One volume of the cache is dirty and waits. The other one is clean, and neither waits nor fails.
/// When the cache works again both use it, with their earlier options.
#[test]
fn who_waits_keeps_nobody_else_waiting() {
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::with_pond(&["freeze_timeout=50s"]);
    site.fail();
    let mut waiting = site.begin(&["write -P 9 0 16k", "flush"]);
    site.daemon.wait_for("it is degraded", |status| status["volumes"][0]["state"] == "degraded");
    site.pond_goes_on();
    assert!(is_running(&mut waiting), "it waits");
    site.recover();
    let ended = end(waiting);
    assert_eq!(ended.exit, 0, "{ended:?}");
    let status = site.daemon.status();
    let is_attached = |volume: usize| status["volumes"][volume]["attached"] == true;
    assert!(is_attached(0) && is_attached(1), "{status}");
    // It fails again. Options set on the volume also apply to the reopened set.
    site.fail();
    let again = site.begin(&["write -P 8 0 16k", "flush", "read -P 8 0 16k"]);
    site.daemon.wait_for("it waits as long as it was told to", |status| {
        let reason = status["volumes"][0]["reason"].as_str().unwrap_or_default();
        reason.contains("writes wait until it works again, for at most 50s")
    });
    site.daemon.writes_succeed();
    let ended = end(again);
    assert_eq!(ended.exit, 0, "{ended:?}\n{}", site.daemon.log());
    site.stop();
}

/// The device accepts writes again, but its superblock is damaged, which does not pass by itself.
/// Requests that need it fail without waiting, volumes that do not need it go on, and no data is
/// lost once it is repaired.
#[test]
fn a_cache_that_comes_back_damaged_is_waited_for_by_nobody() {
    if !tools() {
        return;
    }
    let site = CacheFailureFixture::with_pond(&[]);
    site.fail();
    let waiting = site.begin(&["write -P 9 0 16k", "flush"]);
    site.daemon.wait_for("it is degraded", |status| status["volumes"][0]["state"] == "degraded");
    let whole = bytes(&site.cache)[4096..][..512].to_vec();
    patch(&site.cache, 4096 + 16, b"nonsense");
    site.daemon.writes_succeed();
    let tried = |_: &serde_json::Value| site.daemon.log().contains("event=cache-not-opened-again");
    site.daemon.wait_for("it has been tried", tried);
    assert_ne!(end(waiting).exit, 0, "it has nothing to wait for");
    let refused = run(site.client(&["read -P 7 64k 960k"]).arg("-r"));
    assert!(refused.exit != 0, "never with what the backing device has: {refused:?}");
    site.pond_goes_on();
    let status = site.daemon.status();
    assert_eq!(status["volumes"][1]["attached"], false, "{status}");
    let CacheFailureFixture { images, cache, backing, daemon } = site;
    assert_eq!(daemon.stop().0, 4);
    patch(&cache, 4096, &whole);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    let site = CacheFailureFixture { images, cache, backing, daemon };
    assert_eq!(site.ask(&["read -P 7 64k 960k"]).exit, 0, "nothing was lost");
    site.stop();
}
