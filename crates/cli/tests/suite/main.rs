//! `bcached` as users run it: each module runs the program, as root or not, on files that it makes.
//!
//! All modules are in one program, so that it is linked once; `cargo xtask test` starts it once for
//! each module.

mod common;

// Shared with the tests of front ends.
#[path = "../../../front-nbd/tests/support/certificates.rs"]
mod certificates;
#[path = "../../../front-vhost/tests/support/machine.rs"]
mod machine;

mod activation;
mod ailing;
mod blocks;
mod cache_options;
mod compat;
mod control_files;
mod cycle;
mod damaged;
mod dev;
mod early;
mod errors;
mod events;
mod file_peers;
mod flips;
mod forget;
mod import;
mod judging;
mod labels;
mod links;
mod log_reader;
mod looking;
mod lost_cache;
mod lost_table;
mod make;
mod memory;
mod monitor;
mod named_here;
mod nbd;
mod nbd_peers;
mod next_steps;
mod numbers;
mod older_copies;
mod option_states;
mod options;
mod refusals;
mod release;
mod reload;
mod repeated;
mod replace;
mod reserve;
mod resize;
mod returned;
mod scarce;
mod schema;
mod serve;
mod show;
mod stop;
mod systemd;
mod take_over;
mod take_over_ways;
mod taken_away;
mod told;
mod trouble;
mod twins;
mod unknown;
mod verbs;
mod verbs_of_caches;
mod ways;
mod who;
mod without;
