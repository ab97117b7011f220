//! Values that an engine was asked to write to a superblock, or to put into force, and has not
//! answered. The table shows such a value at once, so that a repeated request finds it done. If the
//! engine refuses it, the table goes back to the previous value, unless a newer request has been
//! made meanwhile: that one counts.

use bcached_engine::Settings;
use bcached_format::CacheMode;
use std::sync::Arc;

/// One request. Clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct RequestId(Arc<()>);

/// Requests that are not settled, the oldest first, each with the value before it.
#[derive(Clone, Debug)]
pub struct PendingValues<T>(Vec<(RequestId, T)>);

impl<T> Default for PendingValues<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> PendingValues<T> {
    /// Records a request that replaces the value `before`.
    pub fn add(&mut self, request: &RequestId, before: T) {
        self.0.push((request.clone(), before));
    }

    /// The requests that are not settled, the oldest first.
    #[cfg(test)]
    pub fn open(&self) -> Vec<RequestId> {
        self.0.iter().map(|(request, _)| request.clone()).collect()
    }

    /// Settles a request, as done or refused. Returns the value in force from now on if that has
    /// changed.
    pub fn settle(&mut self, request: &RequestId, is_refused: bool) -> Option<T> {
        let at = self.0.iter().position(|(open, _)| Arc::ptr_eq(&open.0, &request.0))?;
        if !is_refused {
            // Older requests no longer matter, however they end.
            self.0.drain(..=at);
            return None;
        }
        let (_, before) = self.0.remove(at);
        match self.0.get_mut(at) {
            // If the next request is refused, too, the value does not fall back to this one.
            Some((_, before_next)) => {
                *before_next = before;
                None
            }
            None => Some(before),
        }
    }
}

/// Pending cache modes of a volume.
#[derive(Clone, Debug, Default)]
pub struct PendingModes {
    pub in_force: PendingValues<CacheMode>,
    /// Those to be written to its superblock.
    pub kept: PendingValues<Option<CacheMode>>,
}

/// Pending settings of a cache's superblock.
pub type PendingSettings = PendingValues<Settings>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: after two refusals the value went back to the first request, which had been
    /// refused itself.
    #[test]
    fn two_words_that_are_refused_leave_what_was_before_both() {
        let (mut pending, first, second) =
            (PendingValues::default(), RequestId::default(), RequestId::default());
        pending.add(&first, "a");
        pending.add(&second, "b");
        assert_eq!(pending.settle(&first, true), None, "the second counts");
        assert_eq!(pending.settle(&second, true), Some("a"));
        assert_eq!(pending.settle(&second, true), None, "it is settled");
    }

    #[test]
    fn a_word_that_holds_outlives_older_ones() {
        for first_is_earlier in [true, false] {
            let (mut pending, first, second) =
                (PendingValues::default(), RequestId::default(), RequestId::default());
            pending.add(&first, "a");
            pending.add(&second, "b");
            let order = if first_is_earlier {
                [(&first, true), (&second, false)]
            } else {
                [(&second, false), (&first, true)]
            };
            for (request, is_refused) in order {
                assert_eq!(pending.settle(request, is_refused), None);
            }
        }
    }

    #[test]
    fn a_later_word_that_is_refused_leaves_the_one_before() {
        let (mut pending, first, second) =
            (PendingValues::default(), RequestId::default(), RequestId::default());
        pending.add(&first, "a");
        pending.add(&second, "b");
        assert_eq!(pending.settle(&second, true), Some("b"));
        assert_eq!(pending.settle(&first, true), Some("a"));
    }
}
