//! Watches what the daemon needs and what can be taken away while it runs: the files of its notes,
//! its sockets, its configuration, the reader of its log. Each loss is noticed within seconds.
//! Notes and sockets are made anew. For the rest, the log and `status` say what no longer works.

use crate::control_server::ControlServer;
use crate::log;
use crate::supervisor::Supervisor;
use bcached_offline::notes;
use bcached_uring::note::{NoteFileState, look_after_all};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The shortest time between two looks.
const EACH: Duration = Duration::from_secs(1);

/// The key of the log.
const LOG: &str = "log";

/// What is missing, by its subject: the id of the event, and the message.
type MissingFiles = BTreeMap<String, (&'static str, String)>;

/// The state of the watch.
#[derive(Default)]
pub struct FileWatch {
    looked: Option<Instant>,
    /// The sockets that have files, as they were first seen.
    sockets: BTreeMap<PathBuf, SocketIdentity>,
    /// The main file of the configuration existed.
    had_configuration: bool,
    /// The messages that were logged and still hold.
    told: MissingFiles,
}

/// A socket, as it was seen.
#[derive(Clone, Copy)]
struct SocketIdentity {
    /// The number of the volume's server that made it (0 if it is not a volume's). A volume that is
    /// removed and added again is served on another socket at the same place.
    listener: u64,
    /// Device and inode.
    file: (u64, u64),
}

impl Supervisor {
    /// Looks at everything, if it is time.
    pub fn look_after_what_may_go(&mut self, control: &mut ControlServer) {
        if self.file_watch.looked.is_some_and(|looked| looked.elapsed() < EACH) {
            return;
        }
        self.file_watch.looked = Some(Instant::now());
        let mut gone = MissingFiles::new();
        self.look_after_notes(&mut gone);
        self.look_after_sockets(control, &mut gone);
        self.look_for_configuration(&mut gone);
        if log::condition().stuck.is_some() {
            let told = "the log is not being read: when 1 MiB of lines is pending, further lines are dropped";
            gone.insert(LOG.to_owned(), ("log-stuck", told.to_owned()));
        }
        for (what, (event, sentence)) in &gone {
            if self.file_watch.told.get(what).map(|(_, told)| told) != Some(sentence) {
                tracing::error!(event = *event, "{sentence}");
            }
        }
        for (what, (event, _)) in &self.file_watch.told {
            if !gone.contains_key(what) {
                tracing::info!(event = "back-again", "{}", over(event, what));
            }
        }
        // `status` reports the log by itself: volumes are as they should be.
        let warnings = gone.iter().filter(|(what, _)| *what != LOG);
        self.shared().warnings = warnings.map(|(_, (_, sentence))| sentence.clone()).collect();
        self.file_watch.told = gone;
    }

    /// Looks after the notes: one whose file is missing cannot be found after a kill.
    fn look_after_notes(&self, gone: &mut MissingFiles) {
        let mut found = look_after_all();
        if found.iter().any(|(_, found)| found.is_err()) {
            // Its directory may be missing, too.
            let _or_told_below = notes::directory();
            let again = look_after_all();
            // Replacements are logged once.
            found.retain(|(_, found)| matches!(found, Ok(NoteFileState::WasReplaced)));
            found.extend(again);
        }
        for (path, found) in found {
            let name = path.display().to_string();
            match found {
                Ok(NoteFileState::Present) => {}
                Ok(NoteFileState::WasReplaced) => tracing::warn!(
                    event = "note-gone",
                    "{name}: this note was removed. It is in its place again, and nothing is lost"
                ),
                Ok(NoteFileState::Replaced) => {
                    let told = format!("{name}: this note was removed: another one is taking its place");
                    gone.insert(name, ("note-gone", told));
                }
                Err(error) => {
                    let told = format!(
                        "{name}: this note was removed, and cannot be replaced: each write waits for the \
                         journal, and if its set fails, writes that were acknowledged and not flushed are \
                         lost when bcached ends. {error}"
                    );
                    gone.insert(name, ("note-not-replaced", told));
                }
            }
        }
    }

    /// Looks after the sockets. New clients cannot find one whose file is gone, so another takes
    /// its place.
    fn look_after_sockets(&mut self, control: &mut ControlServer, gone: &mut MissingFiles) {
        let of_commands = control.sockets().map(|path| (path.to_owned(), 0));
        let all: Vec<_> = of_commands.chain(self.fronts.sockets()).collect();
        let is_there = |path: &Path, seen: &SocketIdentity| {
            all.iter().any(|(other, listener)| (other.as_path(), *listener) == (path, seen.listener))
        };
        self.file_watch.sockets.retain(|path, seen| is_there(path, seen));
        for (path, listener) in all {
            let now = socket_at(&path);
            let before = self.file_watch.sockets.get(&path).map(|seen| seen.file);
            if before.is_none()
                && let Some(file) = now
            {
                self.file_watch.sockets.insert(path, SocketIdentity { listener, file });
                continue;
            }
            if now.is_some() && now == before {
                continue;
            }
            let name = path.display().to_string();
            let what = if now.is_some() { "was replaced" } else { "is gone" };
            let of_control = || control.bind_again(&path).map_err(|failure| failure.to_string());
            match self.fronts.bind_again(&path).unwrap_or_else(of_control) {
                Ok(()) => {
                    self.file_watch.sockets.remove(&path);
                    self.file_watch
                        .sockets
                        .extend(socket_at(&path).map(|file| (path, SocketIdentity { listener, file })));
                    tracing::warn!(
                        event = "socket-gone",
                        "{name}: the file of this socket {what}: bcached now listens on a new one there. Connected \
                         clients are not affected"
                    );
                }
                Err(why) => {
                    let told = format!(
                        "{name}: the file of this socket {what}: connected clients are not affected, but new clients \
                         cannot reach the daemon there. bcached tries again every few seconds. {why}"
                    );
                    gone.insert(name, ("socket-gone", told));
                }
            }
        }
    }

    fn look_for_configuration(&mut self, gone: &mut MissingFiles) {
        let Some(main) = self.config.main_file.as_deref() else { return };
        let is_there = main.is_file();
        self.file_watch.had_configuration |= is_there;
        if self.file_watch.had_configuration && !is_there {
            let name = main.display().to_string();
            let told = format!(
                "{name}: the configuration is gone. The running daemon is not affected; restore the file before the \
                 next start, or nothing is served then"
            );
            gone.insert(name, ("configuration-gone", told));
        }
    }
}

/// Returns the message that something is as it should be again.
fn over(event: &str, what: &str) -> String {
    match event {
        "log-stuck" => "the log is read again".to_owned(),
        "socket-gone" => format!("{what}: bcached listens there again"),
        "configuration-gone" => format!("{what}: the configuration is there again"),
        _ => format!("{what}: the note is in its place again"),
    }
}

/// Returns device and inode of the socket at a path.
fn socket_at(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok().filter(|found| found.file_type().is_socket())?;
    Some((found.dev(), found.ino()))
}
