//! A file served by a program that decides the outcome of each request. Needs `nbdkit` and
//! `nbdfuse`.

use super::{Images, requires};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a FUSE file system may take to appear.
const LIMIT: Duration = Duration::from_secs(120);

/// The served file; it exists as long as this.
pub struct NbdkitFile {
    folder: PathBuf,
    server: Child,
    mount: Child,
}

impl NbdkitFile {
    /// Serves the file by nbdkit with these words. Returns `None` if this machine lacks the tools.
    pub fn by(images: &Images, name: &str, words: &[String]) -> Option<Self> {
        if !["nbdkit", "nbdfuse"].iter().all(|tool| requires(tool)) {
            return None;
        }
        let (folder, socket) = (images.path(name), images.path(&format!("{name}.sock")));
        std::fs::create_dir(&folder).expect("a folder");
        let mut server = Command::new("nbdkit");
        server.arg("-f").arg("-U").arg(&socket).args(words).stdin(Stdio::null());
        let server = server.spawn().expect("nbdkit starts");
        await_file(&socket);
        let mut mount = Command::new("nbdfuse");
        mount.arg(&folder).arg(format!("nbd+unix:///?socket={}", socket.display())).stdin(Stdio::null());
        let mount = mount.spawn().expect("nbdfuse starts");
        let served = Self { folder, server, mount };
        if !await_file(&served.file()) {
            println!("skipped: no file system in user space can be mounted here");
            return None;
        }
        Some(served)
    }

    /// Serves an image by nbdkit, with shell commands to run before each read and write, after each
    /// write, and for each flush. They see a request as `$3` bytes from `$4` on.
    pub fn scripted(
        images: &Images,
        name: &str,
        (image, before, after, flush): (&str, &str, &str, &str),
    ) -> Option<Self> {
        let words = [
            "eval".to_owned(),
            format!("get_size=stat -c %s {image}"),
            "can_write=exit 0".to_owned(),
            "can_flush=exit 0".to_owned(),
            format!(
                "pread={before}; dd if={image} iflag=skip_bytes,count_bytes skip=$4 count=$3 bs=64k status=none"
            ),
            format!(
                "pwrite={before}; dd of={image} iflag=fullblock oflag=seek_bytes seek=$4 conv=notrunc bs=64k status=none && {after}"
            ),
            format!("flush={flush}"),
        ];
        Self::by(images, name, &words)
    }

    /// Returns the path of the file.
    pub fn file(&self) -> PathBuf {
        self.folder.join("nbd")
    }
}

impl Drop for NbdkitFile {
    fn drop(&mut self) {
        let _not_mounted = Command::new("umount").arg("-l").arg(&self.folder).status();
        for child in [&mut self.mount, &mut self.server] {
            let _ended_already = child.kill();
            let _reaped_already = child.wait();
        }
    }
}

fn await_file(path: &Path) -> bool {
    let started = Instant::now();
    while !path.exists() && started.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(20));
    }
    path.exists()
}
