//! Tests of `sim` as a process: what it prints, saves and refuses. A refusal is one sentence and
//! exit status 2.

use bcached_sim::workload::DRAWING;
use std::path::Path;
use std::process::{Command, Stdio};

struct CommandResult {
    exit: i32,
    out: String,
    err: String,
}

fn sim(words: &[&str]) -> CommandResult {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sim"));
    let done = command.args(words).stdin(Stdio::null()).output().expect("it starts");
    CommandResult {
        exit: done.status.code().expect("it ends by itself"),
        out: String::from_utf8(done.stdout).expect("text"),
        err: String::from_utf8(done.stderr).expect("text"),
    }
}

/// Asserts that the command is refused with one line that contains `wanted`, and that nothing is
/// run.
fn assert_refused(words: &[&str], wanted: &str) {
    let CommandResult { exit, out, err } = sim(words);
    assert_eq!((exit, out.as_str()), (2, ""), "{words:?}: {err}");
    assert!(err.contains(wanted) && err.starts_with("sim: "), "{words:?}: {err}");
    assert_eq!(err.lines().count(), 1, "{words:?}: {err}");
}

const RUN: [&str; 5] = ["run", "--system", "passthrough", "--workload", "points"];

/// Returns the arguments of a short run.
fn run<'a>(more: &[&'a str]) -> Vec<&'a str> {
    RUN.into_iter().chain(["--seed", "1"]).chain(more.iter().copied()).collect()
}

#[test]
fn what_cannot_be_run_is_refused_in_one_sentence() {
    assert_refused(
        &["run", "--seed", "1", "--workload", "point"],
        "no workload \"point\"; the nearest are points",
    );
    assert_refused(&["run", "--seed", "1", "--system", "motor"], "no system \"motor\"; the nearest are");
    assert_refused(&["hunt", "--system", "motor"], "no system \"motor\"; the nearest are");
    assert_refused(&["sweep", "--seeds", "0..1", "--workload", "x"], "no workload \"x\"; the nearest are");
    assert_refused(&["sweep", "--seeds", "5..5"], "there is no seed in 5..5");
    assert_refused(&["sweep", "--seeds", "5..4"], "there is no seed in 5..4");
    assert_refused(&["sweep", "--seeds", "5"], "seeds are given as 0..100, not \"5\"");
    assert_refused(&["sweep", "--seeds", "0..1", "--every", "0"], "0 is not in 1..");
    assert_refused(&run(&["--length", "0"]), "0 is not in 1..=100000");
    assert_refused(&run(&["--length", "99999999999999"]), "is not in 1..=100000");
    assert_refused(&run(&["--steps", "1-0"]), "steps are given in their order, as 0-3,7, not \"1-0\"");
    assert_refused(&run(&["--steps", "60"]), "the workload has only 60 steps");
    assert_refused(&run(&["--cut", "17"]), "a cut is POINT:CRASH:SUBSET, not \"17\"");
    assert_refused(&run(&["--cut", "17:sleep:nothing"]), "a crash is power or death, not \"sleep\"");
    assert_refused(
        &run(&["--then", "17:power:nothing"]),
        "required arguments were not provided: --cut <CUT>",
    );
    assert_refused(
        &["sweep", "--seeds", "0..1", "--depth", "deep"],
        "[possible values: whole, quick, full, exhaustive]",
    );
    for option in [["--every", "5"], ["--within", "leaf split"], ["--recovery-one-in", "2"]] {
        let words = [&["sweep", "--seeds", "0..1", "--depth", "whole"], &option[..]].concat();
        assert_refused(
            &words,
            "--depth whole crashes nothing, so it excludes --every, --within and --recovery-one-in",
        );
    }
    assert_refused(
        &["swim"],
        "unrecognized subcommand 'swim': the commands are run, sweep, hunt, scenario, bench-model, machines, list",
    );
    let help = concat!("found: `", env!("CARGO_BIN_EXE_sim"), " COMMAND --help` lists the options");
    assert_refused(&["--swim"], &format!("unexpected argument '--swim' {help}"));
    assert_refused(&["run", "--swim"], &format!("unexpected argument '--swim' {help}"));
    for seed in ["x", "1.5", ""] {
        let words =
            format!("invalid value '{seed}' for '--seed <SEED>': it must be a whole number, such as 7");
        assert_refused(&["run", "--seed", seed], &words);
    }
    assert_refused(&["run", "--seed", "18446744073709551616"], "'--seed <SEED>': the number is too large");
    for jobs in ["0", "100000"] {
        let words = format!("'--jobs <JOBS>': {jobs} is not in 1..=64");
        assert_refused(&["sweep", "--seeds", "0..1", "--jobs", jobs], &words);
    }
    let nine: Vec<&str> =
        [run(&["--cut", "1:power:nothing"]), ["--then", "1:power:nothing"].repeat(8)].concat();
    assert_refused(&nine, "at most 8 crashes can follow each other, not 9");
}

#[test]
fn a_point_that_never_comes_is_no_success() {
    let CommandResult { exit, err, .. } = sim(&run(&["--cut", "9999999:power:nothing"]));
    assert_eq!(exit, 2, "{err}");
    let points: u64 = err
        .strip_prefix("sim: there is no point 9999999 to crash at: the run has only ")
        .and_then(|rest| rest.strip_suffix(" points\n")?.parse().ok())
        .unwrap_or_else(|| panic!("{err}"));
    let text = |point: u64| format!("{point}:power:nothing");
    let at = |point: u64| sim(&[&run(&["--cut"])[..], &[&text(point)]].concat());
    assert_eq!((at(points).exit, at(points).out.as_str()), (0, "nothing found\n"));
    assert_eq!(at(points + 1).exit, 2);
    assert_refused(
        &run(&["--cut", "3:power:nothing", "--then", "8888888:death:nothing"]),
        "there is no point 8888888 to crash at: the recovery from 3:power:nothing ends before it",
    );
}

/// Returns the number at the end of an operation's line, if the operation is a point.
fn point_of(line: &str) -> Option<u64> {
    line.rsplit_once(" point ")?.1.parse().ok()
}

#[test]
fn a_trace_shows_the_crashes_that_were_asked_for_and_what_follows_them() {
    let crashes = ["--cut", "40:power:nothing", "--then", "2:death:everything"];
    let CommandResult { exit, out, err } =
        sim(&[&["run", "--workload", "points", "--seed", "1", "--trace"], &crashes[..]].concat());
    assert_eq!(exit, 0, "{err}");
    assert!(out.starts_with("0 ") && out.ends_with("\nnothing found\n"), "{out}");
    let lines: Vec<&str> = out.lines().collect();
    let lives: Vec<&[&str]> = lines.split(|line| line.contains(": its recovery follows")).collect();
    assert_eq!(lives.len(), 3, "{out}");
    for (life, last) in lives.iter().zip([Some(40), Some(2), None]) {
        let points: Vec<u64> = life.iter().filter_map(|line| point_of(line)).collect();
        let count = last.unwrap_or(points.len() as u64);
        assert_eq!(points, (1..=count).collect::<Vec<_>>(), "each in its order: {out}");
        assert!(last.is_none() || life.last().and_then(|line| point_of(line)) == last, "{out}");
    }
    let crash = |place: usize| lines[lives[..=place].iter().map(|life| life.len() + 1).sum::<usize>() - 1];
    let follows = "its recovery follows, with its own clock and points";
    assert_eq!(crash(0), format!("= crash power:nothing: {follows}"));
    assert_eq!(crash(1), format!("= crash death:everything: {follows}"));
}

#[test]
fn a_trace_numbers_the_steps_as_they_are_asked_for() {
    let words = ["run", "--system", "passthrough", "--workload", "points", "--seed", "1", "--trace"];
    let (all, some) = (sim(&words), sim(&[&words[..], &["--steps", "3,5-6"]].concat()));
    let kept: Vec<&str> = [3, 5, 6].iter().filter_map(|place| all.out.lines().nth(*place)).collect();
    assert_eq!(some.out.lines().take(3).collect::<Vec<_>>(), kept, "{}", some.out);
}

/// The trace of a failing run is that of the run, followed by its fault.
#[test]
fn a_trace_ends_with_what_was_found() {
    let words = ["run", "--workload", "mixed", "--seed", "1", "--system", "mutant-ZeroesHalf"];
    let (plain, traced) = (sim(&words), sim(&[&words[..], &["--trace"]].concat()));
    assert_eq!((plain.exit, traced.exit), (1, 1));
    let trace = traced.out.strip_suffix(&plain.out).expect("the fault comes last");
    let points: Vec<u64> = trace.lines().filter_map(point_of).collect();
    assert!(!points.is_empty() && points == (1..=points.len() as u64).collect::<Vec<_>>(), "{trace}");
}

#[test]
fn recoveries_of_recoveries_are_crashed() {
    let crashes = "--cut 40:power:nothing --then 2:power:nothing --then 2:death:nothing";
    let words: Vec<&str> = "run --workload points --seed 1".split(' ').chain(crashes.split(' ')).collect();
    let CommandResult { exit, out, err } = sim(&[&words[..], &["--then", "2:power:everything"]].concat());
    assert_eq!((exit, out.as_str()), (0, "nothing found\n"), "{err}");
    assert_refused(
        &[&words[..], &["--then", "99999:power:everything"]].concat(),
        "there is no point 99999 to crash at: the recovery from 2:death:nothing ends before it",
    );
}

#[test]
fn a_seed_of_another_drawing_is_refused() {
    let other = (DRAWING + 1).to_string();
    let words = format!("the seed is of drawing {other} and this simulator uses drawing {DRAWING}");
    assert_refused(&["run", "--seed", "1", "--drawing", &other], &words);
    assert_refused(&["hunt", "--from", "1", "--drawing", &other], &words);
    let ran = sim(&["hunt", "--system", "passthrough", "--seconds", "0", "--from", "1"]);
    assert!(ran.out.starts_with(&format!("hunt 1, drawing {DRAWING}\n")), "{}", ran.out);
    assert_eq!(ran.exit, 0);
}

/// A closed output ends `sim` without a message. The reader is closed from the start, so that
/// nothing gets through by chance.
#[test]
fn who_has_stopped_listening_is_told_nothing_and_not_complained_to() {
    let scenario = "a_fua_write_is_there_from_its_answer_on";
    let traced = run(&["--trace"]);
    let hunt = ["hunt", "--system", "passthrough", "--from", "1", "--seconds", "0"];
    for words in [&["list"], &["scenario"], &["scenario", scenario][..], &traced[..], &hunt[..]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sim"));
        let done = command.args(words).stdin(Stdio::null()).stdout(writer).output().expect("it starts");
        let err = String::from_utf8(done.stderr).expect("text");
        assert_eq!((done.status.code(), err.as_str()), (Some(141), ""), "{words:?}");
    }
}

#[test]
fn the_round_that_found_something_is_begun_with_by_its_number() {
    let hunt = |more: &[&str]| {
        let words = ["hunt", "--system", "mutant-FlushSkipped", "--from", "7", "--as-found", "--rounds"];
        sim(&[&words[..], more].concat())
    };
    let told = |out: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix("found in round ")).expect("it is found");
        let (round, _) = line.split_once(' ').expect("words");
        round.to_owned()
    };
    let all = hunt(&[]);
    let round = told(&all.out);
    let line = |out: &str| out.lines().rfind(|line| line.starts_with("round ")).map(str::to_owned);
    assert!(round != "0" && all.exit == 1, "{}", all.out);
    let again = hunt(&["--round", &round, "--seconds", "0"]);
    assert_eq!((again.exit, told(&again.out)), (1, round.clone()), "{}", again.out);
    assert!(line(&all.out).expect("a line").starts_with(&format!("round {round}: ")), "{}", all.out);
    assert!(line(&again.out).expect("a line").starts_with(&format!("round {round}: ")), "{}", again.out);
}

/// Returns the lines after the one that contains `start`, as far as they are steps.
fn steps_after<'a>(out: &'a str, start: &str) -> Vec<&'a str> {
    let lines = out.lines().skip_while(|line| !line.contains(start)).skip(2);
    lines.map_while(|line| line.strip_prefix("    ")).collect()
}

#[test]
fn what_a_hunt_or_sweep_shortens_it_shows() {
    let system = ["--system", "mutant-FlushSkipped"];
    let sweep = ["sweep", "--workload", "points", "--seeds", "3..5", "--keep-going"];
    for words in [&sweep[..], &["hunt", "--from", "3"]] {
        let found = sim(&[words, &system].concat());
        assert!(found.exit == 1 && found.out.contains("shortened to "), "{}", found.out);
        let (_, told) = found.out.split_once("shortened to ").expect("counted");
        let (count, _) = told.split_once(" steps in ").expect("a number");
        let steps = steps_after(&found.out, "shortened to ");
        assert_eq!(steps.len().to_string(), count, "{}", found.out);
        assert!(steps.iter().any(|step| step.starts_with("flush ")), "{}", found.out);
    }
}

#[test]
fn the_table_of_a_failing_hunt_says_that_more_follows() {
    let words = ["hunt", "--system", "mutant-FlushSkipped", "--from", "7", "--as-found"];
    let found = sim(&words);
    let (above, rest) = found.out.split_once("\nrequests ").expect("a table");
    let (_, after) = rest.split_once("found in round ").expect("it is found");
    let round = after.split(' ').next().expect("a number");
    let last = above.lines().next_back().expect("a line");
    assert_eq!(last, format!("a fault was found (see below); figures of the {round} rounds before it:"));
}

#[test]
fn after_the_last_number_there_is_no_round() {
    let last = u64::MAX.to_string();
    let CommandResult { exit, out, err } =
        sim(&["hunt", "--system", "passthrough", "--from", "1", "--round", &last, "--seconds", "5"]);
    assert_eq!((exit, err.as_str()), (0, ""), "{out}");
    assert!(out.ends_with("\n1 rounds, nothing found\n"), "{out}");
}

#[test]
fn recoveries_are_told_apart_from_processes() {
    let words =
        ["sweep", "--system", "passthrough", "--workload", "points", "--seeds", "0..1", "--every", "9"];
    let CommandResult { exit, out, .. } = sim(&words);
    let count = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.split_whitespace().next().and_then(|count| count.parse::<u64>().ok()).expect("a number")
    };
    assert!(count("recoveries") > 0 && exit == 0, "{out}");
    assert_eq!(count("recoveries"), count("crashes"));
    // `docs/reliability.md` uses this term.
    assert!(count("  three deep") <= count("  inside recoveries"));
    assert!(count("processes") > count("recoveries"), "the workload's own besides: {out}");
}

#[test]
fn scenarios_are_listed_told_and_played() {
    let listed = sim(&["scenario"]);
    let names: Vec<&str> = listed.out.lines().filter(|line| !line.starts_with(' ')).collect();
    assert!(names.len() >= 50 && listed.exit == 0, "{}", listed.out);
    let told = "    A file system writes its journal block with FUA, and relies on it from the moment of the answer\n";
    assert!(listed.out.contains(told), "{}", listed.out);
    let name = "a_fua_write_is_there_from_its_answer_on";
    let played = sim(&["scenario", name]);
    assert!(played.out.ends_with(&format!("\npass {name}\n1 played, 0 failed\n")), "{}", played.out);
    assert_eq!(played.exit, 0);
    let two = sim(&["scenario", name, name]);
    assert_eq!(two.out, format!("pass {name}\npass {name}\n2 played, 0 failed\n"));
    let words = format!("no scenario \"fua_write_is_there\"; the nearest are {name}, ");
    assert_refused(&["scenario", name, "fua_write_is_there"], &words);
}

/// Returns the command in a failure report, without the program.
fn again(out: &str) -> Vec<&str> {
    let start = concat!("again: ", env!("CARGO_BIN_EXE_sim"), " ");
    let line = out.lines().find_map(|line| line.trim().strip_prefix(start)).expect("a command");
    line.split(' ').collect()
}

#[test]
fn commands_run_as_they_are_printed() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("it's here");
    std::fs::create_dir(&place).expect("a folder");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sim"), place.join("sim")).expect("a link");
    let ran = |command: &str| {
        let mut shell = Command::new("sh");
        let done = shell.args(["-c", command]).current_dir(folder.path()).output().expect("it starts");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (done.status.code(), text(done.stdout), text(done.stderr))
    };
    let words = "run --system mutant-ZeroesHalf --workload mixed --seed 2 --minimise --save 'the file.sim'";
    let (exit, out, err) = ran(&format!("\"it's here/sim\" {words}"));
    assert_eq!((exit, err.as_str()), (Some(1), ""), "{out}");
    let commands: Vec<&str> = out
        .lines()
        .filter_map(|line| Some(line.split_once("again: ").or(line.split_once("run it with: "))?.1))
        .collect();
    assert_eq!(commands.len(), 3, "as found, shortened, saved: {out}");
    for command in commands {
        assert!(command.starts_with(r"'it'\''s here/sim' run "), "{command}");
        let (exit, again, err) = ran(command);
        assert_eq!((exit, err.as_str()), (Some(1), ""), "{command}");
        assert!(out.contains(again.lines().next().expect("a line")), "{command}: {again}");
    }
}

#[test]
fn a_failure_is_shown_again_by_its_command_and_by_its_script() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("found.sim");
    let file = file.to_str().expect("a name");
    let found = sim(&[
        "sweep",
        "--system",
        "mutant-FlushSkipped",
        "--workload",
        "points",
        "--seeds",
        "3..4",
        "--as-found",
    ]);
    assert_eq!(found.exit, 1, "{}", found.err);
    let words = again(&found.out);
    assert!(words.contains(&"--cut"), "{words:?}");
    let told = sim(&words);
    assert_eq!(told.exit, 1);
    let saved = sim(&[&words[..], &["--save", file]].concat());
    assert_eq!((saved.exit, saved.err.as_str()), (1, ""));
    let script = sim(&["run", "--system", "mutant-FlushSkipped", "--script", file]);
    assert_eq!(script.exit, 1, "{}", script.err);
    assert_eq!(script.out.lines().next(), told.out.lines().next(), "the same fault");
    assert_eq!(sim(&again(&script.out)).out, script.out, "and by the script's own command");
    assert_refused(&[&words[..], &["--save", file]].concat(), "already exists");
}

#[test]
fn a_shortened_failure_is_saved_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let system = ["--system", "mutant-ZeroesHalf"];
    // Of the second one, only the steps after the last step remain.
    for (seed, zeroes_in) in [("3", "steps\n"), ("2", "after\n")] {
        let file = folder.path().join(seed);
        let file = file.to_str().expect("a name");
        let words = ["run", "--workload", "mixed", "--seed", seed, "--minimise", "--save", file];
        let found = sim(&[&words[..], &system[..]].concat());
        assert_eq!(found.exit, 1, "{}", found.err);
        let text = std::fs::read_to_string(file).expect("it is there");
        let (_, steps) = text.split_once("steps\n").expect("steps");
        let (steps, _) = steps.split_once("after\n").expect("what follows them");
        let (_, zeroes) = text.split_once(zeroes_in).expect("a list");
        let has_zeroes = ["zero ", "unmap "].iter().any(|word| zeroes.contains(word));
        assert!(steps.lines().count() <= 3 && has_zeroes, "{text}");
        let again = sim(&[&["run", "--script", file], &system[..]].concat());
        let fault = again.out.lines().next().expect("a fault");
        assert!(again.exit == 1 && found.out.contains(fault), "{fault}: {}", found.out);
    }
}

#[test]
fn what_a_sweep_or_hunt_has_found_is_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let system = ["--system", "mutant-FlushSkipped"];
    let sweep = ["sweep", "--workload", "points", "--seeds", "3..5", "--keep-going"];
    let hunt = ["hunt", "--from", "3"];
    for (name, words) in [("sweep.sim", &sweep[..]), ("hunt.sim", &hunt[..])] {
        let file = folder.path().join(name);
        let file = file.to_str().expect("a name");
        let words = [words, &system, &["--save", file]].concat();
        let found = sim(&words);
        assert_eq!((found.exit, found.err.as_str()), (1, ""), "{}", found.out);
        let again = sim(&[&["run", "--script", file], &system[..]].concat());
        assert_eq!(again.exit, 1, "{}", again.err);
        let (fault, _) = again.out.split_once('\n').expect("a line");
        assert!(found.out.contains(fault), "{fault}: {}", found.out);
        assert_refused(&words, "already exists");
    }
}

#[test]
fn what_cannot_be_saved_is_refused_before_anything_is_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = |name: &str| folder.path().join(name).to_str().expect("a name").to_owned();
    let (nowhere, taken, free) = (name("nowhere/it.sim"), name("taken.sim"), name("free.sim"));
    std::fs::write(&taken, "mine").expect("written");
    let system = ["--system", "mutant-FlushSkipped"];
    let sweep = ["sweep", "--workload", "points", "--seeds", "3..4"];
    for words in [&run(&[])[..], &sweep, &["hunt", "--from", "3"]] {
        let words = [words, if words[0] == "run" { &[] } else { &system[..] }].concat();
        let save = |file| [&words[..], &["--save", file]].concat();
        assert_refused(&save(&nowhere), &format!("sim: cannot write {nowhere}: No such file or directory"));
        assert_refused(&save(&taken), &format!("sim: {taken} already exists"));
    }
    assert_refused(&run(&["--cut", "17", "--save", &free]), "a cut is POINT");
    assert!(!Path::new(&free).exists(), "nothing was run");
    assert_eq!(std::fs::read_to_string(&taken).expect("it is there"), "mine");
}

/// A fault is reported although its workload is too long to be saved as a script.
#[test]
fn a_fault_that_cannot_be_saved_is_one_all_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("long.sim");
    let file = file.to_str().expect("a name");
    let long = |system: &str, more: &[&str]| {
        let words = ["run", "--workload", "hot", "--length", "30000", "--seed", "1", "--save", file];
        sim(&[&words[..], &["--system", system], more].concat())
    };
    let found = long("mutant-ZeroesHalf", &[]);
    let is_refused = found.err.starts_with(&format!("sim: the script was not saved: {file}: line "))
        && found.err.ends_with(": a script has at most 20000 steps\n");
    assert!(found.exit == 1 && is_refused, "{}\n{}", found.err, found.out);
    assert!(found.out.contains("again: "), "{}", found.out);
    let sound = long("passthrough", &["--steps", "0-20000"]);
    assert_eq!((sound.exit, sound.err.as_str()), (2, found.err.as_str()), "{}", sound.out);
    assert!(!Path::new(file).exists());
}

#[test]
fn a_script_that_is_damaged_or_missing_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("a name").to_owned()
    };
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let sound = std::fs::read_to_string(scripts.join("trouble-15.sim")).expect("a script");
    let refused = |text: &[u8], words: &str| {
        let file = write("it.sim", text);
        assert_refused(&["run", "--script", &file], &format!("sim: {file}: {words}"));
    };
    refused(b"", "line 1: a script begins with \"sim script 1\"");
    refused(&[0xff; 80], "line 1: this is not UTF-8 text");
    refused(&vec![b'#'; 2 << 20], "line 1: a script has at most 1048576 bytes");
    refused(&sound.as_bytes()[..sound.len() / 2], "line ");
    refused(sound.replace("script 1", "script 9").as_bytes(), "line 1: the script is of version \"9\"");
    let whole = |file: &str| sim(&["run", "--script", file]).err;
    assert_eq!(
        whole("/nowhere.sim"),
        "sim: cannot read /nowhere.sim: No such file or directory (os error 2)\n"
    );
    let file = write("version.sim", b"sim script 9\n");
    let words = "line 1: the script is of version \"9\" and this simulator reads version 1 only";
    assert_eq!(whole(&file), format!("sim: {file}: {words}\n"));
    assert_refused(&["run"], "sim: a run needs a seed or a script: --seed NUMBER or --script FILE");
    for option in ["--seed", "--drawing"] {
        let words = format!("'{option} <{}>' cannot be used with", option[2..].to_uppercase());
        assert_refused(&["run", option, "1", "--script", "x"], &words);
    }
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("it starts").success());
    for place in [&pipe, folder.path()] {
        let words = format!("sim: cannot read {}: it is not a regular file", place.display());
        let mut command = Command::new("timeout");
        command.arg("5").arg(env!("CARGO_BIN_EXE_sim")).args(["run", "--script"]).arg(place);
        let done = command.stdin(Stdio::null()).output().expect("it starts");
        assert_eq!(
            (done.status.code(), String::from_utf8_lossy(&done.stderr).trim_end()),
            (Some(2), &words[..])
        );
    }
}

#[test]
fn figures_are_printed_beside_their_bounds() {
    let CommandResult { exit, out, err } = sim(&["bench-model", "--quick", "b12"]);
    assert_eq!((exit, err.as_str()), (0, ""), "{out}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("id ") && lines[0].ends_with("verdict"), "{out}");
    assert!(lines[1].starts_with("B12 ") && lines[1].contains("<= 1.13"), "{out}");
    assert!(lines[lines.len() - 1].ends_with(" missed"), "{out}");
    assert_refused(&["bench-model", "B99"], "no benchmark \"B99\"; the nearest are");
}
