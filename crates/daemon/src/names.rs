//! What volumes and caches are called: the configuration's name, else the label, else eight digits of the UUID.
//! Names depend on what the devices say and on nothing else, never on the order of arrival.

use bcached_format::{Label, Uuid};

/// The name of a volume that the configuration does not name. `taken` says which names others have, or could claim
/// with equal right (the same label).
#[must_use]
pub fn of_volume(label: Label, uuid: Uuid, taken: impl Fn(&str) -> bool) -> String {
    from_label(label, taken).unwrap_or_else(|| format!("bcache-{}", digits(uuid)))
}

/// The name of a cache that the configuration does not name.
#[must_use]
pub fn of_cache(label: Label, set: Uuid, taken: impl Fn(&str) -> bool) -> String {
    from_label(label, taken).unwrap_or_else(|| format!("set-{}", digits(set)))
}

fn from_label(label: Label, taken: impl Fn(&str) -> bool) -> Option<String> {
    let text = std::str::from_utf8(label.text()).ok()?;
    let usable = !text.is_empty() && !text.chars().any(|letter| letter.is_control() || letter == '/');
    (usable && !taken(text)).then(|| text.to_owned())
}

fn digits(uuid: Uuid) -> String {
    uuid.to_string().chars().take(8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
