# Adds up what a whole run of `cargo xtask test` printed: one line "PASSED FAILED SKIPPED".
#
# A skipped test cannot be told from a passed one by Rust's test runner, so it prints `skipped: REASON` on a line of its own (see
# requires.rs) and the runner shows the output of passing tests; it is then taken off the passed. `#[ignore]`d tests are skipped too.
# A test program that died or was stopped has told of no failed test: of it there is a line (see xtask/src/testing).
/^test result: (ok|FAILED)\. [0-9]+ passed; [0-9]+ failed; [0-9]+ ignored;/ { passed += $4; failed += $6; skipped += $8 }
/^error: test failed: .*; it counts as one failed test$/ { failed += 1 }
/^skipped: / { passed -= 1; skipped += 1 }
END { print passed + 0, failed + 0, skipped + 0 }
