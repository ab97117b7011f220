//! A fixed hash for traces and contents, the same on every machine and in every run. It is built
//! like FNV-1a, with its constants, but takes whole words of 64 bits and rotates after each. So it
//! is a different hash, which no other program uses.

/// A running hash.
#[derive(Clone, Copy, Debug)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self::new()
    }
}

impl Digest {
    /// Returns the hash of nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Adds a number.
    pub const fn word(&mut self, word: u64) {
        // The rotation spreads the upper bits, which the multiplication alone never brings down.
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    /// Adds bytes; a remainder shorter than a word is padded with zeroes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        // Whole words are handled apart from the remainder: the simulator spends much of its time
        // here.
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.word(u64::from_le_bytes(word));
        }
    }

    /// Returns the hash so far.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }
}

/// Returns a number that depends on all of `words` and on nothing else, for choices that must not
/// change with the order in which they are made.
#[must_use]
pub fn mix(words: &[u64]) -> u64 {
    words.iter().fold(0, |value, word| bcached_env::rng::Rng::new(word ^ value).next())
}
