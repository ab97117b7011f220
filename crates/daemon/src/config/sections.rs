//! Sections with names, in the order in which they stand: by that volumes are numbered, and one that comes later moves no other.

use std::collections::BTreeMap;

/// Sections of one kind, by name.
#[derive(Debug)]
pub struct Sections<T> {
    /// With their places, which only grow.
    by_name: BTreeMap<String, (usize, T)>,
    next: usize,
}

impl<T> Default for Sections<T> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new(), next: 0 }
    }
}

impl<T> Sections<T> {
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub fn get(&self, name: &str) -> Option<&T> {
        self.by_name.get(name).map(|(_, section)| section)
    }

    pub fn get_mut(&mut self, name: &str) -> Option<&mut T> {
        self.by_name.get_mut(name).map(|(_, section)| section)
    }

    /// Behind all others, also one that was there before.
    pub fn push(&mut self, name: String, section: T) {
        self.by_name.insert(name, (self.next, section));
        self.next += 1;
    }

    /// The section called so, which is made behind all others if there is none.
    pub fn of(&mut self, name: &str) -> &mut T
    where
        T: Default,
    {
        let next = &mut self.next;
        let made = || {
            *next += 1;
            (*next - 1, T::default())
        };
        &mut self.by_name.entry(name.to_owned()).or_insert_with(made).1
    }

    /// Puts it behind all others.
    pub fn move_last(&mut self, name: &str) {
        if let Some((name, (_, section))) = self.by_name.remove_entry(name) {
            self.push(name, section);
        }
    }

    pub fn retain(&mut self, is_kept: impl Fn(&str, &T) -> bool) {
        self.by_name.retain(|name, (_, section)| is_kept(name, section));
    }

    /// In order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        let mut all: Vec<_> = self.by_name.iter().collect();
        all.sort_by_key(|(_, (place, _))| *place);
        all.into_iter().map(|(name, (_, section))| (name.as_str(), section))
    }

    /// In whichever order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut T)> {
        self.by_name.iter_mut().map(|(name, (_, section))| (name.as_str(), section))
    }
}

impl<T> IntoIterator for Sections<T> {
    type Item = (String, T);
    type IntoIter = std::vec::IntoIter<(String, T)>;

    /// In order.
    fn into_iter(self) -> Self::IntoIter {
        let mut all: Vec<_> = self.by_name.into_iter().collect();
        all.sort_by_key(|(_, (place, _))| *place);
        let all: Vec<_> = all.into_iter().map(|(name, (_, section))| (name, section)).collect();
        all.into_iter()
    }
}

impl<T> FromIterator<(String, T)> for Sections<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(sections: I) -> Self {
        let mut all = Self::default();
        sections.into_iter().for_each(|(name, section)| all.push(name, section));
        all
    }
}
