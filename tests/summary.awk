# Adds up what a whole run of `cargo xtask test` printed: one line "PASSED FAILED SKIPPED".
#
# Rust's test runner cannot distinguish a skipped test from a passed one. A skipped test therefore
# prints `skipped: REASON` on a line of its own (see requires.rs), and the runner shows the output
# of passing tests; the test is then subtracted from the passed ones. `#[ignore]`d tests count as
# skipped, too.
# A test program that died or was stopped has reported no failed test. A separate line reports it
# (see xtask/src/testing).
/^test result: (ok|FAILED)\. [0-9]+ passed; [0-9]+ failed; [0-9]+ ignored;/ { passed += $4; failed += $6; skipped += $8 }
/^error: test failed: .*; it counts as one failed test$/ { failed += 1 }
/^skipped: / { passed -= 1; skipped += 1 }
END { print passed + 0, failed + 0, skipped + 0 }
