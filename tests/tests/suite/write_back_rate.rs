//! Compares the rate at which a kernel writes back with our controller, fed with the same numbers:
//! the target, terms and rate after each of its steps must be equal except for the kernel's
//! rounding. The time of a step and the actual write-back rate are not tested.

use std::time::Duration;

use bcached_engine::{RateController, RateInfo, RateInputs, VolumeOptions, dirty_target};
use bcached_env::Time;
use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel};
use bcached_tests::uml::Uml;
use bcached_tests::workload::Workload;

/// Shell commands that print the kernel's state of the controller of `/dev/bcache0` ten times a
/// second, with the times before and after each query. If the machine stalls for long, there may be
/// no sample for a step.
const LOOKS: &str = "for look in $(busybox seq 40); do\n\
    read asked rest < /proc/uptime\n\
    said=$(cat /sys/block/bcache0/bcache/writeback_rate_debug)\n\
    read answered rest < /proc/uptime\n\
    echo look $phase $asked $answered $said\n\
    sleep 0.1\ndone\n";
/// Interval between two steps of a controller, in seconds.
const STEP: u64 = 1;

/// A number between two bounds, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Span {
    least: f64,
    most: f64,
}

impl Span {
    fn meets(self, other: Self) -> bool {
        self.least <= other.most && other.least <= self.most
    }

    /// Parses a value such as `-155.0k` into its range in sectors: the kernel truncates to a tenth
    /// of the unit.
    fn parse(said: &str) -> Outcome<Self> {
        let said = said.trim_end_matches("/sec");
        let (is_negative, said) = said.strip_prefix('-').map_or((false, said), |rest| (true, rest));
        let (number, unit) = said.split_at(said.len().saturating_sub(1));
        let power =
            "kMGT".find(unit).filter(|_| !unit.is_empty()).context(format_args!("no size: {said}"))?;
        let sectors = 2.0 * 1024_f64.powi(i32::try_from(power)?);
        let least = number.parse::<f64>()? * sectors;
        // For numbers above 1000, the kernel would have used the next unit.
        let most = least + sectors / 10.0;
        if is_negative {
            Ok(Self { least: -most, most: -least })
        } else if least == 0.0 {
            Ok(Self { least: -most, most })
        } else {
            Ok(Self { least, most })
        }
    }
}

/// The number of sectors is small enough to be exact.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
const fn real(sectors: i64) -> f64 {
    sectors as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of dirty sectors")]
const fn whole(sectors: f64) -> u64 {
    sectors as u64
}

/// A sample of the kernel's state.
#[derive(Clone, Debug)]
struct Look {
    phase: usize,
    asked_seconds: f64,
    answered_seconds: f64,
    rate: Span,
    dirty: Span,
    target: Span,
    proportional: Span,
    integral: Span,
    line: String,
}

impl Look {
    fn parse(line: &str) -> Outcome<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after = |name: &str| {
            let at = words.iter().position(|word| *word == name).context(format_args!("no {name} {line}"))?;
            Span::parse(words.get(at + 1).context("cut off")?).context(name)
        };
        Ok(Self {
            phase: words.first().context("no phase")?.parse()?,
            asked_seconds: words.get(1).context("no time")?.parse()?,
            answered_seconds: words.get(2).context("no time")?.parse()?,
            rate: after("rate:")?,
            dirty: after("dirty:")?,
            target: after("target:")?,
            proportional: after("proportional:")?,
            integral: after("integral:")?,
            line: line.to_owned(),
        })
    }

    fn is_another_step(&self, other: &Self) -> bool {
        (self.rate, self.proportional, self.integral) != (other.rate, other.proportional, other.integral)
    }
}

/// A setting that a phase changes: in the kernel's file, and in our options.
type Turn = (&'static str, fn(&mut VolumeOptions));

const PHASES: [&[Turn]; 5] = [
    // Without a change. The kernel's first step may come as late as its default interval.
    &[],
    &[],
    &[
        ("writeback_rate_p_term_inverse 400", |options| options.writeback_rate_p_term_inverse = 400),
        ("writeback_rate_i_term_inverse 100", |options| options.writeback_rate_i_term_inverse = 100),
    ],
    // The target is above the dirty data, so the accumulated integral decreases.
    &[("writeback_percent 40", |options| options.writeback_percent = 40)],
    &[("writeback_rate_minimum 300", |options| options.writeback_rate_minimum = 300)],
];

/// Number of parts into which the range of possible dirty data at a step is divided. The two ends
/// alone are not enough. The integral term no longer decreases once it is below zero. One end may
/// then be far below zero and the other just below, while the values between them are just below as
/// well.
const PARTS: u32 = 64;

/// The controller, for each amount of dirty data that is possible at its steps, from the least to
/// the most.
#[derive(Clone, Debug)]
struct Ours {
    rates: Vec<RateController>,
    now: Time,
    /// The options at the last step.
    options: VolumeOptions,
}

impl Ours {
    /// Returns the state after one more step. With `keeps_up`, more is owed than was paid, so the
    /// device is not the bottleneck.
    fn step(&self, options: &VolumeOptions, dirty: Span, target: u64, keeps_up: bool) -> Self {
        let mut next = self.clone();
        // After that long, everything is paid.
        next.options = *options;
        next.now = self.now + Duration::from_secs(if keeps_up { STEP } else { 1_000_000 });
        let (least, most) = (dirty.least.floor(), dirty.most.ceil());
        for (rate, part) in next.rates.iter_mut().zip(0..) {
            if keeps_up {
                rate.charge(next.now, rate.allowed() * 4);
            }
            let measured = RateInputs {
                dirty: whole(least + (most - least) * f64::from(part) / f64::from(PARTS)),
                target,
                in_use_percent: 20,
                dirty_buckets: 1,
                bucket_sectors: 1024,
                is_idle: false,
                is_full: false,
            };
            rate.update(next.now, options, &measured, 0);
        }
        next
    }

    fn span(&self, of: impl Fn(&RateInfo) -> i64) -> Span {
        let each = self.rates.iter().map(|rate| real(of(&rate.info(self.now, &self.options))));
        each.fold(Span { least: f64::INFINITY, most: f64::NEG_INFINITY }, |span, one| Span {
            least: span.least.min(one),
            most: span.most.max(one),
        })
    }

    /// Returns the spans of the rate, the proportional term and the integral term.
    fn spans(&self) -> [Span; 3] {
        [
            self.span(|info| info.rate.map_or(0, u64::cast_signed)),
            self.span(|info| info.proportional),
            self.span(|info| info.integral),
        ]
    }

    fn agrees(&self, look: &Look) -> bool {
        let said = [look.rate, look.proportional, look.integral];
        self.spans().iter().zip(said).all(|(ours, said)| ours.meets(said))
    }
}

/// A possible history of the kernel's controller up to a sample.
#[derive(Clone)]
struct Course {
    ours: Ours,
    /// The earliest time of its last step, in seconds.
    stepped: f64,
    /// Number of steps at which the device kept up.
    grown: u32,
}

impl Course {
    /// Returns the possible histories between two samples. A step that changes less than the
    /// kernel's precision is not visible, and if the machine stalls for long, there may be several
    /// steps. The kernel does not report whether the device kept up at a step, but its integral
    /// term depends on it.
    fn until(&self, look: &Look, before: &Look, options: &[VolumeOptions], target: &Target<'_>) -> Vec<Self> {
        let dirty = Span { least: look.dirty.least, most: before.dirty.most };
        let (mut possible, mut last) = (vec![self.clone()], vec![self.clone()]);
        for _ in 0..STEPS_MAX {
            let is_due = |course: &Self| look.answered_seconds - course.stepped >= real(STEP.cast_signed());
            last = last
                .iter()
                .filter(|course| is_due(course))
                .flat_map(|course| {
                    options.iter().flat_map(move |options| {
                        [true, false].map(|up| Self {
                            ours: course.ours.step(options, dirty, target(options), up),
                            // Several steps may have been late, and the next is counted from when
                            // it was due.
                            stepped: before.asked_seconds.max(course.stepped + real(STEP.cast_signed())),
                            grown: course.grown + u32::from(up),
                        })
                    })
                })
                .collect();
            possible.extend(last.iter().cloned());
        }
        possible.retain(|course| course.ours.agrees(look));
        possible
    }

    /// Returns whether nothing can distinguish the two any more.
    fn is_like(&self, other: &Self) -> bool {
        self.ours.spans() == other.ours.spans() && self.stepped.total_cmp(&other.stepped).is_eq()
    }
}

/// Returns the target in sectors.
type Target<'a> = dyn Fn(&VolumeOptions) -> u64 + 'a;

/// Maximum number of steps between two samples.
const STEPS_MAX: u32 = 3;
/// Maximum number of histories followed: those that have grown most.
const COURSES_MAX: usize = 64;

/// Fills half a cache with dirty data of one of two volumes of the same size, which is far above
/// its target. Then takes the samples, phase by phase.
fn looks(uml: &Uml, geometry: Geometry) -> Outcome<Vec<Look>> {
    const VOLUME: &str = "/sys/block/bcache0/bcache";
    let mut set = CacheSet::make(geometry, 2, Maker::Tools)?;
    let workload = Workload { write_sectors_max: 512, read_every: 0, ..set.further(0, 1, 400) };
    let before = format!(
        "keep_dirty 0\necho 0 > $(set_directory)/internal/idle_max_writeback_rate\n\
        echo {STEP} > {VOLUME}/writeback_rate_update_seconds\n"
    );
    let mut after = format!("echo 1 > {VOLUME}/writeback_running\n");
    for (phase, turns) in PHASES.iter().enumerate() {
        for (turn, _) in *turns {
            let (name, value) = turn.split_once(' ').context("a name and a value")?;
            after += &format!("echo {value} > {VOLUME}/{name}\n");
        }
        after += &format!("phase={phase}\n{LOOKS}");
    }
    let report = Kernel(uml).leg_asking(&mut set, &[&before, &after], &[workload], Ending::CleanStop)?;
    let lines = report.output.iter().filter_map(|line| line.strip_prefix("look "));
    lines.map(Look::parse).collect()
}

/// Removes duplicates, and keeps those that have grown most.
fn told_apart(mut courses: Vec<Course>) -> Vec<Course> {
    courses.sort_by_key(|course| std::cmp::Reverse(course.grown));
    let mut kept: Vec<Course> = Vec::new();
    for course in courses {
        if kept.len() < COURSES_MAX && !kept.iter().any(|other| other.is_like(&course)) {
            kept.push(course);
        }
    }
    kept
}

#[test]
fn a_kernel_s_rate_is_ours() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let geometry = Geometry::small(512 << 10, 4096);
    let looks = looks(&uml, geometry)?;
    let mut options =
        VolumeOptions { writeback_rate_update: Duration::from_secs(STEP), ..VolumeOptions::default() };
    let target = |options: &VolumeOptions| {
        let (cache, percent) = (geometry.cache_bytes / 512, options.writeback_percent);
        dirty_target(cache, percent, geometry.volume_sectors, 2 * geometry.volume_sectors)
    };
    let rates = vec![RateController::default(); PARTS as usize + 1];
    let ours = Ours { rates, now: Time::default(), options };
    let mut courses = vec![Course { ours, stepped: 0.0, grown: 0 }];
    let mut steps = [0; PHASES.len()];
    // Before the first step, there is no target.
    let first = looks.iter().position(|look| look.target.least > 0.0).context("no target")?;
    for pair in looks[first.saturating_sub(1)..].windows(2) {
        let [before, look] = pair else { continue };
        let mut turned = vec![options];
        if look.phase != before.phase {
            // Between two phases, the last step of the former may come, or the first of the next.
            PHASES[look.phase].iter().for_each(|(_, turn)| turn(&mut options));
            turned.push(options);
        }
        let next: Vec<Course> =
            courses.iter().flat_map(|course| course.until(look, before, &turned, &target)).collect();
        if next.is_empty() {
            let ours: Vec<_> = courses.iter().map(|course| course.ours.spans()).collect();
            return Err(Failure::new(format!(
                "ours, rate, proportional and integral, before: {ours:?}\nbefore: {}\nafter: {}",
                before.line, look.line
            )));
        }
        courses = told_apart(next);
        if look.is_another_step(before) {
            steps[look.phase] += 1;
            let wanted = real(target(&options).cast_signed());
            if look.phase == before.phase && !look.target.meets(Span { least: wanted, most: wanted }) {
                return Err(Failure::new(format!("our target is {wanted} sectors: {}", look.line)));
            }
        }
    }
    let grown = courses.iter().map(|course| course.grown).max().unwrap_or(0);
    println!("steps in each phase: {steps:?}; {grown} of them with a device that kept up");
    // A step that changes nothing is not visible: in the last phase, there may be only one.
    if steps[1..4].iter().any(|steps| *steps < 3) || steps[4] < 1 || grown < 6 {
        return Err(Failure::new(format!("too few steps: {steps:?}, {grown}")));
    }
    Ok(())
}
