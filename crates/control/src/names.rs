//! What volumes and caches are called: the configuration's name, else the label, else eight digits of the UUID.
//! Names depend on what the devices say and on nothing else, never on the order of arrival.

use crate::failure::{Failure, Kind};
use bcached_format::{Label, Uuid};
use bcached_uring::Presence;
use std::path::Path;

/// The least of a UUID that names a volume, in digits.
const UUID_BEGINNING: usize = 8;

/// What a volume can be called by.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Known {
    /// Its name here.
    pub name: String,
    /// What control files call it, if it is a volume: `bcacheN`.
    pub kernel_name: Option<String>,
    /// Its label, if that is known and not empty.
    pub label: Option<String>,
    /// Its UUID, as text in lower case.
    pub uuid: Option<String>,
    /// Its device, as configured.
    pub path: Option<String>,
    /// Which device that is, once it was opened.
    pub opened: Option<Presence>,
    /// What something was called that has been removed: it is nothing else's label for who asks for the same once more.
    pub former: Option<String>,
}

/// Which of `all` is meant by `typed`: the one with that name, or else with that label, name in control files, UUID, beginning of a UUID (8 digits
/// at least) or device, by whatever path. Looks at files if `typed` is a path.
///
/// # Errors
/// All that could be meant, or none.
pub fn resolve(typed: &str, all: &[Known]) -> Result<usize, Vec<usize>> {
    resolve_called(Called::by_owner(typed), all)
}

/// What somebody calls something.
#[derive(Clone, Copy, Debug)]
pub struct Called<'a> {
    /// As he has typed it.
    pub typed: &'a str,
    /// It may be another name of a device. Who may only look is not to have a process of root look at files of his choice: of him a path
    /// is what it says.
    pub looks_at_files: bool,
}

impl<'a> Called<'a> {
    /// By somebody who may do everything.
    #[must_use]
    pub const fn by_owner(typed: &'a str) -> Self {
        Self { typed, looks_at_files: true }
    }
}

/// As [`resolve`], for whoever that is.
///
/// # Errors
/// As of that.
pub fn resolve_called(called: Called<'_>, all: &[Known]) -> Result<usize, Vec<usize>> {
    let Called { typed, looks_at_files } = called;
    let those = |is_meant: &dyn Fn(&Known) -> bool| -> Vec<usize> {
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
        |opened: &Presence| looks_at_files && typed.starts_with('/') && opened.is_at(Path::new(typed));
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

/// `typed` is that UUID, or the beginning of it, of 8 digits at least; `UUID=` may stand before it.
#[must_use]
pub fn is_uuid(typed: &str, uuid: &str) -> bool {
    let beginning = typed.strip_prefix("UUID=").unwrap_or(typed).to_lowercase().replace('-', "");
    beginning.len() >= UUID_BEGINNING && uuid.replace('-', "").starts_with(beginning.as_str())
}

/// A letter that nobody sees, or that changes how others are seen.
#[must_use]
pub fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The refusal of `typed`, by which several `meant` are called, or nothing; `all` are the names there are.
#[must_use]
pub fn refusal<'a>(
    typed: &str,
    meant: impl IntoIterator<Item = &'a str>,
    all: impl IntoIterator<Item = &'a str>,
) -> Failure {
    let meant: Vec<_> = meant.into_iter().collect();
    let all: Vec<_> = all.into_iter().collect();
    if !meant.is_empty() {
        return Failure::new(Kind::AmbiguousName, format!("several volumes may be meant by `{typed}`"))
            .next(format!("name one of: {}", meant.join(", ")));
    }
    let failure = Failure::new(Kind::UnknownName, format!("nothing is called `{typed}`"));
    if all.is_empty() { failure } else { failure.next(format!("there are: {}", all.join(", "))) }
}

/// The name of a volume that the configuration does not name. `taken` says which names others have, or could claim
/// with equal right (the same label).
#[must_use]
pub fn of_volume(label: Label, uuid: Uuid, taken: impl Fn(&str) -> bool) -> String {
    from_label(label, taken).unwrap_or_else(|| format!("bcache-{}", digits(uuid)))
}

/// What control files call the volume of this number: that which its section asks for, else its place in the configuration or on the command
/// line; those in caches alone are behind them.
#[must_use]
pub fn in_control_files(number: usize) -> String {
    format!("bcache{number}")
}

/// The name of a cache that the configuration does not name.
#[must_use]
pub fn of_cache(label: Label, set: Uuid, taken: impl Fn(&str) -> bool) -> String {
    from_label(label, taken).unwrap_or_else(|| format!("set-{}", digits(set)))
}

/// Names go into paths, NBD and JSON: they are not empty, and have no slash and no control character.
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

    /// Who removed a volume twice removed another one, which had its name as a label.
    #[test]
    fn the_name_of_what_was_removed_is_nobody_elses_label() {
        let other = Known { name: "other".to_owned(), label: Some("same".to_owned()), ..Known::default() };
        let removed = Known { former: Some("same".to_owned()), ..Known::default() };
        assert_eq!(resolve("same", std::slice::from_ref(&other)), Ok(0));
        let all = [removed, other];
        assert_eq!((resolve("same", &all), resolve("other", &all)), (Err(Vec::new()), Ok(1)));
        let again = Known { name: "same".to_owned(), ..Known::default() };
        assert_eq!(resolve("same", &[&all[..], &[again]].concat()), Ok(2), "it has been added again");
    }

    /// Whatever is not unique names nothing, except that a name is stronger than a label.
    #[test]
    fn a_volume_is_called_by_name_label_uuid_or_path() {
        let known = |name: &str, label: &str, uuid: &str, path: &str| Known {
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
        let as_text = |typed| resolve_called(Called { typed, looks_at_files: false }, &all);
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
