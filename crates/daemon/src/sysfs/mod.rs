//! The kernel's control files, as `sys` in a FUSE mount. Scripts and monitors find what they know
//! from `/sys/fs/bcache` and `/sys/block/bcacheN/bcache`, with the same names, permissions and
//! formats, for what this daemon serves.
//!
//! | file | what |
//! |---|---|
//! | `layout` | the directories and links |
//! | `files` | the files, what they return and accept |
//! | `print`, `input` | the formats of what is read and written |
//! | `actions` | the effects of writes |
//!
//! All values come from the same snapshot as `status`, which waits for an engine for a limited
//! time. An engine that does not answer in that time is not asked again by each reader: until
//! [`SILENCE`] has passed, readers get its last snapshot.

mod actions;
mod files;
mod input;
mod layout;
mod print;

use crate::control_server::Handlers;
use crate::control_server::{StatusHandler, WorkPermit};
use actions::ClearedStats;
use bcached_config::options::Scope;
use bcached_config::options::value::{Value, ValueKind};
use bcached_control::names::TypedName;
use bcached_control::status::Status;
use bcached_front_fuse::tree::Errno;
use bcached_front_fuse::{ControlTree, TreeEntry};
use files::{File, FileRead};
use layout::{Content, FileOwner, Node, TreeSnapshot, Window};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The name of the tree in the mount.
pub const NAME: &str = "sys";

/// How old a snapshot may be for finding paths, unless something is not found.
const LAYOUT: Duration = Duration::from_millis(100);

/// How long readers get the last snapshot, once an engine did not answer.
const SILENCE: Duration = Duration::from_secs(10);

/// The tree.
pub struct Sysfs {
    /// Returns the status without what the front ends report.
    look: StatusHandler,
    handlers: Arc<Handlers>,
    last: Mutex<Option<CachedSnapshot>>,
    cleared: Mutex<ClearedStats>,
}

/// A snapshot.
struct CachedSnapshot {
    seen: Arc<TreeSnapshot>,
    began: Instant,
    ended: Instant,
    /// Every engine has answered.
    is_whole: bool,
}

impl Sysfs {
    /// Makes a tree that shows what `look` returns, and has `handlers` carry out writes.
    #[must_use]
    pub fn new(look: StatusHandler, handlers: Arc<Handlers>) -> Self {
        Self { look, handlers, last: Mutex::default(), cleared: Mutex::default() }
    }

    /// Returns a snapshot begun at `since` or later, unless an engine does not answer.
    fn seen(&self, since: Instant) -> Arc<TreeSnapshot> {
        // A reader that arrives during a look waits for its end, and may then look itself.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(look) = &*last
            && (look.began >= since || (!look.is_whole && look.ended.elapsed() < SILENCE))
        {
            return Arc::clone(&look.seen);
        }
        let began = Instant::now();
        let mut status = (self.look)(None);
        let is_whole = !status.caches.iter().any(is_silent);
        if let (Some(look), false) = (&*last, is_whole) {
            keep_what_is_silent(&mut status, &look.seen.status);
        }
        let seen = Arc::new(TreeSnapshot::new(status));
        *last = Some(CachedSnapshot { seen: Arc::clone(&seen), began, ended: Instant::now(), is_whole });
        seen
    }

    /// Returns what is at a path, with the snapshot it is from. If it is not found, a new snapshot
    /// is taken, as it may have appeared just now.
    fn find(&self, path: &str, since: Instant) -> Option<(Node, Arc<TreeSnapshot>)> {
        let found = |since| {
            let seen = self.seen(since);
            seen.find(path).map(|node| (node, seen))
        };
        found(since).or_else(|| found(Instant::now()))
    }

    fn recent() -> Instant {
        let now = Instant::now();
        now.checked_sub(LAYOUT).unwrap_or(now)
    }

    fn cleared(&self) -> MutexGuard<'_, ClearedStats> {
        self.cleared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the text of the file; `None` if its owner is gone.
    fn text(&self, seen: &TreeSnapshot, of: FileOwner, file: &File) -> Result<Option<String>, Errno> {
        let set = |index| {
            let cleared = self.cleared().written(seen, index);
            seen.set(index, cleared)
        };
        let text = match (file.read, of) {
            (FileRead::Set(read), FileOwner::Cache(index) | FileOwner::CacheDevice(index)) => {
                set(index).map(|set| read(&set))
            }
            (FileRead::Bare(read), FileOwner::Cache(index)) => return Ok(set(index).map(|set| read(&set))),
            (FileRead::Ages, FileOwner::CacheDevice(index)) => self.ages(seen, index),
            (FileRead::Volume(read), FileOwner::Volume(index)) => {
                seen.member(index).map(|member| read(&member))
            }
            (FileRead::Counted(read), FileOwner::CacheCounts(index, window)) => set(index).map(|set| {
                let counted = window.of(&set.numbers.windows);
                read(&self.cleared().counted(&set.counts.set_uuid, counted, window == Window::Total))
            }),
            (FileRead::Counted(read), FileOwner::VolumeCounts(index, window)) => {
                seen.member(index).map(|member| {
                    let counted = window.of(&member.numbers.windows);
                    read(&self.cleared().counted(&member.facts.uuid, counted, window == Window::Total))
                })
            }
            (FileRead::Option(scope, name), of) => {
                let Some(owner) = owner(seen, scope, of) else { return Ok(None) };
                Some(shown(scope, name, self.option(scope, owner, name)?))
            }
            _ => return Err(Errno::IO),
        };
        Ok(text.map(|text| text + "\n"))
    }

    /// Returns the value of an option in force.
    fn option(&self, scope: Scope, owner: &str, name: &str) -> Result<Value, Errno> {
        let called = TypedName { typed: owner, looks_at_files: false };
        let options = (self.handlers.options)(scope, called).map_err(|failure| actions::errno(&failure))?;
        let value =
            options.options.into_iter().find(|shown| shown.name == name).and_then(|shown| shown.value);
        let read = value.and_then(|value| scope.find(name)?.read(&value).ok());
        read.ok_or(Errno::IO)
    }

    /// The text of `priority_stats`: it needs a scan of all buckets, as in the kernel.
    fn ages(&self, seen: &TreeSnapshot, index: usize) -> Option<String> {
        let name = &seen.status.caches.get(index)?.name;
        let looked = TreeSnapshot::new((self.look)(Some(WorkPermit::default())));
        let place = looked.status.caches.iter().position(|cache| cache.name == *name)?;
        let set = looked.set(place, files::WrittenBytes::default())?;
        let ages = set.numbers.ages.clone().unwrap_or_default();
        let quantiles: Vec<_> = ages.quantiles.iter().map(u64::to_string).collect();
        let percent = |percent: u64| format!("{percent}%");
        let text = print::lines(&[
            ("Unused", 2, percent(set.numbers.unused_percent)),
            ("Clean", 2, percent(set.numbers.clean_percent)),
            ("Dirty", 2, percent(set.numbers.dirty_percent)),
            ("Metadata", 1, percent(set.numbers.metadata_percent)),
            ("Average", 1, ages.average.unwrap_or_default().to_string()),
            ("Sectors per Q", 1, (ages.bytes_per_quantile / 512).to_string()),
            ("Quantiles", 1, format!("[{}]", quantiles.join(" "))),
        ]);
        Some(text.trim_end_matches('\n').to_owned())
    }
}

/// The name of the volume or cache whose option a file shows.
fn owner(seen: &TreeSnapshot, scope: Scope, of: FileOwner) -> Option<&str> {
    match (scope, of) {
        (Scope::Volume, FileOwner::Volume(index)) => {
            seen.status.volumes.get(index).map(|volume| volume.name.as_str())
        }
        (Scope::Cache, FileOwner::Cache(index) | FileOwner::CacheDevice(index)) => {
            seen.status.caches.get(index).map(|cache| cache.name.as_str())
        }
        _ => None,
    }
}

/// Formats the value of an option as the kernel does.
fn shown(scope: Scope, name: &str, value: Value) -> String {
    match (value, scope.find(name).map(|option| option.kind)) {
        (Value::Word(word), Some(ValueKind::Choice(words))) => print::choice(words, word),
        (Value::Size(bytes), _) => print::size(bytes),
        (Value::Rate(sectors), _) => sectors.to_string(),
        (Value::Time(time), _) => time.as_secs().to_string(),
        (value, _) => value.to_string(),
    }
}

/// True for an open set whose engine does not answer.
fn is_silent(cache: &bcached_control::status::CacheStatus) -> bool {
    cache.state == "open" && cache.counts.is_none()
}

/// Copies from `before` what is known of the sets whose engines do not answer.
fn keep_what_is_silent(status: &mut Status, before: &Status) {
    let silent: Vec<String> =
        status.caches.iter().filter(|cache| is_silent(cache)).map(|cache| cache.name.clone()).collect();
    for cache in status.caches.iter_mut().filter(|cache| silent.contains(&cache.name)) {
        let then = before.caches.iter().find(|then| then.name == cache.name);
        cache.counts = then.and_then(|then| then.counts.clone());
    }
    for volume in &mut status.volumes {
        let is_its = volume.cache.as_ref().is_some_and(|cache| silent.contains(cache));
        let then = before.volumes.iter().find(|then| then.name == volume.name && is_its);
        if let (Some(then), true) = (then, volume.facts.is_some()) {
            volume.facts.clone_from(&then.facts);
        }
    }
}

impl ControlTree for Sysfs {
    fn entry(&self, path: &str) -> Option<TreeEntry> {
        self.find(path, Self::recent()).map(|(node, _)| entry(node))
    }

    fn list(&self, path: &str) -> Option<Vec<(String, TreeEntry)>> {
        let (node, seen) = self.find(path, Instant::now())?;
        let Node::Directory(directory) = node else { return None };
        Some(seen.list(directory).into_iter().map(|(name, node)| (name, entry(node))).collect())
    }

    fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
        let (node, seen) = self.find(path, Instant::now()).ok_or(Errno::NODEV)?;
        let text = match node {
            Node::File(of, Content::Listed(file)) => self.text(&seen, of, file)?.ok_or(Errno::NODEV)?,
            Node::File(_, Content::Number(number)) => {
                let (major, minor) = number.unwrap_or_default();
                format!("{major}:{minor}\n")
            }
            Node::File(_, Content::Sectors(sectors)) => format!("{sectors}\n"),
            Node::Directory(_) => return Err(Errno::ISDIR),
            Node::Link(_) => return Err(Errno::INVAL),
        };
        let mut text = text.into_bytes();
        text.truncate(bcached_front_fuse::tree::TEXT_BYTES_MAX);
        Ok(text)
    }

    fn write(&self, path: &str, text: &[u8], user: u32) -> Result<(), Errno> {
        let (node, seen) = self.find(path, Instant::now()).ok_or(Errno::NODEV)?;
        let Node::File(of, Content::Listed(file)) = node else { return Err(Errno::ACCESS) };
        self.take(&seen, (of, file), (path, text), user)
    }
}

fn entry(node: Node) -> TreeEntry {
    match node {
        Node::Directory(_) => TreeEntry::Directory,
        Node::Link(target) => TreeEntry::Link { target },
        Node::File(_, Content::Listed(file)) => TreeEntry::File { mode: file.mode() },
        Node::File(..) => TreeEntry::File { mode: 0o444 },
    }
}

#[cfg(test)]
mod tests;
