# The entry points. Each target installs what is missing (as root: Debian packages, with apt) or
# prints the exact command that does, then builds and runs.
.PHONY: test check demo setup fuzz hunt sim bench bench-guest bench-model coverage mutants deny

# Builds and runs the simulator without link-time optimisation. With it, a run would take 5 % less
# time, but each build a minute more.
sim := CARGO_PROFILE_RELEASE_LTO=false cargo run --quiet --release --package bcached-sim --bin sim --

# Format, lints and all tests, with real kernels as judges. The last line is
# "N passed, 0 failed, M skipped".
test:
	@tests/run

# Format, lints, documents and unit tests: minutes.
check:
	@tests/check

# An "SSD" file and an "HDD" file, with a real file system that survives a crash.
demo:
	@demo/run

# Only installs what `test` and `demo` need.
setup:
	@tests/setup

# Fuzzes each parser, the note and the NBD codec for ten minutes each (FUZZ_SECONDS), with a nightly
# compiler.
fuzz:
	@fuzz/run

# Runs the whole engine on simulated devices, with fresh seeds, crashes and failing devices, for
# five minutes (SIM_SECONDS).
hunt:
	@$(sim) hunt --seconds $${SIM_SECONDS:-300}

# A hunt, then `coverage`.
sim: hunt
	@if [ -e "$$(rustc --print target-libdir)/../bin/llvm-cov" ]; then cargo xtask coverage; \
	else echo "llvm-cov, which reports coverage, is missing: rustup component add llvm-tools"; fi

# Compares this daemon with nbdkit, qemu-nbd and qemu-storage-daemon on the same bytes, as ratios
# (BENCH_ROUNDS). Takes ten minutes.
bench:
	@cargo xtask bench --rounds $${BENCH_ROUNDS:-7}

# Compares volumes as block devices (ublk) with the kernel's caches, in one guest, as ratios
# (BENCH_ROUNDS) or in instructions (BENCH_COUNT=1). Fails if a bound is missed. Takes six minutes.
bench-guest:
	@cargo build --quiet --release --package bcached-cli --package bcached-tests
	@target/release/guest-rates

# Runs the engine on models of real drives, in virtual time, and prints the figures that
# docs/performance.md promises, with their bounds. Takes eight minutes.
bench-model:
	@$(sim) bench-model

# Prints which share of the engine's lines a hunt of one minute executes. Needs the component
# llvm-tools, which `setup` adds.
coverage:
	@cargo xtask coverage

# Plants each deliberate fault of crates/sim/mutants and checks that the simulator's random
# workloads find it. Takes an hour or two.
mutants:
	@cargo xtask mutants

# Checks the licences and sources of all dependencies (deny.toml) with cargo-deny, which it
# builds if it is missing. `cargo deny check advisories` needs the network.
deny:
	@command -v cargo-deny >/dev/null || cargo install --quiet --locked cargo-deny
	@cargo deny check licenses bans sources
