//! The front ends, and the set of those through which a volume is available.

use std::fmt;

/// A front end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Way {
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
pub struct Ways(u8);

impl Way {
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

impl Ways {
    /// Returns whether the set contains it.
    #[must_use]
    pub const fn has(self, way: Way) -> bool {
        self.0 & way.bit() != 0
    }

    /// Returns the set with `way` in place of `of`, if it contains `of`.
    #[must_use]
    pub const fn with_instead(self, way: Way, of: Way) -> Self {
        if self.has(of) { Self(self.0 & !of.bit() | way.bit()) } else { self }
    }

    /// Iterates in the order of [`Way::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Way> {
        Way::ALL.into_iter().filter(move |way| self.has(*way))
    }
}

impl From<Way> for Ways {
    fn from(way: Way) -> Self {
        Self(way.bit())
    }
}

impl FromIterator<Way> for Ways {
    fn from_iter<I: IntoIterator<Item = Way>>(ways: I) -> Self {
        Self(ways.into_iter().fold(0, |all, way| all | way.bit()))
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.iter().map(Way::word).collect();
        f.write_str(&words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_what_was_put_in() {
        assert_eq!(Ways::from_iter(Way::ALL).to_string(), "nbd, ublk, vhost-user, fuse, dev");
        let some: Ways = [Way::Fuse, Way::Nbd, Way::Fuse].into_iter().collect();
        assert!(some.has(Way::Nbd) && some.has(Way::Fuse) && !some.has(Way::VhostUser));
        assert_eq!(some.iter().collect::<Vec<_>>(), [Way::Nbd, Way::Fuse]);
        assert_eq!(Ways::from(Way::VhostUser).to_string(), "vhost-user");
        assert_eq!(Ways::default().iter().count(), 0);
        let chosen = [Way::Dev, Way::Nbd].into_iter().collect::<Ways>().with_instead(Way::Ublk, Way::Dev);
        assert_eq!(chosen.to_string(), "nbd, ublk");
        assert_eq!(some.with_instead(Way::Ublk, Way::Dev), some, "it was none of these");
    }
}
