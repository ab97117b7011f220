//! What devices do wrong, in sentences: a user must learn from the log and from `status` which device fails or hangs.

use bcached_engine::{DiskHealth, Error};
use std::time::Duration;

/// A device that has not answered for so long is worth a word.
const SLOW: Duration = Duration::from_secs(5);

/// What has been said of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Said {
    errors: u64,
    is_stuck: bool,
}

/// Something new about a device, for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum News {
    /// Operations failed, or it does not answer.
    Bad(String),
    /// It answers again.
    Good(String),
}

/// What is wrong with `device` now; `None` if nothing is and nothing ever was.
pub fn sentence(device: &str, health: &DiskHealth) -> Option<String> {
    if let Some(told) = stuck(device, health) {
        return Some(told);
    }
    let last = health.last_error?;
    let (errors, sector, kind) = (health.errors, last.sector, last.kind);
    Some(format!(
        "{errors} operations on {device} have failed, the last at sector {sector} ({kind}); look at the device"
    ))
}

/// Since when `device` does not answer, if it does not.
pub fn stuck(device: &str, health: &DiskHealth) -> Option<String> {
    let (seconds, waiting) = (health.longest_wait.as_secs(), health.waiting);
    (health.longest_wait >= SLOW)
        .then(|| format!("{device} has not answered for {seconds} s; operations that wait for it: {waiting}"))
}

/// Why a set has stopped writing, and what that means.
pub fn stopped(error: &Error) -> String {
    format!(
        "it has stopped writing ({error}): volumes with dirty data refuse writes, the others go on without it; mend \
         the device and start the daemon again"
    )
}

/// What is new since the last look.
pub fn news(device: &str, health: &DiskHealth, said: &mut Said) -> Option<News> {
    let is_stuck = health.longest_wait >= SLOW;
    let before = std::mem::replace(said, Said { errors: health.errors, is_stuck });
    if is_stuck && !before.is_stuck || health.errors > before.errors {
        return sentence(device, health).map(News::Bad);
    }
    (before.is_stuck && !is_stuck).then(|| News::Good(format!("{device} answers again")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_env::{DiskId, IoError, IoErrorKind};

    #[test]
    fn each_trouble_is_told_when_it_comes_and_when_it_goes() {
        let mut said = Said::default();
        let mut health = DiskHealth::default();
        assert_eq!((sentence("sdb", &health), news("sdb", &health, &mut said)), (None, None));

        health.errors = 3;
        health.last_error = Some(IoError { kind: IoErrorKind::Io, disk: DiskId(1), sector: 77 });
        let Some(News::Bad(told)) = news("sdb", &health, &mut said) else { panic!("three errors") };
        assert!(told.starts_with("3 operations on sdb have failed, the last at sector 77"), "{told}");
        assert_eq!(news("sdb", &health, &mut said), None, "told once");
        assert_eq!(sentence("sdb", &health), Some(told), "status goes on saying it");

        (health.waiting, health.longest_wait) = (16, Duration::from_secs(12));
        let Some(News::Bad(told)) = news("sdb", &health, &mut said) else { panic!("it hangs") };
        assert_eq!(told, "sdb has not answered for 12 s; operations that wait for it: 16");
        assert_eq!(news("sdb", &health, &mut said), None);
        (health.waiting, health.longest_wait) = (0, Duration::ZERO);
        assert_eq!(news("sdb", &health, &mut said), Some(News::Good("sdb answers again".to_owned())));
    }
}
