//! A map for few elements: a sorted list that keeps its memory. With few elements, searching and
//! moving is faster than with the nodes of a tree, and no request allocates.

use alloc::vec::Vec;

/// A map for few elements.
pub struct SortedMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Copy + Ord, V> SortedMap<K, V> {
    /// Creates an empty map that does not allocate until it holds more than `count` elements.
    pub fn with_room_for(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// The index of `key`, or the index where it would be inserted.
    #[inline]
    pub fn place(&self, key: K) -> Result<usize, usize> {
        self.0.binary_search_by_key(&key, |(key, _)| *key)
    }

    /// The value of `key`.
    #[inline]
    pub fn get(&self, key: K) -> Option<&V> {
        self.place(key).ok().map(|place| &self.0[place].1)
    }

    /// The value of `key`, mutable.
    #[inline]
    pub fn get_mut(&mut self, key: K) -> Option<&mut V> {
        let place = self.place(key).ok()?;
        Some(self.at_mut(place))
    }

    /// The value at an [index](Self::place), mutable.
    #[inline]
    pub fn at_mut(&mut self, place: usize) -> &mut V {
        &mut self.0[place].1
    }

    /// Removes `key` and returns its value.
    pub fn remove(&mut self, key: K) -> Option<V> {
        let place = self.place(key).ok()?;
        Some(self.0.remove(place).1)
    }

    /// Inserts a value and returns its index.
    ///
    /// # Panics
    /// If the map has that key already.
    pub fn insert(&mut self, key: K, value: V) -> usize {
        let place = self.place(key).expect_err("the key is not in the map yet");
        self.0.insert(place, (key, value));
        place
    }

    /// Inserts a value and returns the one that `key` had before.
    pub fn replace(&mut self, key: K, value: V) -> Option<V> {
        match self.place(key) {
            Ok(place) => Some(core::mem::replace(&mut self.0[place].1, value)),
            Err(place) => {
                self.0.insert(place, (key, value));
                None
            }
        }
    }

    /// Iterates over all elements, in order.
    pub fn iter(&self) -> impl Iterator<Item = &(K, V)> {
        self.0.iter()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }
}
