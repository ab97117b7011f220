//! A small NBD client: enough to run a workload on an export and to read all of it.
//!
//! Written from the protocol specification, sharing no code with the server under test: fixed
//! newstyle with `NBD_OPT_GO`, simple replies, one request at a time. Every wait has a limit.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::workload::{SECTOR_BYTES, Target};

/// Time limit for a reply; only a server that hangs takes this long.
const LIMIT: Duration = Duration::from_secs(200);
/// The longest read or write in one request.
const REQUEST_BYTES_MAX: usize = 1 << 20;

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// The handshake flags that the client requests: fixed newstyle, and no zeroes after the export's
/// data.
const CLIENT_FLAGS: u32 = 0b11;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
/// The flag of a write that is durable when acknowledged.
const FUA: u16 = 1;

/// How long a client waits for the server to close the connection.
const HANGS_UP_WITHIN: Duration = Duration::from_secs(2);

/// A connection to one export.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    cookie: u64,
    bytes: u64,
    /// The process to kill as soon as the next request has been sent.
    victim: Option<Pid>,
}

impl Client {
    /// Connects to the export called `name` (a name, label or UUID) on the server's socket.
    ///
    /// # Errors
    /// No connection, or the server does not offer that export.
    pub fn connect(socket: &Path, name: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        expect(u64::from_be_bytes(take(&mut stream)?), SERVER_MAGIC)?;
        expect(u64::from_be_bytes(take(&mut stream)?), OPTION_MAGIC)?;
        let _server_flags: [u8; 2] = take(&mut stream)?;
        let length = u32::try_from(name.len()).map_err(io::Error::other)?;
        let mut greeting = CLIENT_FLAGS.to_be_bytes().to_vec();
        greeting.extend(OPTION_MAGIC.to_be_bytes());
        greeting.extend(OPTION_GO.to_be_bytes());
        greeting.extend((length + 6).to_be_bytes());
        greeting.extend(length.to_be_bytes());
        greeting.extend(name.as_bytes());
        // No information requests.
        greeting.extend(0u16.to_be_bytes());
        stream.write_all(&greeting)?;
        let bytes = negotiate(&mut stream)?;
        Ok(Self { stream, cookie: 0, bytes, victim: None })
    }

    /// Returns the size of the export, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Arranges that the server, process `victim`, is killed after the next request has been sent
    /// and before its reply is read. Whether a reply arrives is open.
    pub const fn kill_at_next_request(&mut self, victim: Pid) {
        self.victim = Some(victim);
    }

    /// Reads the whole export from its start.
    ///
    /// # Errors
    /// The first request that failed.
    pub fn read_whole(&mut self, mut visit: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        let mut at = 0;
        while at < self.bytes {
            let count = usize::try_from(self.bytes - at).map_or(buffer.len(), |left| left.min(buffer.len()));
            self.read(at / SECTOR_BYTES as u64, &mut buffer[..count])?;
            visit(&buffer[..count])?;
            at += count as u64;
        }
        Ok(())
    }

    /// Writes `bytes` starting at `sector`. The data is durable when this returns.
    ///
    /// # Errors
    /// The server's error.
    pub fn write_durable(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_with(FUA, sector, bytes)
    }

    fn write_with(&mut self, flags: u16, sector: u64, bytes: &[u8]) -> io::Result<()> {
        for (index, piece) in (0..).zip(bytes.chunks(REQUEST_BYTES_MAX)) {
            let offset = sector * SECTOR_BYTES as u64 + index * REQUEST_BYTES_MAX as u64;
            self.request_with(flags, WRITE, offset, piece.len(), piece)?;
            self.answer()?;
        }
        Ok(())
    }

    fn request(&mut self, command: u16, offset: u64, length: usize, payload: &[u8]) -> io::Result<()> {
        self.request_with(0, command, offset, length, payload)
    }

    fn request_with(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        length: usize,
        payload: &[u8],
    ) -> io::Result<()> {
        self.cookie += 1;
        let mut header = REQUEST_MAGIC.to_be_bytes().to_vec();
        header.extend(flags.to_be_bytes());
        header.extend(command.to_be_bytes());
        header.extend(self.cookie.to_be_bytes());
        header.extend(offset.to_be_bytes());
        header.extend(u32::try_from(length).map_err(io::Error::other)?.to_be_bytes());
        self.stream.write_all(&header)?;
        self.stream.write_all(payload)?;
        if let Some(victim) = self.victim.take() {
            kill_process(victim, Signal::KILL)?;
        }
        Ok(())
    }

    fn answer(&mut self) -> io::Result<()> {
        expect(u32::from_be_bytes(take(&mut self.stream)?), REPLY_MAGIC)?;
        let error = u32::from_be_bytes(take(&mut self.stream)?);
        expect(u64::from_be_bytes(take(&mut self.stream)?), self.cookie)?;
        if error == 0 {
            return Ok(());
        }
        Err(i32::try_from(error).map_or_else(|_| io::Error::other("no errno"), io::Error::from_raw_os_error))
    }
}

impl Target for Client {
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()> {
        for (index, piece) in (0..).zip(bytes.chunks_mut(REQUEST_BYTES_MAX)) {
            let offset = sector * SECTOR_BYTES as u64 + index * REQUEST_BYTES_MAX as u64;
            self.request(READ, offset, piece.len(), &[])?;
            self.answer()?;
            self.stream.read_exact(piece)?;
        }
        Ok(())
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_with(0, sector, bytes)
    }

    fn discard(&mut self, sector: u64, sectors: u64) -> io::Result<()> {
        let length = usize::try_from(sectors).map_err(io::Error::other)? * SECTOR_BYTES;
        self.request(TRIM, sector * SECTOR_BYTES as u64, length, &[])?;
        self.answer()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.request(FLUSH, 0, 0, &[])?;
        self.answer()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A server that is already gone need not be told. A running server has released the client
        // by the time it closes the connection, so the next user of the volume does not find it in
        // use.
        let _ = self.request(DISCONNECT, 0, 0, &[]);
        let _ = self.stream.set_read_timeout(Some(HANGS_UP_WITHIN));
        let _ = self.stream.read(&mut [0]);
    }
}

/// Reads the server's replies to `NBD_OPT_GO` until it acknowledges. Returns the export's size in
/// bytes.
fn negotiate(stream: &mut UnixStream) -> io::Result<u64> {
    let mut size = None;
    loop {
        expect(u64::from_be_bytes(take(stream)?), OPTION_REPLY_MAGIC)?;
        expect(u32::from_be_bytes(take(stream)?), OPTION_GO)?;
        let kind = u32::from_be_bytes(take(stream)?);
        let length = u32::from_be_bytes(take(stream)?);
        let mut payload = Vec::new();
        stream.take(u64::from(length)).read_to_end(&mut payload)?;
        match kind {
            REPLY_ACK => return size.ok_or_else(|| io::Error::other("the server told no size")),
            REPLY_INFO if payload.len() >= 10 && payload[..2] == INFO_EXPORT.to_be_bytes() => {
                size = Some(u64::from_be_bytes(payload[2..10].try_into().expect("eight bytes")));
            }
            REPLY_INFO => {}
            _ => {
                let said = String::from_utf8_lossy(&payload);
                return Err(io::Error::other(format!("the server refused: {kind:#x} {said}")));
            }
        }
    }
}

fn take<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn expect<T: PartialEq + std::fmt::LowerHex>(found: T, wanted: T) -> io::Result<()> {
    if found == wanted {
        return Ok(());
    }
    Err(io::Error::other(format!("the server sent {found:#x}, wanted {wanted:#x}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requires;
    use crate::workload::{Fate, Model, Workload, run};
    use std::process::{Child, Command};
    use std::time::Instant;

    struct Server(Child);

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_workload_runs_on_another_server() {
        if !requires::programs(&["nbdkit"]) {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("socket");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(["memory", "1M"]);
        let _server = Server(command.spawn().expect("nbdkit starts"));
        let deadline = Instant::now() + LIMIT;
        // The socket exists a moment before the server listens on it.
        let mut client = loop {
            match Client::connect(&socket, "") {
                Ok(client) => break client,
                Err(error) => assert!(Instant::now() < deadline, "an export: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(client.bytes(), 1 << 20);
        let workload: Workload = "seed=4 volume=1 first_sequence=1 sectors=2048 block_sectors=1 \
            write_sectors_max=64 writes=300 flush_every=100 read_every=3"
            .parse()
            .expect("a workload");
        run(&workload, &mut client, &mut |_| {}).expect("a faithful server");
        let mut content = Vec::new();
        client.read_whole(|bytes| content.write_all(bytes)).expect("a whole read");
        let mut model = Model::blank(1, 2048);
        model.apply(&workload, Fate::Finished);
        model.check(&content[..]).expect("the same content");
    }
}
