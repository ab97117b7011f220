//! A device that fails or hangs at a hand-over, or during it, affects only the volumes that share
//! its engine.

use super::clients::{MIB, TakeOverClient, WrittenModel, at_work, check_all, take_over};
use super::steps::{AWAY, between, loses_its_name};
use super::wait_until;
use crate::common::nbdkit::NbdkitFile;
use crate::common::{Daemon, Images, StopOnDrop, ask, bcached, pid};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An image as a file that does not answer while told not to.
struct HangingFile {
    served: NbdkitFile,
    control: PathBuf,
}

impl HangingFile {
    /// Returns `None` if this machine lacks the tools.
    fn over(images: &Images, image: &str) -> Option<Self> {
        let control = images.path("silent.control");
        let words = [
            "--filter=pause".to_owned(),
            "file".to_owned(),
            image.to_owned(),
            format!("pause-control={}", control.display()),
        ];
        Some(Self { served: NbdkitFile::by(images, "silent", &words)?, control })
    }

    fn tell(&self, word: &[u8; 1]) {
        let mut control = UnixStream::connect(&self.control).expect("it listens");
        control.write_all(word).expect("it hears");
        control.read_exact(&mut [0]).expect("it has done so");
    }

    /// The device is silent until the returned value is dropped.
    fn is_silent(&self) -> HangGuard<'_> {
        self.tell(b"p");
        HangGuard(self)
    }
}

/// Ends also if the test fails meanwhile, which would wait for the device, too.
struct HangGuard<'a>(&'a HangingFile);

impl Drop for HangGuard<'_> {
    fn drop(&mut self) {
        self.0.tell(b"r");
    }
}

/// When this is dropped, the file is created and the device answers, also if the test fails: that
/// would wait for the daemon, and the daemon for the device.
struct AnswerOnDrop<'a>(&'a Path);

impl Drop for AnswerOnDrop<'_> {
    fn drop(&mut self) {
        std::fs::write(self.0, "").expect("a file");
    }
}

/// Serves `slow` as a file that stops answering when the old daemon hands over, until the file that
/// is returned second exists. That stops new requests and, with `holds_writes`, the answer of a
/// write in flight.
fn silent_from_the_hand_over(
    images: &Images,
    slow: &str,
    holds_writes: bool,
) -> Option<(NbdkitFile, PathBuf)> {
    let (log, well) = (images.path("errors"), images.path("well"));
    let has_begun = format!("grep -qs event=handing-over {}", log.display());
    let waits = format!("while {has_begun} && [ ! -e {} ]; do sleep 0.1; done", well.display());
    let after = if holds_writes { &*waits } else { "exit 0" };
    let served = NbdkitFile::scripted(images, "silent", (slow, &waits, after, &waits))?;
    Some((served, well))
}

/// The device answers again: the volumes that share its engine are served, and the others have lost
/// nothing.
fn all_come_back(images: &Images, models: &mut [WrittenModel]) {
    for volume in ["slow", "plain"] {
        wait_until("it is served", || {
            TakeOverClient::connect_to(images, volume).is_ok_and(|mut client| client.read(1).is_ok())
        });
    }
    check_all(images, models);
}

/// The new process is killed before it can report that it has taken over: the old one continues.
fn fails_to_take_over(images: &Images, daemon: &Daemon) {
    let program = between(images, ("new", "before", "Ready", 1));
    let ran = take_over(images, &["--program", &program]);
    assert_eq!(ran.exit, 4, "{}\n{}", ran.err, daemon.log());
}

/// Makes images, one of them of the backing device `slow`.
fn with_slow() -> (Images, String) {
    let images = Images::new();
    let slow = images.blank("slow", 20 * MIB);
    assert_eq!(bcached(&["make", "-B", &slow]).exit, 0);
    (images, slow)
}

/// `tank` has a cache. `slow`, with `of_slow` in its section, and `plain` have none and share an
/// engine.
fn configure(images: &Images, slow: &str, of_slow: &str) {
    let (fast, tank) = images.pair(64 * MIB, 20 * MIB);
    let plain = images.blank("plain", 20 * MIB);
    assert_eq!(bcached(&["make", "-B", &plain]).exit, 0);
    images.configure(&format!(
        "version = 1\n[defaults]\nwait = \"1s\"\n[cache.fast]\ndevice = {fast:?}\n[volume.tank]\nbacking = {tank:?}\n\
         [volume.slow]\nbacking = {slow:?}\ncache = \"none\"\n{of_slow}[volume.plain]\nbacking = {plain:?}\ncache = \"none\"\n"
    ));
    std::fs::create_dir(images.path("run")).expect("a folder");
}

/// A regression: the old daemon first ended everything for the hand-over. Clients with requests in
/// flight were disconnected, and nothing was served until the device answered.
#[test]
fn while_a_device_is_silent_nobody_takes_over() {
    let (images, slow) = with_slow();
    let Some(silent) = HangingFile::over(&images, &slow) else { return };
    configure(&images, silent.served.file().to_str().expect("text"), "");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let former = pid(&images);
    let mut models = [WrittenModel::new(0)];
    let refused = |words| {
        let ran = take_over(&images, words);
        let is_told = ran.err.contains("silent/nbd has not answered for ");
        assert!(ran.exit == 6 && is_told, "{words:?}: {ran:?}\n{}", daemon.log());
    };
    let mut client = TakeOverClient::connect_to(&images, "slow").expect("it is served");
    std::thread::scope(|scope| {
        let silence = silent.is_silent();
        let reads = scope.spawn(|| client.read(0));
        let (_, fared) = at_work(&images, &mut models, || refused(&[]));
        fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
        assert!(!reads.is_finished(), "or it tells nothing");
        drop(silence);
        assert_eq!(reads.join().expect("no panic").expect("it is answered at last"), 0);
    });
    assert_eq!(pid(&images), former);
    // Its silence is detected even if it has no requests in flight.
    let silence = silent.is_silent();
    refused(&["--dry-run"]);
    drop(silence);
    wait_until("the device answers", || take_over(&images, &["--dry-run"]).exit == 0);
    let ran = take_over(&images, &[]);
    assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
    assert_eq!(client.read(1).expect("it goes on"), 0);
    check_all(&images, &mut models);
}

/// A regression: all clients, also new ones, waited up to a minute until all volumes were served
/// again.
#[test]
fn a_volume_that_does_not_come_back_keeps_no_other_waiting() {
    for has_client in [true, false] {
        let (images, slow) = with_slow();
        // The search for the device lasts longer than the test: nothing may wait for its end.
        configure(&images, &slow, "wait = \"1h\"\n");
        let daemon = Daemon::configured(&images);
        let _last = StopOnDrop(&images);
        let former = pid(&images);
        let mut models = [WrittenModel::new(0)];
        let mut kept = has_client.then(|| TakeOverClient::connect_to(&images, "slow").expect("it is served"));
        if let Some(kept) = &mut kept {
            kept.write(3, 7).expect("it is served");
        }
        loses_its_name(&images, &slow);
        let (_, fared) = at_work(&images, &mut models, || {
            fails_to_take_over(&images, &daemon);
            for volume in ["tank", "plain"] {
                let mut came = TakeOverClient::connect_to(&images, volume).expect("who comes now is let in");
                came.read(1000).expect("it is served");
            }
        });
        assert_eq!(pid(&images), former, "{}", daemon.log());
        fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
        println!("clients of others have waited for {:?}", models[0].longest);
        assert!(!PathBuf::from(&slow).exists(), "or it tells nothing");
        assert!(TakeOverClient::connect_to(&images, "slow").is_err(), "it is not served");
        let back = || std::fs::rename(format!("{slow}{AWAY}"), &slow).expect("ours");
        let Some(mut kept) = kept else { continue };
        std::thread::scope(|scope| {
            let reads = scope.spawn(|| kept.write(4, 8).and_then(|()| kept.read(3)));
            std::thread::sleep(Duration::from_millis(200));
            assert!(!reads.is_finished(), "it waits");
            back();
            wait_until("it goes on", || reads.is_finished());
            assert_eq!(reads.join().expect("no panic").expect("it was not cut, and may write"), 7);
        });
        check_all(&images, &mut models);
    }
}

/// The device falls silent after the old process has released it: the new one hangs when opening
/// it, and cannot even be killed. A regression: the old process waited for its end, and with it all
/// clients and every command.
#[test]
fn who_falls_silent_when_the_new_one_opens_it_keeps_the_old_one_from_nothing() {
    let (images, slow) = with_slow();
    let Some((served, well)) = silent_from_the_hand_over(&images, &slow, false) else { return };
    configure(&images, served.file().to_str().expect("text"), "");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let answers = AnswerOnDrop(&well);
    let former = pid(&images);
    let mut models = [WrittenModel::new(0)];
    // The device has no requests in flight: the old process has nothing to end there.
    let (ran, fared) = at_work(&images, &mut models, || take_over(&images, &["--timeout", "150s"]));
    let log = daemon.log();
    assert_eq!(ran.exit, 4, "{ran:?}\n{log}");
    assert!(log.contains("[event=successor-hangs]"), "or it tells nothing: {log}");
    assert_eq!(pid(&images), former, "{log}");
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    println!("clients of others have waited for {:?}", models[0].longest);
    drop(answers);
    all_come_back(&images, &mut models);
}

/// A regression: volumes that were not reopened yet were inherited twice then, and with them all
/// that were open. No device could be opened any more.
#[test]
fn a_second_take_over_that_fails_while_a_volume_is_missing_loses_nothing() {
    let (images, slow) = with_slow();
    configure(&images, &slow, "wait = \"1s\"\n");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let former = pid(&images);
    let mut models = [WrittenModel::new(0)];
    let mut kept = TakeOverClient::connect_to(&images, "slow").expect("it is served");
    kept.write(3, 7).expect("it is served");
    loses_its_name(&images, &slow);
    let (_, fared) = at_work(&images, &mut models, || {
        for _ in 0..2 {
            let ready = || take_over(&images, &["--dry-run"]).exit == 0;
            wait_until("all is served that is there", ready);
            fails_to_take_over(&images, &daemon);
        }
    });
    assert_eq!(pid(&images), former, "{}", daemon.log());
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    std::fs::rename(format!("{slow}{AWAY}"), &slow).expect("ours");
    assert_eq!(kept.read(3).expect("it goes on"), 7, "{}", daemon.log());
    check_all(&images, &mut models);
}

/// A regression: nothing was logged about clients that were still kept when the daemon was stopped.
#[test]
fn a_stop_ends_who_is_kept_and_says_so() {
    let (images, slow) = with_slow();
    configure(&images, &slow, "wait = \"1h\"\n");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut kept = TakeOverClient::connect_to(&images, "slow").expect("it is served");
    loses_its_name(&images, &slow);
    fails_to_take_over(&images, &daemon);
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| kept.read(3));
        wait_until("the others are served", || TakeOverClient::connect_to(&images, "tank").is_ok());
        assert!(!reads.is_finished(), "it waits");
        let stopped = ask(&daemon, &["stop"]);
        assert_eq!(stopped.exit, 0, "{stopped:?}\n{}", daemon.log());
        reads.join().expect("no panic").expect_err("nobody answers any more");
    });
    let (exit, log) = daemon.stop();
    assert_eq!(
        (
            exit,
            log.contains(
                "the daemon is stopping and their volumes are not served: 1 (of slow) [event=clients-cut]"
            )
        ),
        (0, true),
        "{log}"
    );
}

/// The device answers the check and then falls silent, when the old process is about to end. The
/// old process continues, and so do the clients of volumes that do not share its engine.
#[test]
fn who_falls_silent_in_the_middle_of_it_ends_it() {
    let (images, slow) = with_slow();
    let Some((served, well)) = silent_from_the_hand_over(&images, &slow, true) else { return };
    configure(&images, served.file().to_str().expect("text"), "");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let answers = AnswerOnDrop(&well);
    let former = pid(&images);
    let mut models = [WrittenModel::new(0)];
    let (ran, fared) = at_work(&images, &mut models, || {
        std::thread::scope(|scope| {
            // They write until they are disconnected. The device holds their writes from that
            // moment on, unless a client is between two writes.
            for first in [0, 100, 200, 300] {
                let mut client = TakeOverClient::connect_to(&images, "slow").expect("it is served");
                scope.spawn(move || (0..).map_while(|n| client.write(first + n % 100, 1).ok()).count());
            }
            take_over(&images, &["--timeout", "100s"])
        })
    });
    let log = daemon.log();
    assert!(ran.exit == 4 && ran.err.contains("silent/nbd has not answered for"), "{ran:?}\n{log}");
    assert!(log.contains("cannot be handed over: ") && log.contains(" uses slow"), "{log}");
    assert_eq!(pid(&images), former, "{log}");
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    drop(answers);
    all_come_back(&images, &mut models);
}
