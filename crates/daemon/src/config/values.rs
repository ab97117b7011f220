//! The values of settings: sizes, times, places to listen on. Each is understood where it is parsed, so that
//! an error has its line.

use crate::sizes::{self, Bare};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A size in bytes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);

impl TryFrom<String> for Size {
    type Error = sizes::SizeError;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        sizes::parse(&typed, Bare::Bytes).map(Self)
    }
}

/// A time: `500ms`, `30s`, `5m`, `2h`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Time(pub Duration);

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        let refused = || format!("`{typed}` is not a time: write 500ms, 30s, 5m or 2h");
        let digits = typed.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = typed.split_at(digits);
        let milliseconds = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(refused()),
        };
        let number = number.parse::<u32>().map_err(|_| refused())?;
        Ok(Self(Duration::from_millis(u64::from(number) * milliseconds)))
    }
}

/// A place where NBD is served.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum Listen {
    /// A unix socket.
    Unix(PathBuf),
    /// TCP on loopback.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        if typed.contains('/') {
            return Ok(Self::Unix(PathBuf::from(typed)));
        }
        let address: SocketAddr = typed.parse().map_err(|_| {
            format!("`{typed}` is neither a socket's path nor ADDRESS:PORT, as 127.0.0.1:10809")
        })?;
        if !address.ip().to_canonical().is_loopback() {
            return Err(format!(
                "{address} is not a loopback address, and NBD without TLS is open to anybody"
            ));
        }
        Ok(Self::Tcp(address))
    }
}

/// An address on loopback.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Loopback(pub SocketAddr);

impl TryFrom<String> for Loopback {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        let address: SocketAddr =
            typed.parse().map_err(|_| format!("`{typed}` is not ADDRESS:PORT, as 127.0.0.1:9763"))?;
        if !address.ip().to_canonical().is_loopback() {
            return Err(format!(
                "{address} is not a loopback address, and whoever reaches the port can read the names and numbers of all \
                 volumes: write 127.0.0.1:{}, and let a proxy answer to others",
                address.port()
            ));
        }
        Ok(Self(address))
    }
}

impl Listen {
    /// The address as it is configured.
    #[must_use]
    pub fn unix_path(&self) -> Option<&Path> {
        match self {
            Self::Unix(path) => Some(path),
            Self::Tcp(_) => None,
        }
    }
}
