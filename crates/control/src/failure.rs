//! The failure of a command: what happened, why, and what to do next. One value gives the sentence
//! for people, the JSON object for programs, and the exit status.

use bcached_format::SuperblockError;
use bcached_uring::{DeviceError, DeviceErrorKind};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a failure. The names are part of the public interface (`kind` in JSON): names are
/// added, never renamed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Kind {
    /// The answer is no: damage was found, something is not healthy, or there is a difference.
    No,
    /// The command line is wrong.
    Usage,
    /// No volume or cache has this name.
    UnknownName,
    /// Several volumes match this name.
    AmbiguousName,
    /// This version does not have this command or option of the interface.
    NotInThisVersion,
    /// The configuration is wrong.
    Config,
    /// The named device is not a bcache device, or not of the requested kind.
    NotBcache,
    /// A size, offset or geometry that bcache cannot use on this device.
    Geometry,
    /// The device is in use.
    InUse,
    /// The device belongs to md, LVM or another assembler.
    Member,
    /// The device carries a file system, partition table or other signature.
    Signature,
    /// The device already is a bcache device.
    AlreadyBcache,
    /// The same device was named twice.
    SameDevice,
    /// The given name matches several devices.
    Ambiguous,
    /// The process lacks the permission.
    Permission,
    /// A named file or device does not exist.
    NotFound,
    /// The structures on the device are damaged.
    Damaged,
    /// A format or feature that this program must not touch.
    Unsupported,
    /// The dirty data is in a cache that is absent, or the device belongs to another set.
    WrongSet,
    /// Dirty data would be lost.
    DataLoss,
    /// More space would be promised than can be stored.
    NoRoom,
    /// An I/O error, or another failure of the machine.
    Io,
    /// The device answers with errors, and may recover later. Reported to clients as [`Kind::Io`].
    #[serde(rename = "io", skip_deserializing)]
    DeviceFails,
    /// There is no room for what a cache needs beside its device; there may be later. Reported to
    /// clients as [`Kind::Io`].
    #[serde(rename = "io", skip_deserializing)]
    Scarce,
    /// The device has not been looked for yet. Reported to clients as [`Kind::NotFound`].
    #[serde(rename = "not-found", skip_deserializing)]
    NotLooked,
    /// No daemon answers.
    NoDaemon,
    /// The other side did not answer in time, and may still be at work.
    TimeLimit,
    /// The work was cancelled on request.
    Cancelled,
    /// Too many requests are in progress; nothing was started.
    Busy,
}

impl Kind {
    /// Returns the exit status of the kind.
    #[must_use]
    pub const fn exit(self) -> u8 {
        match self {
            Self::No => 1,
            Self::UnknownName | Self::AmbiguousName => 2,
            Self::Usage | Self::NotInThisVersion | Self::Config | Self::NotBcache | Self::Geometry => 2,
            Self::InUse | Self::Member | Self::Signature | Self::AlreadyBcache | Self::SameDevice => 3,
            Self::WrongSet | Self::Ambiguous | Self::DataLoss | Self::NoRoom => 3,
            Self::Permission | Self::NotFound | Self::Damaged | Self::Unsupported | Self::Io => 4,
            Self::DeviceFails | Self::Scarce | Self::NotLooked | Self::Cancelled => 4,
            Self::NoDaemon => 5,
            Self::TimeLimit | Self::Busy => 6,
        }
    }
}

/// When a device that is to be served and is not available is tried again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RetryClass {
    /// Not before an operator has mended something and told the daemon.
    Never,
    /// The device may become available without a repair. It may be plugged in, or its user may
    /// release it, or the mapped device on top of it, which is the one meant, may appear. Looking
    /// for it costs nothing.
    WhenPresent,
    /// The device is present and may recover. Only an attempt shows it, so attempts are made at
    /// growing intervals.
    Backoff,
}

/// The failure of a command. The texts do not change after construction, so each is a boxed `str`,
/// which keeps a `Result` small.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The kind, which determines the exit status.
    pub kind: Kind,
    /// What happened, as a clause without a full stop.
    pub what: Box<str>,
    /// The reason, if it is known.
    pub why: Option<Box<str>>,
    /// What to do next.
    pub next: Option<Box<str>>,
    /// The option that is wrong, or that overrides a refusal.
    pub option: Option<Box<str>>,
    /// The users that hold the device. The reason names them as well.
    pub holders: Vec<String>,
}

impl Failure {
    /// Creates a failure of `kind`; `what` is a clause without a full stop.
    #[must_use]
    pub fn new(kind: Kind, what: impl Into<Box<str>>) -> Self {
        Self { kind, what: what.into(), why: None, next: None, option: None, holders: Vec::new() }
    }

    /// Adds the reason.
    #[must_use]
    pub fn why(mut self, why: impl Into<Box<str>>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// Adds what to do next.
    #[must_use]
    pub fn next(mut self, next: impl Into<Box<str>>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Names the option concerned.
    #[must_use]
    pub fn option(mut self, option: impl Into<Box<str>>) -> Self {
        self.option = Some(option.into());
        self
    }

    /// Returns what happened and why, for a sentence that ends with different advice.
    #[must_use]
    pub fn reason(&self) -> String {
        Self { next: None, ..self.clone() }.to_string()
    }

    /// Returns when a device that is not available because of this failure is tried again, whatever
    /// its role.
    #[must_use]
    pub const fn retry_class(&self) -> RetryClass {
        match self.kind {
            Kind::NotFound | Kind::NotLooked | Kind::InUse | Kind::Ambiguous => RetryClass::WhenPresent,
            Kind::DeviceFails | Kind::Scarce => RetryClass::Backoff,
            _ => RetryClass::Never,
        }
    }

    /// Returns the kind of failure for an error in a superblock.
    #[must_use]
    pub fn kind_of_superblock(error: SuperblockError) -> Kind {
        use SuperblockError as E;
        match error {
            E::Truncated { .. } | E::BadOffset { .. } | E::BadMagic { .. } => Kind::NotBcache,
            E::UnsupportedVersion { .. }
            | E::UnsupportedCompat { .. }
            | E::UnsupportedRoCompat { .. }
            | E::UnsupportedIncompat { .. }
            | E::ObsoleteLargeBucket
            | E::SeveralDevices { .. } => Kind::Unsupported,
            _ => Kind::Damaged,
        }
    }

    /// Reads the failure from `object`, as [`Failure::to_json`] writes it. A kind that is not known
    /// here becomes [`Kind::Io`]. Returns `None` if `object` is something else.
    #[must_use]
    pub fn from_json(object: &serde_json::Value) -> Option<Self> {
        Self::from_error(object.get("error")?)
    }

    /// Reads the failure from the content of the `error` field.
    #[must_use]
    pub fn from_error(error: &serde_json::Value) -> Option<Self> {
        let text = |key: &str| error.get(key).and_then(serde_json::Value::as_str).map(Box::from);
        let kind = error.get("kind").cloned().and_then(|kind| serde_json::from_value(kind).ok());
        let holders = error.get("holders").and_then(serde_json::Value::as_array);
        let holders = holders.into_iter().flatten().filter_map(|holder| Some(holder.as_str()?.to_owned()));
        Some(Self {
            kind: kind.unwrap_or(Kind::Io),
            what: text("what")?,
            why: text("why"),
            next: text("next"),
            option: text("option"),
            holders: holders.collect(),
        })
    }

    /// Returns the failure as a JSON object.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({ "error": self.to_error() })
    }

    /// Returns the content of the `error` field of that object.
    #[must_use]
    pub fn to_error(&self) -> serde_json::Value {
        serde_json::json!({
            "kind": self.kind,
            "exit": self.kind.exit(),
            "what": self.what,
            "why": self.why,
            "next": self.next,
            "option": self.option,
            "holders": self.holders,
        })
    }
}

/// `what: why; next`, on one line.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        if let Some(why) = &self.why {
            write!(f, ": {why}")?;
        }
        if let Some(next) = &self.next {
            write!(f, "; {next}")?;
        }
        Ok(())
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        let kind = match &error.kind {
            DeviceErrorKind::NotFound | DeviceErrorKind::NoMedium => Kind::NotFound,
            DeviceErrorKind::Permission | DeviceErrorKind::ReadOnly => Kind::Permission,
            DeviceErrorKind::NotADevice(_) => Kind::Usage,
            DeviceErrorKind::Busy(_) | DeviceErrorKind::StillWritten => Kind::InUse,
            DeviceErrorKind::Twice => Kind::SameDevice,
            DeviceErrorKind::Empty | DeviceErrorKind::BlockTooLarge { .. } => Kind::Geometry,
            _ if error.is_of_device() => Kind::DeviceFails,
            _ => Kind::Io,
        };
        let mut failure = Self::new(kind, error.what()).why(error.why()).next(error.next());
        failure.holders = error.holders().iter().map(ToString::to_string).collect();
        failure
    }
}

/// The report about a cache set that cannot be opened.
pub const CANNOT_OPEN: &str = "cannot open the cache set";

/// The same report, with the path of the cache device.
#[must_use]
pub fn cannot_open(device: &std::path::Path) -> String {
    format!("{CANNOT_OPEN} on {}", device.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_and_the_object_say_the_same() {
        let mut failure = Failure::new(Kind::InUse, "cannot open /dev/x")
            .why("it is in use by the mount /mnt")
            .next("stop its user; nothing overrides this");
        failure.holders.push("the mount /mnt".into());
        assert_eq!(
            failure.to_string(),
            "cannot open /dev/x: it is in use by the mount /mnt; stop its user; nothing overrides this"
        );
        let json = failure.to_json();
        assert_eq!(json["error"]["kind"], "in-use");
        assert_eq!(json["error"]["exit"], 3);
        assert_eq!(json["error"]["holders"][0], "the mount /mnt");
        assert!(json["error"]["option"].is_null());
        assert_eq!(Failure::from_json(&json), Some(failure));
        assert_eq!(Failure::from_json(&serde_json::json!({"schema": "bcached.status"})), None);
    }

    /// The code that waits for devices distinguishes more kinds than the interface has names for.
    #[test]
    fn what_devices_do_has_one_name_outside() {
        let told = |kind| Failure::new(kind, "cannot open /dev/x").to_json();
        assert_eq!(told(Kind::DeviceFails), told(Kind::Io));
        assert_eq!(told(Kind::Scarce), told(Kind::Io));
        assert_eq!(told(Kind::NotLooked), told(Kind::NotFound));
        let back = Failure::from_json(&told(Kind::DeviceFails)).map(|failure| failure.kind);
        assert_eq!(back, Some(Kind::Io));
        let error = |errno| DeviceError {
            path: "/dev/x".into(),
            kind: DeviceErrorKind::Io {
                doing: "read sector 8".to_owned(),
                source: std::io::Error::from_raw_os_error(errno),
            },
        };
        // EIO, and no room for another open file.
        let kinds = [5, 24].map(|errno| Failure::from(error(errno)).kind);
        assert_eq!(kinds, [Kind::DeviceFails, Kind::Io]);
    }
}
