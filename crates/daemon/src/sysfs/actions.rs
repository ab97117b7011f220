//! Carries out writes to control files: the same as the corresponding command, through the same
//! handlers, with the user in the log. Options hold until the daemon stops, except for a label,
//! which its device keeps.

use super::files::{File, FileAction, FileWrite, WrittenBytes};
use super::layout::{FileOwner, TreeSnapshot};
use super::{Sysfs, input, owner};
use bcached_config::TypedValue;
use bcached_config::options::Scope;
use bcached_config::options::value::{Value, ValueKind};
use bcached_control::failure::{Failure, Kind as FailureKind};
use bcached_control::jobs::{JobKind, JobSpec};
use bcached_control::options::OptionChange;
use bcached_control::statistics::RequestCounts;
use bcached_front_fuse::tree::Errno;
use std::collections::BTreeMap;

/// Offsets to subtract from counters since `clear_stats`, for these files only. The counters
/// themselves go on, so metrics and `status` do not change.
#[derive(Default)]
pub struct ClearedStats {
    /// Of sets and volumes, by UUID.
    counted: BTreeMap<String, RequestCounts>,
    /// Of cache devices, by the UUID of the set.
    written: BTreeMap<String, WrittenBytes>,
}

impl ClearedStats {
    /// Returns what was counted since the clearing; all of it if the counters have started anew.
    pub fn counted(&self, uuid: &str, now: RequestCounts, is_total: bool) -> RequestCounts {
        let Some(then) = self.counted.get(uuid).filter(|_| is_total) else { return now };
        let since = || {
            let (hits, misses) = (now.hits.checked_sub(then.hits)?, now.misses.checked_sub(then.misses)?);
            Some(RequestCounts {
                hits,
                misses,
                hit_percent: (hits * 100).checked_div(hits + misses),
                bypass_hits: now.bypass_hits.checked_sub(then.bypass_hits)?,
                bypass_misses: now.bypass_misses.checked_sub(then.bypass_misses)?,
                miss_collisions: now.miss_collisions.checked_sub(then.miss_collisions)?,
                bypassed_bytes: now.bypassed_bytes.checked_sub(then.bypassed_bytes)?,
            })
        };
        since().unwrap_or(now)
    }

    /// Returns what was written to a cache device before the clearing.
    pub fn written(&self, seen: &TreeSnapshot, cache: usize) -> WrittenBytes {
        let set = seen.set(cache, WrittenBytes::default());
        set.and_then(|set| self.written.get(&set.counts.set_uuid).copied()).unwrap_or_default()
    }
}

/// The error number of a refusal.
pub fn errno(failure: &Failure) -> Errno {
    match failure.kind {
        FailureKind::InUse | FailureKind::SameDevice | FailureKind::Busy => Errno::BUSY,
        FailureKind::UnknownName | FailureKind::NotFound | FailureKind::NotLooked => Errno::NOENT,
        FailureKind::NotInThisVersion | FailureKind::Unsupported => Errno::OPNOTSUPP,
        FailureKind::NoRoom => Errno::NOSPC,
        FailureKind::TimeLimit => Errno::TIMEDOUT,
        kind if kind.exit() == 2 => Errno::INVAL,
        kind if kind.exit() == 3 => Errno::PERM,
        FailureKind::Permission => Errno::PERM,
        _ => Errno::IO,
    }
}

/// Refuses a write without effect. The log says why, since an error number does not.
fn refuse(path: &str, user: u32, errno: Errno, why: &str) -> Errno {
    tracing::info!(event = "control-file-refused", uid = user, "write to {path}: {why}");
    errno
}

/// Refuses a write that the file does not understand.
fn not_understood(path: &str, user: u32, takes: &str) -> Errno {
    refuse(path, user, Errno::INVAL, &format!("the value is invalid; the file takes {takes}"))
}

/// What a file of this kind takes, for messages.
fn values(kind: ValueKind) -> String {
    match kind {
        ValueKind::Flag => "0 or 1".to_owned(),
        ValueKind::Choice(words) => format!("one of {}", words.join(", ")),
        ValueKind::Size => SIZES.to_owned(),
        ValueKind::Number(..) | ValueKind::Rate(..) | ValueKind::Time(..) => NUMBERS.to_owned(),
        ValueKind::Text => "a line of at most 32 bytes".to_owned(),
        ValueKind::Stripe | ValueKind::Hours => "nothing".to_owned(),
    }
}

const NUMBERS: &str = "a whole number";
const SIZES: &str = "a number of bytes, or one with the suffix k, M, G, T or P";

impl Sysfs {
    /// Carries out what a user has written.
    pub(super) fn take(
        &self,
        seen: &TreeSnapshot,
        (of, file): (FileOwner, &File),
        (path, text): (&str, &[u8]),
        user: u32,
    ) -> Result<(), Errno> {
        let not_understood = |takes: &str| not_understood(path, user, takes);
        if text.is_empty() {
            return Ok(());
        }
        let line = input::line(text).ok_or_else(|| not_understood("text"))?;
        match file.write {
            FileWrite::Never => Err(Errno::ACCESS),
            FileWrite::Refused(why) => Err(refuse(path, user, Errno::OPNOTSUPP, why)),
            FileWrite::Fixed(kind, why) => {
                let wanted = normal(kind, line).ok_or_else(|| not_understood(&values(kind)))?;
                let now = self.text(seen, of, file)?.unwrap_or_default();
                let holds = if matches!(kind, ValueKind::Choice(_)) { format!("[{wanted}]") } else { wanted };
                if now.split_ascii_whitespace().any(|word| word == holds) {
                    Ok(())
                } else {
                    Err(refuse(path, user, Errno::OPNOTSUPP, why))
                }
            }
            FileWrite::Option(scope, name) => {
                let owner = owner(seen, scope, of).ok_or(Errno::NODEV)?;
                let kind = scope.find(name).map(|option| option.kind).ok_or(Errno::IO)?;
                let typed = if name == "label" { label(text) } else { normal(kind, line) };
                let typed = typed.ok_or_else(|| not_understood(&values(kind)))?;
                let typed = self.between_neighbours(owner, name, typed)?;
                let change = OptionChange {
                    set: BTreeMap::from([(name.to_owned(), TypedValue(typed))]),
                    runtime: name != "label",
                    ..OptionChange::default()
                };
                (self.handlers.change)(scope, owner, change, Some(user))
                    .map_err(|failure| errno(&failure))?;
                Ok(())
            }
            FileWrite::Action(deed) => self.act(seen, (of, deed), (path, line), user),
        }
    }

    /// Returns the value to set for one of three terms, each of which lies strictly between its
    /// neighbours. As in the kernel, a value beyond them becomes the nearest that fits.
    fn between_neighbours(&self, owner: &str, name: &str, typed: String) -> Result<String, Errno> {
        const TERMS: [&str; 3] =
            ["writeback_rate_fp_term_low", "writeback_rate_fp_term_mid", "writeback_rate_fp_term_high"];
        let Some(place) = TERMS.iter().position(|term| *term == name) else { return Ok(typed) };
        let of = |place: usize| match self.option(Scope::Volume, owner, TERMS[place])? {
            Value::Number(number) => Ok(number),
            _ => Err(Errno::IO),
        };
        let least = if place == 0 { 1 } else { of(place - 1)? + 1 };
        let most = if place == 2 { u64::from(u32::MAX) } else { of(place + 1)? - 1 };
        let wanted = input::number(&typed).unwrap_or_default();
        Ok(wanted.max(least).min(most.max(least)).to_string())
    }

    fn act(
        &self,
        seen: &TreeSnapshot,
        (of, deed): (FileOwner, FileAction),
        (path, line): (&str, &str),
        user: u32,
    ) -> Result<(), Errno> {
        let not_understood = |takes: &str| not_understood(path, user, takes);
        let begin = |begin: JobSpec| {
            (self.handlers.begin)(begin, Some(user)).map(drop).map_err(|failure| errno(&failure))
        };
        if deed == FileAction::ClearStats {
            self.clear(seen, of).ok_or(Errno::NODEV)?;
            tracing::info!(
                event = "control-stats-cleared",
                uid = user,
                "{path}: the statistics start again from zero"
            );
            return Ok(());
        }
        if let (FileAction::CreateFlash, FileOwner::Cache(cache)) = (deed, of) {
            let set = seen.set(cache, WrittenBytes::default()).ok_or(Errno::NODEV)?;
            let bytes = input::size(line).ok_or_else(|| not_understood(SIZES))?;
            let mut add = JobSpec::new(JobKind::Add, free_name(seen));
            add.cache = Some(set.cache.name.clone());
            add.size_bytes = Some(bytes - bytes % set.counts.block_bytes);
            return begin(add);
        }
        let FileOwner::Volume(index) = of else { return Err(Errno::IO) };
        let member = seen.member(index).ok_or(Errno::NODEV)?;
        let verb = |verb| JobSpec::new(verb, member.volume.name.clone());
        match deed {
            FileAction::Stop => begin(verb(JobKind::Stop)),
            // As in the kernel, there is nothing to do then.
            FileAction::Detach if member.facts.attached == Some(false) => Ok(()),
            FileAction::Detach => begin(verb(JobKind::Detach)),
            FileAction::Attach => {
                let digits = input::uuid_digits(line).ok_or_else(|| not_understood("the UUID of a set"))?;
                let is_it = |set: &super::files::SetView<'_>| set.counts.set_uuid.replace('-', "") == digits;
                let mut sets = (0..seen.status.caches.len())
                    .filter_map(|cache| seen.set(cache, WrittenBytes::default()));
                let nowhere = || refuse(path, user, Errno::NOENT, "no set with that UUID is served here");
                let set = sets.find(is_it).ok_or_else(nowhere)?;
                if member.facts.attached == Some(true) {
                    return Err(refuse(path, user, Errno::INVAL, "it is already attached: detach it first"));
                }
                begin(JobSpec { cache: Some(set.cache.name.clone()), ..verb(JobKind::Attach) })
            }
            FileAction::Run => match input::number(line) {
                None => Err(not_understood(NUMBERS)),
                Some(0) => Ok(()),
                Some(_) => Err(refuse(path, user, Errno::BUSY, "it is already running")),
            },
            FileAction::Resize => {
                let bytes = input::size(line).ok_or_else(|| not_understood(SIZES))?;
                let bytes = bytes - bytes % member.facts.block_bytes.max(512);
                let to = |of| JobSpec { size_bytes: Some(bytes), ..verb(of) };
                match bytes.cmp(&member.facts.size_bytes) {
                    std::cmp::Ordering::Equal => Ok(()),
                    std::cmp::Ordering::Greater => begin(to(JobKind::Grow)),
                    std::cmp::Ordering::Less => begin(to(JobKind::Shrink)),
                }
            }
            FileAction::ClearStats | FileAction::CreateFlash => Err(Errno::IO),
        }
    }

    fn clear(&self, seen: &TreeSnapshot, of: FileOwner) -> Option<()> {
        let mut cleared = self.cleared();
        match of {
            FileOwner::Cache(index) => {
                let set = seen.set(index, WrittenBytes::default())?;
                cleared.counted.insert(set.counts.set_uuid.clone(), set.numbers.windows.total);
            }
            FileOwner::CacheDevice(index) => {
                let set = seen.set(index, WrittenBytes::default())?;
                let now = WrittenBytes::of(set.counts, set.numbers);
                cleared.written.insert(set.counts.set_uuid.clone(), now);
            }
            FileOwner::Volume(index) => {
                let member = seen.member(index)?;
                cleared.counted.insert(member.facts.uuid.clone(), member.numbers.windows.total);
            }
            FileOwner::Nobody | FileOwner::CacheCounts(..) | FileOwner::VolumeCounts(..) => return None,
        }
        Some(())
    }
}

/// Converts a value of this kind from the kernel's syntax to that of `set`; `None` if it is not
/// valid for the kernel.
fn normal(kind: ValueKind, line: &str) -> Option<String> {
    match kind {
        ValueKind::Flag => input::flag(line).map(|yes| u8::from(yes).to_string()),
        ValueKind::Number(..) | ValueKind::Rate(..) | ValueKind::Time(..) => {
            input::number(line).map(|number| number.to_string())
        }
        // The kernel's documentation shows suffixes, which its newer versions no longer accept.
        ValueKind::Size => input::size(line).map(|bytes| bytes.to_string()),
        ValueKind::Choice(words) => words.contains(&line).then(|| line.to_owned()),
        ValueKind::Text | ValueKind::Stripe | ValueKind::Hours => None,
    }
}

/// Returns a label, of at most 32 bytes including the end of its line.
fn label(text: &[u8]) -> Option<String> {
    const MOST: usize = 32;
    input::line(text).filter(|_| text.len() <= MOST).map(str::to_owned)
}

/// Returns a free name for a volume that was not given one.
fn free_name(seen: &TreeSnapshot) -> String {
    let is_free = |name: &String| !seen.status.volumes.iter().any(|volume| volume.name == *name);
    (0..).map(|number| format!("volume{number}")).find(is_free).unwrap_or_default()
}
