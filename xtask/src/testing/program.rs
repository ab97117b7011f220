//! A test program and how cargo would start it.
//!
//! What a test may count on (the folder it runs in, the variables that name its package and its programs) is cargo's to say, so cargo is
//! let to say it: it runs all tests, and in the place of each program it starts this one, which writes down the arguments, the folder and
//! the environment it was given. The pool starts the programs just so.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The name of the tests in documentation, which cargo runs by itself.
const DOCUMENTATION: &str = "documentation";

/// One of them. Paths are strings here: one that is no UTF-8 is kept too.
#[derive(Serialize, Deserialize)]
pub struct Program {
    /// The file without what cargo appends, and the package that it tests.
    pub name: String,
    file: OsString,
    arguments: Vec<OsString>,
    folder: OsString,
    environment: Vec<(OsString, OsString)>,
}

impl Program {
    /// What `called` would start (a file and its arguments) in the folder and environment of this process.
    ///
    /// # Errors
    /// Nothing is called, or in no folder.
    pub fn called(called: &[OsString]) -> Result<Self> {
        let (file, arguments) = called.split_first().context("no program is named")?;
        let stem = Path::new(file).file_stem().unwrap_or_default().to_string_lossy();
        let name = stem.rsplit_once('-').map_or(&*stem, |(name, _)| name);
        let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
        Ok(Self {
            name: format!("{name} of {package}"),
            file: file.clone(),
            arguments: arguments.to_vec(),
            folder: std::env::current_dir().context("the working directory")?.into(),
            environment: std::env::vars_os().collect(),
        })
    }

    /// Tests in the documentation: cargo makes programs of them, and keeps none.
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

    /// Writes it down in `folder`, in a file that comes after those of earlier ones.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn keep(&self, folder: &Path) -> Result<()> {
        // cargo starts one after the other.
        let count = fs::read_dir(folder).with_context(|| folder.display().to_string())?.count();
        let file = folder.join(format!("{count:05}"));
        fs::write(&file, serde_json::to_vec(self)?).with_context(|| file.display().to_string())
    }

    /// How it is started.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.args(&self.arguments).current_dir(&self.folder).env_clear();
        command.envs(self.environment.iter().map(|(name, value)| (name, value))).stdin(Stdio::null());
        command
    }
}

/// How cargo is told of packages.
fn of(packages: &[String]) -> Vec<String> {
    match packages {
        [] => vec!["--workspace".to_owned()],
        named => named.iter().map(|name| format!("--package={name}")).collect(),
    }
}

/// Builds the tests of these packages, or of the workspace if none is named; all programs, in cargo's order, each to be given `options`.
///
/// # Errors
/// What does not build.
pub fn all(packages: &[String], options: &[OsString]) -> Result<Vec<Program>> {
    let notes = tempfile::tempdir().context("a folder for notes")?;
    let own = std::env::current_exe().context("this program")?;
    // A list of JSON strings is one of TOML strings too.
    let runner = serde_json::to_string(&[own.as_path(), Path::new("note-test"), notes.path()])?;
    let mut cargo = crate::cargo();
    cargo.current_dir(crate::origin()).args(["test", "--quiet", "--tests", "--no-fail-fast"]);
    cargo.args(of(packages));
    cargo.arg("--config").arg(format!("target.'cfg(all())'.runner={runner}")).arg("--").args(options);
    if !cargo.stdin(Stdio::null()).status().context("cargo does not start")?.success() {
        bail!("the tests do not build");
    }
    let mut files = fs::read_dir(notes.path())?.collect::<Result<Vec<_>, _>>().context("notes")?;
    files.sort_unstable_by_key(fs::DirEntry::file_name);
    let read = |file: &fs::DirEntry| -> Result<Program> {
        let mut program: Program = serde_json::from_slice(&fs::read(file.path())?)?;
        // That cargo is to be quiet here it passes on.
        options.clone_into(&mut program.arguments);
        Ok(program)
    };
    let mut programs = files.iter().map(read).collect::<Result<Vec<_>>>()?;
    if packages.is_empty() {
        programs.push(Program::documentation(options)?);
    }
    Ok(programs)
}
