//! The constants of the protocol, under the protocol's own names, and our limits where it leaves a
//! choice. All integers on the wire are big-endian.

use thiserror::Error;

/// "NBDMAGIC", the first eight bytes a server sends.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", the second eight bytes, and the start of each option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Start of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of each chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags of server and client: the same bits have the same meaning.
pub mod handshake_flag {
    /// Fixed newstyle: unknown options are answered instead of ending the connection.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zero bytes after an export's flags are omitted.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client may send.
pub mod option {
    /// Choose an export and start; cannot be refused with an error.
    pub const EXPORT_NAME: u32 = 1;
    /// Hang up.
    pub const ABORT: u32 = 2;
    /// List exports.
    pub const LIST: u32 = 3;
    /// Switch to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and start.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts: the kinds of block status.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts: the kinds of block status.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = (1 << 31) | 1;
    /// Malformed, or not allowed at this point.
    pub const ERR_INVALID: u32 = (1 << 31) | 3;
    /// TLS is required: only STARTTLS is allowed before it.
    pub const ERR_TLS_REQD: u32 = (1 << 31) | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    /// Too large.
    pub const ERR_TOO_BIG: u32 = (1 << 31) | 9;
}

/// Types of information about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum request size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: the features of an export.
pub mod flag {
    /// The other flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA is supported on every command.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// DF is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections of one client see one volume: a flush on one covers the writes of all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// FAST_ZERO is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Hang up.
    pub const DISC: u16 = 2;
    /// Flush.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Prefetch. Not offered, as it would have no effect.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Query allocation.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod command_flag {
    /// Durable before the reply. Allowed on every command.
    pub const FUA: u16 = 1 << 0;
    /// WRITE_ZEROES: keep the space allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// READ: return the content in one chunk.
    pub const DF: u16 = 1 << 2;
    /// BLOCK_STATUS: return one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// WRITE_ZEROES: fail unless faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of structured replies.
pub mod chunk {
    /// Flag: the last chunk of its reply.
    pub const DONE: u16 = 1 << 0;
    /// No data.
    pub const NONE: u16 = 0;
    /// Content at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Block status.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error with a text.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// The one metadata context that we support.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The id that we assign to it when a client chooses it.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// Block status: no space is allocated.
pub const STATE_HOLE: u32 = 1 << 0;
/// Block status: reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// The protocol's limit on a name or query, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;
/// The longest option that is parsed, in bytes. Enough for a name, a count and more information
/// types or queries than exist.
pub const OPTION_BYTES_MAX: u32 = 16 << 10;
/// The longest option that is skipped and answered "too big", in bytes. A longer one ends the
/// connection.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// The minimum request size that is announced and accepted, and the alignment of all requests, in
/// bytes. The preferred size is the volume's block.
pub const BLOCK_BYTES_MIN: u32 = 512;
/// Lower bound of the preferred request size: a page, whatever the volume's block.
pub const BLOCK_BYTES_PREFERRED_MIN: u32 = 4096;
/// The largest payload that is announced and accepted; the protocol's own default.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// A write with a payload up to this size is skipped and answered with an error; a larger one ends
/// the connection.
pub const PAYLOAD_SKIP_MAX: u32 = 64 << 20;
/// Extents in the answer to a block status request; the client asks again for the rest.
pub const STATUS_EXTENTS_MAX: u32 = 1024;

const _: () = assert!(
    BLOCK_BYTES_PREFERRED_MIN.is_multiple_of(BLOCK_BYTES_MIN)
        && PAYLOAD_BYTES_MAX.is_multiple_of(BLOCK_BYTES_MIN),
    "announced sizes are multiples of the smallest",
);

/// Errors of the transmission phase, with Linux's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NbdError(pub u32);

impl NbdError {
    /// Not permitted: the export is read-only for this client.
    pub const EPERM: Self = Self(1);
    /// Input/output error.
    pub const EIO: Self = Self(5);
    /// Malformed request.
    pub const EINVAL: Self = Self(22);
    /// A write beyond the end.
    pub const ENOSPC: Self = Self(28);
    /// Not supported, or not faster than writing.
    pub const ENOTSUP: Self = Self(95);
}

/// Why the server ends a connection.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Violation {
    /// The client set handshake flags that do not exist.
    #[error("unknown handshake flags {0:#x}")]
    HandshakeFlags(u32),
    /// An option does not start with its magic.
    #[error("an option begins with the wrong magic number {0:#018x}")]
    OptionMagic(u64),
    /// An option is longer than any real client would send.
    #[error("option {option} claims a length of {bytes} bytes")]
    OptionSize {
        /// The option.
        option: u32,
        /// Its claimed length in bytes.
        bytes: u32,
    },
    /// A client without fixed newstyle sent an option that could only be refused.
    #[error("option {0} without fixed newstyle")]
    NotFixed(u32),
    /// `EXPORT_NAME` named no export; that option cannot be answered with an error.
    #[error("no export for EXPORT_NAME: {0}")]
    ExportName(String),
    /// `EXPORT_NAME` was sent before TLS, which is required; it cannot be answered with an error
    /// either.
    #[error("EXPORT_NAME before TLS")]
    NotEncrypted,
    /// Bytes arrived after STARTTLS and before its answer: their author may not be the peer that
    /// then speaks TLS.
    #[error("data arrived between STARTTLS and its answer")]
    BeforeTls,
    /// A request does not start with its magic.
    #[error("a request begins with the wrong magic number {0:#010x}")]
    RequestMagic(u32),
    /// A write is larger than any real client would send.
    #[error("a write claims a length of {0} bytes")]
    PayloadSize(u32),
}
