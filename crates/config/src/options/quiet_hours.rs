//! Quiet hours: `23:00-07:00`, in the local time of the machine. The engine has no wall clock: the
//! supervisor tells it when they begin and end.
//!
//! The hours are wall-clock time. If the clock is put forward past one of their ends, they begin or
//! end at that moment. If it is put back, an hour may be quiet twice.

use std::fmt;

/// Minutes of a day.
const DAY: u16 = 24 * 60;

/// From one minute of the day until another; past midnight if that is earlier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuietHours {
    /// First quiet minute of the day.
    from: u16,
    /// First minute of the day that is not quiet any more.
    until: u16,
}

impl QuietHours {
    /// Parses the hours; `24:00` is valid as an end.
    ///
    /// # Errors
    /// What is wrong, as a clause that begins with a verb.
    pub fn read(typed: &str) -> Result<Self, String> {
        let hours = typed.split_once('-').and_then(|(from, until)| {
            let (from, until) = (minute(from)?, minute(until)?);
            (from < DAY).then_some(Self { from, until })
        });
        let hours =
            hours.ok_or("is neither FROM-UNTIL in hours and minutes, as 23:00-07:00, nor none".to_owned())?;
        if hours.from == hours.until {
            return Err(
                "begins where it ends: to stop write-back at all times, set writeback_running=0".to_owned()
            );
        }
        Ok(hours)
    }

    /// Returns whether `minute` of the day is quiet.
    #[must_use]
    pub fn contains(self, minute: u16) -> bool {
        if self.from < self.until {
            (self.from..self.until).contains(&minute)
        } else {
            minute >= self.from || minute < self.until
        }
    }
}

impl fmt::Display for QuietHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, until) = (self.from, self.until);
        write!(f, "{:02}:{:02}-{:02}:{:02}", from / 60, from % 60, until / 60, until % 60)
    }
}

fn minute(typed: &str) -> Option<u16> {
    let (hour, minute) = typed.split_once(':')?;
    let number = |digits: &str| {
        let is_short = (1..=2).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_short.then(|| digits.parse::<u16>().ok()).flatten()
    };
    let (hour, minute) = (number(hour)?, number(minute).filter(|_| minute.len() == 2)?);
    let minutes = hour * 60 + minute;
    (minute < 60 && minutes <= DAY).then_some(minutes)
}

/// Returns the current minute of the day in local time, by `TZ` or `/etc/localtime`, which may
/// change while the daemon runs; UTC on a machine that has neither.
#[must_use]
pub fn local_minute() -> u16 {
    let now = jiff::Zoned::now();
    let part = |number: i8| u16::try_from(number).unwrap_or(0);
    part(now.hour()) * 60 + part(now.minute())
}
