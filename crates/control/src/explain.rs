//! The answer to where the data at one offset of a volume is: `bcached.explain` version 1. Within a
//! version, fields are only added; a field whose value is not known is absent.

use crate::sizes::human;
use serde::{Deserialize, Serialize};

/// Where the data at one offset is, and why it may not be cached.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExplainReport {
    /// The volume's name.
    pub volume: String,
    /// The offset that was asked for, in bytes.
    pub offset_bytes: u64,
    /// Whether the cache has the data.
    pub cached: bool,
    /// `dirty` (in the cache only), `clean` (in both), `parked` (in both, but a crash invalidates
    /// the cache's copy), `not-cached`, `off-grid` (after the last whole block, never cached) or
    /// `uncached` (the volume has no cache).
    pub state: String,
    /// Start of the range that is in this state, as far as it was examined.
    pub start_bytes: u64,
    /// End of that range, exclusive.
    pub end_bytes: u64,
    /// The cache device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_device: Option<String>,
    /// The offset of the data on the cache device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_offset_bytes: Option<u64>,
    /// The bucket that holds the data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u64>,
    /// The generation of that bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u8>,
    /// The backing device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// The offset of the data on the backing device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_offset_bytes: Option<u64>,
    /// A write to the offset is in flight or pending.
    pub being_written: bool,
    /// The data is being written back.
    pub being_written_back: bool,
    /// The data is being read from the backing device, or inserted into the cache.
    pub being_filled: bool,
    /// The reasons why the data may not be cached, one sentence each.
    pub why: Vec<String>,
}

impl ExplainReport {
    /// Formats the answer as text for people.
    #[must_use]
    pub fn text(&self) -> String {
        let what = match self.state.as_str() {
            "dirty" => "dirty: the newest data is in the cache only",
            "clean" => "clean: in the cache and on the backing device",
            "parked" => {
                "clean: in the cache and on the backing device; until that is flushed, \
                 a crash drops the copy in the cache"
            }
            "off-grid" => "on the backing device: after the last whole block, where nothing is cached",
            "uncached" => "on the backing device: the volume has no cache",
            _ if self.backing.is_none() => "zeroes: nothing was written there",
            _ => "not cached: on the backing device",
        };
        let Self { volume, offset_bytes, start_bytes, end_bytes, .. } = self;
        let length = human(end_bytes - start_bytes);
        let mut text = format!(
            "{volume} at byte {offset_bytes}: {what}\n\
             the same holds for bytes {start_bytes} to {end_bytes} ({length})\n"
        );
        if let (Some(device), Some(offset), Some(bucket), Some(generation)) =
            (&self.cache_device, self.cache_offset_bytes, self.bucket, self.generation)
        {
            text.push_str(&format!("{device}: byte {offset}, in bucket {bucket}, generation {generation}\n"));
        }
        if let (Some(device), Some(offset)) = (&self.backing, self.backing_offset_bytes) {
            text.push_str(&format!("{device}: byte {offset}\n"));
        }
        let doing = [
            (self.being_written, "it is being written"),
            (self.being_written_back, "it is being written back"),
            (self.being_filled, "it is being read from the backing device"),
        ];
        for (_, sentence) in doing.iter().filter(|(is_so, _)| *is_so) {
            text.push_str(sentence);
            text.push('\n');
        }
        self.why.iter().fold(text, |text, why| text + why + "\n")
    }
}
