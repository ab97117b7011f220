//! A list of keys as stored in sets and journal entries: back to back, each as long as its pointer
//! count says.
//!
//! [`KeyList::parse`] checks every key once; iterating over the checked list cannot fail. The
//! checks here only decide whether a key can be read at all. `key_check` decides whether it makes
//! sense in a leaf or as a child.

use crate::error::{KeyError, KeyListError};
use crate::key::{Key, MAX_POINTERS, Pointer, Pointers};
use crate::units::{Position, WORD_BYTES};

/// Words of a key before its pointers.
const KEY_HEADER_WORDS: usize = 2;

/// Readable keys, stored back to back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyList<'a> {
    bytes: &'a [u8],
}

impl<'a> KeyList<'a> {
    /// The empty list.
    pub const EMPTY: Self = Self { bytes: &[] };

    /// Checks `bytes`, which must consist of whole keys, and returns them as a list.
    ///
    /// # Errors
    /// The first malformed key, and its index.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, KeyListError> {
        let mut reader = KeyListReader::new(bytes);
        loop {
            if let Some(keys) = reader.step(usize::MAX)? {
                return Ok(keys);
            }
        }
    }

    /// Returns the keys in stored order.
    #[must_use]
    pub fn iter(&self) -> KeyIter<'a> {
        KeyIter { rest: self.bytes }
    }

    /// Returns true if there are no keys.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the length in words, which is what the `keys` fields count.
    #[must_use]
    pub const fn words(&self) -> usize {
        self.bytes.len() / WORD_BYTES
    }

    /// Returns the keys as stored.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> IntoIterator for &KeyList<'a> {
    type Item = Key;
    type IntoIter = KeyIter<'a>;

    fn into_iter(self) -> KeyIter<'a> {
        self.iter()
    }
}

/// Checks a list in pieces.
#[derive(Clone, Debug)]
pub struct KeyListReader<'a> {
    bytes: &'a [u8],
    /// Index of the next key, and the word at which it begins.
    index: usize,
    word: usize,
}

impl<'a> KeyListReader<'a> {
    /// Creates a reader for the keys of `bytes`; none of them has been checked yet.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, index: 0, word: 0 }
    }

    /// Returns the number of bytes checked so far.
    #[must_use]
    pub const fn found(&self) -> usize {
        self.word * WORD_BYTES
    }

    /// Checks up to `keys` further keys, but at least one. Returns the list once all keys are
    /// checked.
    ///
    /// # Errors
    /// As for [`KeyList::parse`].
    pub fn step(&mut self, keys: usize) -> Result<Option<KeyList<'a>>, KeyListError> {
        let upto = self.index.saturating_add(keys.max(1));
        while self.word * WORD_BYTES < self.bytes.len() {
            if self.index == upto {
                return Ok(None);
            }
            let Self { index, word, .. } = *self;
            self.word += check_key(&self.bytes[word * WORD_BYTES..]).map_err(|error| KeyListError {
                index,
                word,
                error,
            })?;
            self.index += 1;
        }
        Ok(Some(KeyList { bytes: self.bytes }))
    }
}

/// Iterates over a checked list.
#[derive(Clone, Debug)]
pub struct KeyIter<'a> {
    rest: &'a [u8],
}

impl KeyIter<'_> {
    fn next_of_any_length(&mut self) -> Option<Key> {
        if self.rest.is_empty() {
            return None;
        }
        let (key, words) = parse_key(self.rest).expect("every key was read when the list was checked");
        self.rest = &self.rest[words * WORD_BYTES..];
        Some(key)
    }
}

impl Iterator for KeyIter<'_> {
    type Item = Key;

    #[inline]
    fn next(&mut self) -> Option<Key> {
        // Nearly every key has one pointer.
        if let Some(([header, end, word], behind)) = words_at_start(self.rest)
            && Key::pointer_count_of(header) == 1
        {
            self.rest = behind;
            return Some(Key::from_words(header, end, Pointers::one(Pointer::from_word(word))));
        }
        self.next_of_any_length()
    }
}

/// Reads the key at the start of `bytes`, and returns it with its length in words. Bits of the
/// header that mean nothing are ignored, as every kernel does.
///
/// # Errors
/// [`KeyError`] if it runs past the bytes, has too many pointers, or ends beyond the key space.
/// `key_check` decides whether the size makes sense: in an interior node it is the size of the
/// child and unrelated to the position.
pub fn parse_key(bytes: &[u8]) -> Result<(Key, usize), KeyError> {
    let words = check_key(bytes)?;
    let ([header, end], behind) = words_at_start(bytes).expect("the length was checked");
    let mut list = [Pointer::default(); MAX_POINTERS];
    let count = words - KEY_HEADER_WORDS;
    for (slot, word) in list[..count].iter_mut().zip(behind.as_chunks().0) {
        *slot = Pointer::from_word(u64::from_le_bytes(*word));
    }
    let pointers = Pointers::from_slice(&list[..count]).expect("the count was checked");
    Ok((Key::from_words(header, end, pointers), words))
}

/// Makes all of [`parse_key`]'s checks on the key at the start of `bytes`, and returns its length
/// in words.
#[inline]
fn check_key(bytes: &[u8]) -> Result<usize, KeyError> {
    let found = bytes.len() / WORD_BYTES;
    let Some(([header], behind)) = words_at_start(bytes) else {
        return Err(KeyError::Truncated { wanted: KEY_HEADER_WORDS, found });
    };
    let count = Key::pointer_count_of(header);
    if count > MAX_POINTERS {
        return Err(KeyError::TooManyPointers { limit: MAX_POINTERS, found: count });
    }
    let wanted = KEY_HEADER_WORDS + count;
    let Some(([end], _)) = words_at_start(behind).filter(|_| wanted <= found) else {
        return Err(KeyError::Truncated { wanted, found });
    };
    if end > Position::MAX.offset {
        return Err(KeyError::EndTooLarge { found: end });
    }
    Ok(wanted)
}

/// Returns the first words of `bytes`, and the bytes after them.
#[inline]
fn words_at_start<const N: usize>(bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let (words, behind) = bytes.split_at_checked(N * WORD_BYTES)?;
    let mut list = [0; N];
    for (slot, word) in list.iter_mut().zip(words.as_chunks::<WORD_BYTES>().0) {
        *slot = u64::from_le_bytes(*word);
    }
    Some((list, behind))
}

/// Writes `key` to the start of `bytes` and returns its length in words; `None` if it does not fit.
pub fn write_key(bytes: &mut [u8], key: &Key) -> Option<usize> {
    let words = key.words();
    let target = bytes.get_mut(..words * WORD_BYTES)?;
    let (slots, _) = target.as_chunks_mut::<WORD_BYTES>();
    let (head, pointers) = slots.split_first_chunk_mut::<2>()?;
    *head = [key.header_word().to_le_bytes(), key.end.to_le_bytes()];
    for (slot, pointer) in pointers.iter_mut().zip(key.pointers.as_slice()) {
        *slot = pointer.word().to_le_bytes();
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Inode;
    use alloc::vec::Vec;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn error_of(bytes: &[u8]) -> KeyListError {
        KeyList::parse(bytes).expect_err("must be refused")
    }

    #[test]
    fn a_key_that_runs_past_the_end_is_refused() {
        let bytes = words(&[0x9000_0000_0080_0000, 0x18, 0xbc_0001, 0x9000_0000_0080_0000, 0x20]);
        let error = KeyError::Truncated { wanted: 3, found: 2 };
        assert_eq!(error_of(&bytes), KeyListError { index: 1, word: 3, error });
        let error = KeyError::Truncated { wanted: 2, found: 0 };
        assert_eq!(error_of(&[0; 7]), KeyListError { index: 0, word: 0, error });
    }

    #[test]
    fn a_key_with_three_pointers_is_refused() {
        let bytes = words(&[0xB000_0000_0080_0000, 0x18, 1, 2, 3]);
        assert_eq!(error_of(&bytes).error, KeyError::TooManyPointers { limit: 2, found: 3 });
    }

    #[test]
    fn a_key_beyond_the_key_space_is_refused() {
        let beyond = words(&[0x8000_0000_0080_0000, 1 << 63]);
        assert_eq!(error_of(&beyond).error, KeyError::EndTooLarge { found: 1 << 63 });
    }

    #[test]
    fn a_child_may_be_larger_than_its_position() {
        // A node of 512 sectors that ends at sector 8 of volume 1.
        let bytes = words(&[0x9000_0000_2000_0001, 8, 0x90_0001]);
        let key = KeyList::parse(&bytes).expect("readable").iter().next().expect("one key");
        assert_eq!((key.position(), key.size), (Position::new(Inode(1), 8), 512));
    }

    #[test]
    fn a_freeing_key_is_readable() {
        let bytes = words(&[0x9000_0000_2000_0000, 0, 0x90_0002]);
        let key = KeyList::parse(&bytes).expect("readable").iter().next().expect("one key");
        assert_eq!((key.position(), key.size, key.inode), (Position::ZERO, 512, Inode(0)));
    }
}
