# The menu. Each target installs what is missing (Debian packages with apt when root) or prints the exact line, builds, and does its job.
.PHONY: test demo setup fuzz hunt sim bench bench-guest bench-model coverage mutants

# The simulator, without link-time optimisation: hours of it take 5 % less with that, and each build of it a minute more.
sim := CARGO_PROFILE_RELEASE_LTO=false cargo run --quiet --release --package bcached-sim --bin sim --

test: # Format, lints, every test, real kernels as judges; ends with "N passed, 0 failed, M skipped".
	@tests/run

demo: # An "SSD" and an "HDD" file, a real file system, a crash survived.
	@demo/run

setup: # Only install what the two above need.
	@tests/setup

fuzz: # Each parser, the note and the NBD codec, ten minutes each (FUZZ_SECONDS), on a nightly compiler.
	@fuzz/run

hunt: # The whole engine on simulated devices, with fresh seeds, crashes and failing devices, for five minutes (SIM_SECONDS).
	@$(sim) hunt --seconds $${SIM_SECONDS:-300}

sim: hunt # That, then coverage.
	@if [ -e "$$(rustc --print target-libdir)/../bin/llvm-cov" ]; then cargo xtask coverage; \
	else echo "no share of the engine's lines: rustup component add llvm-tools"; fi

bench: # This daemon beside nbdkit, qemu-nbd and qemu-storage-daemon, on the same bytes, as ratios (BENCH_ROUNDS); ten minutes.
	@cargo xtask bench --rounds $${BENCH_ROUNDS:-7}

bench-guest: # Volumes as block devices (ublk) beside the kernel's caches, in one guest, as ratios (BENCH_ROUNDS), or in instructions (BENCH_COUNT=1); fails if a bound is missed; six minutes.
	@cargo build --quiet --release --package bcached-cli --package bcached-tests
	@target/release/guest-rates

bench-model: # The engine on models of real drives, in virtual time: what docs/performance.md promises, beside its bounds; eight minutes.
	@$(sim) bench-model

coverage: # Which share of the engine's lines a minute of that runs (needs the component llvm-tools, which setup adds).
	@cargo xtask coverage

mutants: # Plants each deliberate fault of crates/sim/mutants and sees that the simulator's random workloads find it: an hour or two.
	@cargo xtask mutants
