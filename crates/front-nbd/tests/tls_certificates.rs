//! Keys and certificates made by openssl, of the kinds that nbdkit and qemu accept. They are
//! accepted, or the error says why not.

mod support;

use bcached_front_nbd::{Limits, TlsConfig, TlsFile};
use bcached_port::ram::Verdict;
use std::path::PathBuf;
use support::tools::{has, run, succeed, tool};
use support::{TANK_SECTORS, serve_in};

const P256: &[&str] = &["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
const P521: &[&str] = &["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-521"];
const SECP256K1: &[&str] = &["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:secp256k1"];
const P521_SEC1: &[&str] = &["ecparam", "-name", "secp521r1", "-genkey", "-noout"];
const RSA: &[&str] = &["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
const RSA_PKCS1: &[&str] = &["genrsa", "-traditional", "2048"];
const ED25519: &[&str] = &["genpkey", "-algorithm", "ed25519"];

const SERVER: &str = "subjectAltName = DNS:localhost, IP:127.0.0.1\n";
const CLIENT: &str = "extendedKeyUsage = clientAuth\n";

/// openssl has no `--version`.
fn has_openssl() -> bool {
    let is_there = tool("openssl").arg("version").output().is_ok_and(|ran| ran.status.success());
    if !is_there {
        println!("skipped: openssl is not installed");
    }
    is_there
}

/// Files made by openssl.
struct OpensslFiles(tempfile::TempDir);

/// The size of the key comes last.
fn make_key(command: &[&str], file: &str) {
    succeed("openssl", &[&command[..1], &["-out", file], &command[1..]].concat());
}

impl OpensslFiles {
    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).expect("openssl has made it")
    }

    /// Makes an authority with a key of this kind, which signs with this digest.
    fn authority(name: &str, key: &[&str], digest: &str) -> Self {
        let files = Self(tempfile::tempdir().expect("a folder"));
        make_key(key, &files.path("ca.key"));
        let subject = format!("/CN={name}");
        succeed(
            "openssl",
            &[
                &["req", "-x509", "-new", "-days", "2", "-subj", &subject, "-key", &files.path("ca.key")][..],
                &["-addext", "keyUsage = critical, keyCertSign", digest, "-out", &files.path("ca.pem")],
            ]
            .concat(),
        );
        files
    }

    /// Makes a key of this kind, and its certificate with these extensions. Without extensions it
    /// is of X.509 version 1.
    fn leaf(&self, name: &str, key: &[&str], extensions: &str, digest: &str) {
        let of = |ending: &str| self.path(&format!("{name}.{ending}"));
        make_key(key, &of("key"));
        let request = ["req", "-new", "-subj", "/CN=localhost", "-key", &of("key"), "-out", &of("csr")];
        succeed("openssl", &request);
        std::fs::write(of("ext"), extensions).expect("a file");
        let (ca, ca_key, csr, ext, pem) =
            (self.path("ca.pem"), self.path("ca.key"), of("csr"), of("ext"), of("pem"));
        let sign = [
            "x509",
            "-req",
            "-days",
            "2",
            digest,
            "-in",
            &csr,
            "-CA",
            &ca,
            "-CAkey",
            &ca_key,
            "-CAcreateserial",
        ];
        let with = ["-extfile", &ext];
        let with = if extensions.is_empty() { &[][..] } else { &with[..] };
        succeed("openssl", &[&sign[..], with, &["-out", &pem]].concat());
    }

    /// Makes the directory of a client that trusts the authority `of`.
    fn client(&self, of: &Self) -> PathBuf {
        let folder = self.0.path().join("client");
        std::fs::create_dir_all(&folder).expect("a folder");
        for (from, to) in [
            (of.path("ca.pem"), "ca-cert.pem"),
            (self.path("c.pem"), "client-cert.pem"),
            (self.path("c.key"), "client-key.pem"),
        ] {
            std::fs::copy(from, folder.join(to)).expect("it is there");
        }
        folder
    }
}

#[test]
fn keys_and_signatures_of_the_usual_tools_are_taken() {
    if !has_openssl() || !has("nbdinfo") {
        return;
    }
    for (what, (authority, digest), server, client) in [
        ("RSA", (RSA, "-sha256"), RSA, RSA),
        ("keys in older frames", (RSA_PKCS1, "-sha512"), RSA_PKCS1, P521_SEC1),
        ("server's key on P-521", (RSA, "-sha256"), P521, P256),
        ("client's key on P-521", (RSA, "-sha256"), P256, P521),
        ("authority's key on P-521", (P521, "-sha512"), P521_SEC1, P521_SEC1),
        ("P-256 signed with SHA-512", (P256, "-sha512"), P256, P256),
        ("P-521 signed with SHA-256", (P521, "-sha256"), P256, P256),
        ("Ed25519", (RSA, "-sha256"), ED25519, ED25519),
    ] {
        let files = OpensslFiles::authority("root", authority, digest);
        files.leaf("s", server, SERVER, digest);
        files.leaf("c", client, CLIENT, digest);
        let tls = TlsConfig::new(&files.read("s.pem"), &files.read("s.key"), Some(&files.read("ca.pem")));
        let tls = tls.unwrap_or_else(|error| unreachable!("{what}: {error}"));
        let served = serve_in(Some(tls), Limits::default(), Box::new(|_, _| Verdict::Serve));
        let port = served.tcp.port();
        let uri = format!("nbds://localhost:{port}/tank?tls-certificates={}", files.client(&files).display());
        let told = run("nbdinfo", &["--size", &uri]);
        assert_eq!(
            String::from_utf8_lossy(&told.stdout),
            format!("{}\n", TANK_SECTORS * 512),
            "{what}: {told:?}"
        );
    }
}

#[test]
fn a_servers_key_or_certificate_that_cannot_be_used_is_named_with_its_reason() {
    if !has_openssl() {
        return;
    }
    let files = OpensslFiles::authority("root", RSA, "-sha256");
    files.leaf("s", RSA, SERVER, "-sha256");
    files.leaf("old", RSA, "", "-sha256");
    files.leaf("odd", SECP256K1, SERVER, "-sha256");
    let refused = |name: &str| {
        let key = files.read(&format!("{name}.key"));
        let error =
            TlsConfig::new(&files.read(&format!("{name}.pem")), &key, None).expect_err("it cannot be used");
        (error.part(), error.to_string())
    };
    let (part, why) = refused("old");
    assert!(
        part == TlsFile::Certificate && why.contains("X.509 version 1") && why.contains("-extfile"),
        "{why}"
    );
    let (part, why) = refused("odd");
    assert!(
        part == TlsFile::Key && why.contains("of an unsupported curve") && why.contains("P-521"),
        "{why}"
    );
    // An old certificate is accepted as an authority: what it lacks matters only for certificates
    // of clients.
    let tls = TlsConfig::new(&files.read("s.pem"), &files.read("s.key"), Some(&files.read("old.pem")));
    assert!(tls.is_ok(), "{tls:?}");
}
