//! The front ends, and the set of those through which a volume is available.

use std::fmt;

/// A front end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Frontend {
    /// An export of the NBD server.
    Nbd,
    /// A block device of the kernel.
    Ublk,
    /// A disk of virtual machines.
    VhostUser,
    /// A file of the FUSE mount.
    Fuse,
    /// A block device of the kernel, by whatever mechanism the machine offers.
    Dev,
}

/// A set of front ends.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FrontendSet(u8);

impl Frontend {
    /// All front ends.
    pub const ALL: [Self; 5] = [Self::Nbd, Self::Ublk, Self::VhostUser, Self::Fuse, Self::Dev];

    /// Returns its name in a configuration.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::Ublk => "ublk",
            Self::VhostUser => "vhost-user",
            Self::Fuse => "fuse",
            Self::Dev => "dev",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl FrontendSet {
    /// Returns whether the set contains it.
    #[must_use]
    pub const fn has(self, frontend: Frontend) -> bool {
        self.0 & frontend.bit() != 0
    }

    /// Returns the set with `frontend` in place of `of`, if it contains `of`.
    #[must_use]
    pub const fn with_instead(self, frontend: Frontend, of: Frontend) -> Self {
        if self.has(of) { Self(self.0 & !of.bit() | frontend.bit()) } else { self }
    }

    /// Iterates in the order of [`Frontend::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Frontend> {
        Frontend::ALL.into_iter().filter(move |frontend| self.has(*frontend))
    }
}

impl From<Frontend> for FrontendSet {
    fn from(frontend: Frontend) -> Self {
        Self(frontend.bit())
    }
}

impl FromIterator<Frontend> for FrontendSet {
    fn from_iter<I: IntoIterator<Item = Frontend>>(frontends: I) -> Self {
        Self(frontends.into_iter().fold(0, |all, frontend| all | frontend.bit()))
    }
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for FrontendSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.iter().map(Frontend::word).collect();
        f.write_str(&words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_what_was_put_in() {
        assert_eq!(FrontendSet::from_iter(Frontend::ALL).to_string(), "nbd, ublk, vhost-user, fuse, dev");
        let some: FrontendSet = [Frontend::Fuse, Frontend::Nbd, Frontend::Fuse].into_iter().collect();
        assert!(some.has(Frontend::Nbd) && some.has(Frontend::Fuse) && !some.has(Frontend::VhostUser));
        assert_eq!(some.iter().collect::<Vec<_>>(), [Frontend::Nbd, Frontend::Fuse]);
        assert_eq!(FrontendSet::from(Frontend::VhostUser).to_string(), "vhost-user");
        assert_eq!(FrontendSet::default().iter().count(), 0);
        let chosen = [Frontend::Dev, Frontend::Nbd]
            .into_iter()
            .collect::<FrontendSet>()
            .with_instead(Frontend::Ublk, Frontend::Dev);
        assert_eq!(chosen.to_string(), "nbd, ublk");
        assert_eq!(some.with_instead(Frontend::Ublk, Frontend::Dev), some, "it was none of these");
    }
}
