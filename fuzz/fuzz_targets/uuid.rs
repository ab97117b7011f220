#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| bcached_fuzz::targets::uuid(data));
