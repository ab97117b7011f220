//! How long and for how many a host waits. Constants of the daemon; the simulator draws them.

use std::time::Duration;

/// The limits of one host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// A device that has not answered an operation for this long hangs. A disk under load may take
    /// a second.
    pub hangs: Duration,
    /// How long all volumes may stand still for one device while their set is closed.
    pub quiesce: Duration,
    /// How long another device that is to take the place of a backing device waits for the requests
    /// in flight.
    pub exchange: Duration,
    /// How soon a request is tried again that met a place which cannot be read, in a set that
    /// works.
    pub try_again: Duration,
    /// The shortest pause before a set is reopened. Each attempt in vain, and each failure soon
    /// after a success, doubles it.
    pub pause_min: Duration,
    /// The longest such pause.
    pub pause_max: Duration,
    /// When a set has worked for this long its next failure begins with the shortest pause.
    pub works_after: Duration,
    /// Requests of one volume that wait for a device at most.
    pub waiting_of_volume: usize,
    /// Requests of all volumes of a set that wait at most: with those in flight no more tasks than
    /// the executor has room for.
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
