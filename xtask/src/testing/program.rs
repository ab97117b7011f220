//! A test program, and how cargo would start it.
//!
//! Cargo determines what a test may rely on: the folder it runs in, and the variables that name its
//! package and its programs. So cargo runs all tests, but instead of each program it starts this
//! one, which records the arguments, the folder and the environment. The pool starts the programs
//! in exactly the same way.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The program that contains all integration tests of its package.
const SUITE: &str = "suite";

/// Options of test programs that do not affect which tests run.
const OF_OUTPUT: [&str; 3] = ["--show-output", "--nocapture", "--quiet"];

/// Name of the tests in documentation, which cargo runs itself.
const DOCUMENTATION: &str = "documentation";

/// One test program. Paths are strings here, so that one that is not UTF-8 is kept too.
#[derive(Clone, Serialize, Deserialize)]
pub struct Program {
    /// The file name without cargo's suffix, and the package that it tests.
    pub name: String,
    file: OsString,
    arguments: Vec<OsString>,
    folder: OsString,
    environment: Vec<(OsString, OsString)>,
}

impl Program {
    /// Returns the program that `called` (a file and its arguments) would start, in the folder and
    /// environment of this process.
    ///
    /// # Errors
    /// `called` is empty, or there is no working directory.
    pub fn called(called: &[OsString]) -> Result<Self> {
        let (file, arguments) = called.split_first().context("no program is given")?;
        let stem = Path::new(file).file_stem().unwrap_or_default().to_string_lossy();
        let name = stem.rsplit_once('-').map_or(&*stem, |(name, _)| name);
        let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
        Ok(Self {
            name: format!("{name} of {package}"),
            file: file.clone(),
            arguments: arguments.to_vec(),
            folder: std::env::current_dir().context("cannot get the working directory")?.into(),
            environment: std::env::vars_os().collect(),
        })
    }

    /// Returns the tests in the documentation: cargo builds programs for them, and keeps none.
    fn documentation(options: &[OsString]) -> Result<Self> {
        let cargo = crate::cargo().get_program().to_owned();
        let words = ["test", "--workspace", "--doc", "--no-fail-fast", "--"].map(OsString::from);
        let called = [&[cargo], &words[..], options].concat();
        let mut program = Self::called(&called)?;
        DOCUMENTATION.clone_into(&mut program.name);
        program.folder = crate::origin().into();
        program.environment.retain(|(name, _)| !crate::names_this_package(name));
        Ok(program)
    }

    /// Records the program in `folder`, in a file that sorts after the earlier ones.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn keep(&self, folder: &Path) -> Result<()> {
        // cargo starts one program after the other.
        let count = fs::read_dir(folder).with_context(|| folder.display().to_string())?.count();
        let file = folder.join(format!("{count:05}"));
        fs::write(&file, serde_json::to_vec(self)?).with_context(|| file.display().to_string())
    }

    /// Splits a suite into its modules, each as a program of its own. Any other program stays as it
    /// is, and so does a suite of which only some tests are to run.
    fn modules(self) -> Result<Vec<Self>> {
        let prefix = format!("{SUITE} of ");
        let is_whole = self.arguments.iter().all(|one| OF_OUTPUT.iter().any(|option| one == option));
        let Some(package) = self.name.strip_prefix(&prefix).filter(|_| is_whole) else {
            return Ok(vec![self]);
        };
        let listed =
            self.command().args(["--list", "--format=terse"]).output().context("cannot list the tests")?;
        if !listed.status.success() {
            bail!("cannot list the tests of {}: {}", self.name, String::from_utf8_lossy(&listed.stderr));
        }
        let listed = String::from_utf8(listed.stdout).context("the names of tests are not UTF-8")?;
        let module = |(name, tests): (String, Vec<String>)| {
            let exactly = ["--exact".to_owned()].into_iter().chain(tests).map(OsString::from);
            Self {
                name: format!("{name} of {package}"),
                file: self.file.clone(),
                arguments: self.arguments.iter().cloned().chain(exactly).collect(),
                folder: self.folder.clone(),
                environment: self.environment.clone(),
            }
        };
        Ok(by_module(&listed).into_iter().map(module).collect())
    }

    /// Returns the command that starts it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.args(&self.arguments).current_dir(&self.folder).env_clear();
        command.envs(self.environment.iter().map(|(name, value)| (name, value))).stdin(Stdio::null());
        command
    }
}

/// Returns the tests of a terse list, by their outermost module.
fn by_module(listed: &str) -> BTreeMap<String, Vec<String>> {
    let mut modules: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for test in listed.lines().filter_map(|line| line.strip_suffix(": test")) {
        let (module, _) = test.split_once("::").unwrap_or((SUITE, test));
        modules.entry(module.to_owned()).or_default().push(test.to_owned());
    }
    modules
}

/// Returns cargo's arguments for these packages.
fn of(packages: &[String]) -> Vec<String> {
    match packages {
        [] => vec!["--workspace".to_owned()],
        named => named.iter().map(|name| format!("--package={name}")).collect(),
    }
}

/// Builds the tests of these packages, or of the workspace if none is named. Returns all programs
/// in cargo's order, each with `options`.
///
/// # Errors
/// What does not build.
pub fn all(packages: &[String], options: &[OsString]) -> Result<Vec<Program>> {
    let notes = tempfile::tempdir().context("cannot create a folder for notes")?;
    let own = std::env::current_exe().context("cannot find this program")?;
    // A list of JSON strings is also a list of TOML strings.
    let runner = serde_json::to_string(&[own.as_path(), Path::new("note-test"), notes.path()])?;
    let mut cargo = crate::cargo();
    cargo.current_dir(crate::origin()).args(["test", "--quiet", "--tests", "--no-fail-fast"]);
    cargo.args(of(packages));
    cargo.arg("--config").arg(format!("target.'cfg(all())'.runner={runner}")).arg("--").args(options);
    if !cargo.stdin(Stdio::null()).status().context("cannot start cargo")?.success() {
        bail!("cannot build the tests");
    }
    let mut files =
        fs::read_dir(notes.path())?.collect::<Result<Vec<_>, _>>().context("cannot read the notes")?;
    files.sort_unstable_by_key(fs::DirEntry::file_name);
    let read = |file: &fs::DirEntry| -> Result<Vec<Program>> {
        let mut program: Program = serde_json::from_slice(&fs::read(file.path())?)?;
        // cargo passes its own `--quiet` on to the programs.
        options.clone_into(&mut program.arguments);
        program.modules()
    };
    let mut programs = files.iter().map(read).collect::<Result<Vec<_>>>()?.concat();
    if packages.is_empty() {
        programs.push(Program::documentation(options)?);
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_go_by_their_outermost_module() {
        let listed = "errors::one: test\nerrors::deep::two: test\nalone: test\nnbd::three: test\nnbd::four: bench\n\n4 tests, 1 benchmark\n";
        let names = |tests: &[&str]| tests.iter().map(|test| (*test).to_owned()).collect::<Vec<_>>();
        let wanted = [
            ("errors", names(&["errors::one", "errors::deep::two"])),
            ("nbd", names(&["nbd::three"])),
            ("suite", names(&["alone"])),
        ];
        assert_eq!(by_module(listed), wanted.map(|(module, tests)| (module.to_owned(), tests)).into());
    }

    /// Proves that a suite is split into its modules. A script takes the place of the program: it
    /// prints such a list, or what it was told to run.
    #[test]
    fn a_suite_is_started_once_for_each_module() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("suite-0123abcd");
        let script =
            "#!/bin/sh\ncase $* in *--list*) printf 'one::a: test\\ntwo::b: test\\n';; *) echo $*;; esac\n";
        // Written by another process: a child that another thread starts at the same time would
        // hold the file open for writing.
        let mut writer = Command::new("sh");
        writer.args(["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\""]).arg(&file).arg(script);
        assert!(writer.status().unwrap().success());
        let started = |options: &[&str]| -> Vec<(String, String)> {
            let mut program = Program::called(&[file.clone().into()]).unwrap();
            "suite of some-package".clone_into(&mut program.name);
            program.arguments = options.iter().map(OsString::from).collect();
            let print = |program: &Program| {
                let out = program.command().output().unwrap().stdout;
                (program.name.clone(), String::from_utf8(out).unwrap())
            };
            program.modules().unwrap().iter().map(print).collect()
        };
        let named = |name: &str, told: &str| (name.to_owned(), told.to_owned());
        let each = ["one", "two"].map(|module| {
            let test = if module == "one" { "one::a" } else { "two::b" };
            named(&format!("{module} of some-package"), &format!("--show-output --exact {test}\n"))
        });
        assert_eq!(started(&["--show-output"]), each);
        assert_eq!(
            started(&["one"]),
            [named("suite of some-package", "one\n")],
            "only some tests are to run"
        );
    }
}
