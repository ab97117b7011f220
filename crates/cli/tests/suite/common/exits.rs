//! Judges a command that is to end with a given exit status, and explain itself if it fails.

use super::{CommandResult, Daemon, ask, json};

/// Runs `line` with `--json`. A refusal must explain itself, and be the same without `--dry-run`.
/// Returns what is wrong if the exit status is not `exit`.
pub fn unexpected_exit(daemon: &Daemon, line: &str, exit: i32) -> Option<String> {
    let words: Vec<&str> = line.split(' ').chain(["--json"]).collect();
    let ran = ask(daemon, &words);
    let is_answer = words[0] == "explain" && ran.exit == 1;
    if ran.exit != 0 && !is_answer {
        explains_itself(&words, &ran);
        // Without `--dry-run` nothing is done either.
        let real: Vec<&str> = words.iter().copied().filter(|word| *word != "--dry-run").collect();
        let again = ask(daemon, &real);
        assert_eq!((again.exit, &again.err), (ran.exit, &ran.err), "{real:?}");
    }
    (ran.exit != exit).then(|| format!("{line}: {} and not {exit}: {}{}", ran.exit, ran.out, ran.err))
}

/// Checks that a refusal says what, why and what next, with its exit status.
fn explains_itself(words: &[&str], ran: &CommandResult) {
    let object = json(ran.err.lines().last().unwrap_or_default());
    let error = &object["error"];
    let says = |key: &str| error[key].as_str().is_some_and(|text| !text.is_empty());
    assert!(says("what") && says("next"), "{words:?}: {ran:?}");
    // For an unknown name there is no further reason.
    assert!(says("why") || ran.exit == 2, "{words:?}: {ran:?}");
    assert_eq!(error["exit"].as_i64(), Some(ran.exit.into()), "{words:?}: {ran:?}");
}
