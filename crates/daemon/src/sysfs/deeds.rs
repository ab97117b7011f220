//! Carries out writes to control files: the same as the corresponding command, through the same
//! handlers, with the user in the log. Options hold until the daemon stops, except for a label,
//! which its device keeps.

use super::files::{Deed, File, Write, Written};
use super::layout::{Of, Seen};
use super::{Sysfs, input, owner};
use bcached_config::Typed;
use bcached_config::options::Scope;
use bcached_config::options::value::{Kind, Value};
use bcached_control::failure::{Failure, Kind as FailureKind};
use bcached_control::jobs::{Begin, Verb};
use bcached_control::options::Change;
use bcached_control::statistics::Counted;
use bcached_front_fuse::tree::Errno;
use std::collections::BTreeMap;

/// Offsets to subtract from counters since `clear_stats`, for these files only. The counters
/// themselves go on, so metrics and `status` do not change.
#[derive(Default)]
pub struct Cleared {
    /// Of sets and volumes, by UUID.
    counted: BTreeMap<String, Counted>,
    /// Of cache devices, by the UUID of the set.
    written: BTreeMap<String, Written>,
}

impl Cleared {
    /// Returns what was counted since the clearing; all of it if the counters have started anew.
    pub fn counted(&self, uuid: &str, now: Counted, is_total: bool) -> Counted {
        let Some(then) = self.counted.get(uuid).filter(|_| is_total) else { return now };
        let since = || {
            let (hits, misses) = (now.hits.checked_sub(then.hits)?, now.misses.checked_sub(then.misses)?);
            Some(Counted {
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
    pub fn written(&self, seen: &Seen, cache: usize) -> Written {
        let set = seen.set(cache, Written::default());
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
fn values(kind: Kind) -> String {
    match kind {
        Kind::Flag => "0 or 1".to_owned(),
        Kind::Choice(words) => format!("one of {}", words.join(", ")),
        Kind::Size => SIZES.to_owned(),
        Kind::Number(..) | Kind::Rate(..) | Kind::Time(..) => NUMBERS.to_owned(),
        Kind::Text => "a line of at most 32 bytes".to_owned(),
        Kind::Stripe | Kind::Hours => "nothing".to_owned(),
    }
}

const NUMBERS: &str = "a whole number";
const SIZES: &str = "a number of bytes, or one with the suffix k, M, G, T or P";

impl Sysfs {
    /// Carries out what a user has written.
    pub(super) fn take(
        &self,
        seen: &Seen,
        (of, file): (Of, &File),
        (path, text): (&str, &[u8]),
        user: u32,
    ) -> Result<(), Errno> {
        let not_understood = |takes: &str| not_understood(path, user, takes);
        if text.is_empty() {
            return Ok(());
        }
        let line = input::line(text).ok_or_else(|| not_understood("text"))?;
        match file.write {
            Write::Never => Err(Errno::ACCESS),
            Write::Refused(why) => Err(refuse(path, user, Errno::OPNOTSUPP, why)),
            Write::Fixed(kind, why) => {
                let wanted = normal(kind, line).ok_or_else(|| not_understood(&values(kind)))?;
                let now = self.text(seen, of, file)?.unwrap_or_default();
                let holds = if matches!(kind, Kind::Choice(_)) { format!("[{wanted}]") } else { wanted };
                if now.split_ascii_whitespace().any(|word| word == holds) {
                    Ok(())
                } else {
                    Err(refuse(path, user, Errno::OPNOTSUPP, why))
                }
            }
            Write::Option(scope, name) => {
                let owner = owner(seen, scope, of).ok_or(Errno::NODEV)?;
                let kind = scope.find(name).map(|option| option.kind).ok_or(Errno::IO)?;
                let typed = if name == "label" { label(text) } else { normal(kind, line) };
                let typed = typed.ok_or_else(|| not_understood(&values(kind)))?;
                let typed = self.between_neighbours(owner, name, typed)?;
                let change = Change {
                    set: BTreeMap::from([(name.to_owned(), Typed(typed))]),
                    runtime: name != "label",
                    ..Change::default()
                };
                (self.handlers.change)(scope, owner, change, Some(user))
                    .map_err(|failure| errno(&failure))?;
                Ok(())
            }
            Write::Deed(deed) => self.act(seen, (of, deed), (path, line), user),
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
        seen: &Seen,
        (of, deed): (Of, Deed),
        (path, line): (&str, &str),
        user: u32,
    ) -> Result<(), Errno> {
        let not_understood = |takes: &str| not_understood(path, user, takes);
        let begin = |begin: Begin| {
            (self.handlers.begin)(begin, Some(user)).map(drop).map_err(|failure| errno(&failure))
        };
        if deed == Deed::ClearStats {
            self.clear(seen, of).ok_or(Errno::NODEV)?;
            tracing::info!(
                event = "control-stats-cleared",
                uid = user,
                "{path}: the statistics start again from zero"
            );
            return Ok(());
        }
        if let (Deed::CreateFlash, Of::Cache(cache)) = (deed, of) {
            let set = seen.set(cache, Written::default()).ok_or(Errno::NODEV)?;
            let bytes = input::size(line).ok_or_else(|| not_understood(SIZES))?;
            let mut add = Begin::new(Verb::Add, free_name(seen));
            add.cache = Some(set.cache.name.clone());
            add.size_bytes = Some(bytes - bytes % set.counts.block_bytes);
            return begin(add);
        }
        let Of::Volume(index) = of else { return Err(Errno::IO) };
        let member = seen.member(index).ok_or(Errno::NODEV)?;
        let verb = |verb| Begin::new(verb, member.volume.name.clone());
        match deed {
            Deed::Stop => begin(verb(Verb::Stop)),
            // As in the kernel, there is nothing to do then.
            Deed::Detach if member.facts.attached == Some(false) => Ok(()),
            Deed::Detach => begin(verb(Verb::Detach)),
            Deed::Attach => {
                let digits = input::uuid_digits(line).ok_or_else(|| not_understood("the UUID of a set"))?;
                let is_it = |set: &super::files::Set<'_>| set.counts.set_uuid.replace('-', "") == digits;
                let mut sets =
                    (0..seen.status.caches.len()).filter_map(|cache| seen.set(cache, Written::default()));
                let nowhere = || refuse(path, user, Errno::NOENT, "no set with that UUID is served here");
                let set = sets.find(is_it).ok_or_else(nowhere)?;
                if member.facts.attached == Some(true) {
                    return Err(refuse(path, user, Errno::INVAL, "it is already attached: detach it first"));
                }
                begin(Begin { cache: Some(set.cache.name.clone()), ..verb(Verb::Attach) })
            }
            Deed::Run => match input::number(line) {
                None => Err(not_understood(NUMBERS)),
                Some(0) => Ok(()),
                Some(_) => Err(refuse(path, user, Errno::BUSY, "it is already running")),
            },
            Deed::Resize => {
                let bytes = input::size(line).ok_or_else(|| not_understood(SIZES))?;
                let bytes = bytes - bytes % member.facts.block_bytes.max(512);
                let to = |of| Begin { size_bytes: Some(bytes), ..verb(of) };
                match bytes.cmp(&member.facts.size_bytes) {
                    std::cmp::Ordering::Equal => Ok(()),
                    std::cmp::Ordering::Greater => begin(to(Verb::Grow)),
                    std::cmp::Ordering::Less => begin(to(Verb::Shrink)),
                }
            }
            Deed::ClearStats | Deed::CreateFlash => Err(Errno::IO),
        }
    }

    fn clear(&self, seen: &Seen, of: Of) -> Option<()> {
        let mut cleared = self.cleared();
        match of {
            Of::Cache(index) => {
                let set = seen.set(index, Written::default())?;
                cleared.counted.insert(set.counts.set_uuid.clone(), set.numbers.windows.total);
            }
            Of::CacheDevice(index) => {
                let set = seen.set(index, Written::default())?;
                let now = Written::of(set.counts, set.numbers);
                cleared.written.insert(set.counts.set_uuid.clone(), now);
            }
            Of::Volume(index) => {
                let member = seen.member(index)?;
                cleared.counted.insert(member.facts.uuid.clone(), member.numbers.windows.total);
            }
            Of::Nobody | Of::CacheCounts(..) | Of::VolumeCounts(..) => return None,
        }
        Some(())
    }
}

/// Converts a value of this kind from the kernel's syntax to that of `set`; `None` if it is not
/// valid for the kernel.
fn normal(kind: Kind, line: &str) -> Option<String> {
    match kind {
        Kind::Flag => input::flag(line).map(|yes| u8::from(yes).to_string()),
        Kind::Number(..) | Kind::Rate(..) | Kind::Time(..) => {
            input::number(line).map(|number| number.to_string())
        }
        // The kernel's documentation shows suffixes, which its newer versions no longer accept.
        Kind::Size => input::size(line).map(|bytes| bytes.to_string()),
        Kind::Choice(words) => words.contains(&line).then(|| line.to_owned()),
        Kind::Text | Kind::Stripe | Kind::Hours => None,
    }
}

/// Returns a label, of at most 32 bytes including the end of its line.
fn label(text: &[u8]) -> Option<String> {
    const MOST: usize = 32;
    input::line(text).filter(|_| text.len() <= MOST).map(str::to_owned)
}

/// Returns a free name for a volume that was not given one.
fn free_name(seen: &Seen) -> String {
    let is_free = |name: &String| !seen.status.volumes.iter().any(|volume| volume.name == *name);
    (0..).map(|number| format!("volume{number}")).find(is_free).unwrap_or_default()
}
