//! For any input from a client: no panic, bounded memory, every complete request answered once, and
//! nothing carried out outside the export.

use bcached_front_nbd::proto::handshake::Encryption;
use bcached_front_nbd::proto::loopback::{Conversation, ConversationEnd, converse, converse_with};
use bcached_front_nbd::proto::request::Command;
use bcached_front_nbd::proto::wire::{
    IHAVEOPT, OPTION_REPLY_MAGIC, PAYLOAD_BYTES_MAX, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC,
};
use proptest::prelude::*;

const TANK_BYTES: u64 = 16 << 20;

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).expect("short");
    [&IHAVEOPT.to_be_bytes()[..], &number.to_be_bytes(), &length.to_be_bytes(), data].concat()
}

fn string(text: &[u8]) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("short");
    [&length.to_be_bytes()[..], text].concat()
}

/// Options that are nearly valid, and some that are valid.
fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![
        Just(b"tank".to_vec()),
        Just(b"archive".to_vec()),
        prop::collection::vec(any::<u8>(), 0..9)
    ];
    let data = prop_oneof![
        Just(Vec::new()),
        prop::collection::vec(any::<u8>(), 0..40),
        (name.clone(), prop::collection::vec(any::<[u8; 2]>(), 0..4)).prop_map(|(name, wanted)| {
            let count = u16::try_from(wanted.len()).expect("few");
            [string(&name), count.to_be_bytes().to_vec(), wanted.concat()].concat()
        }),
        name.prop_map(
            |name| [string(&name), 1u32.to_be_bytes().to_vec(), string(b"base:allocation")].concat()
        ),
    ];
    let number = prop_oneof![6 => prop::sample::select(vec![3u32, 5, 6, 8, 9, 10]), 1 => any::<u32>()];
    (number, data).prop_map(|(number, data)| option(number, &data))
}

#[derive(Clone, Debug)]
struct RawRequest {
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u32,
}

/// Requests, of which about half are valid.
fn any_request() -> impl Strategy<Value = RawRequest> {
    let offset = prop_oneof![
        6 => (0..TANK_BYTES / 512).prop_map(|sector| sector * 512),
        2 => (0..16u64).prop_map(|sectors| TANK_BYTES - sectors * 512),
        1 => 0..TANK_BYTES + 512,
        1 => any::<u64>(),
    ];
    let length =
        prop_oneof![6 => (0..16u32).prop_map(|sectors| sectors * 512), 1 => 0..10_000u32, 1 => any::<u32>()];
    let flags = prop_oneof![4 => Just(0), 3 => 0..32u16, 1 => any::<u16>()];
    let command = prop_oneof![8 => prop::sample::select(vec![0u16, 1, 3, 4, 5, 6, 7]), 1 => any::<u16>()];
    (flags, command, any::<u64>(), offset, length).prop_map(|(flags, command, cookie, offset, length)| {
        // A write of gigabytes would need gigabytes of payload here.
        let length = if command == 1 { length % 20_000 } else { length };
        RawRequest { flags, command, cookie, offset, length }
    })
}

impl RawRequest {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&self.flags.to_be_bytes());
        bytes.extend_from_slice(&self.command.to_be_bytes());
        bytes.extend_from_slice(&self.cookie.to_be_bytes());
        bytes.extend_from_slice(&self.offset.to_be_bytes());
        bytes.extend_from_slice(&self.length.to_be_bytes());
        if self.command == 1 {
            bytes.resize(bytes.len() + self.length as usize, 0x5a);
        }
        bytes
    }
}

/// The handshake's answers end where the first reply to a request begins; both parts must consist
/// of complete messages.
fn cookies_answered(outgoing: &[u8], asked: &[RawRequest]) -> Vec<u64> {
    let mut rest = &outgoing[18..];
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    while rest.len() >= 20 && number(&rest[..8]) == OPTION_REPLY_MAGIC {
        let length = usize::try_from(number(&rest[16..20])).expect("fits");
        rest = &rest[20 + length..];
    }
    let mut cookies = Vec::new();
    while !rest.is_empty() {
        let (magic, cookie) = (number(&rest[..4]), number(&rest[8..16]));
        let length = if magic == u64::from(SIMPLE_REPLY_MAGIC) {
            let question = &asked[cookies.len()];
            let content = question.command == 0 && number(&rest[4..8]) == 0;
            16 + if content { question.length as usize } else { 0 }
        } else {
            assert_eq!(magic, u64::from(STRUCTURED_REPLY_MAGIC));
            assert_eq!(number(&rest[4..6]), 1, "the only chunk of its reply");
            20 + usize::try_from(number(&rest[16..20])).expect("fits")
        };
        cookies.push(cookie);
        rest = &rest[length..];
    }
    cookies
}

fn inside(command: &Command) -> bool {
    let (sector, sectors) = match *command {
        Command::Read { sector, bytes } | Command::Write { sector, bytes, .. } => {
            assert!(bytes <= PAYLOAD_BYTES_MAX && bytes % 512 == 0);
            (sector, u64::from(bytes / 512))
        }
        Command::Trim { sector, sectors, .. }
        | Command::WriteZeroes { sector, sectors, .. }
        | Command::BlockStatus { sector, sectors, .. } => (sector, sectors),
        Command::Flush => return true,
    };
    sectors > 0 && sector + sectors <= TANK_BYTES / 512
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _: Conversation = converse(&bytes);
    }

    /// A client that has not begun TLS learns nothing about the exports and can do nothing to them.
    #[test]
    fn before_tls_nothing_is_told(
        client_flags in prop_oneof![8 => Just(3u32), 1 => any::<u32>()],
        options in prop::collection::vec(any_option(), 0..8),
        requests in prop::collection::vec(any_request(), 0..3),
    ) {
        let mut input = client_flags.to_be_bytes().to_vec();
        input.extend(options.concat());
        input.extend(option(7, &[&string(b"tank")[..], &[0, 0]].concat()));
        input.extend(requests.iter().flat_map(RawRequest::bytes));
        let told = converse_with(Encryption::Required, &input);
        prop_assert!(told.commands.is_empty());
        let size = (32_768_u64 * 512).to_be_bytes();
        for secret in [&b"tank"[..], b"archive", b"base:allocation", &size] {
            prop_assert!(!told.outgoing.windows(secret.len()).any(|bytes| bytes == secret));
        }
    }

    #[test]
    fn any_options_then_any_requests(
        client_flags in prop_oneof![8 => Just(3u32), 1 => any::<u32>()],
        options in prop::collection::vec(any_option(), 0..8),
        requests in prop::collection::vec(any_request(), 0..20),
        cut in 0..200usize,
    ) {
        let mut input = client_flags.to_be_bytes().to_vec();
        input.extend(options.concat());
        input.extend(option(7, &[&string(b"tank")[..], &[0, 0]].concat()));
        let handshake = converse(&input);
        prop_assert!(handshake.commands.is_empty());
        let entered = handshake.outgoing.len();
        input.extend(requests.iter().flat_map(RawRequest::bytes));
        let whole = converse(&input);
        prop_assert!(whole.commands.iter().all(inside));
        prop_assert!(whole.outgoing.len() >= entered);
        if client_flags == 3 && whole.end == ConversationEnd::InputEnded(0) && !requests.is_empty() {
            let cookies: Vec<u64> = requests.iter().map(|asked| asked.cookie).collect();
            prop_assert_eq!(cookies_answered(&whole.outgoing, &requests), cookies);
        }
        // If the input is cut anywhere, the conversation is the same up to there.
        let part = converse(&input[..input.len().saturating_sub(cut)]);
        prop_assert!(whole.outgoing.starts_with(&part.outgoing));
        prop_assert!(whole.commands.starts_with(&part.commands));
    }
}
