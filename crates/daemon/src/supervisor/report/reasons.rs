//! Why a volume is not served, because of its cache or for another reason, in the words of the
//! messages.

use crate::supervisor::table::{CacheState, Table, VolumeEntry, VolumeState};
use bcached_config::options::value::Value;
use bcached_control::failure::{Failure, Kind};
use bcached_format::{BackingState, BackingSuperblock, Uuid};
use std::time::Duration;

/// Returns why the volume is not served, and what can be done.
pub fn not_served(entry: &VolumeEntry) -> Failure {
    let name = entry.display_name();
    let failure = Failure::new(Kind::NotFound, format!("{name} is not served"));
    match &entry.state {
        VolumeState::Waiting(reason) | VolumeState::Failed(reason) => {
            let next = reason.next.as_deref().map(str::to_owned);
            let next = next.unwrap_or_else(|| format!("fix that, or `bcached remove {name}`"));
            failure.why(reason.reason()).next(next)
        }
        VolumeState::Stopped => {
            failure.why("it was stopped on request").next(format!("`bcached add {name}` serves it again"))
        }
        VolumeState::Releasing => failure
            .why("it is being released with its cache")
            .next("`bcached import` takes the cache back when the release has ended"),
        VolumeState::Removed => {
            failure.why("it was removed").next(format!("`bcached add {name}` serves it again"))
        }
        VolumeState::Served(_) | VolumeState::Attaching => {
            failure.why("it is being attached").next("try again in a moment")
        }
    }
}

/// Returns the reason for a volume whose cache recovers.
pub fn its_cache_opens() -> Failure {
    Failure::new(Kind::NotFound, "its cache is not open yet")
        .next("it is served when the cache is open; `bcached status` shows the progress")
}

/// Returns the reason for a volume that is about to be served without its cache, which takes a
/// moment.
pub fn goes_without() -> Failure {
    Failure::new(Kind::NotFound, "it is about to be served without a cache")
        .next("`bcached status` shows when it is")
}

/// Returns what it means for the volume with `superblock` that its cache is missing. `name` is the
/// cache's name, if known.
pub fn missing_cache(superblock: &BackingSuperblock, name: Option<&str>) -> Failure {
    let name = name.map_or_else(String::new, |name| format!(" {name}"));
    let set = superblock.set_uuid();
    let failure = |what: String| Failure::new(Kind::NotFound, what);
    match superblock.state() {
        BackingState::Dirty => {
            failure(format!("its newest data is in the cache set {set}, which is missing"))
                .next("connect the cache's device; without the cache the volume holds old data")
        }
        BackingState::None => {
            failure(format!("its cache{name} is missing")).next("connect the cache's device")
        }
        BackingState::Clean | BackingState::Stale => {
            failure(format!("its cache{name} (set {set}) is missing")).next("connect the cache's device")
        }
    }
}

/// Returns the reason for a volume that is served without its cache after `wait`, because no data
/// of it is dirty there.
pub fn goes_without_soon(waits: Failure, wait: Duration) -> Failure {
    let wait = Value::Time(wait);
    let mend = if waits.kind == Kind::DeviceFails { "repair" } else { "connect" };
    waits.next(format!(
        "{mend} the cache's device: after {wait} the volume is served without its cache, which is then cold for it"
    ))
}

/// Returns the failure for the cache devices `one` and `other`, which cannot be told apart.
pub fn two_of_one_set(one: &str, other: &str, set: Uuid) -> Failure {
    Failure::new(Kind::SameDevice, format!("cannot serve {one}"))
        .why(format!("it is the cache set {set}, and so is {other}: two devices have the same UUID"))
        .next("one is a copy of the other: serve the one that was in use, and remove the other")
}

/// Returns the reason for a volume whose cache will not be served because of `failure`.
pub fn cache_not_served(failure: &Failure) -> Failure {
    let next = failure.next.as_deref().unwrap_or("`bcached status` shows what is wrong with it");
    // The advice of the failure is put at the end of the whole sentence.
    Failure::new(failure.kind, "its cache is not served").why(failure.reason()).next(next)
}

/// Returns the same for a cache whose metadata is damaged. Only the volume's superblock says what
/// of its data is in the cache.
pub fn cache_damaged(superblock: &BackingSuperblock, cache: &str, failure: &Failure) -> Failure {
    let refused = cache_not_served(failure);
    let says = match superblock.state() {
        BackingState::Dirty => {
            "the backing device's superblock says dirty, so the newest data is in that cache; the amount is unknown"
        }
        BackingState::Clean => {
            "the backing device's superblock says clean, so all data is on the backing device"
        }
        BackingState::None | BackingState::Stale => return refused,
    };
    let what = failure.why.as_deref().unwrap_or("it cannot be read").to_owned();
    Failure::new(failure.kind, format!("its cache {cache} is not served: {what}"))
        .why(says)
        .next(failure.next.as_deref().unwrap_or("`bcached check` shows the extent of the damage").to_owned())
}

/// Returns the reason for a volume whose cache's device has no bcache superblock, and may have been
/// its cache all the same.
pub fn cache_has_no_superblock(superblock: &BackingSuperblock, reason: &Failure) -> Failure {
    if superblock.state() != BackingState::Dirty {
        return cache_not_served(reason);
    }
    let set = superblock.set_uuid();
    Failure::new(reason.kind, format!("its newest data is in the cache set {set}, which is missing"))
        .why(reason.reason())
        .next(
            "do not run `make` on that device; docs/failures.md (A cache whose superblock is damaged) \
             describes how to recover the cache",
        )
}

/// Returns what it means for a volume that the device of its cache is not available yet. `cache` is
/// the cache's name, if known.
pub fn cache_waits(superblock: &BackingSuperblock, cache: Option<&str>, reason: &Failure) -> Failure {
    match reason.kind {
        Kind::InUse => {}
        Kind::DeviceFails => return failing_cache(superblock, cache, reason),
        Kind::Scarce => return cache_not_served(reason),
        _ => return missing_cache(superblock, cache),
    }
    let cache = cache.map_or_else(String::new, |cache| format!(" {cache}"));
    let next = reason.next.as_deref().unwrap_or("it is used as soon as it is released").into();
    Failure { what: format!("its cache{cache} is in use").into(), next: Some(next), ..reason.clone() }
}

/// Returns the same for a cache whose device answers with errors.
fn failing_cache(superblock: &BackingSuperblock, cache: Option<&str>, reason: &Failure) -> Failure {
    let cache = cache.map_or_else(String::new, |cache| format!(" {cache}"));
    let set = superblock.set_uuid();
    let mend = reason.next.as_deref().unwrap_or("repair the cache's device; bcached tries it again");
    let (what, next) = match superblock.state() {
        BackingState::Dirty => (
            format!("its newest data is in the cache set {set}, whose device fails"),
            format!("{mend}; without the cache the volume holds old data"),
        ),
        _ => (format!("the device of its cache{cache} fails"), mend.to_owned()),
    };
    Failure::new(Kind::DeviceFails, what).why(reason.reason()).next(next)
}

/// Returns the failure for a volume with `superblock` whose cache is not among those that are
/// served.
pub fn no_cache(what: impl Into<Box<str>>, superblock: &BackingSuperblock) -> Failure {
    let (kind, why) = match superblock.state() {
        BackingState::None => {
            (Kind::Usage, "several caches are served, and it names none of them".to_owned())
        }
        _ => (Kind::WrongSet, format!("it belongs to the cache set {}", superblock.set_uuid())),
    };
    Failure::new(kind, what).why(why)
}

impl Table {
    /// Returns a sentence for each configured device that is not served and has no final reason.
    pub fn not_served_yet(&self) -> Vec<String> {
        let caches = self.caches.iter().filter_map(|cache| {
            let name = cache.name.as_ref().unwrap_or(&cache.device);
            match &cache.state {
                CacheState::Waiting(failure) => Some(format!("cache {name}: {failure}")),
                CacheState::Opening { .. } => Some(format!("cache {name} is still opening")),
                _ => None,
            }
        });
        let volumes = self.volumes.iter().filter_map(|volume| {
            let name = volume.display_name();
            match &volume.state {
                VolumeState::Waiting(failure) => Some(format!("volume {name}: {failure}")),
                VolumeState::Attaching => Some(format!("volume {name} is still being attached")),
                _ => None,
            }
        });
        caches.chain(volumes).collect()
    }

    /// Returns the same, and a sentence for each that is not going to be served.
    pub fn not_served(&self) -> Vec<String> {
        let caches = self.caches.iter().filter_map(|cache| match &cache.state {
            CacheState::Failed(failure) => Some(format!("cache {}: {failure}", cache.display_name())),
            _ => None,
        });
        let volumes = self.volumes.iter().filter_map(|volume| match &volume.state {
            VolumeState::Failed(failure) => Some(format!("volume {}: {failure}", volume.display_name())),
            _ => None,
        });
        self.not_served_yet().into_iter().chain(caches).chain(volumes).collect()
    }
}
