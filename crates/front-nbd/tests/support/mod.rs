//! A server over memory-backed volumes, behind real sockets, and a small client that can also
//! misbehave.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod certificates;
mod ring;
pub mod tools;

pub use ring::TestRing;

use bcached_front_nbd::proto::wire::{IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC};
use bcached_front_nbd::{
    BoundAddress, EndpointAddress, HandoffSocket, Limits, NbdServer, Options, TlsConfig, VolumeRings,
};
use bcached_port::ram::{Hook, RamServer, Verdict};
use bcached_port::socket::inherited::{self, Purpose};
use bcached_port::socket::{PassedSocket, SocketOwner};
use bcached_port::{Export, ExportTable, VolumeId};
use certificates::CertificateAuthority;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub const TANK: VolumeId = VolumeId(1);
pub const ARCHIVE: VolumeId = VolumeId(2);
pub const TANK_SECTORS: u64 = 64 << 11;
/// Time limit for anything a test waits for; nothing here takes nearly as long.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Two volumes, "tank" (64 MiB, writable, label "fast") and "archive" (1 MiB, read-only), on a unix
/// and a TCP socket.
pub struct TestServer {
    pub ram: RamServer,
    pub exports: ExportTable,
    pub server: Option<NbdServer>,
    pub path: PathBuf,
    pub tcp: SocketAddr,
    /// The ring of the connections, where there is one.
    pub ring: Option<TestRing>,
    _directory: tempfile::TempDir,
}

pub fn serve() -> TestServer {
    serve_with(Limits::default(), Box::new(|_, _| Verdict::Serve))
}

/// Serves with the connections on a ring. Returns `None`, with the reason, where there is none.
pub fn serve_on_a_ring() -> Option<TestServer> {
    let served = serve();
    if served.ring.is_none() {
        eprintln!("SKIPPED: no io_uring here");
        return None;
    }
    Some(served)
}

pub fn serve_with(limits: Limits, hook: Hook) -> TestServer {
    serve_in(None, limits, hook)
}

/// Serves with TLS on TCP.
pub fn serve_in(tls: Option<TlsConfig>, limits: Limits, hook: Hook) -> TestServer {
    serve_as(tls, false, (limits, hook))
}

/// Serves such that clients wait until the server is opened.
pub fn serve_closed() -> TestServer {
    serve_as(None, true, (Limits::default(), Box::new(|_, _| Verdict::Serve)))
}

fn serve_as(tls: Option<TlsConfig>, closed: bool, (limits, hook): (Limits, Hook)) -> TestServer {
    let ram = RamServer::start_with(&[(TANK, TANK_SECTORS), (ARCHIVE, 2048)], 64, hook);
    let exports = ExportTable::new();
    exports.insert(tank(&ram));
    exports.insert(Export { read_only: true, ..ram.export("archive", ARCHIVE, 2048) });
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("nbd.sock");
    let address = "127.0.0.1:0".parse().expect("an address");
    let places = [
        EndpointAddress::Unix { path: path.clone(), group: None },
        EndpointAddress::Tcp { address, anywhere: false },
    ];
    let endpoints = places.map(Into::into).to_vec();
    let (ring, rings) = (if is_threaded() { None } else { TestRing::start() }, VolumeRings::default());
    for export in exports.served() {
        ring.iter().for_each(|ring: &TestRing| rings.insert(export.uuid.0, ring.ring_handle.clone()));
    }
    let server = start(Options { endpoints, closed, limits, tls, rings }, &exports, Vec::new());
    let BoundAddress::Tcp(tcp) = server.bound()[1] else { unreachable!("the second is TCP") };
    TestServer { ram, exports, server: Some(server), path, tcp, ring, _directory: directory }
}

/// Inherited sockets belong to the whole process, so another test that asks for any port could take
/// them. Until they are settled, a server of another test also must not close its sockets.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Starts a server that continues with these sockets.
fn start(options: Options, exports: &ExportTable, left: Vec<HandoffSocket>) -> NbdServer {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for HandoffSocket { socket, bound, whose } in left {
        let socket = PassedSocket::new(socket).expect("it is listened on");
        match (bound, whose) {
            (BoundAddress::Tcp(_), _) => inherited::keep_tcp(Purpose::Nbd, socket),
            (BoundAddress::Unix(_), SocketOwner::Ours(file)) => inherited::keep_unix(socket, file),
            (BoundAddress::Unix(_), SocketOwner::Foreign) => unreachable!("it was bound here"),
        }
    }
    let server = NbdServer::start(options, exports.clone()).expect("starts");
    inherited::settle();
    server
}

/// Whether this is the test program without rings.
fn is_threaded() -> bool {
    let program = std::env::current_exe().expect("a program");
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("threaded"))
}

pub fn tank(ram: &RamServer) -> Export {
    Export { label: "fast".to_owned(), block_sectors: 16, ..ram.export("tank", TANK, TANK_SECTORS) }
}

impl TestServer {
    pub fn unix(&self) -> TestClient {
        let stream = UnixStream::connect(&self.path).expect("connects");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        stream.set_write_timeout(Some(LIMIT)).expect("a timeout");
        TestClient { stream: ClientStream::Unix(stream), structured: false }
    }

    pub fn tcp(&self) -> TestClient {
        let stream = TcpStream::connect(self.tcp).expect("connects");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        stream.set_write_timeout(Some(LIMIT)).expect("a timeout");
        TestClient { stream: ClientStream::Tcp(stream), structured: false }
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.path.display())
    }

    pub fn server(&self) -> &NbdServer {
        self.server.as_ref().expect("runs")
    }

    /// Waits until exactly `count` clients are connected.
    pub fn wait_for_clients(&self, count: usize) {
        wait_until("the number of clients", || self.server().clients().len() == count);
    }

    /// Hands over to another server, within `limit`. Returns how many connections were ended.
    pub fn go_over(&mut self, limit: Duration) -> usize {
        self.go_over_but_for(None, limit).0
    }

    /// Like [`TestServer::go_over`], but the other server does not serve this volume, which is
    /// returned.
    pub fn go_over_but_for(&mut self, volume: Option<&str>, limit: Duration) -> (usize, Option<Export>) {
        let mut missing = None;
        let left = self.server.take().expect("it runs").leave(limit);
        let places = [
            EndpointAddress::Unix { path: self.path.clone(), group: None },
            EndpointAddress::Tcp { address: self.tcp, anywhere: false },
        ];
        let (rings, former) = (VolumeRings::default(), std::mem::take(&mut self.exports));
        for export in former.served() {
            self.ring.iter().for_each(|ring| rings.insert(export.uuid.0, ring.ring_handle.clone()));
            // A copy, because another process does not know which clients have written.
            if volume == Some(&export.name) {
                missing = Some((*export).clone());
            } else {
                self.exports.insert((*export).clone());
            }
        }
        let endpoints = places.map(Into::into).to_vec();
        let options = Options { endpoints, closed: true, limits: Limits::default(), tls: None, rings };
        let server = start(options, &self.exports, left.sockets);
        server.keep(left.connections);
        server.go_on();
        server.open();
        self.server = Some(server);
        (left.ended.len(), missing)
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(server) = self.server.take()
            && !std::thread::panicking()
        {
            let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
            assert_eq!(server.shutdown(LIMIT), Ok(()), "every thread ends");
            assert!(!self.path.exists(), "the socket file goes with the server");
        }
    }
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub enum ClientStream {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

/// One connection. Reads and writes fail after [`LIMIT`].
pub struct TestClient {
    pub stream: ClientStream,
    pub structured: bool,
}

/// A structured reply's chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    pub payload: Vec<u8>,
}

impl TestClient {
    pub fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).expect("the server reads");
    }

    pub fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match &mut self.stream {
            ClientStream::Unix(stream) => stream.write_all(bytes),
            ClientStream::Tcp(stream) => stream.write_all(bytes),
            ClientStream::Tls(stream) => stream.write_all(bytes),
        }
    }

    pub fn try_receive(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        match &mut self.stream {
            ClientStream::Unix(stream) => stream.read_exact(into),
            ClientStream::Tcp(stream) => stream.read_exact(into),
            ClientStream::Tls(stream) => stream.read_exact(into),
        }
    }

    pub fn receive(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = vec![0; bytes];
        self.try_receive(&mut buffer).expect("the server answers");
        buffer
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        self.receive(N).try_into().expect("as many as asked for")
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }

    /// Checks that the server has ended the connection, rather than the read timing out.
    pub fn assert_closed(&mut self) {
        let mut rest = Vec::new();
        let result = match &mut self.stream {
            ClientStream::Unix(stream) => stream.read_to_end(&mut rest),
            ClientStream::Tcp(stream) => stream.read_to_end(&mut rest),
            ClientStream::Tls(stream) => stream.read_to_end(&mut rest),
        };
        let reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(result.as_ref().is_ok() || result.as_ref().is_err_and(reset), "{result:?}");
        assert_eq!(rest, [] as [u8; 0], "nothing more is said");
    }

    pub fn greet(&mut self, client_flags: u32) -> &mut Self {
        assert_eq!((self.u64(), self.u64()), (NBDMAGIC, IHAVEOPT));
        assert_eq!(self.u16(), 3, "fixed newstyle, no zeroes");
        self.send(&client_flags.to_be_bytes());
        self
    }

    /// Switches to TLS with a server that has a certificate of this authority.
    pub fn start_tls(mut self, authority: &CertificateAuthority) -> Self {
        assert_eq!(self.option(5, &[]), [(1, vec![])]);
        let ClientStream::Tcp(stream) = self.stream else { unreachable!("TLS is for TCP") };
        let mut roots = RootCertStore::empty();
        let trusted = CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate");
        roots.add(trusted).expect("an authority");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = versions.expect("usual").with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from("localhost").expect("a name");
        let connection = ClientConnection::new(Arc::new(config), name).expect("a connection");
        Self {
            stream: ClientStream::Tls(Box::new(StreamOwned::new(connection, stream))),
            structured: self.structured,
        }
    }

    pub fn send_option(&mut self, option: u32, data: &[u8]) {
        let length = u32::try_from(data.len()).expect("short");
        self.send(
            &[&IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data].concat(),
        );
    }

    /// Receives one reply to an option: type and data.
    pub fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64(), OPTION_REPLY_MAGIC);
        assert_eq!(self.u32(), option);
        let (kind, bytes) = (self.u32(), self.u32());
        assert!(bytes < 1 << 20, "a reply of sane size");
        (kind, self.receive(bytes as usize))
    }

    /// Sends an option and collects the replies up to the last: an ACK or an error.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(option, data);
        let mut replies = Vec::new();
        loop {
            let reply = self.option_reply(option);
            let last = reply.0 == 1 || reply.0 & 1 << 31 != 0;
            replies.push(reply);
            if last {
                return replies;
            }
        }
    }

    /// Performs the handshake up to GO, with structured replies and block status. Returns size and
    /// flags.
    pub fn enter(&mut self, export: &str) -> (u64, u16) {
        self.greet(3);
        assert_eq!(self.option(8, &[]), [(1, vec![])]);
        self.structured = true;
        let chosen = self.option(10, &context_question(export, &["base:allocation"]));
        assert_eq!(chosen.len(), 2, "{chosen:?}");
        self.go(export)
    }

    /// Performs the handshake without structured replies or block status.
    pub fn enter_plainly(&mut self, export: &str) -> (u64, u16) {
        self.greet(3).go(export)
    }

    pub fn go(&mut self, export: &str) -> (u64, u16) {
        let replies = self.option(7, &export_question(export, &[]));
        assert_eq!(replies.last().map(|reply| reply.0), Some(1), "{replies:?}");
        let (_, fact) =
            replies.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]).expect("size and flags");
        (
            u64::from_be_bytes(fact[2..10].try_into().expect("of that length")),
            u16::from_be_bytes([fact[10], fact[11]]),
        )
    }

    pub fn request(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        self.send(&request(command, flags, cookie, offset, length));
    }

    pub fn write(&mut self, flags: u16, cookie: u64, offset: u64, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("short");
        let mut bytes = request(1, flags, cookie, offset, length);
        bytes.extend_from_slice(payload);
        self.send(&bytes);
    }

    /// Receives a simple reply: error and cookie.
    pub fn simple(&mut self) -> (u32, u64) {
        assert_eq!(self.u32(), 0x6744_6698);
        (self.u32(), self.u64())
    }

    pub fn chunk(&mut self) -> Chunk {
        assert_eq!(self.u32(), 0x668e_33ef);
        self.chunk_behind_its_magic()
    }

    fn chunk_behind_its_magic(&mut self) -> Chunk {
        let (flags, kind, cookie, bytes) = (self.u16(), self.u16(), self.u64(), self.u32());
        assert!(bytes <= 33 << 20, "a chunk of sane size");
        Chunk { flags, kind, cookie, payload: self.receive(bytes as usize) }
    }

    /// Receives the result of a request without content: error and cookie.
    pub fn result(&mut self) -> (u32, u64) {
        if !self.structured {
            return self.simple();
        }
        match self.u32() {
            0x6744_6698 => (self.u32(), self.u64()),
            0x668e_33ef => {
                let (flags, kind, cookie, bytes) = (self.u16(), self.u16(), self.u64(), self.u32());
                assert_eq!((flags, kind), (1, 0x8001), "the only chunk, an error");
                let payload = self.receive(bytes as usize);
                (u32::from_be_bytes(payload[..4].try_into().expect("of that length")), cookie)
            }
            other => unreachable!("{other:#x} begins no reply"),
        }
    }

    /// Reads, and expects success.
    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.request(0, 0, 77, offset, length);
        if !self.structured {
            assert_eq!(self.simple(), (0, 77));
            return self.receive(length as usize);
        }
        let chunk = self.chunk();
        assert_eq!((chunk.flags, chunk.kind, chunk.cookie), (1, 1, 77));
        assert_eq!(chunk.payload[..8], offset.to_be_bytes());
        chunk.payload[8..].to_vec()
    }

    /// Receives the answer to a request that may have content: the content's chunk, or an empty
    /// chunk.
    pub fn chunk_or_done(&mut self) -> Chunk {
        match self.u32() {
            0x6744_6698 => {
                assert_eq!(self.u32(), 0, "success");
                Chunk { flags: 1, kind: 0, cookie: self.u64(), payload: Vec::new() }
            }
            0x668e_33ef => self.chunk_behind_its_magic(),
            other => unreachable!("{other:#x} begins no reply"),
        }
    }

    /// Reads to the end of the connection, in whatever way it ends.
    pub fn drain(&mut self) {
        let mut rest = Vec::new();
        let end = match &mut self.stream {
            ClientStream::Unix(stream) => stream.read_to_end(&mut rest),
            ClientStream::Tcp(stream) => stream.read_to_end(&mut rest),
            ClientStream::Tls(stream) => stream.read_to_end(&mut rest),
        };
        let waited = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        assert!(!end.is_err_and(|error| waited(&error)), "the server ends it");
    }

    /// Reads and discards everything on a separate thread, to the end.
    pub fn read_elsewhere(&self) -> std::thread::JoinHandle<()> {
        let ClientStream::Unix(stream) = &self.stream else { unreachable!("only needed on unix sockets") };
        let mut stream = stream.try_clone().expect("a second descriptor");
        std::thread::spawn(move || {
            let mut bytes = vec![0; 64 << 10];
            while stream.read(&mut bytes).is_ok_and(|read| read > 0) {}
        })
    }

    /// The same connection, for another thread.
    pub fn also(&self) -> Self {
        let stream = match &self.stream {
            ClientStream::Unix(stream) => {
                ClientStream::Unix(stream.try_clone().expect("a second descriptor"))
            }
            ClientStream::Tcp(stream) => ClientStream::Tcp(stream.try_clone().expect("a second descriptor")),
            ClientStream::Tls(_) => unreachable!("one thread has what it knows of TLS"),
        };
        Self { stream, structured: self.structured }
    }

    pub fn hang_up_halfway(&self) {
        let how = std::net::Shutdown::Write;
        match &self.stream {
            ClientStream::Unix(stream) => stream.shutdown(how).expect("half a close"),
            ClientStream::Tcp(stream) => stream.shutdown(how).expect("half a close"),
            ClientStream::Tls(stream) => stream.sock.shutdown(how).expect("half a close"),
        }
    }
}

pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

/// Content for "tank": half megabytes of noise and of zeroes, so that copying uses both writes and
/// zeroing. (With smaller pieces, nbdcopy takes long to punch holes into its target file.)
pub fn image() -> Vec<u8> {
    let mut seed = 88_172_645_463_325_252_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let half_megabytes = (0..TANK_SECTORS / 1024).flat_map(|_| {
        let (noise, zero) = (random().to_le_bytes(), random() % 3 == 0);
        let byte = move |at: usize| if zero { 0 } else { noise[at % 8].wrapping_add(noise[at / 512 % 8]) };
        (0..1024 * 512).map(byte)
    });
    half_megabytes.collect()
}

fn string(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("short");
    [&length.to_be_bytes()[..], text.as_bytes()].concat()
}

/// The data of INFO and GO.
pub fn export_question(name: &str, wanted: &[u16]) -> Vec<u8> {
    let count = u16::try_from(wanted.len()).expect("few");
    let wanted: Vec<u8> = wanted.iter().flat_map(|fact| fact.to_be_bytes()).collect();
    [&string(name)[..], &count.to_be_bytes(), &wanted].concat()
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn context_question(name: &str, queries: &[&str]) -> Vec<u8> {
    let count = u32::try_from(queries.len()).expect("few");
    let queries: Vec<u8> = queries.iter().flat_map(|query| string(query)).collect();
    [&string(name)[..], &count.to_be_bytes(), &queries].concat()
}
