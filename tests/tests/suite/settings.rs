//! Settings kept in superblocks, changed by one side and honoured by the other: cache mode and
//! label of a backing device, replacement policy and `discard` of a cache. Each side finds what the
//! other has left, works by it, and leaves something else.

use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::offline::judge;
use bcached_tests::set::{CacheMode, CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ending, KEEP_DIRTY, Kernel, Ours, uuid_of};
use bcached_tests::uml::Uml;
use bcached_tests::workload::{Step, Workload};

/// Number of writes of a workload; a turn has two workloads.
const WRITES: u64 = 300;
/// The flush after which a crash comes.
const LAST_FLUSH: u64 = 5;

/// The settings that a superblock keeps, in the words of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    mode: CacheMode,
    label: &'static str,
    policy: &'static str,
    discard: bool,
}

/// The settings of each leg. Each side finds each mode and each policy, and leaves them to the
/// other.
const LEGS: [Settings; 8] = [
    Settings { mode: CacheMode::Writethrough, label: "first", policy: "fifo", discard: true },
    Settings { mode: CacheMode::Writearound, label: "", policy: "random", discard: true },
    Settings {
        mode: CacheMode::Writeback,
        label: "label of thirty-one characters!",
        policy: "lru",
        discard: false,
    },
    Settings { mode: CacheMode::None, label: "b", policy: "fifo", discard: true },
    Settings { mode: CacheMode::Writethrough, label: "no/name", policy: "random", discard: true },
    Settings { mode: CacheMode::Writeback, label: "b", policy: "lru", discard: false },
    Settings { mode: CacheMode::None, label: "c", policy: "random", discard: false },
    Settings { mode: CacheMode::Writearound, label: "last", policy: "lru", discard: true },
];

/// A turn of either side: what it finds, what it leaves, and how it ends.
#[derive(Clone, Copy, Debug)]
struct Turn {
    before: Settings,
    after: Settings,
    ending: Ending,
    seed: u64,
}

/// The effects of a workload, in bytes (the kernel prints them in tenths of a unit).
#[derive(Clone, Copy, Debug)]
struct Done {
    /// Increase of dirty data.
    dirty: i64,
    /// Data written to the cache.
    cached: i64,
    /// Data that the workload requested to be written.
    asked: i64,
}

impl Done {
    /// Checks by where the data went that the mode was `mode`.
    fn expect(&self, mode: CacheMode) -> Outcome {
        let to_cache = matches!(mode, CacheMode::Writeback | CacheMode::Writethrough);
        // A few requests may bypass the cache, and overwritten data may have been dirty before.
        let is_right = (self.dirty > self.asked / 2) == (mode == CacheMode::Writeback)
            && if to_cache { self.cached > self.asked * 3 / 4 } else { self.cached < self.asked / 8 };
        if is_right { Ok(()) } else { Err(Failure::new(format!("{self:?} is not {}", mode.name()))) }
    }
}

/// Returns a workload whose writes are directed by the cache mode alone. It has no reads, since
/// those fill the cache.
fn writes(set: &CacheSet, seed: u64) -> Workload {
    Workload { read_every: 0, ..set.further(0, seed, WRITES) }
}

fn asked(workload: &Workload) -> i64 {
    let sectors =
        workload.steps().map(|step| if let Step::Write { sectors, .. } = step { sectors } else { 0 });
    i64::try_from(sectors.sum::<u64>() * 512).expect("small")
}

/// Parses a size that a kernel prints, such as "29.7M".
fn bytes_of(said: &str) -> Outcome<i64> {
    let (number, unit) = said.split_at(said.len().saturating_sub(1));
    let power = "kMG".find(unit).context(format_args!("no unit: {said}"))?;
    let tenths: i64 = match number.split_once('.') {
        Some((whole, tenth)) => whole.parse::<i64>()? * 10 + tenth.parse::<i64>()?,
        None => number.parse::<i64>()? * 10,
    };
    Ok((tenths << (10 * (power + 1))) / 10)
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, found: T, wanted: T) -> Outcome {
    if found == wanted { Ok(()) } else { Err(Failure::new(format!("{what}: {found:?}, wanted {wanted:?}"))) }
}

/// Runs a kernel's turn. It works by the settings it finds; under the settings it leaves, a second
/// workload runs, which may not reach its end.
fn kernel_turn(kernel: &Kernel<'_>, set: &mut CacheSet, turn: Turn) -> Outcome {
    let Turn { before, after, ending, seed } = turn;
    const VOLUME: &str = "/sys/block/bcache0/bcache";
    let look = format!(
        "echo found mode $(cat {VOLUME}/cache_mode)\necho found label $(cat {VOLUME}/label)\n\
        echo found policy $(cat $(set_directory)/cache0/cache_replacement_policy)\n\
        echo found discard $(cat $(set_directory)/cache0/discard)\nkeep_dirty 0\n"
    );
    let count = |when: &str| {
        format!(
            "echo {when} dirty $(cat {VOLUME}/dirty_data)\necho {when} cached $(cat $(set_directory)/cache0/written)\n"
        )
    };
    let change = format!(
        "echo {} > {VOLUME}/cache_mode\necho '{}' > {VOLUME}/label\n\
        echo {} > $(set_directory)/cache0/cache_replacement_policy\necho {} > $(set_directory)/cache0/discard\n",
        after.mode.name(),
        after.label,
        after.policy,
        u8::from(after.discard)
    );
    let first = writes(set, seed);
    let second = Workload { seed: seed + 1000, first_sequence: first.next_sequence(), ..first };
    let questions = [look + &count("before"), count("after") + &change];
    let questions: Vec<&str> = questions.iter().map(String::as_str).collect();
    let report = kernel.leg_asking(set, &questions, &[first, second], ending)?;
    let said = |prefix: &str| report.line_after(prefix).map(str::trim).context(format_args!("no {prefix}"));
    let chosen = |prefix: &str| {
        let choice = said(prefix)?;
        let (_, rest) = choice.split_once('[').context(choice)?;
        rest.split_once(']').map(|(chosen, _)| chosen.to_owned()).context(choice)
    };
    expect("mode", chosen("found mode ")?, before.mode.name().to_owned())?;
    expect("policy", chosen("found policy ")?, before.policy.to_owned())?;
    expect("label", said("found label")?, before.label)?;
    expect("discard", said("found discard ")?, if before.discard { "1" } else { "0" })?;
    let grown = |what: &str| {
        Outcome::Ok(
            bytes_of(said(&format!("after {what} "))?)? - bytes_of(said(&format!("before {what} "))?)?,
        )
    };
    Done { dirty: grown("dirty")?, cached: grown("cached")?, asked: asked(&first) }.expect(before.mode)
}

/// Runs a turn of ours in the same way. The superblocks' settings apply to a daemon without a
/// configuration.
fn our_turn(ours: &Ours, set: &mut CacheSet, turn: Turn) -> Outcome {
    let before = turn.before;
    let program = ours.program();
    let (volume, cache) = (uuid_of(&set.backings[0])?, set.cache.display().to_string());
    let daemon = Daemon::start(program, set)?;
    set.left_by_kernel = false;
    let quiet = ["sequential_cutoff=0", "writeback_running=0", "--runtime"];
    daemon.command(program, &[&["set", &volume], &quiet[..]].concat())?;
    let patient = ["congested_read_threshold_us=0", "congested_write_threshold_us=0", "--runtime"];
    daemon.command(program, &[&["set", &cache], &patient[..]].concat())?;
    let mut client = daemon.prove(set, 0)?;
    // In every mode, we write over dirty data in the cache.
    daemon.command(program, &["flush", &volume])?;
    let status = daemon.status(program)?;
    let text = |of: &str, name: &str| status[of][0][name].as_str().unwrap_or_default().to_owned();
    expect("mode", text("volumes", "cache_mode"), before.mode.name().to_owned())?;
    expect("label", text("volumes", "label"), before.label.to_owned())?;
    expect("policy", text("caches", "cache_replacement_policy"), before.policy.to_owned())?;
    expect("discard", text("caches", "discard"), if before.discard { "on" } else { "off" }.to_owned())?;
    let first = writes(set, turn.seed);
    daemon.write(set, &first, &mut client, Ending::CleanStop)?;
    let later = daemon.status(program)?;
    let grown = |of: &str, name: &str| {
        let number =
            |status: &serde_json::Value| status[of][0].pointer(name).and_then(serde_json::Value::as_i64);
        Outcome::Ok(number(&later).context(name)? - number(&status).context(name)?)
    };
    let (dirty, cached) =
        (grown("volumes", "/dirty_bytes")?, grown("caches", "/written_by_cause_bytes/data")?);
    Done { dirty, cached, asked: asked(&first) }.expect(before.mode)?;
    drop(client);
    daemon.stop()?;
    leave(ours, set, Turn { seed: turn.seed + 1000, ..turn })
}

/// Changes the settings through a daemon with a configuration, so that they persist.
fn leave(ours: &Ours, set: &mut CacheSet, turn: Turn) -> Outcome {
    let after = turn.after;
    let program = ours.program();
    let daemon = Daemon::configured(program, set, KEEP_DIRTY)?;
    let (mode, label) = (format!("cache_mode={}", after.mode.name()), format!("label={}", after.label));
    daemon.command(program, &["set", "v0", &mode, &label])?;
    let policy = format!("cache_replacement_policy={}", after.policy);
    let discard = format!("discard={}", u8::from(after.discard));
    daemon.command(program, &["set", "fast", &policy, &discard])?;
    let mut client = daemon.prove(set, 0)?;
    let second = writes(set, turn.seed);
    daemon.write(set, &second, &mut client, turn.ending)?;
    drop(client);
    daemon.end(set, turn.ending)?;
    // The settings in files beside a configuration would override the superblocks.
    std::fs::remove_dir_all(set.directory().join("config.d"))?;
    Ok(())
}

#[test]
fn what_superblocks_keep_is_honoured_by_the_other_side() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let mut set = CacheSet::make(Geometry::small(64 << 10, 512), 1, Maker::Tools)?;
    let mut before = Settings { mode: CacheMode::Writeback, label: "", policy: "lru", discard: false };
    for (leg, after) in (0..).zip(LEGS) {
        let ending = if leg % 4 < 2 { Ending::CleanStop } else { Ending::CrashAfterFlush(LAST_FLUSH) };
        let turn = Turn { before, after, ending, seed: leg };
        let done =
            if leg % 2 == 0 { kernel_turn(&kernel, &mut set, turn) } else { our_turn(&ours, &mut set, turn) };
        done.context(format_args!("{turn:?}"))?;
        judge(&set).context(format_args!("after leg {leg}"))?;
        before = after;
    }
    kernel_turn(&kernel, &mut set, Turn { before, after: before, ending: Ending::CleanStop, seed: 99 })
}
