//! Explains what the library reports about certificates and keys, in words that say what to do. The
//! library names some of it by numbers of standards, and calls other things just "unexpected".

use rustls::pki_types::PrivateKeyDer;
use rustls::{CertificateError, Error, OtherError};
use std::borrow::Cow;
use std::io;

/// The algorithms that this server supports.
pub(super) const KNOWN: &str =
    "RSA of 2048 to 8192 bits, ECDSA on the curves P-256, P-384 and P-521, and Ed25519";

/// X.509 version 1 had no extensions; tools still create such certificates if no extension is
/// requested.
const VERSION_1: &str = "it is of X.509 version 1, which has no extensions and is not accepted: sign it \
     again with an extension, as with `openssl x509 -req -extfile FILE` and a FILE of \
     `basicConstraints = CA:FALSE`";

/// Why TLS did not begin on a connection.
pub(super) fn of_peer(error: Error) -> io::Error {
    let why = match &error {
        Error::NoCertificatesPresented => format!(
            "the client presents no certificate: it has none, or its key is of an unsupported kind \
             (supported: {KNOWN})"
        ),
        Error::InvalidCertificate(certificate) => {
            format!("the client's certificate is refused: {}", of_certificate(certificate))
        }
        _ => return io::Error::new(io::ErrorKind::InvalidData, error),
    };
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// What is wrong with a certificate.
pub(super) fn of_certificate(error: &CertificateError) -> Cow<'static, str> {
    match error {
        CertificateError::Other(OtherError(other))
            if matches!(other.downcast_ref(), Some(webpki::Error::UnsupportedCertVersion)) =>
        {
            VERSION_1.into()
        }
        CertificateError::BadEncoding => "it cannot be read: it is damaged, or violates X.509".into(),
        CertificateError::UnknownIssuer => "it is not signed by an authority in ca-cert.pem".into(),
        CertificateError::BadSignature => {
            "its signature does not match the certificate in ca-cert.pem".into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("it has expired: {error}").into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("it is not valid yet: {error}").into()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its extended key usage does not allow this (clientAuth is for clients, serverAuth for \
             servers)"
                .into()
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { signature_algorithm_id, .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
            signature_algorithm_id, ..
        } => format!(
            "it is signed with an unsupported algorithm ({}); supported: {KNOWN}",
            named(signature_algorithm_id)
        )
        .into(),
        other => other.to_string().into(),
    }
}

/// The kind of a key, according to its encoding.
pub(super) const fn kind_of(key: &PrivateKeyDer<'_>) -> &'static str {
    match key {
        PrivateKeyDer::Pkcs1(_) => "an RSA key in PKCS#1",
        PrivateKeyDer::Sec1(_) => "an ECDSA key in SEC1",
        PrivateKeyDer::Pkcs8(_) => "a key in PKCS#8",
        _ => "a key",
    }
}

/// Why a key of that kind cannot be used. The library has tried everything it supports.
pub(super) fn of_key(kind: &str, error: &Error) -> String {
    format!("it is {kind}, of an unsupported curve, size or kind, or damaged ({error}); supported: {KNOWN}")
}

/// The common name of the algorithm with this DER-encoded identifier.
fn named(id: &[u8]) -> String {
    let known: [(&[u8], &str); 12] = [
        (b"\x2a\x86\x48\xce\x3d\x04\x01", "ECDSA with SHA-1"),
        (b"\x2a\x86\x48\xce\x3d\x04\x03\x01", "ECDSA with SHA-224"),
        (b"\x2a\x86\x48\xce\x3d\x04\x03\x02", "ECDSA with SHA-256"),
        (b"\x2a\x86\x48\xce\x3d\x04\x03\x03", "ECDSA with SHA-384"),
        (b"\x2a\x86\x48\xce\x3d\x04\x03\x04", "ECDSA with SHA-512"),
        (b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x04", "RSA with MD5"),
        (b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x05", "RSA with SHA-1"),
        (b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0e", "RSA with SHA-224"),
        (b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0a", "RSA-PSS"),
        (b"\x2b\x65\x71", "Ed448"),
        (b"\x2a\x86\x48\xce\x38\x04\x03", "DSA with SHA-1"),
        (b"\x60\x86\x48\x01\x65\x03\x04\x03\x02", "DSA with SHA-256"),
    ];
    // The library passes the content of the sequence: a tag, a length, the identifier, and
    // parameters.
    let bare = match id {
        [6, length, rest @ ..] => rest.get(..usize::from(*length)).unwrap_or(rest),
        other => other,
    };
    let found = known.iter().find(|(bytes, _)| *bytes == bare);
    found.map_or_else(|| format!("identifier {bare:02x?}"), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_called_what_people_call_it() {
        assert_eq!(named(&[6, 8, 42, 134, 72, 206, 61, 4, 3, 4]), "ECDSA with SHA-512");
        assert_eq!(named(&[6, 3, 0x2b, 0x65, 0x71]), "Ed448");
        assert_eq!(named(&[6, 9, 1]), "identifier [01]", "cut short");
        assert_eq!(named(&[]), "identifier []");
    }
}
