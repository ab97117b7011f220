//! Names of volumes and caches: the name in the configuration, else the label, else eight digits of
//! the UUID. Names depend only on the configuration and the devices, never on the order of arrival.

use crate::failure::{Failure, Kind};
use bcached_format::{Label, Uuid};
use bcached_uring::DevicePresence;
use std::path::Path;

/// Minimum number of digits of a UUID that identify a volume.
const UUID_BEGINNING: usize = 8;

/// The names by which a volume or cache can be called.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct KnownNames {
    /// Its configured or derived name.
    pub name: String,
    /// The name in control files, if it is a volume: `bcacheN`.
    pub kernel_name: Option<String>,
    /// Its label, if it is known and not empty.
    pub label: Option<String>,
    /// Its UUID, as text in lower case.
    pub uuid: Option<String>,
    /// Its device, as configured.
    pub path: Option<String>,
    /// The opened device, once it is open.
    pub opened: Option<DevicePresence>,
    /// The name of something that has been removed. A repeated request for that name does not match
    /// another volume's label.
    pub former: Option<String>,
}

/// Returns the index of the item in `all` that `typed` means. An exact name has precedence.
/// Otherwise `typed` may be a label, a name in control files, a UUID, the beginning of one (at
/// least 8 digits), or a device, by any path to it. Accesses files if `typed` is a path.
///
/// # Errors
/// The indexes of all items that could be meant; empty if there are none.
pub fn resolve(typed: &str, all: &[KnownNames]) -> Result<usize, Vec<usize>> {
    resolve_called(TypedName::by_owner(typed), all)
}

/// A name that a user typed, and what may be done to resolve it.
#[derive(Clone, Copy, Debug)]
pub struct TypedName<'a> {
    /// The text as typed.
    pub typed: &'a str,
    /// The text may be another path of a device, so files may be accessed. For clients with
    /// read-only access this is false, because a process with root privileges must not access files
    /// of their choice. A path is then compared as text.
    pub looks_at_files: bool,
}

impl<'a> TypedName<'a> {
    /// Creates a name typed by a user with full access.
    #[must_use]
    pub const fn by_owner(typed: &'a str) -> Self {
        Self { typed, looks_at_files: true }
    }
}

/// Resolves a name like [`resolve`], for any user.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_called(called: TypedName<'_>, all: &[KnownNames]) -> Result<usize, Vec<usize>> {
    let TypedName { typed, looks_at_files } = called;
    let those = |is_meant: &dyn Fn(&KnownNames) -> bool| -> Vec<usize> {
        all.iter().enumerate().filter(|(_, known)| is_meant(known)).map(|(index, _)| index).collect()
    };
    let named = those(&|known| known.name == typed);
    let file =
        (looks_at_files && typed.starts_with('/')).then(|| std::fs::canonicalize(typed).ok()).flatten();
    let is_path = |path: &String| {
        path == typed
            || file.as_ref().is_some_and(|file| std::fs::canonicalize(path).is_ok_and(|it| it == *file))
    };
    let is_open_there =
        |opened: &DevicePresence| looks_at_files && typed.starts_with('/') && opened.is_at(Path::new(typed));
    if named.is_empty() && all.iter().any(|known| known.former.as_deref() == Some(typed)) {
        return Err(Vec::new());
    }
    let meant = if named.is_empty() {
        those(&|known| {
            known.label.as_deref() == Some(typed)
                || known.kernel_name.as_deref() == Some(typed)
                || known.uuid.as_deref().is_some_and(|uuid| is_uuid(typed, uuid))
                || known.path.as_ref().is_some_and(is_path)
                || known.opened.as_ref().is_some_and(is_open_there)
        })
    } else {
        named
    };
    match meant.as_slice() {
        [one] => Ok(*one),
        _ => Err(meant),
    }
}

/// Returns whether `typed` is that UUID or the beginning of it, at least 8 digits long. A prefix
/// `UUID=` is accepted.
#[must_use]
pub fn is_uuid(typed: &str, uuid: &str) -> bool {
    let beginning = typed.strip_prefix("UUID=").unwrap_or(typed).to_lowercase().replace('-', "");
    beginning.len() >= UUID_BEGINNING && uuid.replace('-', "").starts_with(beginning.as_str())
}

/// Returns whether a character is invisible, or changes how others are displayed.
#[must_use]
pub fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Builds the refusal of `typed`, which matches the several names in `meant`, or nothing. `all` are
/// the existing names.
#[must_use]
pub fn refusal<'a>(
    typed: &str,
    meant: impl IntoIterator<Item = &'a str>,
    all: impl IntoIterator<Item = &'a str>,
) -> Failure {
    let meant: Vec<_> = meant.into_iter().collect();
    let all: Vec<_> = all.into_iter().collect();
    if !meant.is_empty() {
        return Failure::new(Kind::AmbiguousName, format!("`{typed}` matches several volumes"))
            .next(format!("name one of: {}", meant.join(", ")));
    }
    let failure = Failure::new(Kind::UnknownName, format!("nothing is called `{typed}`"));
    if all.is_empty() { failure } else { failure.next(format!("there are: {}", all.join(", "))) }
}

/// Returns the name of a volume that the configuration does not name. `taken` tells whether another
/// volume has a name, or has an equal claim to it (the same label).
#[must_use]
pub fn of_volume(label: Label, uuid: Uuid, taken: impl Fn(&str) -> bool) -> String {
    from_label(label, taken).unwrap_or_else(|| format!("bcache-{}", digits(uuid)))
}

/// Returns the name of the volume with this number in control files. The number is the one that its
/// section asks for, else its position in the configuration or on the command line. Volumes that
/// live in caches only follow those.
#[must_use]
pub fn in_control_files(number: usize) -> String {
    format!("bcache{number}")
}

/// Returns the name of a cache that the configuration does not name.
#[must_use]
pub fn of_cache(label: Label, set: Uuid, taken: impl Fn(&str) -> bool) -> String {
    from_label(label, taken).unwrap_or_else(|| format!("set-{}", digits(set)))
}

/// Returns whether `text` can be a name. Names become part of paths, NBD exports and JSON: they are
/// not empty, and have no slash and no control character.
#[must_use]
pub fn can_be_name(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(|letter| letter.is_control() || letter == '/')
}

fn from_label(label: Label, taken: impl Fn(&str) -> bool) -> Option<String> {
    let text = std::str::from_utf8(label.text()).ok()?;
    (can_be_name(text) && !taken(text)).then(|| text.to_owned())
}

fn digits(uuid: Uuid) -> String {
    uuid.to_string().chars().take(8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name of a removed volume does not match another volume's label. A repeated `remove` once
    /// removed a second volume, whose label was that name.
    #[test]
    fn the_name_of_what_was_removed_is_nobody_elses_label() {
        let other =
            KnownNames { name: "other".to_owned(), label: Some("same".to_owned()), ..KnownNames::default() };
        let removed = KnownNames { former: Some("same".to_owned()), ..KnownNames::default() };
        assert_eq!(resolve("same", std::slice::from_ref(&other)), Ok(0));
        let all = [removed, other];
        assert_eq!((resolve("same", &all), resolve("other", &all)), (Err(Vec::new()), Ok(1)));
        let again = KnownNames { name: "same".to_owned(), ..KnownNames::default() };
        assert_eq!(resolve("same", &[&all[..], &[again]].concat()), Ok(2), "it has been added again");
    }

    /// A text that matches several volumes identifies none, except that an exact name has
    /// precedence over a label.
    #[test]
    fn a_volume_is_called_by_name_label_uuid_or_path() {
        let known = |name: &str, label: &str, uuid: &str, path: &str| KnownNames {
            name: name.to_owned(),
            kernel_name: path.strip_prefix("/dev/t").map(|rest| format!("bcache-{rest}")),
            label: Some(label.to_owned()),
            uuid: Some(uuid.to_owned()),
            path: Some(path.to_owned()),
            opened: None,
            former: None,
        };
        let folder = tempfile::tempdir().expect("a folder");
        let (device, link) = (folder.path().join("device"), folder.path().join("link"));
        std::fs::write(&device, "").expect("a file");
        std::os::unix::fs::symlink(&device, &link).expect("a link");
        let [device, link] = [&device, &link].map(|path| path.to_str().expect("text"));
        let all = [
            known("one", "same", "1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10", device),
            known("two", "same", "1f5a0c22-9999-4ae5-9a6f-9f6f5d6b2f10", "/dev/two"),
            known("three", "one", "77777777-2a53-4ae5-9a6f-9f6f5d6b2f10", "/dev/three"),
        ];
        let found = |typed: &str| resolve(typed, &all);
        assert_eq!((found("one"), found("two"), found("same")), (Ok(0), Ok(1), Err(vec![0, 1])));
        assert_eq!((found("77777777"), found("7777777")), (Ok(2), Err(Vec::new())));
        assert_eq!(
            (found("1F5A0C22"), found("1F5A0C22-99"), found("1f5a0c229999")),
            (Err(vec![0, 1]), Ok(1), Ok(1))
        );
        assert_eq!(found("UUID=77777777-2a53-4ae5-9a6f-9f6f5d6b2f10"), Ok(2));
        assert_eq!((found("/dev/three"), found(device), found(link)), (Ok(2), Ok(0), Ok(0)));
        assert_eq!((found("bcache-wo"), found("bcache-w")), (Ok(1), Err(Vec::new())));
        assert_eq!((found("/dev/thre"), found("")), (Err(Vec::new()), Err(Vec::new())));
        let as_text = |typed| resolve_called(TypedName { typed, looks_at_files: false }, &all);
        assert_eq!((as_text(device), as_text("two"), as_text(link)), (Ok(0), Ok(1), Err(Vec::new())));
        let told = refusal("same", ["one", "two"], ["one", "two", "three"]);
        assert_eq!((told.kind.exit(), told.to_string().contains("one, two")), (2, true), "{told}");
    }

    #[test]
    fn labels_are_names_if_they_can_be() {
        let uuid = Uuid::from_text("1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10").expect("a uuid");
        let name =
            |label: &str, taken: bool| of_volume(Label::from_text(label).expect("fits"), uuid, |_| taken);
        assert_eq!(name("tank", false), "tank");
        assert_eq!(name("tank", true), "bcache-1f5a0c22");
        for unusable in ["", "a/b", "a\tb"] {
            assert_eq!(name(unusable, false), "bcache-1f5a0c22", "{unusable:?}");
        }
        assert_eq!(of_cache(Label::default(), uuid, |_| false), "set-1f5a0c22");
    }
}
