//! The handshake at the start of a connection: option haggling.
//!
//! [`Handshake::needed`] says how many bytes the next step takes. The caller collects exactly
//! those, passes them to [`Handshake::step`], and sends [`Handshake::take_outgoing`]. How long a
//! client may keep asking is for the caller to limit; this module bounds the memory.
//!
//! **TLS** ([`Encryption`]) is either not available or required. If a client could choose, a man in
//! the middle could talk it out of TLS. So nothing can be negotiated or disclosed before TLS has
//! begun.

use super::option::{ContextQuery, ExportQuery, OptionError, name};
use super::wire::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, BLOCK_BYTES_MIN, BLOCK_BYTES_PREFERRED_MIN, IHAVEOPT, NBDMAGIC,
    OPTION_BYTES_MAX, OPTION_REPLY_MAGIC, OPTION_SKIP_MAX, PAYLOAD_BYTES_MAX, Violation, flag,
    handshake_flag, info, option, option_reply,
};
use bcached_port::{Export, SECTOR_BYTES};
use std::sync::Arc;

/// The exports that a server can offer, queried during the handshake.
pub trait ExportCatalog {
    /// The names of the current exports.
    fn names(&self) -> Vec<String>;

    /// Returns what this client would get under a name.
    ///
    /// # Errors
    /// Says, in a sentence for people, why there is no such export.
    fn offer(&self, name: &str) -> Result<ExportOffer, String>;
}

/// An export as offered to one client.
#[derive(Clone, Debug)]
pub struct ExportOffer {
    /// The volume.
    pub export: Arc<Export>,
    /// Whether this client is denied writing.
    pub read_only: bool,
    /// Whether this client may use several connections at the same time.
    pub multi_conn: bool,
}

/// The parameters that client and server agreed on.
#[derive(Clone, Debug)]
pub struct NegotiatedParams {
    /// The export.
    pub offer: ExportOffer,
    /// Whether replies are structured.
    pub structured: bool,
    /// Whether the client may request block status.
    pub block_status: bool,
}

/// The state of TLS on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encryption {
    /// Not available: `STARTTLS` is answered "unsupported". A client that insists then disconnects;
    /// any other continues.
    None,
    /// Required and not yet begun: everything except hanging up is refused.
    Required,
    /// Begun: the conversation is encrypted.
    Active,
}

/// What follows a step.
#[derive(Debug)]
pub enum HandshakeStep {
    /// Continue with the next step.
    Continue,
    /// Send the outgoing bytes, then switch to TLS and continue the handshake in it. Bytes that the
    /// client has already sent are not part of that.
    StartTls,
    /// The handshake is complete: send the outgoing bytes; requests follow.
    Transmission(NegotiatedParams),
    /// The client hangs up properly: send the outgoing bytes, then end.
    Goodbye,
    /// End the connection without an answer.
    Violation(Violation),
}

/// The handshake of one connection.
pub struct Handshake {
    state: HandshakeState,
    encryption: Encryption,
    /// Whether an option was sent before TLS, and refused.
    asked_plainly: bool,
    outgoing: Vec<u8>,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export name for which `base:allocation` was chosen.
    context_for: Option<String>,
}

#[derive(Clone, Copy)]
enum HandshakeState {
    ClientFlags,
    OptionHeader,
    OptionData {
        option: u32,
        bytes: u32,
    },
    /// Option data too long to be parsed, with so many bytes still to come.
    Skip {
        option: u32,
        bytes: u32,
    },
}

/// How many bytes of a long option are requested at a time.
const SKIP_STEP: u32 = 4096;

impl Handshake {
    /// Starts a handshake; the greeting is in the outgoing bytes.
    #[must_use]
    pub fn new(encryption: Encryption) -> Self {
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        let mut outgoing = Vec::with_capacity(256);
        outgoing.extend_from_slice(&NBDMAGIC.to_be_bytes());
        outgoing.extend_from_slice(&IHAVEOPT.to_be_bytes());
        outgoing.extend_from_slice(&flags.to_be_bytes());
        Self {
            state: HandshakeState::ClientFlags,
            encryption,
            asked_plainly: false,
            outgoing,
            fixed: false,
            no_zeroes: false,
            structured: false,
            context_for: None,
        }
    }

    /// Whether the client tries to continue without TLS, which is refused.
    #[must_use]
    pub fn wants_no_tls(&self) -> bool {
        self.asked_plainly && self.encryption == Encryption::Required
    }

    /// The number of bytes that the next step takes: at most [`OPTION_BYTES_MAX`], possibly 0.
    #[must_use]
    pub fn needed(&self) -> usize {
        let bytes = match self.state {
            HandshakeState::ClientFlags => 4,
            HandshakeState::OptionHeader => 16,
            HandshakeState::OptionData { bytes, .. } => bytes,
            HandshakeState::Skip { bytes, .. } => bytes.min(SKIP_STEP),
        };
        bytes as usize
    }

    /// Takes the bytes to be sent.
    pub fn take_outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outgoing)
    }

    /// Performs the next step, with exactly [`Handshake::needed`] bytes from the client.
    pub fn step(&mut self, bytes: &[u8], catalog: &dyn ExportCatalog) -> HandshakeStep {
        assert_eq!(bytes.len(), self.needed(), "a step gets the bytes it asked for");
        match self.state {
            HandshakeState::ClientFlags => self.client_flags(bytes),
            HandshakeState::OptionHeader => self.option_header(bytes),
            HandshakeState::OptionData { option, .. } => {
                self.state = HandshakeState::OptionHeader;
                self.option(option, bytes, catalog)
            }
            HandshakeState::Skip { option, bytes: left } => {
                let left = left - left.min(SKIP_STEP);
                self.state = HandshakeState::Skip { option, bytes: left };
                if left == 0 {
                    self.state = HandshakeState::OptionHeader;
                    self.error(option, option_reply::ERR_TOO_BIG, "the option is too long");
                }
                HandshakeStep::Continue
            }
        }
    }

    fn client_flags(&mut self, bytes: &[u8]) -> HandshakeStep {
        let flags = be_u32(bytes, 0);
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        if flags & !u32::from(known) != 0 {
            return HandshakeStep::Violation(Violation::HandshakeFlags(flags));
        }
        self.fixed = flags & u32::from(handshake_flag::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        self.state = HandshakeState::OptionHeader;
        HandshakeStep::Continue
    }

    fn option_header(&mut self, bytes: &[u8]) -> HandshakeStep {
        let magic = u64::from(be_u32(bytes, 0)) << 32 | u64::from(be_u32(bytes, 4));
        let (option, bytes) = (be_u32(bytes, 8), be_u32(bytes, 12));
        if magic != IHAVEOPT {
            return HandshakeStep::Violation(Violation::OptionMagic(magic));
        }
        if option != option::EXPORT_NAME && !self.fixed {
            return HandshakeStep::Violation(Violation::NotFixed(option));
        }
        self.state = match bytes {
            0..=OPTION_BYTES_MAX => HandshakeState::OptionData { option, bytes },
            // This option has no error reply, and a longer one cannot be a real option.
            _ if option == option::EXPORT_NAME || bytes > OPTION_SKIP_MAX => {
                return HandshakeStep::Violation(Violation::OptionSize { option, bytes });
            }
            _ => HandshakeState::Skip { option, bytes },
        };
        HandshakeStep::Continue
    }

    fn option(&mut self, option: u32, data: &[u8], catalog: &dyn ExportCatalog) -> HandshakeStep {
        match option {
            option::STARTTLS => return self.start_tls(data),
            option::EXPORT_NAME if self.encryption == Encryption::Required => {
                self.asked_plainly = true;
                return HandshakeStep::Violation(Violation::NotEncrypted);
            }
            option::EXPORT_NAME => return self.export_name(data, catalog),
            option::ABORT => {
                self.reply(option, option_reply::ACK, &[]);
                return HandshakeStep::Goodbye;
            }
            _ if self.encryption == Encryption::Required => {
                self.asked_plainly = true;
                self.error(
                    option,
                    option_reply::ERR_TLS_REQD,
                    "TLS is required: this server answers nothing else before it",
                );
            }
            option::INFO | option::GO => return self.info_or_go(option, data, catalog),
            option::LIST if data.is_empty() => self.list(catalog),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                self.reply(option, option_reply::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(option, data, catalog),
            option::LIST | option::STRUCTURED_REPLY => {
                self.error(option, option_reply::ERR_INVALID, "this option takes no data");
            }
            _ => self.error(option, option_reply::ERR_UNSUP, "unknown option"),
        }
        HandshakeStep::Continue
    }

    fn start_tls(&mut self, data: &[u8]) -> HandshakeStep {
        let option = option::STARTTLS;
        match self.encryption {
            _ if !data.is_empty() => {
                self.error(option, option_reply::ERR_INVALID, "this option takes no data");
            }
            Encryption::None => {
                self.error(option, option_reply::ERR_UNSUP, "TLS is not available on this socket");
            }
            Encryption::Active => self.error(option, option_reply::ERR_INVALID, "TLS has already begun"),
            Encryption::Required => {
                self.reply(option, option_reply::ACK, &[]);
                self.encryption = Encryption::Active;
                return HandshakeStep::StartTls;
            }
        }
        HandshakeStep::Continue
    }

    fn export_name(&mut self, data: &[u8], catalog: &dyn ExportCatalog) -> HandshakeStep {
        let offer = name(data)
            .map_err(|malformed| describe(malformed).to_owned())
            .and_then(|name| catalog.offer(name));
        let offer = match offer {
            Ok(offer) => offer,
            Err(why) => return HandshakeStep::Violation(Violation::ExportName(why)),
        };
        self.outgoing.extend_from_slice(&offer.export.bytes().to_be_bytes());
        self.outgoing.extend_from_slice(&transmission_flags(&offer, self.structured).to_be_bytes());
        if !self.no_zeroes {
            self.outgoing.extend_from_slice(&[0; 124]);
        }
        let name = str::from_utf8(data).unwrap_or_default();
        HandshakeStep::Transmission(self.agree(offer, name))
    }

    fn info_or_go(&mut self, option: u32, data: &[u8], catalog: &dyn ExportCatalog) -> HandshakeStep {
        let question = match ExportQuery::parse(data) {
            Ok(question) => question,
            Err(malformed) => {
                self.malformed(option, malformed);
                return HandshakeStep::Continue;
            }
        };
        let offer = match catalog.offer(question.name) {
            Ok(offer) => offer,
            Err(why) => {
                self.error(option, option_reply::ERR_UNKNOWN, &why);
                return HandshakeStep::Continue;
            }
        };
        self.facts(option, &question, &offer);
        self.reply(option, option_reply::ACK, &[]);
        if option == option::GO {
            HandshakeStep::Transmission(self.agree(offer, question.name))
        } else {
            HandshakeStep::Continue
        }
    }

    /// Sends size and block sizes to every client, whether it asked for them or not, so that it
    /// need not guess.
    fn facts(&mut self, option: u32, question: &ExportQuery<'_>, offer: &ExportOffer) {
        let export = &offer.export;
        let kind = info::EXPORT.to_be_bytes();
        let size = export.bytes().to_be_bytes();
        let flags = transmission_flags(offer, self.structured).to_be_bytes();
        self.reply(option, option_reply::INFO, &[&kind, &size, &flags]);
        let kind = info::BLOCK_SIZE.to_be_bytes();
        let (smallest, preferred) = (BLOCK_BYTES_MIN.to_be_bytes(), preferred_block(export).to_be_bytes());
        self.reply(
            option,
            option_reply::INFO,
            &[&kind, &smallest, &preferred, &PAYLOAD_BYTES_MAX.to_be_bytes()],
        );
        if question.wants(info::NAME) {
            self.reply(option, option_reply::INFO, &[&info::NAME.to_be_bytes(), export.name.as_bytes()]);
        }
        if question.wants(info::DESCRIPTION) {
            let label =
                if export.label.is_empty() { String::new() } else { format!(", label {}", export.label) };
            let text = format!("bcache volume {}{label}", export.uuid);
            self.reply(option, option_reply::INFO, &[&info::DESCRIPTION.to_be_bytes(), text.as_bytes()]);
        }
    }

    fn list(&mut self, catalog: &dyn ExportCatalog) {
        for name in catalog.names() {
            let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
            self.reply(option::LIST, option_reply::SERVER, &[&length.to_be_bytes(), name.as_bytes()]);
        }
        self.reply(option::LIST, option_reply::ACK, &[]);
    }

    fn meta_context(&mut self, option: u32, data: &[u8], catalog: &dyn ExportCatalog) {
        let setting = option == option::SET_META_CONTEXT;
        if setting {
            // A new choice replaces the old one even if it fails.
            self.context_for = None;
        }
        if !self.structured {
            self.error(option, option_reply::ERR_INVALID, "structured replies must be negotiated first");
            return;
        }
        let question = match ContextQuery::parse(data) {
            Ok(question) => question,
            Err(malformed) => return self.malformed(option, malformed),
        };
        if let Err(why) = catalog.offer(question.name) {
            return self.error(option, option_reply::ERR_UNKNOWN, &why);
        }
        // A listing may ask for everything or for a namespace; a choice names the context.
        let listed = !setting && (question.queries == 0 || question.namespace);
        if question.exact || listed {
            let id = if setting { BASE_ALLOCATION_ID } else { 0 };
            self.reply(option, option_reply::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()]);
        }
        if setting && question.exact {
            self.context_for = Some(question.name.to_owned());
        }
        self.reply(option, option_reply::ACK, &[]);
    }

    /// A choice of block status is valid only for the name it was made with.
    fn agree(&self, offer: ExportOffer, name: &str) -> NegotiatedParams {
        let block_status = self.context_for.as_deref() == Some(name);
        NegotiatedParams { offer, structured: self.structured, block_status }
    }

    fn malformed(&mut self, option: u32, malformed: OptionError) {
        let kind = match malformed {
            OptionError::TooBig => option_reply::ERR_TOO_BIG,
            OptionError::Length | OptionError::Text => option_reply::ERR_INVALID,
        };
        self.error(option, kind, describe(malformed));
    }

    fn error(&mut self, option: u32, kind: u32, text: &str) {
        // The protocol limits the length of strings, and names within the sentence may be long.
        let end = text.floor_char_boundary(super::wire::STRING_BYTES_MAX);
        self.reply(option, kind, &[&text.as_bytes()[..end]]);
    }

    fn reply(&mut self, option: u32, kind: u32, parts: &[&[u8]]) {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let bytes = u32::try_from(bytes).expect("names and texts are short");
        self.outgoing.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        for number in [option, kind, bytes] {
            self.outgoing.extend_from_slice(&number.to_be_bytes());
        }
        for part in parts {
            self.outgoing.extend_from_slice(part);
        }
    }
}

const fn describe(malformed: OptionError) -> &'static str {
    match malformed {
        OptionError::Length => "the lengths in the option do not add up",
        OptionError::TooBig => "a name is longer than 4096 bytes",
        OptionError::Text => "a name is not UTF-8",
    }
}

/// The transmission flags of an export for this client. DF belongs to structured replies; commands
/// that change content belong to writers.
#[must_use]
pub fn transmission_flags(offer: &ExportOffer, structured: bool) -> u16 {
    let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA;
    flags |= if offer.read_only {
        flag::READ_ONLY
    } else {
        flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO
    };
    if structured {
        flags |= flag::SEND_DF;
    }
    if offer.multi_conn {
        flags |= flag::CAN_MULTI_CONN;
    }
    flags
}

/// The volume's block size, but at least a page, and a power of two, as the protocol requires. It
/// is announced as the preferred size rather than the minimum: with a larger minimum, libnbd itself
/// refuses smaller requests, and programs that read sectors of 512 bytes would stop working.
fn preferred_block(export: &Export) -> u32 {
    let bytes = (u64::from(export.block_sectors) * SECTOR_BYTES).next_power_of_two();
    let bytes = u32::try_from(bytes).unwrap_or(PAYLOAD_BYTES_MAX);
    bytes.clamp(BLOCK_BYTES_PREFERRED_MIN, PAYLOAD_BYTES_MAX)
}

fn be_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("the slice has four bytes"))
}
