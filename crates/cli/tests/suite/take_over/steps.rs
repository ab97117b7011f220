//! Kills either process at each of their messages, before the other one receives it and after. This
//! program stands between them, passes their messages on, and does that.

use super::clients::{CLIENTS, TakeOverClient, WrittenModel, at_work, check_all, configured, take_over};
use crate::common::{Daemon, Images, PROGRAM, StopOnDrop, pid, wrapped};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{PidfdFlags, Signal, getppid, kill_process, pidfd_open};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The variable that instructs this program: which process to kill, when, at which message and at
/// which occurrence of that kind, and the file to report it in.
const TOLD: &str = "TEST_KILLS";

/// The messages in their order, with the occurrence of their kind.
const MESSAGES: [(&str, usize); 7] =
    [("Hello", 1), ("Claim", 2), ("Socket", 1), ("Connection", 2), ("Yours", 1), ("Ready", 1), ("Gone", 1)];

/// How long the other process may take to notice and continue.
const GOES_ON: Duration = Duration::from_secs(30);

/// How long both may take to end.
const ENDS: Duration = Duration::from_secs(1);

/// Returns a program for a hand-over, with this one in between.
pub fn between(images: &Images, (victim, when, message, count): (&str, &str, &str, usize)) -> String {
    let this = std::env::current_exe().expect("it runs");
    let done = images.path("killed");
    let _of_before = std::fs::remove_file(&done);
    let told = format!("{victim} {when} {message} {count} {}", done.display());
    let words = format!(
        "for word; do printf '%s\\n' \"$word\"; done > {}\nexport {TOLD}='{told}'\nexec {} --exact take_over::steps::this_program_stands_between --nocapture > /dev/null",
        images.path("words").display(),
        this.display()
    );
    wrapped(images, &words)
}

/// The suffix of a file that has lost its name.
pub const AWAY: &str = ".away";

/// When one of the two is killed, this file is renamed.
pub fn loses_its_name(images: &Images, file: &str) {
    std::fs::write(images.path("killed-with"), file).expect("a file");
}

/// This is no test: see above.
#[test]
fn this_program_stands_between() {
    let Ok(told) = std::env::var(TOLD) else { return };
    let told: Vec<&str> = told.split(' ').collect();
    let [victim, when, message, count, done] = told[..] else { panic!("{told:?}") };
    let count: usize = count.parse().expect("a number");
    let folder = std::path::Path::new(done).parent().expect("a folder");
    let words = std::fs::read_to_string(folder.join("words")).expect("it was written");
    let old = io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (new, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("two sockets");
    let process = Command::new(PROGRAM)
        .args(words.lines())
        .env("BCACHED_TAKES_OVER", std::process::id().to_string())
        .env_remove(TOLD)
        .stdin(Stdio::from(theirs))
        .spawn()
        .expect("it starts");
    let mut between = MessageProxy { old, new, process };
    let mut seen = 0;
    while let Some((from_new, bytes, descriptors)) = between.next() {
        let text = String::from_utf8_lossy(&bytes);
        let is_of_kind = text.contains(&format!("\"{message}\""));
        seen += usize::from(is_of_kind);
        let is_now = is_of_kind && seen == count;
        if is_now && when == "before" {
            between.kill(victim, done);
        }
        let to = if from_new { &between.old } else { &between.new };
        // The receiver may be gone.
        let _heard = send(to, &bytes, &descriptors);
        if is_now && when == "after" {
            between.kill(victim, done);
        }
    }
    // The other process sees the end of this one as the end of its peer.
    let _ended = between.process.wait();
    std::process::exit(0);
}

struct MessageProxy {
    old: OwnedFd,
    new: OwnedFd,
    process: Child,
}

impl MessageProxy {
    /// Returns the next message, and whether it is from the new process; `None` if one of them is
    /// gone.
    fn next(&self) -> Option<(bool, Vec<u8>, Vec<OwnedFd>)> {
        let mut fds = [&self.old, &self.new].map(|fd| PollFd::new(fd, PollFlags::IN));
        poll(&mut fds, None).expect("it waits");
        let from_new = fds[0].revents().is_empty();
        let (bytes, descriptors) = receive(if from_new { &self.new } else { &self.old });
        (!bytes.is_empty()).then_some((from_new, bytes, descriptors))
    }

    /// Kills one of the two, and represents it to the other one by ending. Before that a file may
    /// lose its name (see [`loses_its_name`]).
    fn kill(&mut self, victim: &str, done: &str) -> ! {
        let loses = std::fs::read_to_string(format!("{done}-with"));
        // It may have lost its name before.
        if let Some(file) = loses.ok().filter(|file| std::path::Path::new(file).exists()) {
            std::fs::rename(&file, format!("{file}{AWAY}")).expect("ours");
        }
        std::fs::write(done, victim).expect("a file");
        if victim == "new" {
            self.process.kill().expect("ours");
            self.process.wait().expect("ours");
        } else if let Some(old) = getppid() {
            let end = pidfd_open(old, PidfdFlags::empty()).expect("it is there");
            kill_process(old, Signal::KILL).expect("it has started this one");
            // This process is reparented before all threads of the old one have released its
            // sockets.
            poll(&mut [PollFd::new(&end, PollFlags::IN)], None).expect("it waits");
        }
        std::process::exit(0);
    }
}

fn receive(from: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; 256 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(from, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let got = got.map_or(0, |got| got.bytes);
    bytes.truncate(got);
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    (bytes, descriptors)
}

fn send(to: &OwnedFd, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)), "there is room");
    }
    let mut fds = [PollFd::new(to, PollFlags::OUT)];
    poll(&mut fds, None)?;
    sendmsg(to, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Kills that process at each step, and checks which one continues: `must_go_on` tells for which
/// steps it has to be the other one.
fn killed_at_each_step(victim: &str, must_go_on: impl Fn(&str, &str) -> bool) {
    let images = configured();
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    let mut daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    for (message, count) in MESSAGES {
        for when in ["before", "after"] {
            let step = format!("the {victim} one is killed {when} {message}");
            let former = pid(&images).expect("it is served");
            let program = between(&images, (victim, when, message, count));
            let (_, fared) = at_work(&images, &mut models, || {
                let _told = take_over(&images, &["--program", &program, "--timeout", "50s"]);
                let limit = if must_go_on(when, message) { GOES_ON } else { ENDS };
                wait_for_the_other(&images, (former, victim), limit);
            });
            assert!(!daemon.log().contains("panicked"), "{step}: {}", daemon.log());
            assert!(images.path("killed").exists(), "{step}: there was no such message: {}", daemon.log());
            let now = pid(&images);
            let goes_on = now.is_some_and(|now| (now == former) == (victim == "new"));
            assert!(
                goes_on || !must_go_on(when, message),
                "{step}: {now:?} after {former}: {}",
                daemon.log()
            );
            let all = fared.into_iter().collect::<io::Result<Vec<_>>>();
            // Clients must not notice a hand-over that did not happen.
            assert!(!goes_on || victim == "old" || all.is_ok(), "{step}: {all:?}: {}", daemon.log());
            if now.is_none() {
                daemon.kill();
                daemon = Daemon::configured(&images);
            }
            check_all(&images, &mut models);
        }
    }
}

/// Waits until the remaining process serves.
fn wait_for_the_other(images: &Images, (former, victim): (i32, &str), limit: Duration) {
    let began = Instant::now();
    let serves = || pid(images).is_some_and(|now| (now == former) == (victim == "new"));
    while !(serves() && TakeOverClient::connect(images).is_ok()) && began.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Once the old process has received that everything is served, it ends; then the new one is
/// killed, as can happen to any daemon.
#[test]
fn the_old_one_goes_on_whatever_message_the_new_one_is_killed_at() {
    killed_at_each_step("new", |when, message| message != "Gone" && (when, message) != ("after", "Ready"));
}

#[test]
fn the_new_one_goes_on_whatever_message_the_old_one_is_killed_at() {
    killed_at_each_step("old", |_, _| true);
}
