//! TLS for clients on TCP: the server's certificate, the check of client certificates, and
//! encrypted connections.
//!
//! Certificates, ciphers and records are handled by rustls. An encrypted connection has one state,
//! which both of its threads need. A thread holds it only while computing, not while waiting for
//! the socket ([`stream`]).

mod errors;
mod stream;

pub(crate) use stream::{TlsReceiver, TlsSender};

use crate::socket::Socket;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// The server's certificate and key, and the authorities of client certificates. Clones share the
/// same configuration.
#[derive(Clone)]
pub struct TlsConfig(Arc<ServerConfig>);

/// Why these files cannot be used for TLS.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// No certificate can be read.
    #[error("it contains no certificate in PEM")]
    NoCertificate(TlsFile),
    /// No key can be read.
    #[error("it contains no private key in PEM")]
    NoKey(TlsFile),
    /// A certificate is invalid or could not be verified by any client, or a key is of an
    /// unsupported kind.
    #[error("it cannot be used: {why}")]
    Unusable {
        /// The file concerned.
        part: TlsFile,
        /// The reason.
        why: String,
    },
    /// The key belongs to another certificate.
    #[error("it is not the key of the certificate")]
    OtherKey,
    /// Client certificates could not be verified with these authorities.
    #[error("it cannot be used to check the clients' certificates: {0}")]
    Authorities(VerifierBuilderError),
}

/// The file that an error concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsFile {
    /// The server's certificate.
    Certificate,
    /// Its key.
    Key,
    /// The authorities of client certificates.
    Authorities,
}

impl TlsError {
    /// The file that the error concerns.
    #[must_use]
    pub const fn part(&self) -> TlsFile {
        match self {
            Self::NoCertificate(part) | Self::NoKey(part) | Self::Unusable { part, .. } => *part,
            Self::OtherKey => TlsFile::Key,
            Self::Authorities(_) => TlsFile::Authorities,
        }
    }
}

impl TlsConfig {
    /// Creates a configuration from PEM: the certificate with those between it and its root, its
    /// key, and the authorities that must have signed client certificates. Without authorities, any
    /// client is accepted.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn new(certificate: &[u8], key: &[u8], authorities: Option<&[u8]>) -> Result<Self, TlsError> {
        let provider = Arc::new(default_provider());
        let chain = certificates(certificate, TlsFile::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::NoKey(TlsFile::Key))?;
        let versions =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let builder = versions.expect("the provider supports the default TLS versions");
        let builder = match authorities {
            None => builder.with_no_client_auth(),
            Some(authorities) => {
                let roots = Arc::new(roots(authorities)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
                builder.with_client_cert_verifier(verifier.map_err(TlsError::Authorities)?)
            }
        };
        let kind = errors::kind_of(&key);
        let mut config = builder.with_single_cert(chain, key).map_err(|source| match source {
            rustls::Error::InconsistentKeys(_) => TlsError::OtherKey,
            rustls::Error::InvalidCertificate(source) => TlsError::Unusable {
                part: TlsFile::Certificate,
                why: errors::of_certificate(&source).into_owned(),
            },
            source => TlsError::Unusable { part: TlsFile::Key, why: errors::of_key(kind, &source) },
        })?;
        // Connections are long-lived and not worth resuming, so no session state is kept.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }

    /// Switches a connection to TLS.
    ///
    /// # Errors
    /// The handshake fails, or is not complete by the deadline. The peer is told why, if it can
    /// take that immediately.
    pub(crate) fn begin(
        &self,
        socket: &Arc<Socket>,
        deadline: Instant,
    ) -> io::Result<(TlsReceiver, TlsSender)> {
        let connection = ServerConnection::new(Arc::clone(&self.0)).map_err(io::Error::other)?;
        stream::begin(connection, socket, deadline)
    }
}

fn certificates(bytes: &[u8], part: TlsFile) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(bytes).collect();
    all.ok().filter(|all| !all.is_empty()).ok_or(TlsError::NoCertificate(part))
}

fn roots(authorities: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(authorities, TlsFile::Authorities)? {
        roots.add(authority).map_err(|source| {
            let why = match &source {
                rustls::Error::InvalidCertificate(source) => errors::of_certificate(source).into_owned(),
                other => other.to_string(),
            };
            TlsError::Unusable { part: TlsFile::Authorities, why }
        })?;
    }
    Ok(roots)
}

impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsConfig")
    }
}
