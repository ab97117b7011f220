//! The feature words of a cache superblock of version 5 or later, and which of them bcached
//! supports.
//!
//! Only incompatible features exist. Any bit that is not named here, in any of the three words,
//! means that an unknown program wrote the set, so it is refused.

/// The three feature words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// Features that an older program may ignore.
    pub compat: u64,
    /// Features that a program must know to open the device.
    pub incompat: u64,
    /// Features that a program must know to write to the device.
    pub ro_compat: u64,
}

/// How the bucket size is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketSizeEncoding {
    /// The 16-bit field holds sectors.
    Plain,
    /// The field holds the base-2 logarithm of the sectors.
    Logarithm,
}

impl Features {
    /// Incompat bit: bucket size = `bucket_size + (bucket_size_hi << 16)`, where no checksum covers
    /// the second field. This is the form of kernels 5.9 and 5.10; later kernels run such a set
    /// with all its volumes read-only.
    pub const INCOMPAT_OBSOLETE_LARGE_BUCKET: u64 = 0x1;
    /// Incompat bit: bucket size = `1 << bucket_size`.
    pub const INCOMPAT_LARGE_BUCKET: u64 = 0x2;

    const INCOMPAT_KNOWN: u64 = Self::INCOMPAT_OBSOLETE_LARGE_BUCKET | Self::INCOMPAT_LARGE_BUCKET;

    /// Returns the unknown bits of the compat word.
    #[must_use]
    pub const fn unknown_compat(&self) -> u64 {
        self.compat
    }

    /// Returns the unknown bits of the read-only compat word.
    #[must_use]
    pub const fn unknown_ro_compat(&self) -> u64 {
        self.ro_compat
    }

    /// Returns the unknown bits of the incompat word.
    #[must_use]
    pub const fn unknown_incompat(&self) -> u64 {
        self.incompat & !Self::INCOMPAT_KNOWN
    }

    /// Returns true for large buckets in their first form: known, but not supported.
    #[must_use]
    pub const fn has_obsolete_large_bucket(&self) -> bool {
        self.incompat & Self::INCOMPAT_OBSOLETE_LARGE_BUCKET != 0
    }

    /// Returns how the bucket size is stored, in a supported set.
    #[must_use]
    pub const fn bucket_size_form(&self) -> BucketSizeEncoding {
        if self.incompat & Self::INCOMPAT_LARGE_BUCKET != 0 {
            BucketSizeEncoding::Logarithm
        } else {
            BucketSizeEncoding::Plain
        }
    }
}
