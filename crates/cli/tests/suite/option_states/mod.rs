//! Every option of a volume and of a cache is read, set, set to bad values and unset, in each state
//! that its owner can be in. The list of options is the program's own, so a new option is included
//! automatically.
//!
//! The rule: either the command succeeds, and `get` shows what was set; or it is refused, with the
//! reason and what to do, and nothing changes. What was set while a device was away applies when it
//! is back.

mod states;

use crate::common::{CommandResult, Daemon, Images, ask, bcached, done, json, requires};
use bcached_config::options::value::ValueKind;
use bcached_config::options::{OptionDefinition, OptionStorage, Scope};
use std::path::PathBuf;

/// Past the end of the cache's offsets, so that writes to a backing device alone can be made to
/// fail.
const DATA_OFFSET: u64 = 40 << 20;
const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 60 << 20;

/// The cache `fast` and its volume `media`, without automatic write-back.
struct OptionStateFixture {
    images: Images,
    fast: PathBuf,
    media: PathBuf,
    /// The path of a device while it is missing.
    away: PathBuf,
}

impl OptionStateFixture {
    fn new() -> Self {
        let images = Images::new();
        let (fast, media) = (images.blank("fast", CACHE_BYTES), images.blank("media", BACKING_BYTES));
        let offset = (DATA_OFFSET / 512).to_string();
        assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
        let made = bcached(&["make", "--writeback", "-o", &offset, "--label", "tank", "-B", &media]);
        assert_eq!(made.exit, 0, "{made:?}");
        images.configure(&format!(
            "version = 1\n[cache.fast]\ndevice = {fast:?}\n[defaults]\nwait = \"1s\"\nwriteback_running = false\n\
             [volume.media]\nbacking = {media:?}\n"
        ));
        let away = images.path("unplugged");
        Self { fast: fast.into(), media: media.into(), away, images }
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    /// Returns the stored options, each with its section. Whether a volume is detached is excluded:
    /// that is stored while a job runs, which may end at any moment.
    fn kept(&self) -> Vec<String> {
        let text = self.images.kept();
        let mut section = "";
        let mut options = Vec::new();
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            } else if line.contains(" = ") && !section.is_empty() && !line.starts_with("cache = ") {
                options.push(format!("{section} {line}"));
            }
        }
        options
    }

    /// The volume has been served, and stopped cleanly.
    fn served_once(&self) {
        let (exit, log) = self.start().stop();
        assert_eq!(exit, 0, "{log}");
    }
}

/// A state that a volume or a cache can be in.
struct OwnerState {
    /// The volume or cache whose options are tested.
    owner: &'static str,
    scope: Scope,
    /// Programs that are needed to bring it about.
    needs: &'static [&'static str],
    /// Brings it about.
    enter: fn(&OptionStateFixture) -> Daemon,
    /// Returns whether the owner is in the state.
    is_so: fn(&Daemon) -> bool,
    /// Brings it about again if it has ended, which may happen at any moment. Called before each
    /// option, and at the end.
    renew: fn(&Daemon),
    /// Options that cannot be set in it, and what the refusal says.
    refuses: &'static [(&'static str, i32, &'static str)],
    /// Options whose value is unknown in it unless set: the device stores them.
    hidden: &'static [&'static str],
    /// Options that the owner does not have.
    lacks: &'static [&'static str],
    /// Whether options stored in the superblock are written in this state: they stay there when
    /// unset.
    writes_superblock: bool,
    /// Ends it; the owner works again.
    leave: fn(&OptionStateFixture, Daemon) -> Daemon,
}

/// One option as `get` shows it.
#[derive(Clone, PartialEq, Debug)]
struct OptionShown {
    value: Option<String>,
    origin: String,
}

fn get(daemon: &Daemon, owner: &str, option: &str) -> OptionShown {
    let ran = ask(daemon, &["get", "--json", owner, option]);
    if ran.err.contains("it is a flash-only volume") {
        assert_refused(&ran, 2, "`bcached get ");
        return OptionShown { value: None, origin: String::new() };
    }
    if ran.exit != 0 {
        assert_refused(&ran, 4, "it is stored on its device, which could not be read yet");
        return OptionShown { value: None, origin: "superblock".to_owned() };
    }
    let shown = json(&ran.out)["options"][0].clone();
    let text = |key: &str| shown[key].as_str().map(str::to_owned);
    OptionShown { value: text("value"), origin: text("origin").unwrap_or_default() }
}

/// Returns a value of the option other than `now`, as `get` prints it.
fn other(option: &OptionDefinition, now: Option<&str>) -> String {
    let first = |values: &[&str]| {
        let found = values.iter().find(|value| now != Some(**value));
        (*found.expect("two are enough")).to_owned()
    };
    match option.kind {
        ValueKind::Flag => first(&["0", "1"]),
        ValueKind::Number(least, greatest) => {
            let now: u64 = now.and_then(|now| now.parse().ok()).unwrap_or(least);
            (if now < greatest { now + 1 } else { now - 1 }).to_string()
        }
        ValueKind::Size => first(&["1M", "2M"]),
        ValueKind::Stripe | ValueKind::Rate(..) => first(&["8M", "16M"]),
        ValueKind::Time(..) => first(&["40s", "50s"]),
        // Each in turn, so that the value set last differs from the initial one.
        ValueKind::Choice(words) => {
            let at = words.iter().position(|word| now == Some(*word)).map_or(0, |at| at + 1);
            words[at % words.len()].to_owned()
        }
        ValueKind::Hours => first(&["01:00-02:00", "03:00-04:00"]),
        ValueKind::Text => first(&["one", "two"]),
    }
}

/// Returns invalid values: malformed, empty, negative, fractional, with an unknown unit, and just
/// outside its range. (An option of the kernel's is clamped to its range, as in the kernel:
/// `the_end_of_a_range_is_taken_with_a_word`.)
fn bad(option: &OptionDefinition) -> Vec<String> {
    let beside = |least: u64, greatest: u64| {
        let (below, above) = (least.checked_sub(1), greatest.checked_add(1));
        below.into_iter().chain(above).collect::<Vec<u64>>()
    };
    let (ends, unit): (Vec<u64>, &str) = match option.kind {
        ValueKind::Text => return vec!["x".repeat(33)],
        _ if option.is_of_kernel => (Vec::new(), ""),
        ValueKind::Number(least, greatest) => (beside(least, greatest), ""),
        ValueKind::Rate(least, greatest) => (beside(least, greatest), ""),
        // The longest time has no end that a number could exceed.
        ValueKind::Time(least, greatest) => (beside(least, greatest), "ms"),
        ValueKind::Flag | ValueKind::Size | ValueKind::Stripe | ValueKind::Choice(_) | ValueKind::Hours => {
            (Vec::new(), "")
        }
    };
    let forms = ["?", "", "-1", "1.5.1", "1Q", "1 2", "25:00-26:00"].map(str::to_owned);
    forms.into_iter().chain(ends.iter().map(|end| format!("{end}{unit}"))).collect()
}

/// Returns whether the option's device stores it.
fn is_kept(option: &OptionDefinition) -> bool {
    matches!(
        option.place,
        OptionStorage::Label | OptionStorage::CacheMode | OptionStorage::CacheSuperblock { .. }
    )
}

/// Returns whether the option is never stored.
fn is_fleeting(option: &OptionDefinition) -> bool {
    matches!(option.place, OptionStorage::WritebackRate)
}

/// The refusal gives the reason and what to do.
#[track_caller]
fn assert_refused(ran: &CommandResult, exit: i32, part: &str) {
    let error = json(&ran.err)["error"].clone();
    let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    let whole = [text("what"), text("why"), text("next")].join("; ");
    assert_eq!((ran.exit, error["exit"].as_i64()), (exit, Some(exit.into())), "{ran:?}");
    assert!(whole.contains(part), "{part}: {ran:?}");
    let says_more = !text("why").is_empty() || !text("next").is_empty();
    assert!(!text("what").is_empty() && says_more, "{ran:?}");
}

impl OwnerState {
    fn refusal(&self, option: &OptionDefinition) -> Option<(i32, &'static str)> {
        // The label is stored on the device wherever the other options are.
        let is_any = |name: &str| name == "*" && !matches!(option.place, OptionStorage::Label);
        let found = self.refuses.iter().find(|(name, ..)| *name == option.name || is_any(name));
        found.map(|(_, exit, part)| (*exit, *part))
    }

    /// The same for an option that is valid only for the moment: it is never stored, and its
    /// present value is unpredictable.
    fn walk_fleeting(&self, site: &OptionStateFixture, daemon: &Daemon, option: &OptionDefinition) {
        let (owner, name, kept) = (self.owner, option.name, site.kept());
        let set = |value: &str, more: &[&str]| {
            ask(daemon, &[&["set", "--json", owner, &format!("{name}={value}")], more].concat())
        };
        get(daemon, owner, name);
        for value in bad(option) {
            assert_refused(&set(&value, &["--runtime"]), 2, name);
        }
        let new = other(option, None);
        let is_lacking = self.lacks.contains(&name);
        let why = if is_lacking { "it is a flash-only volume" } else { "add --runtime" };
        assert_refused(&set(&new, &[]), 2, why);
        match self.refusal(option) {
            _ if is_lacking => assert_refused(&set(&new, &["--runtime"]), 2, why),
            Some((exit, part)) => assert_refused(&set(&new, &["--runtime"]), exit, part),
            None => {
                let ran = set(&new, &["--runtime"]);
                assert_eq!(ran.exit, 0, "{ran:?}");
                assert_eq!(json(&ran.out)["changes"][0]["value"].as_str(), Some(new.as_str()), "{ran:?}");
            }
        }
        assert_refused(&ask(daemon, &["unset", "--json", owner, name]), 2, name);
        assert_eq!(site.kept(), kept, "nothing is kept of {name}");
    }

    /// Reads, sets, sets to bad values and unsets one option. Everything is as before when it
    /// returns.
    fn walk(&self, site: &OptionStateFixture, daemon: &Daemon, option: &OptionDefinition) {
        let (owner, name) = (self.owner, option.name);
        if is_fleeting(option) {
            return self.walk_fleeting(site, daemon, option);
        }
        let (before, kept) = (get(daemon, owner, name), site.kept());
        assert_eq!(
            before.value.is_none(),
            self.hidden.contains(&name) || self.lacks.contains(&name),
            "{name} is {before:?}"
        );
        let set = |value: &str, more: &[&str]| {
            let said = format!("{name}={value}");
            ask(daemon, &[&["set", "--json", owner, &said], more].concat())
        };
        let is_as_before = |after: &str| {
            assert_eq!(
                (get(daemon, owner, name), site.kept()),
                (before.clone(), kept.clone()),
                "{after} {name}"
            );
        };
        let refusal = self.refusal(option);
        for value in bad(option) {
            assert_refused(&set(&value, &[]), 2, name);
        }
        is_as_before("a bad value of");
        let new = other(option, before.value.as_deref());
        if self.lacks.contains(&name) {
            for refused in
                [set(&new, &[]), set(&new, &["--runtime"]), ask(daemon, &["unset", "--json", owner, name])]
            {
                assert_refused(&refused, 2, "it is a flash-only volume");
            }
            return is_as_before("a refusal of");
        }
        if let Some((exit, part)) = refusal {
            assert_refused(&set(&new, &[]), exit, part);
            is_as_before("a refusal of");
        } else {
            self.assert_set(daemon, option, &set(&new, &[]), (&new, "set"));
            assert!(matches!(option.place, OptionStorage::Label) || site.kept() != kept, "{name} is kept");
            let again = set(&new, &[]);
            assert_eq!(json(&again.out)["changes"][0]["already"].as_bool(), Some(true), "{again:?}");
        }
        if matches!(option.place, OptionStorage::Label) {
            assert_refused(&set("three", &["--runtime"]), 2, "--runtime");
            assert_refused(&ask(daemon, &["unset", "--json", owner, name]), 2, "only the device keeps it");
        } else {
            let newest = other(option, Some(&new));
            self.assert_set(daemon, option, &set(&newest, &["--runtime"]), (&newest, "runtime"));
            done(daemon, &["unset", owner, name]);
        }
        let now = get(daemon, owner, name);
        // Nothing else sets it, and the device stores the last value.
        let stays = refusal.is_none() && is_kept(option) && self.writes_superblock;
        let after = if stays { OptionShown { value: Some(new), ..before } } else { before };
        assert_eq!(now, after, "{name} is unset");
        let is_kept = site.kept().iter().any(|line| line.contains(&format!("] {name} = ")));
        assert!(!is_kept, "{name}: {:?}", site.kept());
    }

    fn assert_set(
        &self,
        daemon: &Daemon,
        option: &OptionDefinition,
        ran: &CommandResult,
        (value, origin): (&str, &str),
    ) {
        assert_eq!(ran.exit, 0, "{}={value}: {ran:?}\n{}", option.name, daemon.log());
        let origin = if matches!(option.place, OptionStorage::Label) { "superblock" } else { origin };
        let wanted = OptionShown { value: Some(value.to_owned()), origin: origin.to_owned() };
        assert_eq!(get(daemon, self.owner, option.name), wanted, "{}", option.name);
    }

    /// Tests all options, then sets each, half of them with `--runtime`, and checks that they apply
    /// when the state is over.
    fn check(&self) {
        if !self.needs.iter().all(|tool| requires(tool)) {
            return;
        }
        let site = OptionStateFixture::new();
        let daemon = (self.enter)(&site);
        let holds = |when: &str| {
            daemon.wait_for(when, |_| {
                (self.renew)(&daemon);
                (self.is_so)(&daemon)
            });
        };
        holds("the state was not entered");
        for option in self.scope.options() {
            (self.renew)(&daemon);
            self.walk(&site, &daemon, option);
        }
        let mut wanted = Vec::new();
        for (n, option) in self.scope.options().iter().enumerate() {
            let is_label = matches!(option.place, OptionStorage::Label);
            let runtime: &[&str] = if (n % 2 == 1 || self.refusal(option).is_some()) && !is_label {
                &["--runtime"]
            } else {
                &[]
            };
            if is_fleeting(option)
                || self.lacks.contains(&option.name)
                || (is_label && self.refusal(option).is_some())
            {
                continue;
            }
            let value = other(option, get(&daemon, self.owner, option.name).value.as_deref());
            done(&daemon, &[&["set", self.owner, &format!("{}={value}", option.name)], runtime].concat());
            wanted.push((option.name, value, !runtime.is_empty()));
        }
        holds("the state is over though nobody has ended it");
        let id = daemon.id();
        let daemon = (self.leave)(&site, daemon);
        let is_same = daemon.id() == id;
        for (name, value, is_for_now) in &wanted {
            if is_same || !*is_for_now {
                let now = get(&daemon, self.owner, name).value;
                assert_eq!(now.as_ref(), Some(value), "{name} when that is over\n{}", daemon.log());
            }
        }
        let (exit, log) = daemon.stop();
        assert_eq!(exit, 0, "{log}");
        if let Some((_, mode, false)) = wanted.iter().find(|(name, ..)| *name == "cache_mode") {
            let shown = json(&bcached(&["show", "--json", site.media.to_str().expect("text")]).out);
            // The word of `bcache-super-show`, which printed it first.
            let word = if mode == "none" { "no caching" } else { mode.as_str() };
            assert_eq!(shown["backing"]["cache_mode"].as_str(), Some(word), "{log}");
        }
    }
}
