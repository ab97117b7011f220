//! Where the data of one offset of a volume is: `bcached.explain` version 1. Within a version, fields are only added; what is not known is
//! absent.

use crate::sizes::human;
use serde::{Deserialize, Serialize};

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Explained {
    /// The volume's name.
    pub volume: String,
    /// What was asked for.
    pub offset_bytes: u64,
    /// The cache has it.
    pub cached: bool,
    /// `dirty` (in the cache alone), `clean` (on both), `parked` (on both; the cache's copy is forgotten by a crash), `not-cached`,
    /// `off-grid` (behind the last whole block, never cached) or `uncached` (the volume has no cache).
    pub state: String,
    /// Where the range begins of which this is so, as far as was looked.
    pub start_bytes: u64,
    /// Behind its last byte.
    pub end_bytes: u64,
    /// The cache device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_device: Option<String>,
    /// Where the offset is on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_offset_bytes: Option<u64>,
    /// The bucket that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u64>,
    /// The generation of that bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u8>,
    /// The backing device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// Where the offset is on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_offset_bytes: Option<u64>,
    /// A write is under way there, or waits.
    pub being_written: bool,
    /// It is being written back.
    pub being_written_back: bool,
    /// It is being read from the backing device, or put into the cache.
    pub being_filled: bool,
    /// Why it may not be cached: a sentence each.
    pub why: Vec<String>,
}

impl Explained {
    /// Lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let what = match self.state.as_str() {
            "dirty" => "dirty: its newest data is in the cache alone",
            "clean" => "clean: in the cache and on the backing device",
            "parked" => {
                "clean: in the cache and on the backing device, until whose next flush a crash would forget the cache's copy"
            }
            "off-grid" => "on the backing device: behind the last whole block, where nothing is cached",
            "uncached" => "on the backing device: the volume has no cache",
            _ if self.backing.is_none() => "zeroes: nothing was written there",
            _ => "not cached: on the backing device",
        };
        let Self { volume, offset_bytes, start_bytes, end_bytes, .. } = self;
        let length = human(end_bytes - start_bytes);
        let mut text = format!(
            "{volume} at {offset_bytes}: {what}\nso are bytes {start_bytes} to {end_bytes} ({length})\n"
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
