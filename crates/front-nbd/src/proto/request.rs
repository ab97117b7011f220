//! Requests after the handshake: each is parsed and turned into one decision.
//!
//! A request that the protocol lets us refuse with an error is refused, and the connection
//! continues. Only bytes that cannot be the start of a request, or a payload too large to skip, end
//! it.

use super::handshake::NegotiatedParams;
use super::wire::{
    BLOCK_BYTES_MIN, NbdError, PAYLOAD_BYTES_MAX, PAYLOAD_SKIP_MAX, REQUEST_MAGIC, STATUS_EXTENTS_MAX,
    Violation, command, command_flag,
};
use bcached_port::SECTOR_BYTES;

/// Bytes of a request without its payload.
pub const HEADER_BYTES: usize = 28;

/// A request as received, unchecked except for its magic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestHeader {
    /// Flags of the command.
    pub flags: u16,
    /// The command.
    pub command: u16,
    /// Returned in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
}

/// A request that may be carried out: within the export, in whole sectors, not empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// Read.
    Read {
        /// First sector.
        sector: u64,
        /// Length in bytes, at most [`PAYLOAD_BYTES_MAX`].
        bytes: u32,
    },
    /// Write; this many bytes of payload follow the header.
    Write {
        /// First sector.
        sector: u64,
        /// Length in bytes, at most [`PAYLOAD_BYTES_MAX`].
        bytes: u32,
        /// Whether it must be durable before the reply.
        fua: bool,
    },
    /// Flush.
    Flush,
    /// Discard.
    Trim {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// Whether it must be durable before the reply.
        fua: bool,
    },
    /// Write zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// Whether it must be durable before the reply.
        fua: bool,
        /// Whether the space may be deallocated.
        may_discard: bool,
    },
    /// Query allocation.
    BlockStatus {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// Maximum number of extents in the answer.
        extents_max: u32,
    },
}

/// What to do with a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Decision {
    /// Carry it out.
    Run(Command),
    /// Skip `payload` bytes, answer with the error, and continue.
    Refuse {
        /// The answer.
        error: NbdError,
        /// Bytes of payload that follow the header.
        payload: u32,
    },
    /// The client hangs up properly.
    Disconnect,
    /// End the connection.
    Violation(Violation),
}

/// The requests of one connection, judged by the parameters agreed on in its handshake.
#[derive(Clone, Debug)]
pub struct Session {
    agreed: NegotiatedParams,
    /// Size of the export in bytes when the client connected.
    bytes: u64,
}

impl RequestHeader {
    /// Parses a request header.
    ///
    /// # Errors
    /// It does not start like a request, so nothing after it can be understood.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Violation> {
        let number =
            |from: usize, to: usize| bytes[from..to].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let short = |from: usize| u16::from_be_bytes([bytes[from], bytes[from + 1]]);
        let word = |from: usize| u32::from(short(from)) << 16 | u32::from(short(from + 2));
        if word(0) != REQUEST_MAGIC {
            return Err(Violation::RequestMagic(word(0)));
        }
        Ok(Self {
            flags: short(4),
            command: short(6),
            cookie: number(8, 16),
            offset: number(16, 24),
            length: word(24),
        })
    }

    const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

impl Session {
    /// Starts a session after a handshake.
    #[must_use]
    pub fn new(agreed: NegotiatedParams) -> Self {
        let bytes = agreed.offer.export.bytes();
        Self { agreed, bytes }
    }

    /// Resumes a session of another server, which had told the client this size.
    #[must_use]
    pub const fn resumed(agreed: NegotiatedParams, bytes: u64) -> Self {
        Self { agreed, bytes }
    }

    /// Size of the export in bytes, as the client was told.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The agreed parameters.
    #[must_use]
    pub const fn agreed(&self) -> &NegotiatedParams {
        &self.agreed
    }

    /// Decides what to do with a request.
    #[must_use]
    pub fn decide(&self, header: &RequestHeader) -> Decision {
        let payload = if header.command == command::WRITE { header.length } else { 0 };
        if payload > PAYLOAD_SKIP_MAX {
            return Decision::Violation(Violation::PayloadSize(payload));
        }
        if header.command == command::DISC {
            return Decision::Disconnect;
        }
        match self.check(header) {
            Ok(command) => Decision::Run(command),
            Err(error) => Decision::Refuse { error, payload },
        }
    }

    fn check(&self, header: &RequestHeader) -> Result<Command, NbdError> {
        let changes = matches!(header.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if changes && self.agreed.offer.read_only {
            return Err(NbdError::EPERM);
        }
        if header.flags & !self.flags_allowed(header.command) != 0 {
            return Err(NbdError::EINVAL);
        }
        if header.command == command::FLUSH {
            return if header.offset == 0 && header.length == 0 {
                Ok(Command::Flush)
            } else {
                Err(NbdError::EINVAL)
            };
        }
        let (sector, sectors) = self.range(header)?;
        let (bytes, fua) = (header.length, header.has(command_flag::FUA));
        match header.command {
            command::READ | command::WRITE if bytes > PAYLOAD_BYTES_MAX => Err(NbdError::EINVAL),
            command::READ => Ok(Command::Read { sector, bytes }),
            command::WRITE => Ok(Command::Write { sector, bytes, fua }),
            command::TRIM => Ok(Command::Trim { sector, sectors, fua }),
            // Zeroing is never faster than writing zeroes: a cache has to override what lies below
            // it.
            command::WRITE_ZEROES if header.has(command_flag::FAST_ZERO) => Err(NbdError::ENOTSUP),
            command::WRITE_ZEROES => {
                let may_discard = !header.has(command_flag::NO_HOLE);
                Ok(Command::WriteZeroes { sector, sectors, fua, may_discard })
            }
            command::BLOCK_STATUS if self.agreed.block_status => {
                let extents_max = if header.has(command_flag::REQ_ONE) { 1 } else { STATUS_EXTENTS_MAX };
                Ok(Command::BlockStatus { sector, sectors, extents_max })
            }
            _ => Err(NbdError::EINVAL),
        }
    }

    /// FUA is allowed on every command, as the protocol requires; where it has no meaning it is
    /// ignored.
    fn flags_allowed(&self, command: u16) -> u16 {
        command_flag::FUA
            | match command {
                command::READ if self.agreed.structured => command_flag::DF,
                command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
                command::BLOCK_STATUS => command_flag::REQ_ONE,
                _ => 0,
            }
    }

    /// Returns the first sector and the length in sectors, if these are whole sectors within the
    /// export.
    fn range(&self, header: &RequestHeader) -> Result<(u64, u64), NbdError> {
        let (offset, length) = (header.offset, u64::from(header.length));
        let smallest = u64::from(BLOCK_BYTES_MIN);
        if length == 0 || !offset.is_multiple_of(smallest) || !length.is_multiple_of(smallest) {
            return Err(NbdError::EINVAL);
        }
        if offset.checked_add(length).is_none_or(|end| end > self.bytes) {
            // As the protocol specifies: commands that would need space fail for lack of it.
            let needs_space = matches!(header.command, command::WRITE | command::WRITE_ZEROES);
            return Err(if needs_space { NbdError::ENOSPC } else { NbdError::EINVAL });
        }
        Ok((offset / SECTOR_BYTES, length / SECTOR_BYTES))
    }
}

impl Command {
    /// Whether it changes the volume's content.
    #[must_use]
    pub const fn changes_content(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Trim { .. } | Self::WriteZeroes { .. })
    }

    /// Bytes of memory that it needs until it is answered.
    #[must_use]
    pub const fn payload_bytes(&self) -> u32 {
        match self {
            Self::Read { bytes, .. } | Self::Write { bytes, .. } => *bytes,
            _ => 0,
        }
    }
}
