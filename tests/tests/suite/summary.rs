//! Tests the script that adds up the closing line of `make test`, because CI relies on that line.

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns what `tests/summary.awk` prints for a log.
fn summary(log: &str) -> Result<String, Box<dyn Error>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("summary.awk");
    let mut awk =
        Command::new("awk").arg("-f").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    awk.stdin.take().expect("piped above").write_all(log.as_bytes())?;
    Ok(String::from_utf8(awk.wait_with_output()?.stdout)?.trim().to_owned())
}

#[test]
fn results_of_several_test_programs_are_added() -> Result<(), Box<dyn Error>> {
    let log = "running 3 tests\n\
        test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
        test result: FAILED. 4 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.20s\n";
    assert_eq!(summary(log)?, "7 2 1");
    Ok(())
}

#[test]
fn a_test_that_printed_a_reason_was_skipped_not_passed() -> Result<(), Box<dyn Error>> {
    let log = "---- interop stdout ----\n\
        skipped: not installed: linux.uml\n\
        test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
    assert_eq!(summary(log)?, "2 0 1");
    Ok(())
}

#[test]
fn a_test_program_that_died_is_one_failed_test() -> Result<(), Box<dyn Error>> {
    let log = "running 3 tests\n\
        error: test failed: lane of bcached-front-nbd: signal: 6 (SIGABRT); it counts as one failed test\n\
        test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s\n\
        error: test failed: requests of bcached-front-nbd: exit status: 101\n";
    assert_eq!(summary(log)?, "4 3 0");
    Ok(())
}

#[test]
fn an_empty_log_counts_nothing() -> Result<(), Box<dyn Error>> {
    assert_eq!(summary("error: could not compile\n")?, "0 0 0");
    Ok(())
}
