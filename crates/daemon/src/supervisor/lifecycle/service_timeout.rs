//! A service manager ends a start or a stop that takes longer than it was told in general (`TimeoutStartSec`, `TimeoutStopSec`). Here both
//! last as long as the configuration says, so as long as the loop goes round it asks for more time; one that hangs does not.

use std::time::{Duration, Instant};

/// How much time is asked for: enough for all that may keep the loop from going round, the end of an engine above all.
const TIME: Duration = Duration::from_secs(90);

/// How often.
const EVERY: Duration = Duration::from_secs(1);

/// When it was asked for last.
#[derive(Default)]
pub struct Extension(Option<Instant>);

impl Extension {
    /// Asks for more, unless it has a moment ago.
    pub fn tell(&mut self) {
        if self.0.is_some_and(|told| told.elapsed() < EVERY) {
            return;
        }
        self.0 = Some(Instant::now());
        let time = u32::try_from(TIME.as_micros()).expect("minutes");
        let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::ExtendTimeoutUsec(time)]);
    }

    /// A start has become a stop, whose time begins anew.
    pub fn begin_anew(&mut self) {
        self.0 = None;
        self.tell();
    }
}
