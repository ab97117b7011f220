//! Third-party NBD clients.

use super::LIMIT;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

/// A tool of the system. nbdsh takes the first Python in `PATH`, but the bindings belong to the
/// system's own.
pub fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:/bin:{path}")).stdin(Stdio::null());
    command
}

/// Whether a tool is installed and works; prints a line if not.
pub fn has(name: &str) -> bool {
    let status = tool(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let found = status.is_ok_and(|status| status.success());
    if !found {
        println!("skipped: {name} is not installed");
    }
    found
}

/// Runs a tool to its end, with a time limit.
pub fn run(name: &str, arguments: &[&str]) -> Output {
    let mut child =
        tool(name).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let start = Instant::now();
    while child.try_wait().expect("can be waited for").is_none() {
        if start.elapsed() > LIMIT {
            child.kill().expect("can be killed");
            unreachable!("{name} hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.wait_with_output().expect("has ended")
}

/// Runs a tool that must succeed. Returns its output.
pub fn succeed(name: &str, arguments: &[&str]) -> String {
    let output = run(name, arguments);
    assert!(output.status.success(), "{name} {arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
