//! Writes the list of what was lost with a volume. The file is durable before anything is given up,
//! and never overwrites another.
//!
//! It is one JSON object, `bcached.lost-ranges` version 1, with one range per line. It is written
//! while the index is read, so a list of millions needs no more memory than one of ten.

use crate::notes;
use bcached_control::atomic_file;
use bcached_control::failure::{Failure, Kind};
use bcached_control::paths;
use bcached_engine::LostRange;
use bcached_format::Uuid;
use serde_json::json;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

/// Overrides the folder of lists without a given name.
pub const VARIABLE: &str = "BCACHED_STATE";

/// Where a backing device's data begins by default, in sectors; the device that has the true value
/// is gone.
const DATA_OFFSET: u64 = 16;

/// The volume that a list belongs to.
#[derive(Clone)]
pub struct VolumeIdentity {
    /// UUID of the volume.
    pub uuid: Uuid,
    /// Its label; may be empty.
    pub label: String,
    /// UUID of the cache set.
    pub set_uuid: Uuid,
    /// It had no backing device.
    pub flash_only: bool,
}

/// The default path of the list of `uuid`: in a folder that outlives a reboot.
#[must_use]
pub fn default_path(uuid: Uuid) -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_user = || {
        let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
        state.map_or_else(std::env::temp_dir, |state| state.join("bcached"))
    };
    let usual = || match notes::is_root() {
        true => PathBuf::from("/var/lib/bcached"),
        false => of_user(),
    };
    let folder = variable(VARIABLE).unwrap_or_else(|| paths::of_machine(usual()));
    free(&folder, &format!("lost-{uuid}-{}", jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ")))
}

/// A free name in `folder`: a volume may lose something twice within a second.
fn free(folder: &Path, stem: &str) -> PathBuf {
    let named = |number: u32| match number {
        0 => folder.join(format!("{stem}.json")),
        _ => folder.join(format!("{stem}-{number}.json")),
    };
    (0..).map(named).find(|path| path.symlink_metadata().is_err()).expect("some number is free")
}

/// Checks, as far as possible without writing, that the list can be written at `path`.
///
/// # Errors
/// It cannot, or the path exists.
pub fn check(path: &Path) -> Result<(), Failure> {
    if path.symlink_metadata().is_ok() {
        return Err(Failure::new(Kind::Signature, format!("{} already exists", path.display()))
            .why("the list of lost data never overwrites a file")
            .next("name another file with --lost-ranges")
            .option("--lost-ranges"));
    }
    let folder = folder(path);
    let nearest = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
    let may = rustix::fs::access(nearest, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
    may.map_err(|error| cannot(path, &error.into()))
}

/// Writes the list at `path`, durably. `more` returns some of it and where the rest begins. Returns
/// how many bytes are lost.
///
/// # Errors
/// `more`'s, or the list cannot be written: then there is none.
pub fn write(
    path: &Path,
    owner: &VolumeIdentity,
    more: impl FnMut(u64) -> Result<(Vec<LostRange>, Option<u64>), Failure>,
) -> Result<u64, Failure> {
    let unfinished = path.with_extension("new");
    let missing: Vec<_> = folder(path).ancestors().take_while(|folder| !folder.exists()).collect();
    let written = fill(&unfinished, owner, more).and_then(|lost| {
        check(path)?;
        fs::rename(&unfinished, path)
            .and_then(|()| File::open(folder(path))?.sync_all())
            .map_err(|error| cannot(path, &error))?;
        Ok(lost)
    });
    if written.is_err() {
        let _never_made = fs::remove_file(&unfinished);
        // The innermost first; a folder into which something else was put stays.
        missing.iter().for_each(|folder| drop(fs::remove_dir(folder)));
    }
    written
}

fn fill(
    path: &Path,
    owner: &VolumeIdentity,
    mut more: impl FnMut(u64) -> Result<(Vec<LostRange>, Option<u64>), Failure>,
) -> Result<u64, Failure> {
    let failed = |error: io::Error| cannot(path, &error);
    atomic_file::make_folders(folder(path)).map_err(failed)?;
    let mut out = BufWriter::new(File::create(path).map_err(failed)?);
    let offset = if owner.flash_only { 0 } else { DATA_OFFSET };
    out.write_all(head(owner, offset).as_bytes()).map_err(failed)?;
    let (mut at, mut lost, mut last): (_, u64, Option<LostRange>) = (Some(0), 0, None);
    let mut separator = "\n";
    let mut line = |out: &mut BufWriter<File>, range: LostRange| {
        let bytes = (range.end - range.start) * 512;
        let range = json!({ "start_bytes": range.start.saturating_sub(offset) * 512, "length_bytes": bytes });
        write!(out, "{separator}{range}")?;
        separator = ",\n";
        Ok(())
    };
    while let Some(from) = at {
        let (some, rest) = more(from)?;
        for range in some {
            lost += (range.end - range.start) * 512;
            // Merges ranges that were cut where a part ended.
            match last.as_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => {
                    if let Some(before) = last.replace(range) {
                        line(&mut out, before).map_err(failed)?;
                    }
                }
            }
        }
        at = rest;
    }
    if let Some(last) = last {
        line(&mut out, last).map_err(failed)?;
    }
    let end = format!("\n],\"lost_bytes\":{lost}}}\n");
    out.write_all(end.as_bytes()).and_then(|()| out.flush()).map_err(failed)?;
    out.get_ref().sync_all().map_err(failed)?;
    Ok(lost)
}

/// All but the ranges and their sum.
fn head(owner: &VolumeIdentity, offset: u64) -> String {
    let mut head = json!({
        "schema": "bcached.lost-ranges",
        "schema_version": 1,
        "bcached": env!("CARGO_PKG_VERSION"),
        "uuid": owner.uuid.to_string(),
        "label": owner.label,
        "set_uuid": owner.set_uuid.to_string(),
        "lost_at": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    if !owner.flash_only {
        head["assumed_data_offset_bytes"] = json!(offset * 512);
    }
    let head = head.to_string();
    format!("{},\"ranges\":[", head.strip_suffix('}').unwrap_or(&head))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Kind::Permission,
        _ => Kind::Io,
    };
    Failure::new(kind, format!("cannot write {}", path.display()))
        .why(error.to_string())
        .next("no data was given up; use --lost-ranges to name a file that the daemon can write")
        .option("--lost-ranges")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_lists_of_one_second_have_two_names() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = free(folder.path(), "lost");
        fs::write(&first, "").expect("a file");
        let second = free(folder.path(), "lost");
        assert_eq!(
            [&first, &second].map(|path| path.file_name().expect("a name")),
            ["lost.json", "lost-1.json"]
        );
    }

    fn owner(flash_only: bool) -> VolumeIdentity {
        VolumeIdentity {
            uuid: Uuid([7; 16]),
            label: "ta\"nk".to_owned(),
            set_uuid: Uuid([8; 16]),
            flash_only,
        }
    }

    /// Parts that touch become one range, and an existing file is not overwritten.
    #[test]
    fn the_list_is_whole_and_written_over_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deep/er/lost.json");
        let parts = |at| {
            Ok(match at {
                0 => (vec![LostRange { start: 16, end: 24 }, LostRange { start: 32, end: 40 }], Some(40)),
                _ => (vec![LostRange { start: 40, end: 48 }], None),
            })
        };
        assert_eq!(write(&path, &owner(false), parts), Ok(24 * 512));
        let text = fs::read_to_string(&path).expect("it is there");
        let list: serde_json::Value = serde_json::from_str(&text).expect("one object");
        let range =
            |start: u64, length: u64| json!({ "start_bytes": start * 512, "length_bytes": length * 512 });
        assert_eq!(list["ranges"], json!([range(0, 8), range(16, 16)]), "{text}");
        assert_eq!((list["label"].as_str(), list["lost_bytes"].as_u64()), (Some("ta\"nk"), Some(24 * 512)));
        let refused = write(&path, &owner(true), parts).expect_err("it is there");
        assert_eq!(refused.kind.exit(), 3, "{refused}");
        assert_eq!(fs::read_to_string(&path).expect("it is there"), text);
        let failure = Failure::new(Kind::Io, "the index cannot be read");
        for other in ["other.json", "more/folders/other.json"] {
            let other = folder.path().join(other);
            assert!(write(&other, &owner(true), |_| Err(failure.clone())).is_err());
        }
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left of it");
    }
}
