//! Runs the whole server side of the protocol over plain slices, in one call, without sockets and
//! threads: input is what a client sends, output is what it would be sent. The fuzzer and the
//! property tests use this.

use super::handshake::{Agreed, Catalog, Encryption, Handshake, Offer, Step};
use super::reply::Awaited;
use super::request::{Command, Decision, HEADER_BYTES, Header, Session};
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
    pub end: End,
}

/// How a conversation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// The input ended; so many bytes were left that make no complete step.
    Silence(usize),
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
pub struct TwoVolumes;

impl Catalog for TwoVolumes {
    fn names(&self) -> Vec<String> {
        vec!["archive".to_owned(), "tank".to_owned()]
    }

    fn offer(&self, name: &str) -> Result<Offer, String> {
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
            ways: bcached_port::Ways::default(),
            served: None,
        };
        Ok(Offer { export: Arc::new(export), read_only, multi_conn: true })
    }
}

/// Serves all of `input` against [`TwoVolumes`]. Suitable as a fuzz target: it must not panic on
/// any input, and asserts the invariants (the bytes requested by a step are bounded, every complete
/// request is answered).
#[must_use]
pub fn converse(input: &[u8]) -> Conversation {
    converse_with(Encryption::None, input)
}

/// Like [`converse`], with a server in the given state of TLS.
#[must_use]
pub fn converse_with(encryption: Encryption, mut input: &[u8]) -> Conversation {
    let mut conversation = Conversation { outgoing: Vec::new(), commands: Vec::new(), end: End::Silence(0) };
    let mut handshake = Handshake::new(encryption);
    let agreed = loop {
        conversation.outgoing.extend(handshake.take_outgoing());
        let needed = handshake.needed();
        assert!(needed <= OPTION_BYTES_MAX as usize, "a peer cannot make the server collect more");
        let Some((bytes, rest)) = input.split_at_checked(needed) else {
            conversation.end = End::Silence(input.len());
            return conversation;
        };
        input = rest;
        match handshake.step(bytes, &TwoVolumes) {
            Step::Continue => {}
            Step::StartTls => {
                conversation.outgoing.extend(handshake.take_outgoing());
                conversation.end = End::StartTls;
                return conversation;
            }
            Step::Transmission(agreed) => break agreed,
            Step::Goodbye => {
                conversation.outgoing.extend(handshake.take_outgoing());
                conversation.end = End::Goodbye;
                return conversation;
            }
            Step::Violation(violation) => {
                conversation.end = End::Violation(violation);
                return conversation;
            }
        }
    };
    conversation.outgoing.extend(handshake.take_outgoing());
    conversation.end = conversation.requests(agreed, input);
    conversation
}

impl Conversation {
    fn requests(&mut self, agreed: Agreed, mut input: &[u8]) -> End {
        let structured = agreed.structured;
        let session = Session::new(agreed);
        loop {
            let Some((bytes, rest)) = input.split_first_chunk::<HEADER_BYTES>() else {
                return End::Silence(input.len());
            };
            let header = match Header::parse(bytes) {
                Ok(header) => header,
                Err(violation) => return End::Violation(violation),
            };
            let (awaited, reply, payload) = match session.decide(&header) {
                Decision::Run(command) => self.run(&header, command),
                Decision::Refuse { error, payload } => {
                    (Awaited::refusal(&header, error), Reply::done(), payload)
                }
                Decision::Disconnect => return End::Goodbye,
                Decision::Violation(violation) => return End::Violation(violation),
            };
            let Some(rest) = rest.get(payload as usize..) else { return End::Silence(rest.len()) };
            input = rest;
            let before = self.outgoing.len();
            if awaited.encode(structured, &reply, &mut self.outgoing) {
                let content = reply.buffer.as_ref().map(Buffer::as_slice);
                self.outgoing.extend_from_slice(content.expect("content was promised"));
            }
            assert!(self.outgoing.len() >= before + 16, "every request is answered");
        }
    }

    fn run(&mut self, header: &Header, command: Command) -> (Awaited, Reply, u32) {
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
        (Awaited::of(header, command), reply, payload)
    }
}
