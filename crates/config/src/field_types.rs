//! Values of settings: sizes, times, addresses to listen on. Each is checked where it is parsed, so
//! that an error has its line.

use bcached_control::sizes::{self, DefaultUnit};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A size in bytes.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);

impl TryFrom<String> for Size {
    type Error = sizes::SizeError;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        sizes::parse(&typed, DefaultUnit::Bytes).map(Self)
    }
}

/// A time: `500ms`, `30s`, `5m`, `2h`.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct TimeSpan(pub Duration);

impl TryFrom<String> for TimeSpan {
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

/// Number of volume numbers, as in the kernel: its device numbers have room for this many devices
/// of 128 partitions.
const NUMBERS: usize = 8192;

/// The N of a volume's `bcacheN`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(try_from = "i64")]
pub struct VolumeNumber(pub usize);

impl TryFrom<i64> for VolumeNumber {
    type Error = String;

    fn try_from(typed: i64) -> Result<Self, Self::Error> {
        let number = usize::try_from(typed).ok().filter(|number| *number < NUMBERS);
        number
            .map(Self)
            .ok_or_else(|| format!("`{typed}` is not a volume number: write one from 0 to {}", NUMBERS - 1))
    }
}

/// A path that does not depend on the daemon's working directory.
#[derive(Clone, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct AbsolutePath(pub PathBuf);

impl TryFrom<String> for AbsolutePath {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        let path = PathBuf::from(&typed);
        if path.is_absolute() {
            Ok(Self(path))
        } else {
            Err(format!("`{typed}` must be an absolute path, as /{typed}"))
        }
    }
}

/// A group of this machine whose members may connect to a socket: `"kvm"`, `"992"`.
#[derive(Clone, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct Group {
    /// The name or number as typed.
    typed: String,
    /// Its numeric id.
    pub id: u32,
}

impl TryFrom<String> for Group {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        let advice = "write a name that `getent group` lists, or a number";
        // The system takes the largest id to mean *none*.
        let by_number = typed.parse().ok().filter(|id| *id != u32::MAX);
        let id = match by_number {
            Some(id) => id,
            None => match nix::unistd::Group::from_name(&typed) {
                Ok(Some(group)) => group.gid.as_raw(),
                Ok(None) => return Err(format!("`{typed}` is not a group of this machine: {advice}")),
                Err(error) => {
                    let why = error.desc();
                    return Err(format!("cannot look up the group `{typed}` ({why}): {advice}"));
                }
            },
        };
        Ok(Self { typed, id })
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.typed)
    }
}

/// An address where NBD is served: `"/run/bcached/nbd.sock"`, or
/// `{ at = "/run/bcached/look.sock", read_only = true, group = "media" }`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listener {
    /// The address.
    pub at: Address,
    /// Clients that connect here may only read.
    pub read_only: bool,
    /// The group that may connect, for a unix socket that sets its own.
    pub group: Option<Group>,
}

/// An address where NBD is served.
#[derive(Clone, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// TCP. Whether other than loopback addresses are allowed depends on TLS.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.at, if self.read_only { " (read-only)" } else { "" })?;
        self.group.iter().try_for_each(|group| write!(f, " (group {group})"))
    }
}

impl From<Address> for Listener {
    fn from(at: Address) -> Self {
        Self { at, read_only: false, group: None }
    }
}

impl<'de> Deserialize<'de> for Listener {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct ListenTable {
            #[serde(deserialize_with = "in_a_file")]
            at: Address,
            #[serde(default)]
            read_only: bool,
            group: Option<Group>,
        }
        struct ListenVisitor;
        impl<'de> Visitor<'de> for ListenVisitor {
            type Value = Listener;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "an address to listen on, such as \"/run/bcached/nbd.sock\" or \
                     { at = \"..\", read_only = true }",
                )
            }

            fn visit_str<E: Error>(self, typed: &str) -> Result<Listener, E> {
                Address::of_a_file(typed.to_owned()).map(Listener::from).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Listener, A::Error> {
                let ListenTable { at, read_only, group } =
                    ListenTable::deserialize(MapAccessDeserializer::new(map))?;
                if let (Address::Tcp(address), Some(_)) = (&at, &group) {
                    return Err(A::Error::custom(format!(
                        "`group` is for unix sockets only: every client that reaches {address} can connect"
                    )));
                }
                Ok(Listener { at, read_only, group })
            }
        }
        deserializer.deserialize_any(ListenVisitor)
    }
}

fn in_a_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Address, D::Error> {
    Address::of_a_file(String::deserialize(deserializer)?).map_err(D::Error::custom)
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        if typed.contains('/') {
            return Ok(Self::Unix(PathBuf::from(typed)));
        }
        let address: SocketAddr = typed.parse().map_err(|_| {
            format!("`{typed}` is neither the absolute path of a socket nor ADDRESS:PORT, as 127.0.0.1:10809")
        })?;
        Ok(Self::Tcp(address))
    }
}

/// An address on loopback.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct LoopbackAddress(pub SocketAddr);

impl TryFrom<String> for LoopbackAddress {
    type Error = String;

    fn try_from(typed: String) -> Result<Self, Self::Error> {
        let address: SocketAddr =
            typed.parse().map_err(|_| format!("`{typed}` is not ADDRESS:PORT, as 127.0.0.1:9763"))?;
        if !address.ip().to_canonical().is_loopback() {
            return Err(format!(
                "{address} is not a loopback address, and every client that reaches it could read \
                 the names and numbers of all volumes: write 127.0.0.1:{}, \
                 and serve other machines through a proxy",
                address.port()
            ));
        }
        Ok(Self(address))
    }
}

impl Address {
    /// Parses an address in a file, where the path of a socket must be absolute, because the daemon
    /// may be started anywhere. On a command line a relative path has a clear meaning.
    fn of_a_file(typed: String) -> Result<Self, String> {
        let address = Self::try_from(typed.clone())?;
        match address.unix_path() {
            Some(_) => AbsolutePath::try_from(typed).map(|_| address),
            None => Ok(address),
        }
    }

    /// Returns the path of a unix socket, as it is configured.
    #[must_use]
    pub fn unix_path(&self) -> Option<&Path> {
        match self {
            Self::Unix(path) => Some(path),
            Self::Tcp(_) => None,
        }
    }
}
