//! NBD as configured: TLS with its certificates, and read-only addresses.

use crate::certificates::CertificateAuthority;
use crate::common::{CommandResult, Daemon, Images, ask, bcached, json, nbdsh, refused, requires, run, tool};
use rustix::process::Signal;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};

const MIB: u64 = 1 << 20;

/// Makes a cache and its volume `tank`, configured with `nbd` as that section.
fn configured(nbd: &str) -> Images {
    let images = Images::new();
    images.configure_pair(36 * MIB, 20 * MIB, "");
    add(&images, nbd);
    images
}

/// Replaces the lines of `[nbd]` in the configuration made by [`configured`].
fn add(images: &Images, nbd: &str) {
    let text = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let (head, _) = text.split_once("[nbd]").unwrap_or((&text, ""));
    images.configure(&format!("{head}[nbd]\n{nbd}"));
}

/// Returns the port of the only TCP address.
fn port(daemon: &Daemon) -> String {
    let status = daemon.status();
    let places = status["nbd"].as_array().expect("places").iter().filter_map(|place| place.as_str());
    let ports: Vec<_> = places.filter_map(|place| place.strip_prefix("127.0.0.1:")).collect();
    let [port] = ports[..] else { unreachable!("{status}") };
    port.to_owned()
}

fn uri(daemon: &Daemon, certificates: &Path) -> String {
    format!("nbds://localhost:{}/tank?tls-certificates={}", port(daemon), certificates.display())
}

/// Asks for the volume's size as a client that trusts the certificates in the directory.
fn size(daemon: &Daemon, certificates: &Path) -> CommandResult {
    run(tool("nbdinfo").arg("--size").arg(uri(daemon, certificates)))
}

/// A client that is connected to a volume until it is dropped.
struct ConnectedClient(Child);

impl ConnectedClient {
    fn to(uri: &str) -> Self {
        Self(nbdsh(uri, "input()").stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts"))
    }
}

impl Drop for ConnectedClient {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped_already = self.0.wait();
    }
}

/// Returns the only client of a volume, once there is one.
fn client(daemon: &Daemon) -> serde_json::Value {
    let of = |status: &serde_json::Value| {
        let clients = status["clients"].as_array().expect("clients").iter();
        clients.filter(|client| client["volume"] == "tank").cloned().collect::<Vec<_>>()
    };
    daemon.wait_for("a client", |status| of(status).len() == 1);
    of(&daemon.status()).remove(0)
}

/// A regression: the client was refused, and nothing was logged.
#[test]
fn who_comes_without_tls_is_named_in_the_log() {
    use std::io::{Read as _, Write as _};
    let images = configured("");
    let tls = images.path("tls");
    CertificateAuthority::new().put_server(&tls);
    add(&images, &format!("listen = [\"127.0.0.1:0\"]\ntls = {tls:?}\ntls_verify_peer = false\n"));
    std::fs::set_permissions(tls.join("server-key.pem"), PermissionsExt::from_mode(0o644)).expect("ours");
    let check = bcached(&["config", "check", "--config", images.path("config.toml").to_str().expect("text")]);
    assert!(check.out.contains("every user of this machine can read "), "{check:?}");
    assert!(check.out.contains("server-key.pem: run `chmod o= "), "{check:?}");
    let daemon = Daemon::configured(&images);
    assert!(daemon.log().contains("event=tls-key-readable"), "{}", daemon.log());
    let mut client = TcpStream::connect(format!("127.0.0.1:{}", port(&daemon))).expect("it listens");
    client.read_exact(&mut [0; 18]).expect("the greeting");
    // Flags, and then LIST.
    let asked = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &3_u32.to_be_bytes(), &0_u32.to_be_bytes()].concat();
    client.write_all(&asked).expect("it takes it");
    client.read_exact(&mut [0; 20]).expect("a refusal");
    drop(client);
    daemon.wait_for("the line", |_| daemon.log().contains("event=nbd-tls-failed"));
    let told = "was not established: the client tried to continue without TLS, and was refused";
    assert!(daemon.log().contains(told), "{}", daemon.log());
    std::fs::set_permissions(tls.join("server-key.pem"), PermissionsExt::from_mode(0o640)).expect("ours");
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().contains("event=reloaded"));
    assert_eq!(daemon.log().matches("event=tls-key-readable").count(), 1, "{}", daemon.log());

    std::fs::remove_file(tls.join("server-cert.pem")).expect("it was there");
    let check = bcached(&["config", "check", "--config", images.path("config.toml").to_str().expect("text")]);
    assert!(check.err.contains("cannot read the server's certificate /"), "{check:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the log said `peer sent no certificates` and
/// `Other(OtherError(UnsupportedCertVersion))`.
#[test]
fn a_client_that_is_refused_is_told_of_in_words() {
    let has_openssl = tool("openssl").arg("version").output().is_ok_and(|ran| ran.status.success());
    if !requires("nbdinfo") || !has_openssl {
        return println!("skipped: it takes openssl and nbdinfo");
    }
    let images = configured("");
    let (tls, client) = (images.path("tls"), images.path("client"));
    let authority = CertificateAuthority::new();
    authority.put_server(&tls);
    authority.put_client(&client, None);
    add(&images, &format!("listen = [\"127.0.0.1:0\"]\ntls = {tls:?}\n"));
    let openssl = |words: &str| {
        let words =
            words.split(' ').map(|word| word.strip_prefix('@').map_or(word.into(), |name| images.path(name)));
        let ran = run(tool("openssl").args(words));
        assert_eq!(ran.exit, 0, "{ran:?}");
    };
    // As people do it: without a request for an extension the certificate has the version of 1988.
    openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=old -keyout @old.key -out @tls/ca-cert.pem");
    openssl("req -new -newkey rsa:2048 -nodes -subj /CN=c -keyout @client/client-key.pem -out @c.csr");
    openssl(
        "x509 -req -days 2 -in @c.csr -CA @tls/ca-cert.pem -CAkey @old.key -CAcreateserial -out @client/client-cert.pem",
    );
    let daemon = Daemon::configured(&images);
    let told = |sentence: &str| daemon.wait_for(sentence, |_| daemon.log().contains(sentence));
    assert_ne!(size(&daemon, &client).exit, 0);
    told("was not established: the client's certificate is refused: it is of X.509 version 1");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");

    // A client that signs with an algorithm unknown here, and one without a certificate.
    openssl("genpkey -algorithm ed448 -out @client/client-key.pem");
    openssl("req -new -subj /CN=c -key @client/client-key.pem -out @c.csr");
    openssl(
        "x509 -req -days 2 -in @c.csr -CA @tls/ca-cert.pem -CAkey @old.key -CAcreateserial -out @client/client-cert.pem",
    );
    let daemon = Daemon::configured(&images);
    let told = |sentence: &str| daemon.wait_for(sentence, |_| daemon.log().contains(sentence));
    assert_ne!(size(&daemon, &client).exit, 0);
    told(
        "was not established: the client presents no certificate: it has none, or its key is of an \
         unsupported kind (supported: RSA of",
    );
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

#[test]
fn tls_is_served_from_a_directory_and_renewed_by_a_reload() {
    if !requires("nbdinfo") || !requires("nbdsh") {
        return;
    }
    let images = Images::new();
    images.configure_pair(36 * MIB, 20 * MIB, "");
    let (first, second) = (CertificateAuthority::new(), CertificateAuthority::new());
    let tls = images.path("tls");
    first.put_server(&tls);
    let [known, plain, later] = ["known", "plain", "later"].map(|name| images.path(name));
    first.put_client(&known, Some(&first));
    first.put_client(&plain, None);
    second.put_client(&later, Some(&second));
    let socket = images.path("run/nbd.sock");
    let nbd = format!("listen = [\"127.0.0.1:0\", {socket:?}]\ntls = {tls:?}\n");
    add(&images, &nbd);
    let daemon = Daemon::configured(&images);
    assert_eq!(size(&daemon, &known).out, "20963328\n", "{}", daemon.log());
    assert_ne!(size(&daemon, &plain).exit, 0, "it shows no certificate");
    assert!(daemon.log().contains("event=nbd-tls-failed"), "{}", daemon.log());
    let plain_tcp = run(tool("nbdinfo").arg(format!("nbd://localhost:{}/tank", port(&daemon))));
    assert_ne!(plain_tcp.exit, 0, "it does not begin TLS: {plain_tcp:?}");
    let stays = ConnectedClient::to(&uri(&daemon, &known));
    let it = client(&daemon);
    assert_eq!((&it["tls"], &it["read_only"]), (&true.into(), &false.into()), "{it}");

    // A certificate without its key is refused: nothing changes.
    let key = std::fs::read_to_string(tls.join("server-key.pem")).expect("it is there");
    std::fs::write(tls.join("server-key.pem"), second.server().1).expect("a file");
    let check = bcached(&["config", "check", "--config", images.path("config.toml").to_str().expect("text")]);
    let told = format!(
        "cannot use {}/server-key.pem for TLS: it is not the key of the certificate; put the key of server-cert.pem there",
        tls.display()
    );
    assert_eq!((check.exit, check.err.contains(&told)), (1, true), "{check:?}");
    add(&images, &format!("{nbd}tls_verify_peer = false\n"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is refused", |_| daemon.log().contains("event=reload-refused"));
    assert!(daemon.log().contains(&told), "{}", daemon.log());
    assert_eq!(size(&daemon, &known).exit, 0);
    assert_ne!(size(&daemon, &plain).exit, 0, "nothing of it was applied");
    std::fs::write(tls.join("server-key.pem"), key).expect("a file");

    // Another authority, and then no verification of clients.
    add(&images, &nbd);
    second.put_server(&tls);
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().contains("event=reloaded"));
    assert_eq!(size(&daemon, &later).exit, 0, "{}", daemon.log());
    assert_ne!(size(&daemon, &known).exit, 0, "it does not know the new one");
    assert_eq!(client(&daemon)["peer"], it["peer"], "who was there stays");
    second.put_client(&plain, None);
    add(&images, &format!("{nbd}tls_verify_peer = false\n"));
    let differs = ask(&daemon, &["config", "diff"]).out;
    assert_eq!(
        differs,
        "nbd.tls_verify_peer: true is in force, false is in the files (until a reload or the next start)\n"
    );
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().matches("event=reloaded").count() == 2);
    assert_eq!(size(&daemon, &plain).exit, 0, "{}", daemon.log());
    assert_eq!(ask(&daemon, &["config", "diff"]).out, "the running configuration is that of the files\n");

    // Turning TLS on or off takes effect at the next start.
    add(&images, &format!("listen = [\"127.0.0.1:0\", {socket:?}]\n"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().matches("event=reloaded").count() == 3);
    let told = format!("`tls` of [nbd] stays {} until the next start", tls.display());
    assert!(daemon.log().contains(&told), "{}", daemon.log());
    assert_eq!(size(&daemon, &plain).exit, 0);
    drop(stays);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// The start is refused before any device is opened, and leaves nothing behind.
#[test]
fn a_start_without_its_certificates_is_refused_in_one_sentence() {
    let images = configured("");
    let (tls, socket) = (images.path("tls"), images.path("run/nbd.sock"));
    let authority = CertificateAuthority::new();
    authority.put_server(&tls);
    add(&images, &format!("listen = [\"127.0.0.1:0\", {socket:?}]\ntls = {tls:?}\n"));
    let config = images.path("config.toml");
    let refuses = |file: &str, text: Option<&str>, exit: i32, sentence: &str| {
        let path = tls.join(file);
        let before = std::fs::read(&path).expect("it is there");
        match text {
            Some(text) => std::fs::write(&path, text).expect("a file"),
            None => std::fs::remove_file(&path).expect("it was there"),
        }
        let ran = run(&mut Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]));
        let last = ran.err.lines().last().unwrap_or_default();
        assert_eq!((ran.exit, last.contains(sentence)), (exit, true), "{file}: {ran:?}");
        let named =
            if text.is_some_and(|text| text.contains("CERTIFICATE")) { "server-key.pem" } else { file };
        assert!(last.contains(tls.join(named).to_str().expect("text")), "it names the file: {last}");
        assert!(!socket.exists() && !ran.err.contains("event=cache-open"), "{ran:?}");
        std::fs::write(&path, before).expect("a file");
    };
    refuses("server-cert.pem", None, 2, "put the server's certificate there in PEM");
    refuses("server-key.pem", Some("no key"), 2, "it contains no private key in PEM");
    refuses(
        "server-cert.pem",
        Some(&CertificateAuthority::new().server().0),
        2,
        "it is not the key of the certificate",
    );
    refuses("ca-cert.pem", None, 2, "or accept clients without a certificate: tls_verify_peer = false");
    refuses("ca-cert.pem", Some(""), 2, "it contains no certificate in PEM");
    let daemon = Daemon::configured(&images);
    assert_eq!(daemon.stop().0, 0, "with all of them it starts");
}

/// A regression: the old daemon reread the files in order to continue, and ended along with the one
/// that could not take over.
#[test]
fn nobody_takes_over_without_the_certificates() {
    let images = configured("");
    let (tls, socket) = (images.path("tls"), images.path("run/nbd.sock"));
    CertificateAuthority::new().put_server(&tls);
    add(&images, &format!("listen = [\"127.0.0.1:0\", {socket:?}]\ntls = {tls:?}\n"));
    let daemon = Daemon::configured(&images);
    let stays = ConnectedClient::to(&format!("nbd+unix:///tank?socket={}", socket.display()));
    let it = client(&daemon);
    let key = tls.join("server-key.pem");
    let before = std::fs::read(&key).expect("it is there");
    std::fs::remove_file(&key).expect("it was there");
    refused(&daemon, &["take-over"], 2, "put the key of server-cert.pem there");
    std::fs::write(&key, before).expect("a file");
    assert_eq!(client(&daemon)["peer"], it["peer"], "{}", daemon.log());
    assert!(!daemon.log().contains("event=handing-over"), "{}", daemon.log());
    drop(stays);
    assert!(ask(&daemon, &["stop"]).out.contains("has stopped"), "{}", daemon.log());
}

#[test]
fn tcp_for_everybody_is_only_had_by_saying_so() {
    let images = configured("listen = [\"0.0.0.0:0\"]\n");
    let config = images.path("config.toml");
    let ran = run(&mut Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]));
    let sentence = "config.toml:7: 0.0.0.0:0 is not a loopback address, and NBD without TLS is open to every client; write";
    assert_eq!((ran.exit, ran.err.contains(sentence)), (2, true), "{ran:?}");
    add(&images, "listen = [\"0.0.0.0:0\"]\ntls = \"off\"\n");
    let daemon = Daemon::configured(&images);
    let status = daemon.status();
    let place = status["nbd"][0].as_str().expect("a place");
    assert!(place.starts_with("0.0.0.0:"), "{status}");
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn who_comes_where_one_may_only_look_writes_nothing() {
    if !requires("nbdinfo") || !requires("nbdsh") || !requires("qemu-io") {
        return;
    }
    let images = configured("");
    let (own, look) = (images.path("run/nbd.sock"), images.path("run/look.sock"));
    add(&images, &format!("listen = [{own:?}, {{ at = {look:?}, read_only = true }}]\n"));
    let daemon = Daemon::configured(&images);
    let looks = format!("nbd+unix:///tank?socket={}", look.display());
    let is = |uri: &str| run(tool("nbdinfo").args(["--is", "read-only", uri])).exit;
    assert_eq!((is(&looks), is(&daemon.uri("tank"))), (0, 2));
    let write = |uri: &str| run(tool("qemu-io").args(["-f", "raw", "-c", "write -P 7 0 4k", uri]));
    assert_ne!(write(&looks).exit, 0, "a client that writes does not even begin");
    let insists = "h.set_strict_mode(0)\nh.pwrite(bytes(512), 0)";
    let ran = run(&mut nbdsh(&looks, insists));
    assert!(ran.exit != 0 && ran.err.contains("EPERM") || ran.err.contains("not permitted"), "{ran:?}");

    // A read-only client blocks no other client, and sees what others write.
    let watcher = ConnectedClient::to(&looks);
    let it = client(&daemon);
    assert_eq!((&it["read_only"], &it["tls"]), (&true.into(), &false.into()), "{it}");
    let reads = |line: &str| line.starts_with("client of tank: ") && line.ends_with(", reading (read-only)");
    assert!(ask(&daemon, &["status"]).out.lines().any(reads));
    assert_eq!(write(&daemon.uri("tank")).exit, 0);
    let read = run(tool("qemu-io").args(["-r", "-f", "raw", "-c", "read -P 7 0 4k", &looks]));
    assert!(read.exit == 0 && !read.out.contains("failed"), "{read:?}");
    drop(watcher);
    let shown = json(
        &bcached(&[
            "config",
            "show",
            "--json",
            "--config",
            images.path("config.toml").to_str().expect("text"),
        ])
        .out,
    );
    assert!(shown.to_string().contains("read_only"), "{shown}");
    assert_eq!(daemon.stop().0, 0);
}
