//! The kernel tells as soon as something goes from a folder of notes. One thread of the process hears it and
//! looks. Where the kernel does not tell (no inotify left, a folder above is moved) the daemon's own look
//! finds it within seconds.

use super::{UNFINISHED, look_at_all};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// How long the thread rests after the kernel has refused a read.
const AGAIN: Duration = Duration::from_secs(1);

/// What the kernel tells of; `None` if it tells nothing.
static TOLD: OnceLock<Option<OwnedFd>> = OnceLock::new();

/// From now on whatever goes from the folder of the note at `path` is heard of. Costs little if it is so already.
pub(super) fn watch(path: &Path) {
    let Some(told) = TOLD.get_or_init(begin) else { return };
    let Some(folder) = path.parent() else { return };
    let what = WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    // Whoever looks now and then sees it all the same.
    let _untold = inotify::add_watch(told, folder, what);
}

fn begin() -> Option<OwnedFd> {
    let told = inotify::init(CreateFlags::CLOEXEC).ok()?;
    let thread = std::thread::Builder::new().name("note-watch".to_owned());
    thread.spawn(listen).ok()?;
    Some(told)
}

fn listen() {
    // Whoever has started this thread stores it right away.
    let Some(told) = TOLD.wait() else { return };
    let mut memory = [MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(told, &mut memory);
    loop {
        match events.next() {
            // Its own files come and go without anybody having taken one away.
            Ok(event)
                if event.file_name().is_some_and(|name| name.to_bytes().ends_with(UNFINISHED.as_bytes())) => {
            }
            Ok(_) => look_at_all(),
            Err(Errno::INTR) => {}
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
}
