//! The rate at which a kernel writes back, against our controller fed with the same numbers: target, terms and rate after each of its steps,
//! equal but for what the kernel rounds. When a step was taken, and how fast anything really went, is not asked.

use std::time::Duration;

use bcached_engine::{Measured, Rate, RateInfo, VolumeOptions, dirty_target};
use bcached_env::Time;
use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel};
use bcached_tests::uml::Uml;
use bcached_tests::workload::Workload;

/// What a kernel says of the controller of `/dev/bcache0`, ten times a second, between the times before and after it was asked. Where the
/// machine stands still for long no look may meet a step.
const LOOKS: &str = "for look in $(busybox seq 40); do\n\
    read asked rest < /proc/uptime\n\
    said=$(cat /sys/block/bcache0/bcache/writeback_rate_debug)\n\
    read answered rest < /proc/uptime\n\
    echo look $phase $asked $answered $said\n\
    sleep 0.1\ndone\n";
/// Between two steps of a controller, in seconds.
const STEP: u64 = 1;

/// A number between two ends, both possible.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Span {
    least: f64,
    most: f64,
}

impl Span {
    fn meets(self, other: Self) -> bool {
        self.least <= other.most && other.least <= self.most
    }

    /// What `-155.0k` stands for, in sectors: the kernel leaves out what is less than a tenth of the unit.
    fn parse(said: &str) -> Outcome<Self> {
        let said = said.trim_end_matches("/sec");
        let (is_negative, said) = said.strip_prefix('-').map_or((false, said), |rest| (true, rest));
        let (number, unit) = said.split_at(said.len().saturating_sub(1));
        let power =
            "kMGT".find(unit).filter(|_| !unit.is_empty()).context(format_args!("no size: {said}"))?;
        let sectors = 2.0 * 1024_f64.powi(i32::try_from(power)?);
        let least = number.parse::<f64>()? * sectors;
        // Numbers above 1000 of a unit would have had the next one's digits.
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

/// Sectors are few enough to be exact.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
const fn real(sectors: i64) -> f64 {
    sectors as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of dirty sectors")]
const fn whole(sectors: f64) -> u64 {
    sectors as u64
}

/// One look.
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

/// What is turned in each phase, in the kernel's file and here.
type Turn = (&'static str, fn(&mut VolumeOptions));

const PHASES: [&[Turn]; 5] = [
    // The first step may come as late as that of a kernel nobody has told another time.
    &[],
    &[],
    &[
        ("writeback_rate_p_term_inverse 400", |options| options.writeback_rate_p_term_inverse = 400),
        ("writeback_rate_i_term_inverse 100", |options| options.writeback_rate_i_term_inverse = 100),
    ],
    // The target is above what is dirty, and what has added up is taken back.
    &[("writeback_percent 40", |options| options.writeback_percent = 40)],
    &[("writeback_rate_minimum 300", |options| options.writeback_rate_minimum = 300)],
];

/// In how many parts what may have been dirty at a step is cut. The ends alone would not do: an integral term is no longer taken back once it
/// is below zero, so of the ends one may be far beyond that and the other just below, while what is between them is just below as well.
const PARTS: u32 = 64;

/// The controller for each of what may have been dirty when it took its steps, from the least to the most.
#[derive(Clone, Debug)]
struct Ours {
    rates: Vec<Rate>,
    now: Time,
    /// Those of the last step.
    options: VolumeOptions,
}

impl Ours {
    /// One step more. `keeps_up`: more is owed than was paid, so that the device is not what holds it up.
    fn step(&self, options: &VolumeOptions, dirty: Span, target: u64, keeps_up: bool) -> Self {
        let mut next = self.clone();
        // After so long everything is paid.
        next.options = *options;
        next.now = self.now + Duration::from_secs(if keeps_up { STEP } else { 1_000_000 });
        let (least, most) = (dirty.least.floor(), dirty.most.ceil());
        for (rate, part) in next.rates.iter_mut().zip(0..) {
            if keeps_up {
                rate.charge(next.now, rate.allowed() * 4);
            }
            let measured = Measured {
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

    /// Rate, proportional and integral term.
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

/// What may have gone on in the kernel until a look.
#[derive(Clone)]
struct Course {
    ours: Ours,
    /// Its last step was not taken before that, in seconds.
    stepped: f64,
    /// Steps of a device that kept up.
    grown: u32,
}

impl Course {
    /// What may have gone on between two looks. A step that changes less than the kernel tells of is not seen, and where the machine stands
    /// still for long there may be several. Whether the device kept up at that moment the kernel does not say; but its integral term does.
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
                            // Several may have been late, and the next is counted from when it was due.
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

    /// Two that nothing more can tell from each other.
    fn is_like(&self, other: &Self) -> bool {
        self.ours.spans() == other.ours.spans() && self.stepped.total_cmp(&other.stepped).is_eq()
    }
}

/// The target in sectors.
type Target<'a> = dyn Fn(&VolumeOptions) -> u64 + 'a;

/// Steps between two looks at most.
const STEPS_MAX: u32 = 3;
/// Courses that are followed: those that have grown most.
const COURSES_MAX: usize = 64;

/// Half a cache of dirty data before one of two volumes of the same size, so far above its target; then the looks, phase by phase.
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

/// Each once.
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
    let rates = vec![Rate::default(); PARTS as usize + 1];
    let ours = Ours { rates, now: Time::default(), options };
    let mut courses = vec![Course { ours, stepped: 0.0, grown: 0 }];
    let mut steps = [0; PHASES.len()];
    // Before the first step there is no target.
    let first = looks.iter().position(|look| look.target.least > 0.0).context("no target")?;
    for pair in looks[first.saturating_sub(1)..].windows(2) {
        let [before, look] = pair else { continue };
        let mut turned = vec![options];
        if look.phase != before.phase {
            // Between two phases the last step of the former may come, or the first of the next.
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
    // A step that changes nothing is none that can be seen: in the last phase there may be but one.
    if steps[1..4].iter().any(|steps| *steps < 3) || steps[4] < 1 || grown < 6 {
        return Err(Failure::new(format!("too few steps: {steps:?}, {grown}")));
    }
    Ok(())
}
