//! TLS on TCP: third-party clients with and without certificates, requests before TLS, and garbage
//! in its place.

mod support;

use bcached_front_nbd::proto::wire::{command, option, option_reply};
use bcached_front_nbd::{Limits, TlsConfig, TlsError, TlsFile};
use bcached_port::ram::Verdict;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;
use support::certificates::CertificateAuthority;
use support::tools::{has, run, succeed};
use support::{
    LIMIT, TANK, TANK_SECTORS, TestClient, TestServer, export_question, image, request, serve_in, wait_until,
};

const SHORT: Duration = Duration::from_millis(60);
/// Enough for an honest client to do its part of a handshake, even on a busy machine.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// The configuration of a server with a certificate of `authority`. Clients must have certificates
/// of `clients`, if given.
fn tls(authority: &CertificateAuthority, clients: Option<&CertificateAuthority>) -> TlsConfig {
    let (certificate, key) = authority.server();
    let clients = clients.map(CertificateAuthority::pem);
    TlsConfig::new(certificate.as_bytes(), key.as_bytes(), clients.as_ref().map(String::as_bytes))
        .expect("they are good")
}

fn serve_tls(tls: TlsConfig, limits: Limits) -> TestServer {
    serve_in(Some(tls), limits, Box::new(|_, _| Verdict::Serve))
}

/// A client in TLS.
fn encrypted(served: &TestServer, authority: &CertificateAuthority) -> TestClient {
    let mut client = served.tcp();
    client.greet(3);
    client.start_tls(authority)
}

fn uri(served: &TestServer, export: &str, certificates: &Path) -> String {
    format!("nbds://localhost:{}/{export}?tls-certificates={}", served.tcp.port(), certificates.display())
}

/// Directories of clients that trust `authority`: one without a certificate, one with a certificate
/// of it, and one with a certificate of another authority.
struct ClientDirectories {
    root: tempfile::TempDir,
}

impl ClientDirectories {
    fn new(authority: &CertificateAuthority) -> Self {
        let folders = Self { root: tempfile::tempdir().expect("a folder") };
        authority.put_client(&folders.plain(), None);
        authority.put_client(&folders.known(), Some(authority));
        authority.put_client(&folders.stranger(), Some(&CertificateAuthority::new()));
        folders
    }

    fn plain(&self) -> PathBuf {
        self.root.path().join("plain")
    }

    fn known(&self) -> PathBuf {
        self.root.path().join("known")
    }

    fn stranger(&self) -> PathBuf {
        self.root.path().join("stranger")
    }
}

#[test]
fn libnbd_copies_an_image_in_tls_both_ways() {
    if !has("nbdinfo") || !has("nbdcopy") {
        return;
    }
    let authority = CertificateAuthority::new();
    let folders = ClientDirectories::new(&authority);
    let served = serve_tls(tls(&authority, None), Limits::default());
    let tank = uri(&served, "tank", &folders.plain());
    let info = succeed("nbdinfo", &["--json", &tank]);
    assert!(info.contains("\"TLS\": true") && info.contains("\"export-size\": 67108864"), "{info}");
    let listed = succeed("nbdinfo", &["--list", "--json", &uri(&served, "", &folders.plain())]);
    assert!(listed.contains("\"tank\"") && listed.contains("\"archive\""), "{listed}");

    let (from, to) = (folders.root.path().join("from"), folders.root.path().join("to"));
    let image = image();
    std::fs::write(&from, &image).expect("written");
    let (from, to) = (from.to_str().expect("text"), to.to_str().expect("text"));
    succeed("nbdcopy", &["--requests=64", "--flush", from, &tank]);
    assert!(served.ram.content(TANK, 0, TANK_SECTORS) == image, "everything arrived");
    succeed("nbdcopy", &["--requests=64", &tank, to]);
    assert!(std::fs::read(to).expect("read back") == image, "everything came back");
}

#[test]
fn libnbd_is_let_in_with_a_certificate_of_ours_only() {
    if !has("nbdinfo") {
        return;
    }
    let authority = CertificateAuthority::new();
    let folders = ClientDirectories::new(&authority);
    let served = serve_tls(tls(&authority, Some(&authority)), Limits::default());
    let size = |folder: &Path| run("nbdinfo", &["--size", &uri(&served, "tank", folder)]);
    let known = size(&folders.known());
    assert!(known.status.success() && known.stdout == b"67108864\n", "{known:?}");
    for folder in [folders.plain(), folders.stranger()] {
        let refused = size(&folder);
        assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");
    }
    // The other way round: a client that trusts another authority does not talk to us.
    let other = tempfile::tempdir().expect("a folder");
    CertificateAuthority::new().put_client(other.path(), None);
    assert!(!size(other.path()).status.success());
}

/// Runs qemu-io through qemu's own TLS, with the credentials in `folder`.
fn qemu_io(served: &TestServer, folder: &Path, commands: &[&str]) -> Output {
    let credentials =
        format!("tls-creds-x509,id=tls,endpoint=client,verify-peer=yes,dir={}", folder.display());
    let image = format!("driver=nbd,host=localhost,port={},export=tank,tls-creds=tls", served.tcp.port());
    let mut arguments = vec!["--object", &credentials, "--image-opts", "-t", "none"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&image);
    run("qemu-io", &arguments)
}

#[test]
fn qemu_reads_and_writes_in_tls() {
    if !has("qemu-io") {
        return;
    }
    let authority = CertificateAuthority::new();
    let folders = ClientDirectories::new(&authority);
    let served = serve_tls(tls(&authority, Some(&authority)), Limits::default());
    let commands = [
        "write -P 0x5a 0 3M",
        "read -P 0x5a 0 3M",
        "write -f -P 0xa5 64k 64k",
        "write -z 128k 64k",
        "aio_write -P 9 4M 1M",
        "aio_write -P 8 6M 1M",
        "aio_flush",
        "read -P 0xa5 64k 64k",
        "read -P 0 128k 64k",
        "read -P 9 4M 1M",
        "read -P 8 6M 1M",
    ];
    let done = qemu_io(&served, &folders.known(), &commands);
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && !said.contains("failed") && !said.contains("error"), "{done:?}");
    assert_eq!(said.matches("read ").count(), 5, "{done:?}");
    assert_eq!(served.ram.content(TANK, 128, 1), [0xa5; 512]);
    for folder in [folders.plain(), folders.stranger()] {
        let refused = qemu_io(&served, &folder, &["write -P 1 0 512"]);
        assert!(!refused.status.success(), "{refused:?}");
    }
    assert_eq!(served.ram.content(TANK, 0, 1), [0x5a; 512], "nothing of them was written");
}

#[test]
fn who_does_not_begin_tls_is_told_nothing_else() {
    let authority = CertificateAuthority::new();
    let served = serve_tls(tls(&authority, None), Limits::default());
    let mut client = served.tcp();
    client.greet(3);
    let question = export_question("tank", &[]);
    for (asked, data) in [
        (option::LIST, &b""[..]),
        (option::INFO, &question),
        (option::GO, &question),
        (option::STRUCTURED_REPLY, b""),
        (option::SET_META_CONTEXT, b"whatever"),
        (4711, b""),
    ] {
        let (kind, text) = client.option(asked, data).remove(0);
        assert_eq!(kind, option_reply::ERR_TLS_REQD, "{asked}");
        assert!(!String::from_utf8_lossy(&text).contains("tank"));
    }
    assert_eq!(client.option(option::STARTTLS, b"x")[0].0, option_reply::ERR_INVALID);
    assert_eq!(client.option(option::ABORT, &[]), [(option_reply::ACK, vec![])], "it may hang up");
    client.assert_closed();

    // The oldest way to enter has no error reply.
    let mut old = served.tcp();
    old.greet(0).send_option(option::EXPORT_NAME, b"tank");
    old.assert_closed();

    if has("nbdinfo") {
        let plain = run("nbdinfo", &[&format!("nbd://localhost:{}/tank", served.tcp.port())]);
        assert!(!plain.status.success(), "{plain:?}");
    }
    if has("qemu-img") {
        let plain = run("qemu-img", &["info", &format!("nbd://localhost:{}/tank", served.tcp.port())]);
        let said = String::from_utf8_lossy(&plain.stderr);
        assert!(!plain.status.success() && said.contains("TLS"), "{plain:?}");
    }
    // On unix sockets nothing changes.
    let mut local = served.unix();
    assert_eq!(local.greet(3).option(option::STARTTLS, &[])[0].0, option_reply::ERR_UNSUP);
    assert_eq!(local.go("tank").0, TANK_SECTORS * 512);
    let clients = served.server().clients();
    assert_eq!(clients.iter().map(|client| client.tls).collect::<Vec<_>>(), [false]);
}

#[test]
fn in_tls_everything_is_as_without() {
    let authority = CertificateAuthority::new();
    let served = serve_tls(tls(&authority, None), Limits::default());
    let mut client = encrypted(&served, &authority);
    assert_eq!(client.option(option::STARTTLS, &[])[0].0, option_reply::ERR_INVALID, "it has begun");
    assert_eq!(client.option(8, &[]), [(1, vec![])]);
    client.structured = true;
    assert_eq!(client.go("tank").0, TANK_SECTORS * 512);
    // The largest request, and pieces of all sizes around those of records.
    let data: Vec<u8> = (0..32 << 20).map(|at: u32| (at % 251).to_le_bytes()[0]).collect();
    client.write(0, 1, 0, &data);
    assert_eq!(client.result(), (0, 1));
    assert_eq!(client.read(0, 32 << 20), data);
    for sectors in [1, 2, 31, 32, 33, 127, 128, 129, 500] {
        let bytes = sectors * 512;
        assert_eq!(client.read(512, bytes), data[512..512 + bytes as usize]);
    }
    // Many requests at once, in both directions at the same time.
    for cookie in 0..64 {
        client.write(0, cookie, cookie << 16, &[7; 64 << 10]);
        client.request(command::READ, 0, 1000 + cookie, 8 << 20, 64 << 10);
    }
    let mut cookies: Vec<u64> = (0..128)
        .map(|_| {
            let chunk = client.chunk_or_done();
            assert!(chunk.payload.is_empty() || chunk.payload[8..] == data[8 << 20..][..64 << 10]);
            chunk.cookie
        })
        .collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..64).chain(1000..1064).collect::<Vec<_>>());
    let [only] = &served.server().clients()[..] else { unreachable!("one") };
    assert!(only.tls && only.writing && !only.read_only, "{only:?}");
    client.request(command::DISC, 0, 0, 0, 0);
    // The end is announced: a truncated stream would be an error.
    client.assert_closed();
}

/// Plaintext sent before the client was told to begin TLS may be from a man in the middle. It ends
/// the connection.
#[test]
fn what_is_sent_before_tls_is_not_taken_for_what_is_said_in_it() {
    let authority = CertificateAuthority::new();
    let served = serve_tls(tls(&authority, None), Limits::default());
    let mut client = served.tcp();
    client.greet(3);
    let start = [&b"IHAVEOPT"[..], &[0, 0, 0, 5, 0, 0, 0, 0]].concat();
    let list = [&b"IHAVEOPT"[..], &[0, 0, 0, 3, 0, 0, 0, 0]].concat();
    client.send(&[start, list].concat());
    client.assert_closed();
}

#[test]
fn what_is_no_tls_ends_the_connection_and_nothing_else() {
    let authority = CertificateAuthority::new();
    let served = serve_tls(tls(&authority, None), Limits::default());
    let mut working = encrypted(&served, &authority);
    working.go("tank");
    // Records of invalid length, a record of another type, a truncated hello, and requests in
    // plaintext.
    let hello = [&[22, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3][..], &[0xee; 50]].concat();
    for garbage in [
        vec![0xff; 4096],
        [&[22, 3, 1, 0xff, 0xff][..], &[0; 70_000]].concat(),
        vec![23, 3, 3, 0, 1, 0],
        [&hello[..], &[0; 300]].concat(),
        b"IHAVEOPT\0\0\0\x03\0\0\0\0".to_vec(),
        request(command::READ, 0, 1, 0, 4096),
    ] {
        let mut client = served.tcp();
        client.greet(3);
        assert_eq!(client.option(option::STARTTLS, &[]), [(1, vec![])]);
        // The connection may be closed before everything is sent.
        let _ended_already = client.try_send(&garbage);
        client.drain();
        assert_eq!(working.read(0, 512), [0; 512]);
    }
    served.wait_for_clients(1);
    // Garbage inside TLS, too.
    let mut client = encrypted(&served, &authority);
    client.send(&[0xff; 64]);
    client.drain();
    served.wait_for_clients(1);
}

#[test]
fn a_handshake_in_tls_has_the_deadline_of_any() {
    let authority = CertificateAuthority::new();
    let served = serve_tls(tls(&authority, None), Limits { handshake: HANDSHAKE, ..Limits::default() });
    let start = |served: &TestServer| {
        let mut client = served.tcp();
        client.greet(3);
        assert_eq!(client.option(option::STARTTLS, &[]), [(1, vec![])]);
        client
    };
    let (mut silent, mut halfway, mut dripping) = (start(&served), start(&served), start(&served));
    // A hello that is never complete.
    let hello = [&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3][..], &[0xee; 32]].concat();
    halfway.send(&hello);
    dripping.send(&hello);
    wait_until("the dripping one to be cut off", || {
        std::thread::sleep(Duration::from_millis(2));
        dripping.try_send(&[0]).is_err()
    });
    silent.drain();
    halfway.drain();
    served.wait_for_clients(0);
    // And a client that has begun TLS and then sends nothing.
    let mut idle = encrypted(&served, &authority);
    idle.drain();
    served.wait_for_clients(0);
}

/// A renewed certificate is used for new connections, without a restart.
#[test]
fn who_comes_later_is_shown_the_renewed_certificate() {
    let (before, after) = (CertificateAuthority::new(), CertificateAuthority::new());
    let served = serve_tls(tls(&before, None), Limits::default());
    let mut old = encrypted(&served, &before);
    old.go("tank");
    served.server().renew(tls(&after, None));
    let mut new = encrypted(&served, &after);
    new.go("tank");
    assert_eq!((old.read(0, 512), new.read(0, 512)), (vec![0; 512], vec![0; 512]));
    let mut distrustful = encrypted(&served, &before);
    assert!(distrustful.try_send(&[0]).is_err(), "it does not know the new one");
}

/// As without TLS: a client that does not read its replies is disconnected when another waits for
/// its memory.
#[test]
fn who_takes_no_replies_in_tls_goes_when_another_waits_for_its_memory() {
    let authority = CertificateAuthority::new();
    let limits = Limits { total_bytes: 64 << 20, give_way: SHORT, ..Limits::default() };
    let served = serve_tls(tls(&authority, None), limits);
    let mut stuck = [encrypted(&served, &authority), encrypted(&served, &authority)];
    for client in &mut stuck {
        client.go("tank");
        client.request(command::READ, 0, 1, 0, 32 << 20);
    }
    let mut other = encrypted(&served, &authority);
    other.go("tank");
    for _ in 0..4 {
        assert_eq!(other.read(0, 32 << 20).len(), 32 << 20);
    }
    wait_until("one of them to go", || served.server().clients().len() < 3);
}

#[test]
fn a_stop_ends_clients_in_tls_in_order() {
    let authority = CertificateAuthority::new();
    let mut served = serve_tls(tls(&authority, None), Limits::default());
    let mut client = encrypted(&served, &authority);
    client.go("tank");
    assert_eq!(client.read(0, 512), [0; 512]);
    let server = served.server.take().expect("it runs");
    assert_eq!(server.shutdown(LIMIT), Ok(()));
    client.assert_closed();
}

#[test]
fn what_cannot_be_shown_is_refused_with_what_is_wrong() {
    let authority = CertificateAuthority::new();
    let ((certificate, key), (_, other)) = (authority.server(), authority.server());
    let pem = authority.pem();
    let refused = |certificate: &str, key: &str, authorities: Option<&str>| {
        TlsConfig::new(certificate.as_bytes(), key.as_bytes(), authorities.map(str::as_bytes))
            .expect_err("it is wrong")
    };
    let broken = certificate.replacen("MII", "AAA", 1);
    let cut = &key[..key.len() / 2];
    for (error, part) in [
        (refused("", &key, None), TlsFile::Certificate),
        (refused(&key, &key, None), TlsFile::Certificate),
        (refused(&broken, &key, None), TlsFile::Certificate),
        (refused(&certificate, "", None), TlsFile::Key),
        (refused(&certificate, cut, None), TlsFile::Key),
        (refused(&certificate, &certificate, None), TlsFile::Key),
        (refused(&certificate, &key, Some("")), TlsFile::Authorities),
        (refused(&certificate, &key, Some(&broken)), TlsFile::Authorities),
    ] {
        assert_eq!(error.part(), part, "{error}");
    }
    assert!(matches!(refused(&certificate, &other, None), TlsError::OtherKey));
    assert!(TlsConfig::new(certificate.as_bytes(), key.as_bytes(), Some(pem.as_bytes())).is_ok());
}
