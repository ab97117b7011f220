//! Starts the servers that are measured. All of them serve the same bytes. Each is a child process
//! that is killed when its handle is dropped.

use super::VOLUME_BYTES;
use super::fio::FioLoad;
use anyhow::{Context as _, Result, bail};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Read as _, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for the start of a server.
const START_MAX: Duration = Duration::from_secs(30);

/// A running server.
pub struct Server {
    pub name: &'static str,
    /// The address for its clients: a URI, or a socket.
    pub address: String,
    /// The address for streams, if it differs. Streams are not read from a volume that small writes
    /// have left fragmented.
    streams: Option<String>,
    child: Child,
}

/// All servers, ours first.
pub struct Servers(Vec<Server>);

impl Server {
    /// Starts `command`, and waits until `socket` exists.
    fn start(name: &'static str, mut command: Command, socket: &Path, address: String) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let program = command.get_program().to_owned();
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut server = Self { name, address, streams: None, child };
        let deadline = Instant::now() + START_MAX;
        while !socket.exists() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{name} ended: {status}");
            }
            if Instant::now() > deadline {
                bail!("{name} did not create its socket within {START_MAX:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// Returns the address for the clients of this load.
    pub fn address_for(&self, load: &FioLoad) -> &str {
        self.streams.as_deref().filter(|_| load.is_stream()).unwrap_or(&self.address)
    }

    /// Returns the CPU time that the server has used so far, in microseconds.
    pub fn cpu_micros(&self) -> Result<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let behind_name = stat.rsplit_once(')').context("cannot parse /proc/PID/stat")?.1;
        let mut fields = behind_name.split_ascii_whitespace().skip(11);
        let mut ticks = || {
            fields.next().and_then(|field| field.parse::<u64>().ok()).context("cannot parse /proc/PID/stat")
        };
        // A tick is a hundredth of a second on every machine (`USER_HZ`).
        Ok((ticks()? + ticks()?) * 10_000)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _is_over = self.child.kill();
        let _status = self.child.wait();
    }
}

impl Servers {
    pub fn all(&self) -> &[Server] {
        &self.0
    }

    /// Starts all NBD servers, on unix sockets in `place`.
    pub fn start_nbd(place: &Path, bcached: &Path) -> Result<Self> {
        let image = image(place)?;
        let ours = ours(place, bcached, "nbd")?;
        for volume in VOLUMES {
            fill(&image, &ours_by_nbd(place, "nbd", volume))?;
        }
        let socket = |name: &str| place.join(name);
        let uri = |socket: &Path| format!("nbd+unix:///?socket={}", socket.display());
        let mut servers = vec![ours];

        let at = socket("file.sock");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&at).arg("file").arg(&image);
        servers.push(Server::start("nbdkit file", command, &at, uri(&at))?);

        let at = socket("cache.sock");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&at).arg("--filter=cache");
        command.arg("file").arg(&image).args(["cache=writeback", "cache-on-read=true"]).env("TMPDIR", place);
        servers.push(Server::start("nbdkit cache", command, &at, uri(&at))?);
        // Fill the cache, so that it holds everything, as ours does.
        copy(&[uri(&at).as_ref(), "null:".as_ref()])?;

        let at = socket("qemu.sock");
        let mut command = Command::new("qemu-nbd");
        command.args([
            "--persistent",
            "--format=raw",
            "--shared=8",
            "--aio=io_uring",
            "--cache=none",
            "--socket",
        ]);
        command.arg(&at).arg(&image);
        servers.push(Server::start("qemu-nbd", command, &at, uri(&at))?);
        Ok(Self(servers))
    }

    /// Starts the servers that speak vhost-user-blk.
    pub fn start_vhost(place: &Path, bcached: &Path) -> Result<Self> {
        let image = image(place)?;
        let ours = ours(place, bcached, "vhost-user")?;
        fill(&image, &ours_by_nbd(place, "vhost-user", VOLUMES[0]))?;
        let at = place.join("qsd.sock");
        let mut command = Command::new("qemu-storage-daemon");
        let node =
            format!("driver=file,node-name=disk,filename={},aio=io_uring,cache.direct=on", image.display());
        let export = format!(
            "type=vhost-user-blk,id=disk,node-name=disk,writable=on,addr.type=unix,addr.path={},num-queues=2",
            at.display()
        );
        command.args(["--blockdev", &node, "--export", &export]);
        let peer = Server::start("qemu-storage-daemon", command, &at, at.display().to_string())?;
        Ok(Self(vec![ours, peer]))
    }
}

/// Creates a file whose space is allocated, as a device's is, and whose memory has been touched,
/// like that of the other servers' image.
fn zeroes(path: &Path, bytes: u64) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    std::io::copy(&mut std::io::repeat(0).take(bytes), &mut file)?;
    Ok(file.flush()?)
}

/// Creates the image once: bytes that do not compress, the same each time.
fn image(place: &Path) -> Result<PathBuf> {
    let path = place.join("image");
    if path.exists() {
        return Ok(path);
    }
    let mut out = BufWriter::with_capacity(1 << 20, File::create(&path)?);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..VOLUME_BYTES / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.write_all(&state.to_le_bytes())?;
    }
    out.flush()?;
    Ok(path)
}

/// Our volumes: the second is for streams.
const VOLUMES: [&str; 2] = ["tank", "stream"];

/// Returns the NBD address of one of our volumes.
fn ours_by_nbd(place: &Path, way: &str, volume: &str) -> String {
    format!("nbd+unix:///{volume}?socket={}", place.join(way).join("nbd.sock").display())
}

/// Starts the daemon with two volumes in write-back mode, and a cache that can hold both four
/// times.
fn ours(place: &Path, bcached: &Path, way: &str) -> Result<Server> {
    let at = place.join(way);
    std::fs::create_dir(&at)?;
    let cache = at.join("ssd");
    zeroes(&cache, 8 * VOLUME_BYTES)?;
    let mut make = Command::new(bcached);
    make.args(["make", "--writeback", "--cache"]).arg(&cache);
    let mut text = format!(
        "version = 1\n[cache.fast]\ndevice = {cache:?}\n[nbd]\nlisten = [{:?}]\n[vhost-user]\ndirectory = {at:?}\n",
        at.join("nbd.sock")
    );
    for volume in VOLUMES {
        let backing = at.join(volume);
        // Larger by the space for a superblock, so that the volume is as large as what the other
        // servers serve.
        zeroes(&backing, VOLUME_BYTES + (1 << 20))?;
        make.arg("--backing").arg(&backing);
        // At most a quarter of the cache is dirty. That is below the target, so write-back runs at
        // its minimum rate, as it does next to any load.
        let _written = write!(
            text,
            "[volume.{volume}]\nbacking = {backing:?}\ncache = \"fast\"\nexport = [\"nbd\", \"vhost-user\"]\n\
             cache_mode = \"writeback\"\nsequential_cutoff = \"0\"\nwriteback_percent = 40\n"
        );
    }
    quietly(&mut make)?;
    let config = at.join("config.toml");
    std::fs::write(&config, text)?;
    let mut serve = Command::new(bcached);
    serve.arg("serve").arg("--config").arg(&config).arg("--control").arg(at.join("control.sock"));
    serve.env("BCACHED_NOTES", &at).env("BCACHED_STATE", &at);
    let socket = at.join(if way == "nbd" { "nbd.sock" } else { "tank.sock" });
    let address =
        if way == "nbd" { ours_by_nbd(place, way, VOLUMES[0]) } else { socket.display().to_string() };
    let mut server = Server::start("bcached", serve, &socket, address)?;
    server.streams = (way == "nbd").then(|| ours_by_nbd(place, way, VOLUMES[1]));
    for volume in VOLUMES {
        let mut wait = Command::new(bcached);
        wait.args(["wait", volume, "--for", "served", "--control"]).arg(at.join("control.sock"));
        quietly(&mut wait)?;
    }
    Ok(server)
}

/// Writes the image to a volume, so that all of it is in the cache.
fn fill(image: &Path, uri: &str) -> Result<()> {
    copy(&[image.as_os_str(), uri.as_ref()])
}

fn copy(words: &[&std::ffi::OsStr]) -> Result<()> {
    let mut copy = Command::new("nbdcopy");
    copy.args(words);
    quietly(&mut copy)
}

/// Runs a command to its end, and shows its output only if it fails.
fn quietly(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
