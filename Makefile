# The menu. Each target installs what is missing (Debian packages with apt when root) or prints the exact line, builds, and does its job.
.PHONY: test demo setup fuzz

test: # Format, lints, every test, real kernels as judges; ends with "N passed, 0 failed, M skipped".
	@tests/run

demo: # An "SSD" and an "HDD" file, a real file system, a crash survived.
	@demo/run

setup: # Only install what the two above need.
	@tests/setup

fuzz: # Each parser and the NBD codec, ten minutes each (FUZZ_SECONDS), on a nightly compiler.
	@fuzz/run
