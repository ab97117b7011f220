//! A map of little. A sorted list, which keeps its memory: what is in it is found and moved faster than the nodes
//! of a tree would be, and no request asks for memory.

use alloc::vec::Vec;

/// See the file's head.
pub struct Sorted<K, V>(Vec<(K, V)>);

impl<K, V> Default for Sorted<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Copy + Ord, V> Sorted<K, V> {
    /// An empty one that asks for no memory before it holds more than so many.
    pub fn with_room_for(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Where that of `key` is, or would be.
    #[inline]
    pub fn place(&self, key: K) -> Result<usize, usize> {
        self.0.binary_search_by_key(&key, |(key, _)| *key)
    }

    /// That of `key`.
    #[inline]
    pub fn get(&self, key: K) -> Option<&V> {
        self.place(key).ok().map(|place| &self.0[place].1)
    }

    /// That of `key`, to change.
    #[inline]
    pub fn get_mut(&mut self, key: K) -> Option<&mut V> {
        let place = self.place(key).ok()?;
        Some(self.at_mut(place))
    }

    /// That at a [place](Self::place).
    #[inline]
    pub fn at_mut(&mut self, place: usize) -> &mut V {
        &mut self.0[place].1
    }

    /// Takes that of `key` out.
    pub fn remove(&mut self, key: K) -> Option<V> {
        let place = self.place(key).ok()?;
        Some(self.0.remove(place).1)
    }

    /// Puts it in; its place.
    ///
    /// # Panics
    /// If there is one of that key.
    pub fn insert(&mut self, key: K, value: V) -> usize {
        let place = self.place(key).expect_err("the caller has looked");
        self.0.insert(place, (key, value));
        place
    }

    /// Puts it in; what was there before.
    pub fn replace(&mut self, key: K, value: V) -> Option<V> {
        match self.place(key) {
            Ok(place) => Some(core::mem::replace(&mut self.0[place].1, value)),
            Err(place) => {
                self.0.insert(place, (key, value));
                None
            }
        }
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &(K, V)> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }
}
