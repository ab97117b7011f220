//! Identities of devices and sets: the 16 bytes of a uuid, and the 32 bytes of a label.

use core::fmt;

/// A uuid of a device, a volume or a cache set. All zero means "none".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// No uuid.
    pub const NIL: Self = Self([0; 16]);

    /// The value that overwrites the uuid of an invalidated slot of the uuid table.
    pub const INVALIDATED: Self = Self([
        0xa0, 0x3e, 0xf8, 0xed, 0x3e, 0xe1, 0xb8, 0x78, 0xc8, 0x50, 0xfc, 0x5e, 0xcb, 0x16, 0xcd, 0x99,
    ]);

    /// Creates a uuid of random bits, marked as such (version 4).
    #[must_use]
    pub const fn from_random(bits: [u64; 2]) -> Self {
        let [high, low] = bits;
        let number = (high as u128) << 64 | low as u128;
        let number = number & !(0xf << 76) | 0x4 << 76;
        Self((number & !(0x3 << 62) | 0x2 << 62).to_be_bytes())
    }

    /// Returns true if all bytes are zero.
    #[must_use]
    pub fn is_nil(&self) -> bool {
        *self == Self::NIL
    }

    /// Parses a uuid from its usual text (32 hexadecimal digits, hyphens anywhere); `None` if the
    /// text is not a uuid.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        let mut digits = text.bytes().filter(|byte| *byte != b'-');
        for byte in &mut bytes {
            let high = char::from(digits.next()?).to_digit(16)?;
            let low = char::from(digits.next()?).to_digit(16)?;
            *byte = u8::try_from(high << 4 | low).ok()?;
        }
        digits.next().is_none().then_some(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The magic of a cache set: the first eight bytes of its uuid, which mark all its metadata.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SetMagic(u64);

impl SetMagic {
    /// Returns the magic of the set with this uuid.
    #[must_use]
    pub const fn of(set: Uuid) -> Self {
        let b = set.0;
        Self(u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
    }

    /// Returns the magic of a journal entry of this set.
    #[must_use]
    pub const fn jset(self) -> u64 {
        self.0 ^ 0x2452_35C1_A362_5032
    }

    /// Returns the magic of a priority set of this set.
    #[must_use]
    pub const fn prio(self) -> u64 {
        self.0 ^ 0x6750_E15F_8733_7F91
    }

    /// Returns the magic of a stamp in this set's reserve.
    #[must_use]
    pub const fn stamp(self) -> u64 {
        self.0 ^ 0x3C5D_E4B1_1F9A_6E87
    }

    /// Returns the magic of the summary of a bucket of this set.
    #[must_use]
    pub const fn summary(self) -> u64 {
        self.0 ^ 0x8B1D_47F2_E09C_35A6
    }

    /// Returns the magic of a B-tree set of this set.
    #[must_use]
    pub const fn bset(self) -> u64 {
        self.0 ^ 0x9013_5C78_B99E_07F5
    }
}

/// A label: up to 32 bytes of text, padded with NUL and not necessarily terminated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Label(pub [u8; 32]);

impl Label {
    /// Creates a label from text; `None` if it does not fit in 32 bytes or contains a NUL.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        if text.contains('\0') {
            return None;
        }
        let mut label = Self::default();
        label.0.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(label)
    }

    /// Returns the bytes before the first NUL, without a final newline: a kernel stores the newline
    /// that the user's `echo` wrote.
    #[must_use]
    pub fn text(&self) -> &[u8] {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let text = &self.0[..end];
        text.strip_suffix(b"\n").unwrap_or(text)
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.text().utf8_chunks() {
            for character in chunk.valid().chars() {
                write!(f, "{}", if character.is_control() { '\u{FFFD}' } else { character })?;
            }
            if !chunk.invalid().is_empty() {
                f.write_str("\u{FFFD}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn random_uuids_say_that_they_are() {
        let text = |bits| Uuid::from_random([bits, bits]).to_string();
        assert_eq!(text(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(text(u64::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn magics_of_the_worked_example() {
        let set = Uuid::from_text("cab8174e-3fef-40f7-bf59-19a8f8acadb3").expect("a uuid");
        let magic = SetMagic::of(set);
        assert_eq!(magic.jset(), 0xD312_DAFE_ED75_E8F8);
        assert_eq!(magic.bset(), 0x6753_B347_F789_BF3F);
        assert_eq!(magic.prio(), 0x9010_0E60_C924_C75B);
    }

    #[test]
    fn uuids_read_and_print_the_usual_text() {
        let text = "cab8174e-3fef-40f7-bf59-19a8f8acadb3";
        assert_eq!(Uuid::from_text(text).expect("a uuid").to_string(), text);
        for wrong in ["", "cab8", "cab8174e-3fef-40f7-bf59-19a8f8acadb", "xab8174e3fef40f7bf5919a8f8acadb3"] {
            assert_eq!(Uuid::from_text(wrong), None, "{wrong}");
        }
        assert_eq!(Uuid::from_text("cab8174e3fef40f7bf5919a8f8acadb3aa"), None, "too long");
    }

    #[test]
    fn labels_stop_at_nul_and_never_print_control_characters() {
        let mut label = Label::from_text("disk").expect("fits");
        assert_eq!(label.to_string(), "disk");
        label.0[4..12].copy_from_slice(b"\n\0junk\x1b[");
        assert_eq!(label.to_string(), "disk", "what follows the NUL is junk, the newline is sysfs's");
        label.0[1] = 0x1b;
        label.0[2] = 0xff;
        assert_eq!(label.to_string(), "d\u{FFFD}\u{FFFD}k");
        assert_eq!(Label::from_text("123456789012345678901234567890123"), None, "33 bytes");
    }
}
