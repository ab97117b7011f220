//! Certificates for tests, in directories as nbdkit, libnbd and qemu expect them: `ca-cert.pem`,
//! `server-cert.pem`, `client-cert.pem` and the keys.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use std::path::Path;

/// An authority that signs certificates.
pub struct CertificateAuthority(CertifiedIssuer<'static, KeyPair>);

impl CertificateAuthority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// The authority's own certificate.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for this machine, and its key.
    pub fn server(&self) -> (String, String) {
        self.signed(&["localhost", "127.0.0.1"], ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A certificate for a client, and its key.
    pub fn client(&self) -> (String, String) {
        self.signed(&["client"], ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn signed(&self, names: &[&str], purpose: ExtendedKeyUsagePurpose) -> (String, String) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }

    /// Writes a server's files: its certificate and key, and this authority for certificates of its
    /// clients.
    pub fn put_server(&self, folder: &Path) {
        put(folder, "ca", &self.pem(), None);
        let (certificate, key) = self.server();
        put(folder, "server", &certificate, Some(&key));
    }

    /// Writes the files of a client that trusts this authority, with a certificate of `signer` if
    /// given.
    pub fn put_client(&self, folder: &Path, signer: Option<&Self>) {
        put(folder, "ca", &self.pem(), None);
        if let Some((certificate, key)) = signer.map(Self::client) {
            put(folder, "client", &certificate, Some(&key));
        }
    }
}

fn put(folder: &Path, of: &str, certificate: &str, key: Option<&str>) {
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join(format!("{of}-cert.pem")), certificate).expect("a file");
    if let Some(key) = key {
        std::fs::write(folder.join(format!("{of}-key.pem")), key).expect("a file");
    }
}
