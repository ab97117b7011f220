//! TLS for NBD over TCP: `tls` and `tls_verify_peer` of `[nbd]`, and the certificates that they
//! refer to.
//!
//! The files are in one directory and have the names that nbdkit, libnbd and qemu use:
//! `server-cert.pem`, `server-key.pem`, and `ca-cert.pem` of the authority that signs the
//! certificates of clients.

use super::Config;
use super::conflicts::Origins;
use super::field_types::Address;
use super::read_file::{bounded, content_of};
use bcached_control::failure::{Failure, Kind};
use bcached_front_nbd::{self as nbd, TlsFile};
use serde::Deserialize;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Protection of NBD over TCP.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Tls {
    /// Not configured: only loopback addresses are allowed.
    #[default]
    Unset,
    /// Switched off explicitly.
    Off,
    /// TLS.
    On(Certificates),
}

/// Location and use of the certificates.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Certificates {
    /// Their directory.
    pub directory: PathBuf,
    /// Clients must present a certificate, too.
    pub verify_peer: bool,
}

/// The value of `tls`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum TlsSetting {
    /// No TLS.
    Off,
    /// The directory of the certificates.
    Directory(PathBuf),
}

impl TryFrom<String> for TlsSetting {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, String> {
        match typed.as_str() {
            "off" => Ok(Self::Off),
            path if path.starts_with('/') => Ok(Self::Directory(typed.into())),
            _ => Err(format!(
                "`{typed}` is neither \"off\" nor the absolute path of a directory with server-cert.pem and server-key.pem"
            )),
        }
    }
}

impl Tls {
    /// Creates it from the settings. Clients must present certificates unless that is switched off,
    /// because encryption alone excludes no client.
    pub(super) fn of(said: Option<TlsSetting>, verify_peer: Option<bool>) -> Self {
        match said {
            None => Self::Unset,
            Some(TlsSetting::Off) => Self::Off,
            Some(TlsSetting::Directory(directory)) => {
                Self::On(Certificates { directory, verify_peer: verify_peer.unwrap_or(true) })
            }
        }
    }

    /// Returns the certificates, if TLS is used.
    #[must_use]
    pub const fn certificates(&self) -> Option<&Certificates> {
        match self {
            Self::On(certificates) => Some(certificates),
            Self::Unset | Self::Off => None,
        }
    }
}

impl Certificates {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read, or does not match the others. NBD is not served then.
    pub fn read(&self) -> Result<nbd::TlsConfig, Failure> {
        let read = |part: TlsFile| {
            content_of(called(part), &self.path(part), wanted(part)).map_err(|failure| match failure.kind {
                // The file exists.
                Kind::Permission => {
                    failure.next("let the daemon's user read it, for example with chgrp and chmod g+r")
                }
                _ => failure,
            })
        };
        let (certificate, key) = (read(TlsFile::Certificate)?, read(TlsFile::Key)?);
        let authorities = if self.verify_peer { Some(read(TlsFile::Authorities)?) } else { None };
        let authorities = authorities.as_ref().map(String::as_bytes);
        nbd::TlsConfig::new(certificate.as_bytes(), key.as_bytes(), authorities).map_err(|error| {
            let what = format!("cannot use {} for TLS", self.path(error.part()).display());
            Failure::new(Kind::Config, what).why(error.to_string()).next(wanted(error.part()))
        })
    }

    /// Returns a warning if every user of this machine can read the key. With the key a process can
    /// pose as this server.
    pub(super) fn warning(&self) -> Option<String> {
        let key = self.path(TlsFile::Key);
        let mode = |path: &Path| path.metadata().map_or(0, |file| file.permissions().mode());
        // If the file system does not answer, the code that reads the key reports it.
        let is_open = bounded(&key, mode).is_ok_and(|mode| mode & 0o004 != 0);
        let key = key.display();
        is_open.then(|| format!("every user of this machine can read {key}: run `chmod o= {key}`"))
    }

    fn path(&self, part: TlsFile) -> PathBuf {
        self.directory.join(match part {
            TlsFile::Certificate => "server-cert.pem",
            TlsFile::Key => "server-key.pem",
            TlsFile::Authorities => "ca-cert.pem",
        })
    }
}

/// Returns a description of the file, for a sentence.
const fn called(part: TlsFile) -> &'static str {
    match part {
        TlsFile::Certificate => "the server's certificate",
        TlsFile::Key => "the server's key",
        TlsFile::Authorities => "the CA certificate of the clients",
    }
}

/// Returns what the file should contain.
const fn wanted(part: TlsFile) -> &'static str {
    match part {
        TlsFile::Certificate => {
            "put the server's certificate there in PEM, followed by its intermediate certificates"
        }
        TlsFile::Key => "put the key of server-cert.pem there in PEM, without a password",
        TlsFile::Authorities => {
            "put the certificate of the CA that signs the clients' certificates there in PEM, \
             or accept clients without a certificate: tls_verify_peer = false"
        }
    }
}

/// Checks that addresses without TLS are on loopback, and that no setting needs TLS that is off.
pub(super) fn check(config: &Config, places: &Origins, findings: &mut Vec<Failure>) {
    let tls = &config.places.tls;
    if places.has("tls_verify_peer") && tls.certificates().is_none() {
        let failure = places.refused("tls_verify_peer", "`tls_verify_peer` has no effect without TLS");
        findings.push(
            failure
                .next("write the directory of the certificates, `tls = \"/etc/bcached/tls\"`, or remove it"),
        );
    }
    if *tls != Tls::Unset {
        return;
    }
    for (index, listen) in config.places.listen.iter().enumerate() {
        let Address::Tcp(address) = listen.at else { continue };
        if !address.ip().to_canonical().is_loopback() {
            let what =
                format!("{address} is not a loopback address, and NBD without TLS is open to every client");
            let key = format!("listen {index}");
            findings.push(if places.has(&key) {
                places.refused(&key, &what).next(
                    "write the directory of the certificates, `tls = \"/etc/bcached/tls\"`, \
                     or `tls = \"off\"` in a network without other users",
                )
            } else {
                let failure = Failure::new(Kind::Usage, what).option("--export");
                failure.next("use 127.0.0.1, or serve with a configuration that has `tls` in [nbd]")
            });
        }
    }
}
