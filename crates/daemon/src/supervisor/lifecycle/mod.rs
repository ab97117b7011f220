//! The daemon as a whole: its start, what it needs while it runs, and its end.

pub mod memory_budget;
pub mod missing_files;
pub mod ready;
pub mod service_timeout;
pub mod shutdown;
pub mod stop_request;
