//! Extends the time limits of the service manager.
//!
//! A service manager ends a start or a stop that takes longer than its general limit
//! (`TimeoutStartSec`, `TimeoutStopSec`). Here both last as long as the configuration says. The
//! loop therefore asks for more time as long as it runs; one that hangs does not.

use std::time::{Duration, Instant};

/// The time that is asked for: enough for all that may delay the loop, above all the end of an
/// engine.
const TIME: Duration = Duration::from_secs(90);

/// The interval between requests.
const EVERY: Duration = Duration::from_secs(1);

/// The time of the last request.
#[derive(Default)]
pub struct TimeoutExtension(Option<Instant>);

impl TimeoutExtension {
    /// Asks for more time, unless it has a moment ago.
    pub fn tell(&mut self) {
        if self.0.is_some_and(|told| told.elapsed() < EVERY) {
            return;
        }
        self.0 = Some(Instant::now());
        let time = u32::try_from(TIME.as_micros()).expect("minutes");
        let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::ExtendTimeoutUsec(time)]);
    }

    /// Begins anew when a start has become a stop, whose time begins anew as well.
    pub fn begin_anew(&mut self) {
        self.0 = None;
        self.tell();
    }
}
