//! The driver's features, in words.

use crate::device::DriverFeatures;

/// Features (`UBLK_F_..`) that people ask about, whether used here or not.
const NAMES: [(u64, &str); 8] = [
    (1 << 7, "user copy"),
    (1 << 4, "recovery"),
    (1 << 10, "resize"),
    (1 << 0, "zero copy"),
    (1 << 11, "automatic buffers"),
    (1 << 5, "unprivileged devices"),
    (1 << 8, "zones"),
    (1 << 12, "quiesce"),
];

impl DriverFeatures {
    /// The names of the driver's features, of those named here.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        NAMES.into_iter().filter(|(feature, _)| self.has(*feature)).map(|(_, name)| name).collect()
    }
}
