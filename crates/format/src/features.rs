//! The feature words of a cache superblock of version 5 or later, and which of them we run.
//!
//! Only incompatible features exist. Any bit that is not named here, in any of the three words, means that the set
//! was written by something that we do not understand: it is refused.

/// The three feature words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// Bits that an older program may ignore.
    pub compat: u64,
    /// Bits without which the device must not be opened.
    pub incompat: u64,
    /// Bits without which the device must not be written.
    pub ro_compat: u64,
}

/// How the bucket size is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketSizeForm {
    /// The 16-bit field holds sectors.
    Plain,
    /// The field holds the logarithm.
    Logarithm,
}

impl Features {
    /// Incompat bit: bucket size = `bucket_size + (bucket_size_hi << 16)`, where no checksum is over the second field. The
    /// form of kernels 5.9 and 5.10; later ones run such a set with all its volumes read-only.
    pub const INCOMPAT_OBSOLETE_LARGE_BUCKET: u64 = 0x1;
    /// Incompat bit: bucket size = `1 << bucket_size`.
    pub const INCOMPAT_LARGE_BUCKET: u64 = 0x2;

    const INCOMPAT_KNOWN: u64 = Self::INCOMPAT_OBSOLETE_LARGE_BUCKET | Self::INCOMPAT_LARGE_BUCKET;

    /// Bits of the compat word that are not understood.
    #[must_use]
    pub const fn unknown_compat(&self) -> u64 {
        self.compat
    }

    /// Bits of the read-only compat word that are not understood.
    #[must_use]
    pub const fn unknown_ro_compat(&self) -> u64 {
        self.ro_compat
    }

    /// Bits of the incompat word that are not understood.
    #[must_use]
    pub const fn unknown_incompat(&self) -> u64 {
        self.incompat & !Self::INCOMPAT_KNOWN
    }

    /// Large buckets in their first form: known, and not run.
    #[must_use]
    pub const fn has_obsolete_large_bucket(&self) -> bool {
        self.incompat & Self::INCOMPAT_OBSOLETE_LARGE_BUCKET != 0
    }

    /// How the bucket size is stored, in a set that is run.
    #[must_use]
    pub const fn bucket_size_form(&self) -> BucketSizeForm {
        if self.incompat & Self::INCOMPAT_LARGE_BUCKET != 0 {
            BucketSizeForm::Logarithm
        } else {
            BucketSizeForm::Plain
        }
    }
}
