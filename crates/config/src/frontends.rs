//! The front ends of volumes, and their sockets, addresses and directories: `export`, `[nbd]`,
//! `[vhost-user]`, `[fuse]` and `--export`.

use super::field_types::{AbsolutePath, Address, Group, Listener};
use super::parse::{Located, replace};
use super::tls::{Tls, TlsSetting};
use bcached_control::failure::{Failure, Kind};
use bcached_port::{Frontend, FrontendSet};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Memory that the disk of a virtual machine takes from the daemon's: its largest request, in
/// bytes.
pub const DISK_BYTES: u64 = 32 << 20;

/// Returns the daemon's memory that a volume with these front ends takes for itself, in bytes.
pub fn memory_of(ways: FrontendSet) -> u64 {
    let of = |way| match way {
        Frontend::VhostUser => DISK_BYTES,
        // The maximum, whichever driver provides the block device.
        Frontend::Ublk | Frontend::Dev => bcached_front_ublk::BYTES_MAX as u64,
        Frontend::Nbd | Frontend::Fuse => 0,
    };
    ways.iter().map(of).sum()
}

/// The value of `export`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "OneOrSeveral")]
pub struct ExportSetting(pub FrontendSet);

#[derive(Deserialize)]
#[serde(untagged, expecting = "`export` is a way, or a list of ways: \"nbd\", [\"nbd\", \"fuse\"]")]
enum OneOrSeveral {
    One(String),
    Several(Vec<String>),
}

impl TryFrom<OneOrSeveral> for ExportSetting {
    type Error = String;

    fn try_from(said: OneOrSeveral) -> Result<Self, String> {
        let typed = match said {
            OneOrSeveral::One(way) => vec![way],
            OneOrSeveral::Several(ways) => ways,
        };
        if typed.is_empty() {
            return Err("`export` is empty; `served = false` takes the volume out of service".to_owned());
        }
        typed.iter().map(|way| understood(way).map_err(|(_, why)| why)).collect::<Result<_, _>>().map(Self)
    }
}

/// `[nbd]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct RawNbd {
    pub listen: Option<Vec<Spanned<Listener>>>,
    pub tls: Option<TlsSetting>,
    pub tls_verify_peer: Option<Spanned<bool>>,
    pub group: Option<Group>,
}

/// `[vhost-user]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct RawVhostUser {
    pub directory: Option<AbsolutePath>,
    pub group: Option<Group>,
}

/// `[fuse]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct RawFuse {
    pub directory: Option<AbsolutePath>,
    pub allow_other: Option<bool>,
}

/// The settings of these sections, of one file or of several merged.
#[derive(Debug, Default)]
pub struct FrontendSettings {
    pub listen: Option<Vec<Located<Listener>>>,
    pub tls: Option<TlsSetting>,
    pub tls_verify_peer: Option<Located<bool>>,
    pub nbd_group: Option<Group>,
    pub vhost_user: Option<PathBuf>,
    pub vhost_user_group: Option<Group>,
    pub fuse: Option<PathBuf>,
    pub fuse_allow_other: Option<bool>,
}

impl FrontendSettings {
    /// Merges `newer` over these settings, key by key.
    pub fn overlay(&mut self, newer: Self) {
        replace(&mut self.listen, newer.listen);
        replace(&mut self.tls, newer.tls);
        replace(&mut self.tls_verify_peer, newer.tls_verify_peer);
        replace(&mut self.nbd_group, newer.nbd_group);
        replace(&mut self.vhost_user, newer.vhost_user);
        replace(&mut self.vhost_user_group, newer.vhost_user_group);
        replace(&mut self.fuse, newer.fuse);
        replace(&mut self.fuse_allow_other, newer.fuse_allow_other);
    }

    pub const fn is_empty(&self) -> bool {
        self.listen.is_none()
            && self.tls.is_none()
            && self.tls_verify_peer.is_none()
            && self.nbd_group.is_none()
            && self.vhost_user.is_none()
            && self.vhost_user_group.is_none()
            && self.fuse.is_none()
            && self.fuse_allow_other.is_none()
    }

    /// Returns the places of the front ends, for a daemon with this control socket.
    pub fn of(self, control: &Path) -> FrontendConfig {
        let own = FrontendConfig::beside(control);
        let listen = self.listen.map(|all| all.into_iter().map(|listen| listen.value).collect());
        FrontendConfig {
            listen: listen.unwrap_or(own.listen),
            tls: Tls::of(self.tls, self.tls_verify_peer.map(|verify| verify.value)),
            nbd_group: self.nbd_group,
            vhost_user: self.vhost_user.unwrap_or(own.vhost_user),
            vhost_user_group: self.vhost_user_group,
            fuse: self.fuse.unwrap_or(own.fuse),
            fuse_allow_other: self.fuse_allow_other.unwrap_or(own.fuse_allow_other),
            dev: own.dev,
        }
    }
}

/// Parses the name of a front end.
fn understood(typed: &str) -> Result<Frontend, (Kind, String)> {
    let known = "write \"dev\", \"nbd\", \"ublk\", \"vhost-user\" or \"fuse\"";
    let unknown = || (Kind::Usage, format!("`{typed}` is not a way to export a volume: {known}"));
    Frontend::ALL.into_iter().find(|way| way.word() == typed).ok_or_else(unknown)
}

/// The sockets, addresses and directories of the front ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FrontendConfig {
    /// The addresses where NBD is served.
    pub listen: Vec<Listener>,
    /// How connections by TCP are protected.
    pub tls: Tls,
    /// The group that may connect to NBD's unix sockets that set none; the daemon's own group if
    /// `None`.
    pub nbd_group: Option<Group>,
    /// The directory of the sockets for virtual machines.
    pub vhost_user: PathBuf,
    /// The group that may connect to those; likewise.
    pub vhost_user_group: Option<Group>,
    /// The mount point of FUSE.
    pub fuse: PathBuf,
    /// Users other than the daemon's own may access the mount.
    pub fuse_allow_other: bool,
    /// The directory in which volumes are files for loop devices, if block devices use that driver.
    pub dev: PathBuf,
}

impl FrontendConfig {
    /// Returns the default places, beside the control socket.
    #[must_use]
    pub fn beside(control: &Path) -> Self {
        Self {
            listen: vec![Address::Unix(control.with_file_name("nbd.sock")).into()],
            tls: Tls::Unset,
            nbd_group: None,
            vhost_user_group: None,
            vhost_user: control.with_file_name("vhost-user"),
            fuse: control.with_file_name("fuse"),
            fuse_allow_other: false,
            dev: control.with_file_name("dev"),
        }
    }

    /// Applies `--export`, which is for all volumes: `nbd`, `nbd:/path/to/socket`,
    /// `nbd:127.0.0.1:10809`, `vhost-user`, `vhost-user:DIR`, `fuse`, `fuse:DIR`, `ublk`, `dev`.
    ///
    /// # Errors
    /// Anything else.
    pub fn take_over(&mut self, typed: &[String]) -> Result<FrontendSet, Failure> {
        let nbd = std::mem::take(&mut self.listen);
        typed.iter().map(|typed| self.take(typed, &nbd)).collect()
    }

    fn take(&mut self, typed: &str, nbd: &[Listener]) -> Result<Frontend, Failure> {
        let refuse = |(kind, why)| {
            Failure::new(kind, format!("cannot export by `{typed}`")).why(why).option("--export")
        };
        let (word, place) = match typed.split_once(':') {
            Some((word, place)) => (word, Some(place)),
            None => (typed, None),
        };
        let way = understood(word).map_err(refuse)?;
        match (way, place) {
            (Frontend::Nbd, None) => self.listen.extend(nbd.iter().cloned()),
            (Frontend::Nbd, Some(place)) => {
                let at = Address::try_from(place.to_owned()).map_err(|why| refuse((Kind::Usage, why)))?;
                self.listen.push(at.into());
            }
            (_, Some("")) => {
                return Err(refuse((Kind::Usage, "a directory must follow the colon".to_owned())));
            }
            (Frontend::VhostUser, Some(place)) => self.vhost_user = place.into(),
            (Frontend::Fuse, Some(place)) => self.fuse = place.into(),
            (Frontend::Ublk | Frontend::Dev, Some(_)) => {
                return Err(refuse((
                    Kind::Usage,
                    format!("the kernel names its devices: write only {word}"),
                )));
            }
            (Frontend::Ublk | Frontend::VhostUser | Frontend::Fuse | Frontend::Dev, None) => {}
        }
        Ok(way)
    }
}
