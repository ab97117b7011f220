//! Encodes replies to requests. Content is not copied here: [`ReplyContext::encode`] produces what
//! precedes it.
//!
//! Without structured replies everything is a simple reply. With them, a read or a block status is
//! answered by one chunk (so DF holds without being checked), an error by a chunk with a sentence,
//! and any other success by a simple reply, as the protocol allows.

use super::request::{Command, RequestHeader};
use super::wire::{
    BASE_ALLOCATION_ID, NbdError, SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, STRUCTURED_REPLY_MAGIC, chunk,
};
use bcached_port::{ErrorKind, Reply, SECTOR_BYTES, StatusExtent};

/// A pending request: everything that its answer needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplyContext {
    /// The client's cookie.
    pub cookie: u64,
    /// The kind of answer that is due.
    pub due: ReplyKind,
}

/// The answer that a client waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyKind {
    /// Content.
    Content {
        /// Its length in bytes.
        bytes: u32,
        /// Its offset in bytes.
        offset: u64,
    },
    /// Allocation status.
    Status {
        /// Length of the requested range in bytes.
        bytes: u32,
    },
    /// The result alone.
    Result,
    /// An error of ours, whatever the accompanying reply says.
    Refusal(NbdError),
}

impl ReplyContext {
    /// The answer that is due to a command.
    #[must_use]
    pub const fn of(header: &RequestHeader, command: Command) -> Self {
        let due = match command {
            Command::Read { bytes, .. } => ReplyKind::Content { bytes, offset: header.offset },
            Command::BlockStatus { .. } => ReplyKind::Status { bytes: header.length },
            _ => ReplyKind::Result,
        };
        Self { cookie: header.cookie, due }
    }

    /// The answer to a request that is not carried out.
    #[must_use]
    pub const fn refusal(header: &RequestHeader, error: NbdError) -> Self {
        Self { cookie: header.cookie, due: ReplyKind::Refusal(error) }
    }

    /// Appends to `head` the bytes that precede the content. Returns whether the content follows,
    /// which is the reply's whole buffer.
    #[must_use = "true promises the client content"]
    pub fn encode(&self, structured: bool, reply: &Reply, head: &mut Vec<u8>) -> bool {
        let length = reply.buffer.as_ref().map(|buffer| buffer.len() as u64);
        match (self.due, reply.result) {
            (ReplyKind::Refusal(error), _) => self.error(structured, error, refusal_text(error), head),
            (_, Err(kind)) => self.error(structured, NbdError(kind.codes().nbd), &kind.to_string(), head),
            (ReplyKind::Content { bytes, offset }, Ok(())) if length == Some(u64::from(bytes)) => {
                if structured {
                    self.chunk(chunk::OFFSET_DATA, 8 + bytes, head);
                    head.extend_from_slice(&offset.to_be_bytes());
                } else {
                    self.simple(0, head);
                }
                return true;
            }
            (ReplyKind::Status { bytes }, Ok(())) if !reply.extents.is_empty() => {
                self.status(bytes, &reply.extents, head);
            }
            // The engine owes content or extents and returned none that fit: never make any up.
            (ReplyKind::Content { .. } | ReplyKind::Status { .. }, Ok(())) => {
                self.error(structured, NbdError::EIO, &ErrorKind::Io.to_string(), head);
            }
            (ReplyKind::Result, Ok(())) => self.simple(0, head),
        }
        false
    }

    fn simple(&self, error: u32, head: &mut Vec<u8>) {
        head.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head.extend_from_slice(&error.to_be_bytes());
        head.extend_from_slice(&self.cookie.to_be_bytes());
    }

    /// Starts the only chunk of a structured reply, with `length` bytes to follow.
    fn chunk(&self, kind: u16, length: u32, head: &mut Vec<u8>) {
        head.extend_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        head.extend_from_slice(&chunk::DONE.to_be_bytes());
        head.extend_from_slice(&kind.to_be_bytes());
        head.extend_from_slice(&self.cookie.to_be_bytes());
        head.extend_from_slice(&length.to_be_bytes());
    }

    fn error(&self, structured: bool, error: NbdError, text: &str, head: &mut Vec<u8>) {
        if !structured {
            return self.simple(error.0, head);
        }
        let text_bytes = u16::try_from(text.len()).expect("error texts are short");
        self.chunk(chunk::ERROR, 6 + u32::from(text_bytes), head);
        head.extend_from_slice(&error.0.to_be_bytes());
        head.extend_from_slice(&text_bytes.to_be_bytes());
        head.extend_from_slice(text.as_bytes());
    }

    /// Encodes extents as descriptors, clipped to the requested range.
    fn status(&self, bytes: u32, extents: &[StatusExtent], head: &mut Vec<u8>) {
        let at = head.len();
        let mut left = u64::from(bytes);
        // The length is filled in below, when the number of descriptors is known.
        self.chunk(chunk::BLOCK_STATUS, 0, head);
        head.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            let length = extent.sectors.saturating_mul(SECTOR_BYTES).min(left);
            left -= length;
            if let (Ok(length @ 1..), state) = (u32::try_from(length), state_of(extent)) {
                head.extend_from_slice(&length.to_be_bytes());
                head.extend_from_slice(&state.to_be_bytes());
            }
        }
        let behind = u32::try_from(head.len() - at - CHUNK_BYTES).expect("a bounded number of descriptors");
        head[at + CHUNK_BYTES - 4..at + CHUNK_BYTES].copy_from_slice(&behind.to_be_bytes());
    }
}

/// Bytes of a chunk before its payload; the last four are the payload's length.
const CHUNK_BYTES: usize = 20;

const fn state_of(extent: &StatusExtent) -> u32 {
    (if extent.hole { STATE_HOLE } else { 0 }) | (if extent.zero { STATE_ZERO } else { 0 })
}

/// The reason for a refusal, for people.
const fn refusal_text(error: NbdError) -> &'static str {
    match error {
        NbdError::EPERM => "this client may not write: the export is read-only, or another client is writing",
        NbdError::ENOSPC => "the write goes beyond the end of the export",
        NbdError::ENOTSUP => "writing zeroes is not faster here than writing data",
        _ => "the request is malformed or outside the export; offset and length must be multiples of 512",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_port::Buffer;

    fn encoded(due: ReplyKind, structured: bool, reply: &Reply) -> (Vec<u8>, bool) {
        let mut head = Vec::new();
        let content =
            ReplyContext { cookie: 0x0102_0304_0506_0708, due }.encode(structured, reply, &mut head);
        (head, content)
    }

    #[test]
    fn simple_replies_have_sixteen_bytes() {
        let (head, content) = encoded(ReplyKind::Result, false, &Reply::done());
        assert_eq!(head, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(!content);
        let (head, content) = encoded(ReplyKind::Result, false, &Reply::failed(ErrorKind::NoSpace, None));
        assert_eq!(head[4..8], [0, 0, 0, 28]);
        assert!(!content);
    }

    #[test]
    fn content_follows_its_head() {
        let due = ReplyKind::Content { bytes: 512, offset: 0x1000 };
        let (head, content) = encoded(due, true, &Reply::content(Buffer::zeroed(512)));
        assert!(content);
        let wanted = [
            0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0,
        ];
        assert_eq!(head, wanted);
        let (head, content) = encoded(due, false, &Reply::content(Buffer::zeroed(512)));
        assert!(content && head.len() == 16);
    }

    #[test]
    fn content_of_another_length_is_an_error_not_content() {
        for structured in [false, true] {
            for reply in [Reply::content(Buffer::zeroed(1024)), Reply::done()] {
                let (head, content) =
                    encoded(ReplyKind::Content { bytes: 512, offset: 0 }, structured, &reply);
                assert!(!content);
                let error = if structured { &head[20..24] } else { &head[4..8] };
                assert_eq!(error, [0, 0, 0, 5], "EIO");
            }
        }
    }

    #[test]
    fn extents_are_cut_to_the_question() {
        let extents = vec![
            StatusExtent { sectors: 8, hole: false, zero: false },
            StatusExtent { sectors: u64::MAX, hole: true, zero: true },
            StatusExtent { sectors: 8, hole: false, zero: true },
        ];
        let (head, content) = encoded(ReplyKind::Status { bytes: 5120 }, true, &Reply::extents(extents));
        assert!(!content);
        let descriptors = [[0, 0, 0x10, 0], [0; 4], [0, 0, 4, 0], [0, 0, 0, 3]].concat();
        assert_eq!(head[6..8], [0, 5]);
        assert_eq!(head[16..24], [0, 0, 0, 20, 0, 0, 0, 1]);
        assert_eq!(head[24..], descriptors);
        let (head, _) = encoded(ReplyKind::Status { bytes: 5120 }, true, &Reply::done());
        assert_eq!(head[20..24], [0, 0, 0, 5], "no extents are an error");
    }

    #[test]
    fn errors_bring_a_sentence_of_the_length_they_claim() {
        for kind in ErrorKind::ALL {
            let (head, _) =
                encoded(ReplyKind::Content { bytes: 512, offset: 0 }, true, &Reply::failed(kind, None));
            assert_eq!(head[6..8], [0x80, 1]);
            let (payload, text) = (u32::from_be_bytes([head[16], head[17], head[18], head[19]]), &head[26..]);
            assert_eq!(payload as usize, 6 + text.len());
            assert_eq!(usize::from(u16::from_be_bytes([head[24], head[25]])), text.len());
            assert_eq!(text, kind.to_string().as_bytes());
        }
    }
}
