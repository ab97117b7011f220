//! Tests of scripts: what is written reads back unchanged, damage is refused with a message and its
//! line number, and nothing panics.

use super::*;
use crate::disk::{DiskFault, FaultRule, OpKind, Survivors, WrittenPart};
use crate::driver::Crash;
use crate::run::whole_of;
use crate::system::passthrough::Passthrough;
use crate::system::{PolicyOption, System};
use crate::workload::{Shape, Step};
use bcached_env::rng::Rng;
use std::rc::Rc;

fn cuts() -> Vec<CrashPoint> {
    let survivors = [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(u64::MAX)];
    let cut = |(point, survivors)| CrashPoint { point, crash: Crash::PowerCut, survivors };
    (17..).zip(survivors).map(cut).collect()
}

/// A few steps of each kind, some of them after a crash.
fn short() -> Script {
    let mut workload = Shape::named("trouble").unwrap().with_steps(60).draw(5);
    // These are present whatever was drawn.
    let fault = DiskFault::Fail(WrittenPart::Nothing);
    let rule = FaultRule { skip: 3, ..FaultRule::next(OpKind::Read, 4, fault) };
    workload.steps.push(Step::Trouble { device: 2, rule });
    workload.steps.push(Step::Turn { volume: 1, option: PolicyOption::Quiet, value: 1 });
    workload.steps.push(Step::Pull { device: 2, survivors: Survivors::Seeded(3) });
    workload.steps.push(Step::Return { device: 2 });
    Script::of(&workload, &cuts())
}

#[test]
fn every_workload_reads_back_as_written() {
    for shape in Shape::all() {
        for seed in 0..10 {
            for cuts in [Vec::new(), cuts()] {
                let script = Script::of(&shape.draw(seed), &cuts);
                let text = script.to_string();
                let read = Script::parse(&text, "").unwrap_or_else(|error| panic!("{}: {error}", shape.name));
                assert_eq!(read, script, "{} {seed}", shape.name);
                assert_eq!(read.to_string(), text);
            }
        }
    }
}

#[test]
fn a_script_keeps_what_follows_the_crash() {
    let workload = Shape::named("points").unwrap().draw(7);
    let script = Script::of(&workload, &cuts());
    assert!(!aftermath(&workload, &cuts()).is_empty());
    assert_eq!(aftermath(&script.workload, &cuts()), aftermath(&workload, &cuts()));
}

#[test]
fn comments_and_empty_lines_say_nothing() {
    let text = short().to_string().replace("steps\n", "\n# and now\nsteps\n\n");
    assert_eq!(Script::parse(&text, ""), Ok(short()));
}

/// For each case: the line, what it is changed to, and the expected message.
const DAMAGES: [(&str, &str, &str); 40] = [
    ("sim script 1", "sim script 2", "line 1: the script is of version \"2\""),
    ("sim script 1", "#!/bin/sh", "line 2: a script begins with \"sim script 1\", not with \"workload"),
    ("seed 5", "seed", "line 3: expected \"seed ..\" here, found \"seed\""),
    ("seed 5", "seed -5", "line 3: seed must be a number from 0 to"),
    ("seed 5", "seed 05", "line 3: seed must be a number"),
    ("seed 5", "depth 5", "line 3: expected \"seed"),
    ("depth 8", "depth 100000000", "line 4: depth must be a number from 1 to 64"),
    ("troubled yes", "troubled no", "a device fails, although"),
    ("troubled yes", "troubled maybe", "line 5: troubled must be yes or no"),
    ("start new", "start old", "line 6: start must be new or third-level or interior-split"),
    ("start new", "start third-level", "the sizes are not those of the grown set"),
    ("block-sectors", "block-sectors 3", "block-sectors must be one of [1, 8]"),
    ("bucket-sectors", "bucket-sectors 24", "bucket-sectors must be a power of two"),
    ("bucket-sectors", "bucket-sectors 8", "bucket-sectors must be a power of two, and two blocks"),
    ("bucket-sectors", "bucket-sectors 0", "bucket-sectors must be a number from 8"),
    ("buckets", "buckets 512", "buckets must be a number from 513 to"),
    ("buckets", "buckets 18446744073709551616", "buckets must be a number"),
    ("volume-sectors", "volume-sectors 2048 99999999999", "volume-sectors must be a number from 8 to"),
    ("volume-sectors", "volume-sectors 8 8 8 8 8 8 8 8 8", "at most 8 volumes"),
    ("volume-sectors", "volume-sectors ", "volume-sectors must be a number"),
    ("note-records", "note-records 999999999", "note-records must be a number"),
    ("first-mode", "first-mode 6", "first-mode must be a number from 0 to 5"),
    ("journal-delay", "journal-delay-ms 0", "journal-delay-ms must be a number from 1"),
    ("writeback-running", "writeback-running 1", "writeback-running must be yes or no"),
    ("read", "read 7 0..8", "there is no volume 7: there are 2, counted from 0"),
    ("read", "read 0 2048..2056", "they extend beyond its end"),
    ("read", "read 0 8..8", "the range is empty"),
    ("read", "read 0 8..0", "the range is empty"),
    ("read", "read 0 0..8 fua", "\"read 0 0..8 fua\" is not a step"),
    ("read", "fly 0 0..8", "\"fly 0 0..8\" is not a step"),
    ("read", "create 0", "volume must be a flash-only volume, not \"0\""),
    ("turn", "turn 0 luck 1", "\"turn 0 luck 1\" is not a step"),
    ("turn", "turn 0 writeback-quiet 2", "writeback-quiet must be a number from 0 to 1"),
    ("turn", "turn 0 writeback-rate-update-ms 0", "writeback-rate-update-ms must be a number from 1"),
    ("pause", "pause 999999999 ms", "pause must be a number from 0 to"),
    ("trouble ", "trouble 9 Read 0..8 after 3, 4 times: Fail(Nothing)", "there is no device 9"),
    ("pull", "pull 0 nothing", "device must be a backing device, not \"0\""),
    ("pull", "pull 1 half", "\"pull 1 half\" is not a step"),
    ("return", "return 3", "there is no device 3: there are 3, counted from 0"),
    ("17:", "17:power", "a cut is POINT:CRASH:SUBSET"),
];

#[test]
fn damage_is_said_in_one_sentence_with_its_line() {
    let text = short().to_string();
    for (at, damaged, words) in DAMAGES {
        let (number, line) = text
            .lines()
            .zip(1..)
            .map(|(line, number)| (number, line))
            .find(|(_, line)| line.starts_with(at))
            .unwrap_or_else(|| panic!("no line {at} in\n{text}"));
        let lines: Vec<&str> =
            text.lines().map(|other| if std::ptr::eq(other, line) { damaged } else { other }).collect();
        let error = Script::parse(&lines.join("\n"), "").expect_err(damaged).to_string();
        assert!(error.contains(words), "{damaged}: {error}");
        let elsewhere =
            damaged.starts_with("troubled no") || damaged.starts_with("start third") || at.starts_with("sim");
        assert!(elsewhere || error.starts_with(&format!("line {number}: ")), "{damaged}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_script_that_is_not_whole_is_refused_wherever_it_ends() {
    let text = short().to_string();
    for end in 0..text.trim_end().len() {
        let error = Script::parse(&text[..end], "").expect_err("cut short").to_string();
        assert!(error.starts_with("line "), "{error}");
    }
    let behind = Script::parse(&format!("{text}settle\n"), "").unwrap_err().to_string();
    assert!(behind.ends_with("nothing may follow \"end\", but here is \"settle\""), "{behind}");
}

#[test]
fn no_script_asks_for_too_much() {
    let with = |line: &str, times: usize| {
        let text = short().to_string();
        let (head, tail) = text.split_once("steps\n").unwrap();
        format!("{head}steps\n{}{tail}", format!("{line}\n").repeat(times))
    };
    let refusal = |text: &str| {
        let text = parse::text_of(text.as_bytes()).and_then(|text| Script::parse(text, ""));
        text.unwrap_err().to_string()
    };
    assert!(refusal(&with("settle", limits::STEPS_MAX + 1)).ends_with("at most 20000 steps"));
    assert!(refusal(&with("write 0 0..2048", 257)).ends_with("at most 524288 sectors in all its requests"));
    assert!(refusal(&with("pause 10000 ms", 101)).ends_with("at most 1000000 ms in all its pauses"));
    assert!(refusal(&with("# again", 1 << 18)).ends_with("at most 1048576 bytes"));
    let cuts = format!("cuts\n{}", "1:power:nothing\n".repeat(6));
    assert!(refusal(&short().to_string().replace("cuts\n", &cuts)).ends_with("at most 8 crashes"));
    let far = short().to_string().replace("volume-sectors 2048", "volume-sectors 131072");
    let long = far.replace("steps\n", "steps\nread 0 0..65544\n");
    assert!(refusal(&long).ends_with("they are too many for one request"));
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    let mut bytes = short().to_string().into_bytes();
    let place = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 3;
    bytes[place] = 0xff;
    assert_eq!(parse::text_of(&bytes).unwrap_err().to_string(), "line 2: this is not UTF-8 text");
}

/// A flipped byte makes a script that is refused, or one that can be written again and run.
#[test]
fn a_flipped_byte_is_refused_or_can_be_run() {
    let system: Rc<dyn System> = Rc::new(Passthrough);
    let text = Script::of(&Shape::named("trouble").unwrap().with_steps(60).draw(5), &cuts()).to_string();
    let mut rng = Rng::new(1);
    let (mut refused, mut run) = (0, 0);
    for place in 0..text.len() {
        for _ in 0..6 {
            let mut bytes = text.clone().into_bytes();
            // Half of them are digits, which are most likely to pass.
            let drawn = u8::try_from(rng.below(256)).unwrap();
            bytes[place] = if rng.one_in(2) { b'0' + drawn % 10 } else { drawn };
            match parse::text_of(&bytes).and_then(|text| Script::parse(text, "")) {
                Err(_) => refused += 1,
                Ok(script) => {
                    run += 1;
                    assert_eq!(Script::parse(&script.to_string(), "").as_ref(), Ok(&script));
                    let _what_it_finds = whole_of(&system, &script.workload);
                }
            }
        }
    }
    assert!(refused > 1000 && run > 200, "{refused} refused, {run} run");
}

/// The engine opens at every extreme that the limits of a script allow.
#[test]
fn the_extremes_can_be_run() {
    let script = Script::of(&Shape::named("points").unwrap().with_steps(1).draw(1), &[]);
    let system: Rc<dyn System> = Rc::new(crate::system::engine::Engine);
    for (block, set_block, bucket, buckets, volume) in [
        (1, 1, 8, *limits::BUCKETS.start(), 8),
        (1, 4, 8, *limits::BUCKETS.start(), 9),
        (8, 8, 16, *limits::BUCKETS.start(), 8),
        (8, 8, 1024, *limits::BUCKETS.end(), *limits::VOLUME_SECTORS.end()),
        (1, 1, 8, *limits::BUCKETS.end(), *limits::VOLUME_SECTORS.end()),
    ] {
        let mut script = script.clone();
        let geometry = &mut script.workload.geometry;
        (geometry.block_sectors, geometry.set_block_sectors, geometry.bucket_sectors) =
            (block, set_block, bucket);
        (geometry.buckets, geometry.torn_sectors) = (buckets, 8);
        geometry.volumes = vec![volume; limits::VOLUMES_MAX];
        geometry.note_records = *limits::NOTE_RECORDS.start();
        script.workload.steps = vec![Step::Write { volume: 0, sectors: 0..8, fua: true }];
        // Steps that were drawn for other volumes may lie beyond the end of these.
        script.workload.origin = StepSource::Script { file: String::new(), after: Vec::new() };
        let script = Script::parse(&script.to_string(), "").unwrap();
        if let Err(fault) = whole_of(&system, &script.workload) {
            panic!("{block} {set_block} {bucket} {buckets} {volume}: {fault}");
        }
    }
}
