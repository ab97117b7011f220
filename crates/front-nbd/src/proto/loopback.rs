//! Runs the whole server side of the protocol over plain slices, in one call, without sockets and
//! threads: input is what a client sends, output is what it would be sent. The fuzzer and the
//! property tests use this.

use super::handshake::{Encryption, ExportCatalog, ExportOffer, Handshake, HandshakeStep, NegotiatedParams};
use super::reply::ReplyContext;
use super::request::{Command, Decision, HEADER_BYTES, RequestHeader, Session};
use super::wire::{OPTION_BYTES_MAX, Violation};
use bcached_port::{Buffer, ErrorKind, Export, Reply, StatusExtent, Uuid};
use std::sync::Arc;

/// The result of a conversation.
#[derive(Debug)]
pub struct Conversation {
    /// All bytes that the server sent.
    pub outgoing: Vec<u8>,
    /// The requests that would have been carried out.
    pub commands: Vec<Command>,
    /// How it ended.
    pub end: ConversationEnd,
}

/// How a conversation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ConversationEnd {
    /// The input ended; so many bytes were left that make no complete step.
    InputEnded(usize),
    /// The client hung up properly.
    Goodbye,
    /// TLS would follow.
    StartTls,
    /// The server ended it.
    Violation(Violation),
}

/// Reads up to this size are answered with content, larger ones with an error. So a few bytes of
/// input cannot fill the memory of the test.
const CONTENT_BYTES_MAX: u32 = 4096;

/// A catalog of two volumes: "tank" (16 MiB, writable) and "archive" (1 MiB, read-only). Neither is
/// the default export.
#[derive(Debug)]
pub struct TestCatalog;

impl ExportCatalog for TestCatalog {
    fn names(&self) -> Vec<String> {
        vec!["archive".to_owned(), "tank".to_owned()]
    }

    fn offer(&self, name: &str) -> Result<ExportOffer, String> {
        let (sectors, read_only) = match name {
            "tank" => (32_768, false),
            "archive" => (2048, true),
            _ => return Err(format!("no volume is called {name:?}")),
        };
        let export = Export {
            name: name.to_owned(),
            uuid: Uuid([7; 16]),
            label: String::new(),
            sectors,
            block_sectors: 8,
            read_only,
            shared: false,
            frontends: bcached_port::FrontendSet::default(),
            served: None,
        };
        Ok(ExportOffer { export: Arc::new(export), read_only, multi_conn: true })
    }
}

/// Serves all of `input` against [`TestCatalog`]. Suitable as a fuzz target: it must not panic on
/// any input, and asserts the invariants (the bytes requested by a step are bounded, every complete
/// request is answered).
#[must_use]
pub fn converse(input: &[u8]) -> Conversation {
    converse_with(Encryption::None, input)
}

/// Like [`converse`], with a server in the given state of TLS.
#[must_use]
pub fn converse_with(encryption: Encryption, mut input: &[u8]) -> Conversation {
    let mut conversation =
        Conversation { outgoing: Vec::new(), commands: Vec::new(), end: ConversationEnd::InputEnded(0) };
    let mut handshake = Handshake::new(encryption);
    let agreed = loop {
        conversation.outgoing.extend(handshake.take_outgoing());
        let needed = handshake.needed();
        assert!(needed <= OPTION_BYTES_MAX as usize, "a peer cannot make the server collect more");
        let Some((bytes, rest)) = input.split_at_checked(needed) else {
            conversation.end = ConversationEnd::InputEnded(input.len());
            return conversation;
        };
        input = rest;
        match handshake.step(bytes, &TestCatalog) {
            HandshakeStep::Continue => {}
            HandshakeStep::StartTls => {
                conversation.outgoing.extend(handshake.take_outgoing());
                conversation.end = ConversationEnd::StartTls;
                return conversation;
            }
            HandshakeStep::Transmission(agreed) => break agreed,
            HandshakeStep::Goodbye => {
                conversation.outgoing.extend(handshake.take_outgoing());
                conversation.end = ConversationEnd::Goodbye;
                return conversation;
            }
            HandshakeStep::Violation(violation) => {
                conversation.end = ConversationEnd::Violation(violation);
                return conversation;
            }
        }
    };
    conversation.outgoing.extend(handshake.take_outgoing());
    conversation.end = conversation.requests(agreed, input);
    conversation
}

impl Conversation {
    fn requests(&mut self, agreed: NegotiatedParams, mut input: &[u8]) -> ConversationEnd {
        let structured = agreed.structured;
        let session = Session::new(agreed);
        loop {
            let Some((bytes, rest)) = input.split_first_chunk::<HEADER_BYTES>() else {
                return ConversationEnd::InputEnded(input.len());
            };
            let header = match RequestHeader::parse(bytes) {
                Ok(header) => header,
                Err(violation) => return ConversationEnd::Violation(violation),
            };
            let (awaited, reply, payload) = match session.decide(&header) {
                Decision::Run(command) => self.run(&header, command),
                Decision::Refuse { error, payload } => {
                    (ReplyContext::refusal(&header, error), Reply::done(), payload)
                }
                Decision::Disconnect => return ConversationEnd::Goodbye,
                Decision::Violation(violation) => return ConversationEnd::Violation(violation),
            };
            let Some(rest) = rest.get(payload as usize..) else {
                return ConversationEnd::InputEnded(rest.len());
            };
            input = rest;
            let before = self.outgoing.len();
            if awaited.encode(structured, &reply, &mut self.outgoing) {
                let content = reply.buffer.as_ref().map(Buffer::as_slice);
                self.outgoing.extend_from_slice(content.expect("content was promised"));
            }
            assert!(self.outgoing.len() >= before + 16, "every request is answered");
        }
    }

    fn run(&mut self, header: &RequestHeader, command: Command) -> (ReplyContext, Reply, u32) {
        self.commands.push(command);
        let payload = if matches!(command, Command::Write { .. }) { command.payload_bytes() } else { 0 };
        let reply = match command {
            Command::Read { bytes, .. } if bytes > CONTENT_BYTES_MAX => {
                Reply::failed(ErrorKind::NoMemory, None)
            }
            Command::Read { bytes, .. } => Reply::content(Buffer::zeroed(bytes as usize)),
            Command::BlockStatus { sectors, .. } => {
                Reply::extents(vec![StatusExtent { sectors, hole: false, zero: false }])
            }
            _ => Reply::done(),
        };
        (ReplyContext::of(header, command), reply, payload)
    }
}
