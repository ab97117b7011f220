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
mod attach_detach;
mod audit_log;
mod block_size;
mod blocked_log;
mod cache_failure;
mod cache_options;
mod cache_states;
mod client_wait;
mod command_output;
mod compat;
mod control_files;
mod corruption;
mod damaged_index;
mod dev;
mod diagnostics;
mod doc_links;
mod duplicate_uuids;
mod error_messages;
mod events;
mod failing_devices;
mod forget;
mod idempotence;
mod import;
mod inspection;
mod labels;
mod loop_and_iscsi;
mod lost_cache;
mod lost_uuid_table;
mod make;
mod memory;
mod metrics;
mod monitor;
mod nbd;
mod nbd_clients;
mod next_steps;
mod older_copies;
mod option_states;
mod options;
mod reconnect;
mod relative_paths;
mod release;
mod reload;
mod removed_files;
mod replace;
mod reserve;
mod resize;
mod resource_limits;
mod schema;
mod serve;
mod serve_failures;
mod show;
mod stop;
mod systemd;
mod take_over;
mod take_over_reconnect;
mod unknown_values;
mod vhost_and_fuse;
mod volume_states;
mod without_cache;
