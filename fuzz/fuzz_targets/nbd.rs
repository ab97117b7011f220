#![no_main]

use bcached_front_nbd::proto::handshake::Encryption;
use bcached_front_nbd::proto::loopback::converse_with;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    for encryption in [Encryption::None, Encryption::Required, Encryption::Active] {
        let _ = converse_with(encryption, data);
    }
});
