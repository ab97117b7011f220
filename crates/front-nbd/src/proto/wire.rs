//! The numbers of the protocol, under the protocol's own names, and our limits within what it leaves open. All
//! integers on the wire are big-endian.

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

/// Handshake flags, server's and client's: bits with the same meaning.
pub mod handshake_flag {
    /// Fixed newstyle: unknown options are answered, not hung up on.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zeroes after an export's flags are left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options a client may send.
pub mod option {
    /// Choose an export and start; cannot fail politely.
    pub const EXPORT_NAME: u32 = 1;
    /// Hang up.
    pub const ABORT: u32 = 2;
    /// List exports.
    pub const LIST: u32 = 3;
    /// Go over to TLS.
    pub const STARTTLS: u32 = 5;
    /// Tell about an export.
    pub const INFO: u32 = 6;
    /// Tell about an export and start.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List kinds of block status.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose kinds of block status.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// A fact about an export.
    pub const INFO: u32 = 3;
    /// A kind of block status.
    pub const META_CONTEXT: u32 = 4;
    /// Option not known here.
    pub const ERR_UNSUP: u32 = (1 << 31) | 1;
    /// Malformed, or not at this moment.
    pub const ERR_INVALID: u32 = (1 << 31) | 3;
    /// Nothing but STARTTLS before TLS.
    pub const ERR_TLS_REQD: u32 = (1 << 31) | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    /// Too large.
    pub const ERR_TOO_BIG: u32 = (1 << 31) | 9;
}

/// Facts about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// A text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod flag {
    /// The others mean something.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writing is refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA works on every command.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// DF works.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections of one client see one volume: a flush on one covers the writes of all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// FAST_ZERO is understood.
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
    /// Prefetch. Not offered: nobody would act on it.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask for allocation.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod command_flag {
    /// Durable before the reply. Allowed on every command.
    pub const FUA: u16 = 1 << 0;
    /// WRITE_ZEROES: keep the space allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// READ: the content in one chunk.
    pub const DF: u16 = 1 << 2;
    /// BLOCK_STATUS: one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// WRITE_ZEROES: fail unless faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of structured replies.
pub mod chunk {
    /// Flag: the last one of its reply.
    pub const DONE: u16 = 1 << 0;
    /// Nothing but the end.
    pub const NONE: u16 = 0;
    /// Content at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Block status.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error with a text.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// The one kind of block status we know.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The number we give it when a client chooses it.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// Block status: no space is allocated.
pub const STATE_HOLE: u32 = 1 << 0;
/// Block status: reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// Longest name or query of the protocol.
pub const STRING_BYTES_MAX: usize = 4096;
/// Longest option that is looked at. Room for a name, a count and more kinds of facts or queries than exist.
pub const OPTION_BYTES_MAX: u32 = 16 << 10;
/// Longest option that is read over and answered "too big"; a longer one ends the connection.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Smallest request announced and accepted, and the alignment of all; the volume's block is the preferred size.
pub const BLOCK_BYTES_MIN: u32 = 512;
/// Preferred request at least: a page, whatever the volume's block.
pub const BLOCK_BYTES_PREFERRED_MIN: u32 = 4096;
/// Largest payload announced and accepted; the protocol's own default.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// A write with a payload up to this size is read over and answered with an error; a larger one ends the connection.
pub const PAYLOAD_SKIP_MAX: u32 = 64 << 20;
/// Extents in the answer to a block status request; the rest is asked for again.
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

/// Why a connection is ended by us.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Violation {
    /// The client set handshake flags that do not exist.
    #[error("unknown handshake flags {0:#x}")]
    HandshakeFlags(u32),
    /// An option does not begin as options do.
    #[error("an option begins with {0:#018x}")]
    OptionMagic(u64),
    /// An option is longer than anybody would send.
    #[error("option {option} claims {bytes} bytes")]
    OptionSize {
        /// Which.
        option: u32,
        /// How long.
        bytes: u32,
    },
    /// A client that does not speak fixed newstyle sent an option that could only be refused.
    #[error("option {0} without fixed newstyle")]
    NotFixed(u32),
    /// `EXPORT_NAME` named no export: that option cannot be answered with an error.
    #[error("no export for EXPORT_NAME: {0}")]
    ExportName(String),
    /// `EXPORT_NAME` came before TLS, which is demanded: as above.
    #[error("EXPORT_NAME before TLS")]
    NotEncrypted,
    /// Bytes came behind STARTTLS before it was answered: whoever wrote them need not be the one who then speaks TLS.
    #[error("something was sent between STARTTLS and its answer")]
    BeforeTls,
    /// A request does not begin as requests do.
    #[error("a request begins with {0:#010x}")]
    RequestMagic(u32),
    /// A write is larger than anybody would send.
    #[error("a write claims {0} bytes")]
    PayloadSize(u32),
}
