//! Tests control files beside the volumes, as in sysfs.

mod support;

use bcached_front_fuse::tree::{Errno, TEXT_BYTES_MAX};
use bcached_front_fuse::{ControlTree, FuseServer, Limits, Options, StartError, TreeEntry};
use bcached_port::ram::Verdict;
use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use support::{EINVAL, EPERM, TestServer, can_mount, errno, serve_with, wait_until};

/// A tree with `fs/bcache/SET/{label,counter,trigger,slow}` and a link to SET.
#[derive(Default)]
struct TestTree {
    texts: Mutex<BTreeMap<String, Vec<u8>>>,
    counter: AtomicU64,
    /// The user of the last write.
    writer: AtomicU32,
    /// A write to `slow` waits for this.
    gate: Mutex<Option<mpsc::Receiver<()>>>,
}

const SET: &str = "fs/bcache/set";

impl ControlTree for TestTree {
    fn entry(&self, path: &str) -> Option<TreeEntry> {
        match path {
            "" | "fs" | "fs/bcache" | SET => Some(TreeEntry::Directory),
            "fs/bcache/link" => Some(TreeEntry::Link { target: "set".to_owned() }),
            _ => match path.strip_prefix("fs/bcache/set/")? {
                "label" | "slow" => Some(TreeEntry::File { mode: 0o644 }),
                "counter" => Some(TreeEntry::File { mode: 0o444 }),
                "trigger" => Some(TreeEntry::File { mode: 0o200 }),
                _ => None,
            },
        }
    }

    fn list(&self, path: &str) -> Option<Vec<(String, TreeEntry)>> {
        let names: &[&str] = match path {
            "" => &["fs"],
            "fs" => &["bcache"],
            "fs/bcache" => &["set", "link"],
            SET => &["label", "counter", "trigger", "slow"],
            _ => return None,
        };
        let child = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        Some(
            names
                .iter()
                .map(|name| ((*name).to_owned(), self.entry(&child(name)).expect("is there")))
                .collect(),
        )
    }

    fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
        if path.ends_with("counter") {
            let count = self.counter.fetch_add(1, Ordering::SeqCst);
            return Ok(format!("{count:0>100}\n").into_bytes());
        }
        Ok(self.texts.lock().expect("no panic").get(path).cloned().unwrap_or_default())
    }

    fn write(&self, path: &str, text: &[u8], user: u32) -> Result<(), Errno> {
        self.writer.store(user, Ordering::SeqCst);
        if path.ends_with("slow")
            && let Some(gate) = self.gate.lock().expect("no panic").take()
        {
            gate.recv().expect("somebody opens it");
        }
        if text == b"bad\n" {
            return Err(Errno::INVAL);
        }
        self.texts.lock().expect("no panic").insert(path.to_owned(), text.to_vec());
        Ok(())
    }
}

fn serve_sys() -> (TestServer, Arc<TestTree>) {
    serve_sys_with(Limits::default())
}

fn serve_sys_with(limits: Limits) -> (TestServer, Arc<TestTree>) {
    let sys = Arc::new(TestTree::default());
    let trees: Vec<(String, Arc<dyn ControlTree>)> = vec![("sys".to_owned(), Arc::<TestTree>::clone(&sys))];
    (serve_with(limits, Box::new(|_, _| Verdict::Serve), trees), sys)
}

#[test]
fn a_tree_lies_beside_the_volumes() {
    if !can_mount() {
        return;
    }
    let (served, _) = serve_sys();
    let names = |path: &str| {
        let entries = std::fs::read_dir(served.path(path)).expect("a directory");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("plain")).collect();
        names.sort();
        names
    };
    assert_eq!(names(""), ["sys", "volumes"]);
    assert_eq!(names("sys/fs/bcache/set"), ["counter", "label", "slow", "trigger"]);
    let label = std::fs::metadata(served.path("sys/fs/bcache/set/label")).expect("is there");
    assert_eq!((label.mode() & 0o777, label.len()), (0o644, 4096));
    let link = served.path("sys/fs/bcache/link");
    assert_eq!(std::fs::read_link(&link).expect("a link").to_str(), Some("set"));
    assert!(link.join("label").is_file(), "it leads there");
    assert!(!served.path("sys/fs/none").exists());
    assert_eq!(errno(std::fs::write(served.path("sys/fs/new"), "x")), EPERM);
    served.end();
}

#[test]
fn texts_are_read_and_written_whole() {
    if !can_mount() {
        return;
    }
    let (served, sys) = serve_sys();
    let label = served.path("sys/fs/bcache/set/label");
    // Like `echo fast > label`, this sets the size first.
    std::fs::write(&label, "fast\n").expect("is taken");
    assert_eq!(std::fs::read_to_string(&label).expect("is read"), "fast\n");
    assert_eq!(sys.writer.load(Ordering::SeqCst), rustix::process::geteuid().as_raw());
    assert_eq!(errno(std::fs::write(&label, "bad\n")), EINVAL);
    let mut file = support::open(&label).expect("opens");
    file.write_all(b"one\n").expect("is taken");
    file.write_all(b"two\n").expect("is taken");
    let texts = sys.texts.lock().expect("no panic").clone();
    assert_eq!(texts.into_values().collect::<Vec<_>>(), [b"two\n"], "each is a text of its own");
    assert_eq!(errno(file.write_all(&[b'x'; TEXT_BYTES_MAX + 1])), 7, "E2BIG");
    file.write_all(&[b'x'; TEXT_BYTES_MAX]).expect("a page is taken");
    drop(file);
    served.end();
}

/// A reader in pieces gets one text. The number changes with each read, so mixed pieces would show.
#[test]
fn a_reader_gets_pieces_of_one_text() {
    if !can_mount() {
        return;
    }
    let (served, sys) = serve_sys();
    sys.counter.store(7, Ordering::SeqCst);
    let mut file = std::fs::File::open(served.path("sys/fs/bcache/set/counter")).expect("opens");
    let mut text = Vec::new();
    let mut piece = [0; 7];
    loop {
        let bytes = file.read(&mut piece).expect("is read");
        if bytes == 0 {
            break;
        }
        text.extend_from_slice(&piece[..bytes]);
    }
    assert_eq!(String::from_utf8(text).expect("a text"), format!("{:0>100}\n", 7));
    assert_eq!(sys.counter.load(Ordering::SeqCst), 8, "asked once");
    file.rewind().expect("a file");
    let mut again = String::new();
    file.read_to_string(&mut again).expect("is read");
    assert_eq!(again, format!("{:0>100}\n", 8), "from the start it is a new text");
    drop(file);
    served.end();
}

#[test]
fn permissions_hold_for_root_too() {
    if !can_mount() {
        return;
    }
    let (served, _) = serve_sys();
    let denied = std::fs::write(served.path("sys/fs/bcache/set/counter"), "1").expect_err("0444");
    assert_eq!(denied.kind(), std::io::ErrorKind::PermissionDenied);
    let denied = std::fs::read(served.path("sys/fs/bcache/set/trigger")).expect_err("0200");
    assert_eq!(denied.kind(), std::io::ErrorKind::PermissionDenied);
    std::fs::write(served.path("sys/fs/bcache/set/trigger"), "1").expect("is taken");
    served.end();
}

#[test]
fn a_control_file_that_waits_holds_no_volume_up() {
    if !can_mount() {
        return;
    }
    // With one session thread, a request that waited in it would block all others.
    let (served, sys) = serve_sys_with(Limits { threads: 1, ..Limits::default() });
    let (open, gate) = mpsc::channel();
    *sys.gate.lock().expect("no panic") = Some(gate);
    let slow = served.path("sys/fs/bcache/set/slow");
    let writer = std::thread::spawn(move || std::fs::write(slow, "x"));
    wait_until("the write to be there", || {
        sys.gate.try_lock().is_err() || sys.gate.lock().expect("no panic").is_none()
    });
    std::fs::write(served.path("sys/fs/bcache/set/label"), "y").expect("others are called");
    std::fs::read(served.tank()).map(drop).expect("is read");
    assert!(!writer.is_finished());
    open.send(()).expect("it waits");
    writer.join().expect("no panic").expect("is taken");
    served.end();
}

#[test]
fn a_tree_has_a_name_of_its_own() {
    let directory = tempfile::tempdir().expect("a directory");
    for name in ["volumes", "", "a/b", ".."] {
        let options =
            Options { directory: directory.path().to_owned(), allow_other: false, limits: Limits::default() };
        let trees: Vec<(String, Arc<dyn ControlTree>)> =
            vec![(name.to_owned(), Arc::new(TestTree::default()))];
        let result = FuseServer::start(options, bcached_port::ExportTable::new(), trees);
        assert!(matches!(result, Err(StartError::TreeName(_))), "{name:?}");
    }
}
