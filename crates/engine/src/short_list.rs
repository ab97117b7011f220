//! A list optimised for one element: the first is stored inline, without an allocation.

use alloc::vec::Vec;

/// A list that usually has one element.
#[derive(Clone, Debug)]
pub struct ShortList<T> {
    first: Option<T>,
    rest: Vec<T>,
}

impl<T> Default for ShortList<T> {
    fn default() -> Self {
        Self { first: None, rest: Vec::new() }
    }
}

impl<T> ShortList<T> {
    /// Appends an element.
    #[inline]
    pub fn push(&mut self, one: T) {
        match self.first {
            None => self.first = Some(one),
            Some(_) => self.rest.push(one),
        }
    }

    /// Returns the only element, or the list if it has more than one element or none.
    #[inline]
    pub fn only(mut self) -> Result<T, Self> {
        if !self.rest.is_empty() {
            return Err(self);
        }
        self.first.take().ok_or_else(Self::default)
    }

    /// The last element.
    #[must_use]
    pub fn last(&self) -> Option<&T> {
        self.rest.last().or(self.first.as_ref())
    }

    /// Iterates over all elements, in order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.rest)
    }

    /// Iterates over all elements, in order, mutably.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.first.iter_mut().chain(&mut self.rest)
    }
}

impl<T> IntoIterator for ShortList<T> {
    type Item = T;
    type IntoIter = core::iter::Chain<core::option::IntoIter<T>, alloc::vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        self.first.into_iter().chain(self.rest)
    }
}

impl<T> Extend<T> for ShortList<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, more: I) {
        more.into_iter().for_each(|one| self.push(one));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_a_list() {
        let mut list = ShortList::default();
        assert!(list.last().is_none() && list.clone().only().is_err());
        list.push(1);
        assert_eq!((list.clone().only().ok(), list.last()), (Some(1), Some(&1)));
        list.extend([2, 3]);
        list.iter_mut().for_each(|one| *one *= 10);
        assert_eq!(list.iter().copied().collect::<Vec<i32>>(), [10, 20, 30]);
        assert_eq!(list.last(), Some(&30));
        let all = list.only().expect_err("there are more");
        assert_eq!(all.into_iter().collect::<Vec<i32>>(), [10, 20, 30]);
    }
}
