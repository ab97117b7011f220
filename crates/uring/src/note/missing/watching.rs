//! Watches the folders of notes with inotify, and reacts as soon as something is removed from one.
//! One thread of the process receives the events and checks. Where the kernel reports nothing (no
//! inotify instance left, a parent folder was moved), the daemon's own check finds a missing note
//! within seconds.

use super::{UNFINISHED, look_at_all};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// How long the thread pauses after the kernel has refused a read.
const AGAIN: Duration = Duration::from_secs(1);

/// The inotify instance; `None` if there is none.
static TOLD: OnceLock<Option<OwnedFd>> = OnceLock::new();

/// Starts to watch the folder of the note at `path`. Costs little if it is watched already.
pub(super) fn watch(path: &Path) {
    let Some(told) = TOLD.get_or_init(begin) else { return };
    let Some(folder) = path.parent() else { return };
    let what = WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    // The daemon's periodic check sees it all the same.
    let _untold = inotify::add_watch(told, folder, what);
}

fn begin() -> Option<OwnedFd> {
    let told = inotify::init(CreateFlags::CLOEXEC).ok()?;
    let thread = std::thread::Builder::new().name("note-watch".to_owned());
    thread.spawn(listen).ok()?;
    Some(told)
}

fn listen() {
    // The thread that started this one stores it right away.
    let Some(told) = TOLD.wait() else { return };
    let mut memory = [MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(told, &mut memory);
    loop {
        match events.next() {
            // Its own temporary files come and go without anything having been removed.
            Ok(event)
                if event.file_name().is_some_and(|name| name.to_bytes().ends_with(UNFINISHED.as_bytes())) => {
            }
            Ok(_) => look_at_all(),
            Err(Errno::INTR) => {}
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
}
