//! udev's rules: that of bcache-tools, which gives every bcache device to the kernel, and
//! bcached's, which protects the configured devices from it.

use super::system::SystemPaths;
use super::{Facility, FacilityState, Finding};
use bcached_format::Uuid;
use bcached_uring::udev::{OWNED_RULES_PATH, owned_rules};
use std::path::PathBuf;

/// Directories of udev's rules, the administrator's first.
const FOLDERS: &[&str] =
    &["/etc/udev/rules.d", "/run/udev/rules.d", "/usr/lib/udev/rules.d", "/lib/udev/rules.d"];

pub(super) fn items(system: &SystemPaths) -> Vec<Facility> {
    let item = |name, word, detail: &str| match rule(system, word) {
        Some(path) => Facility::yes(name, format!("{}: {detail}", path.display())),
        None => Facility::no(name, "not installed", None),
    };
    let ours = item("udev rule of bcached", "bcached", "it keeps configured devices from the kernel");
    let kernels = item("udev rule of bcache-tools", "bcache", "it gives every bcache device to the kernel");
    let is_unprotected = kernels.available && !ours.available;
    let mends = is_unprotected
        .then(|| "install packaging/udev/68-bcached.rules, else the kernel takes the devices".to_owned());
    let state = if is_unprotected { FacilityState::Warn } else { FacilityState::Ok };
    vec![kernels.in_state(state), Facility { mends, ..ours.in_state(state) }]
}

/// Finds what udev's rules do with a device of that UUID when it appears, or is closed after a
/// write.
pub(super) fn finding(system: &SystemPaths, uuid: Uuid) -> Option<Finding> {
    rule(system, "bcache")?;
    let list = std::fs::read_to_string(system.rules(OWNED_RULES_PATH)).unwrap_or_default();
    let own = owned_rules(&[uuid.0]);
    let is_listed = own.lines().last().is_some_and(|line| list.lines().any(|listed| listed == line));
    let (is_kept, has_rule) = (is_listed, rule(system, "bcached").is_some());
    let why = match (is_kept, has_rule) {
        (true, true) => return None,
        (_, false) => "the rule of bcached, which would prevent this, is not installed",
        (false, true) => {
            "no configuration that was served on this machine names it, so the rule of bcached does not prevent this"
        }
    };
    let said = "the udev rule of bcache-tools gives it to the kernel's bcache when it appears, and when it is closed after a write";
    Some(Finding::new("udev", format!("{said}: {why}")))
}

/// Returns the rule file whose name contains `word` as a whole word. The list of owned devices is
/// not a rule file.
fn rule(system: &SystemPaths, word: &str) -> Option<PathBuf> {
    let is_rule = |file: &str| {
        file.ends_with(".rules")
            && !OWNED_RULES_PATH.ends_with(file)
            && file.split(|letter: char| !letter.is_ascii_alphabetic()).any(|part| part == word)
    };
    let folders = FOLDERS.iter().map(|folder| system.rules(folder));
    let mut files = folders.flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    let found = files.find(|entry| is_rule(&entry.file_name().to_string_lossy()))?;
    // A link to /dev/null masks a rule.
    let is_masked = std::fs::canonicalize(found.path()).is_ok_and(|to| to.ends_with("dev/null"));
    (!is_masked).then(|| found.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_kept_from_the_kernel_by_the_rule_and_the_list() {
        let root = tempfile::tempdir().expect("a folder");
        let system = SystemPaths::at(root.path(), "6.1");
        let uuid = Uuid([7; 16]);
        let write = |path: &str, text: &str| {
            let path = system.path(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        };
        assert!(finding(&system, uuid).is_none(), "nobody takes it");
        write("/usr/lib/udev/rules.d/69-bcache.rules", "");
        let said = |uuid| finding(&system, uuid).map(|finding| finding.text).unwrap_or_default();
        assert!(said(uuid).contains("is not installed"), "{}", said(uuid));
        let [kernels, ours] = &items(&system)[..] else { unreachable!("two") };
        assert!(kernels.available && !ours.available && ours.mends.is_some());
        write(OWNED_RULES_PATH, &owned_rules(&[[7; 16]]));
        assert!(said(uuid).contains("is not installed"), "the list alone does nothing");
        write("/etc/udev/rules.d/68-bcached.rules", "");
        assert_eq!(said(uuid), "");
        assert!(said(Uuid([8; 16])).contains("no configuration"), "{}", said(Uuid([8; 16])));
        assert!(items(&system)[1].mends.is_none());
    }

    #[test]
    fn a_rule_that_was_taken_out_is_none() {
        let root = tempfile::tempdir().expect("a folder");
        let system = SystemPaths::at(root.path(), "6.1");
        let rules = system.path("/etc/udev/rules.d");
        std::fs::create_dir_all(&rules).expect("a folder");
        std::os::unix::fs::symlink("/dev/null", rules.join("69-bcache.rules")).expect("a link");
        std::fs::create_dir_all(system.path("/usr/lib/udev/rules.d")).expect("a folder");
        std::fs::write(system.path("/usr/lib/udev/rules.d/69-bcache.rules"), "").expect("a file");
        assert!(finding(&system, Uuid([7; 16])).is_none());
    }
}
