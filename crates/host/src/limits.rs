//! Time and size limits of a host. They are constants in the daemon; the simulator draws them at
//! random.

use std::time::Duration;

/// The limits of one host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// A device that has not completed an operation for this long counts as hung. A disk under load
    /// may take a second.
    pub hangs: Duration,
    /// How long all volumes may be blocked by one device while their set is closed.
    pub quiesce: Duration,
    /// How long the replacement of a backing device waits for the requests in flight.
    pub exchange: Duration,
    /// The delay before a request that met an unreadable place in a working set is retried.
    pub try_again: Duration,
    /// The shortest pause before a set is reopened. Each failed attempt, and each failure soon
    /// after a success, doubles the pause.
    pub pause_min: Duration,
    /// The longest such pause.
    pub pause_max: Duration,
    /// Once a set has worked for this long, the pause after its next failure starts at the minimum.
    pub works_after: Duration,
    /// Maximum number of requests of one volume that wait for a device.
    pub waiting_of_volume: usize,
    /// Maximum number of waiting requests of all volumes of a set. Together with those in flight
    /// they need no more tasks than the executor has room for.
    pub waiting_of_all: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hangs: Duration::from_secs(2),
            quiesce: Duration::from_secs(5),
            exchange: Duration::from_secs(10),
            try_again: Duration::from_secs(1),
            pause_min: Duration::from_secs(1),
            pause_max: Duration::from_secs(30),
            works_after: Duration::from_secs(60),
            waiting_of_volume: 512,
            waiting_of_all: 4096,
        }
    }
}
