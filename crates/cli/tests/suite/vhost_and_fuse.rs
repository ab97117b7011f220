//! Exports other than NBD: disks of virtual machines, and files.

use crate::common::{
    CommandResult, Daemon, Images, ask, bytes, content, done, fill, has_fuse, pattern, refused, requires,
    run, tool,
};
use crate::machine::{QemuMachine, boot_sector, has_qemu};
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 16 << 20;

/// Returns the volume's exports, as in the status.
fn ways(daemon: &Daemon) -> Vec<(String, String)> {
    let status = daemon.status();
    let exports = status["volumes"][0]["exports"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    exports.iter().map(|export| (text(&export["way"]), text(&export["place"]))).collect()
}

fn clients(status: &Value) -> Vec<(String, bool)> {
    let clients = status["clients"].as_array().expect("clients").iter();
    let way = |client: &Value| client["way"].as_str().unwrap_or_default().to_owned();
    clients.map(|client| (way(client), client["writing"] == true)).collect()
}

/// A virtual machine boots from what another client has written. Its disk is exclusive while it
/// writes, it survives a killed daemon, and what it wrote is there.
#[test]
fn a_virtual_machine_has_a_volume_as_its_disk() {
    if !has_qemu() || !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    // SeaBIOS boots from blocks of 512 bytes only.
    images.configure_blocks("512", (CACHE_BYTES, BACKING_BYTES), "export = [\"nbd\", \"vhost-user\"]\n");
    let daemon = Daemon::configured(&images);
    let mut disk = pattern(64 << 10, 1);
    disk[..512].copy_from_slice(&boot_sector());
    disk[512] = b'!';
    fill(&images, &daemon, "tank", &disk);
    let socket = images.path("run/vhost-user/tank.sock");
    let nbd = images.path("run/nbd.sock");
    let places = [("nbd", &nbd), ("vhost-user", &socket)];
    assert_eq!(ways(&daemon), places.map(|(way, place)| (way.to_owned(), place.display().to_string())));
    assert!(done(&daemon, &["status"]).contains(&format!(", socket {}\n", socket.display())));
    let guest = QemuMachine::start(&socket);
    assert_eq!([guest.says(), guest.says(), guest.says()], *b"!..");
    daemon.wait_for("it writes", |status| clients(status) == [("vhost-user".to_owned(), true)]);
    let data = images.path("data");
    let other = run(tool("nbdcopy").arg(&data).arg(daemon.uri("tank")));
    assert_ne!(other.exit, 0, "one client writes at a time");
    refused(&daemon, &["remove", "tank"], 3, "it is in use by a virtual machine");

    daemon.kill();
    while guest.said.recv_timeout(Duration::from_secs(1)).is_ok() {}
    let daemon = Daemon::configured(&images);
    assert_eq!([guest.says(), guest.says()], *b"..", "it hears of no error");
    drop(guest);
    daemon.wait_for("it is gone", |status| clients(status).is_empty());
    let found = content(&images, &daemon, "tank");
    assert!(found[1024..1536] == disk[512..1024] && found[2048..64 << 10] == disk[2048..]);
    done(&daemon, &["remove", "tank"]);
    daemon.wait_for("its socket goes", |_| !socket.exists());
    // At once, or after the former one is gone.
    for _ in 0..5 {
        done(&daemon, &["add", "tank"]);
        daemon.wait_for("it is there again", |status| {
            status["volumes"][0]["state"] == "served" && socket.exists()
        });
        done(&daemon, &["remove", "tank"]);
    }
    done(&daemon, &["add", "tank"]);
    daemon
        .wait_for("it is there again", |status| status["volumes"][0]["state"] == "served" && socket.exists());
    assert_eq!(ways(&daemon).len(), 2);
    let (exit, log) = daemon.stop();
    assert_eq!((exit, socket.exists()), (0, false), "{log}");
}

#[test]
fn a_volume_is_a_file() {
    if !has_fuse() {
        return;
    }
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"fuse\"\n");
    let daemon = Daemon::configured(&images);
    let file: PathBuf = images.path("run/fuse/volumes/tank");
    assert_eq!(ways(&daemon), [("fuse".to_owned(), file.display().to_string())]);
    assert!(done(&daemon, &["status"]).contains(&format!(" 0 B dirty, file {}\n", file.display())));
    assert!(daemon.status()["nbd"].as_array().is_some_and(|nbd| !nbd.is_empty()), "for volumes that come");
    let data = pattern(300_000, 3);
    let open = OpenOptions::new().read(true).write(true).open(&file).expect("it is there");
    open.write_all_at(&data, 777).expect("it takes it");
    open.sync_all().expect("it is durable");
    daemon.wait_for("it has a writer", |status| clients(status) == [("fuse".to_owned(), true)]);
    refused(&daemon, &["remove", "tank"], 3, "it is in use by");
    let other = run(tool("nbdinfo").arg(daemon.uri("tank")));
    assert_ne!(other.exit, 0, "it is to be had as a file: {other:?}");
    drop(open);

    daemon.kill();
    assert!(std::fs::metadata(&file).is_err(), "its mount is dead");
    let daemon = Daemon::configured(&images);
    let found = bytes(&file);
    assert_eq!(found.len() as u64, std::fs::metadata(&file).expect("a file").len());
    assert!(found[777..][..data.len()] == data[..] && found[..777].iter().all(|byte| *byte == 0));
    done(&daemon, &["remove", "tank"]);
    assert!(!file.exists());
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    assert!(std::fs::read_dir(images.path("run/fuse")).expect("a folder").next().is_none(), "{log}");
    assert!(!log.contains("fuse-ended") && !log.contains("fuse-busy"), "nobody but the daemon: {log}");
}

/// Each socket has the configured group from the moment it appears. A daemon that may not set it
/// says so.
#[test]
fn sockets_have_their_groups() {
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = [\"nbd\", \"vhost-user\"]\n");
    let text = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let run = images.path("run").display().to_string();
    let own = rustix::process::getegid().as_raw();
    // Without root only the process's own groups can be set.
    let is_root = rustix::process::geteuid().is_root();
    let [nbd, look, machines] = if is_root { [own + 1, own + 2, own + 3] } else { [own; 3] };
    let configure = |nbd, machines| {
        images.configure(&format!(
            "{text}[vhost-user]\ngroup = \"{machines}\"\n[nbd]\ngroup = \"{nbd}\"\n\
             listen = [\"{run}/nbd.sock\", {{ at = \"{run}/look.sock\", group = \"{look}\" }}]\n"
        ));
    };
    configure(nbd, machines);
    let daemon = Daemon::configured(&images);
    let file = |name: &str| std::fs::metadata(images.path("run").join(name)).expect("it is there");
    for (name, group) in [("nbd.sock", nbd), ("look.sock", look), ("vhost-user/tank.sock", machines)] {
        assert_eq!((file(name).gid(), file(name).mode() & 0o777), (group, 0o660), "{name}");
    }
    assert_eq!(file("monitor.sock").gid(), own, "which is for looking only");
    configure(nbd, machines + 1);
    let differs = ask(&daemon, &["config", "diff"]).out;
    let line = format!(
        "vhost-user.group: {machines} is in force, {} is in the files (until the next start)",
        machines + 1
    );
    assert!(differs.contains(&line), "{differs}");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");

    if is_root && !requires("setpriv") {
        return;
    }
    configure(own + 77, own);
    let config = images.path("config.toml");
    let serve = Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]);
    let ran = run_without_chown(serve, is_root);
    let sentence =
        "nbd.sock cannot be given its group: only root (CAP_CHOWN) and members of the group may do that";
    assert!(ran.exit == 4 && ran.err.contains(sentence), "{ran:?}");
    assert!(!images.path("run/nbd.sock").exists());
}

/// Runs a command as root without the capability to give files to groups.
fn run_without_chown(command: Command, is_root: bool) -> CommandResult {
    if !is_root {
        return run(&mut { command });
    }
    let mut without = tool("setpriv");
    without
        .args(["--bounding-set=-chown", "--inh-caps=-chown", "--"])
        .arg(command.get_program())
        .args(command.get_args());
    without.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    run(&mut without)
}

/// A configured export that is unavailable fails the start: it is not replaced by another one.
#[test]
fn a_way_that_cannot_be_had_ends_the_start() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let taken = images.path("taken");
    std::fs::write(&taken, "a file").expect("a file");
    let missing = format!("{}/no/such", images.path("run").display());
    let not_created = format!("cannot create {missing}: ");
    for (way, exit, sentence) in [
        (
            format!("vhost-user:{}", taken.display()),
            2,
            "is not a directory, so it cannot hold vhost-user sockets",
        ),
        (format!("vhost-user:{missing}"), 4, not_created.as_str()),
        (format!("fuse:{}", taken.display()), 2, "is not a directory, so nothing can be mounted there"),
    ] {
        let words = ["--cache", &fast, "--backing", &tank, "--export", &way];
        let ran = run(&mut Daemon::command(&images, "run", &words));
        assert_eq!(ran.exit, exit, "{way}: {ran:?}");
        assert!(ran.err.contains(sentence), "{way}: {ran:?}");
    }
}
