//! Asks the machine's own library, libblkid, through `wipefs` if that is installed. It lists every
//! signature that it finds, with its place, even if several programs would claim the device.
//!
//! The program is run and not linked: a static binary in a container has neither, and bcached's own
//! table is all it needs.

use super::{SignatureClass, SignatureScan};
use crate::device;
use bcached_control::failure::{Failure, Kind};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PROGRAM: &str = "wipefs";

/// Adds what the own table does not have.
pub(super) fn find(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    let Some(program) = program() else { return Ok(()) };
    let path = found.device.path();
    let cannot = |why: String| {
        Failure::new(Kind::Io, format!("cannot determine what is on {}", path.display()))
            .why(why)
            .next(format!("run `{} {}` by hand", program.display(), path.display()))
    };
    let ran = Command::new(&program)
        .args(["--noheadings", "--parsable", "--output", "OFFSET,LENGTH,TYPE", "--"])
        .arg(path)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| cannot(format!("{} cannot be run: {error}", program.display())))?;
    let said = String::from_utf8_lossy(&ran.stdout);
    if !ran.status.success() {
        let error = String::from_utf8_lossy(&ran.stderr);
        let error = error.lines().next().unwrap_or("it gave no reason");
        return Err(cannot(format!("{} failed ({}): {error}", program.display(), ran.status)));
    }
    let end = device::length(found.device);
    for line in said.lines().filter(|line| !line.trim().is_empty()) {
        let (kind, offset, length) = parse(line)
            .filter(|(_, offset, length)| offset.checked_add(*length as u64).is_some_and(|at| at <= end))
            .ok_or_else(|| {
                cannot(format!("{} printed {line:?}, which is not understood", program.display()))
            })?;
        if kind != "bcache" && !found.covers(offset, length) {
            found.mark(Cow::Owned(kind), SignatureClass::Content, offset, length);
        }
    }
    Ok(())
}

/// Parses offset, length and type: `0x438,2,ext4`.
fn parse(line: &str) -> Option<(String, u64, usize)> {
    let mut fields = line.trim().split(',');
    let offset = u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok()?;
    let length: usize = fields.next()?.parse().ok().filter(|length| (1..=4096).contains(length))?;
    let kind = fields.next()?;
    let is_name = |kind: &str| kind.chars().all(|letter| letter.is_ascii_graphic());
    (fields.next().is_none() && !kind.is_empty() && is_name(kind)).then(|| (kind.to_owned(), offset, length))
}

/// Finds the program, also where an ordinary user's `PATH` does not lead.
fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute()).chain(usual);
    folders.map(|folder| folder.join(PROGRAM)).find(|program| is_program(program))
}

fn is_program(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_offset_a_length_and_a_type() {
        assert_eq!(parse("0x438,2,ext4"), Some(("ext4".to_owned(), 0x438, 2)));
        let odd =
            ["", "438,2,ext4", "0x438,2", "0x438,0,ext4", "0x438,2,ext4,more", "0x438,2,a b", "0xg,2,x"];
        assert!(odd.iter().all(|line| parse(line).is_none()));
        assert_eq!(parse("0xffffffffffffffffff,2,ext4"), None, "more than 64 bits");
    }
}
