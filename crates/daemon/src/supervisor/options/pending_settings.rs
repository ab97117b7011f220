//! What an engine was asked to have a superblock say, and has not answered: the table says it already, so that who asks for the same finds
//! it done. What is refused is taken back, and no more than that: somebody may have said another word meanwhile, and that counts.

use bcached_engine::Settings;
use bcached_format::CacheMode;
use std::sync::Arc;

/// One word. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Word(Arc<()>);

/// Words that are not settled, the oldest first, each with what counted before it.
#[derive(Clone, Debug)]
pub struct Words<T>(Vec<(Word, T)>);

impl<T> Default for Words<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Words<T> {
    /// A word takes the place of `before`.
    pub fn say(&mut self, word: &Word, before: T) {
        self.0.push((word.clone(), before));
    }

    /// Those that are not settled, the oldest first.
    #[cfg(test)]
    pub fn open(&self) -> Vec<Word> {
        self.0.iter().map(|(word, _)| word.clone()).collect()
    }

    /// The word holds, or was refused. What counts from now on, if that has changed.
    pub fn settle(&mut self, word: &Word, is_refused: bool) -> Option<T> {
        let at = self.0.iter().position(|(open, _)| Arc::ptr_eq(&open.0, &word.0))?;
        if !is_refused {
            // Those before it count no more, however they end.
            self.0.drain(..=at);
            return None;
        }
        let (_, before) = self.0.remove(at);
        match self.0.get_mut(at) {
            // If the next one is refused, too, it does not come back to this one.
            Some((_, before_next)) => {
                *before_next = before;
                None
            }
            None => Some(before),
        }
    }
}

/// Of the cache mode of a volume.
#[derive(Clone, Debug, Default)]
pub struct OfMode {
    pub in_force: Words<CacheMode>,
    /// In its superblock.
    pub kept: Words<Option<CacheMode>>,
}

/// Of what the superblock of a cache says.
pub type OfSettings = Words<Settings>;

#[cfg(test)]
mod tests {
    use super::*;

    /// What was in force before the second word was the first one, which had been refused.
    #[test]
    fn two_words_that_are_refused_leave_what_was_before_both() {
        let (mut words, first, second) = (Words::default(), Word::default(), Word::default());
        words.say(&first, "a");
        words.say(&second, "b");
        assert_eq!(words.settle(&first, true), None, "the second counts");
        assert_eq!(words.settle(&second, true), Some("a"));
        assert_eq!(words.settle(&second, true), None, "it is settled");
    }

    #[test]
    fn a_word_that_holds_outlives_older_ones() {
        for first_is_earlier in [true, false] {
            let (mut words, first, second) = (Words::default(), Word::default(), Word::default());
            words.say(&first, "a");
            words.say(&second, "b");
            let order = if first_is_earlier {
                [(&first, true), (&second, false)]
            } else {
                [(&second, false), (&first, true)]
            };
            for (word, is_refused) in order {
                assert_eq!(words.settle(word, is_refused), None);
            }
        }
    }

    #[test]
    fn a_later_word_that_is_refused_leaves_the_one_before() {
        let (mut words, first, second) = (Words::default(), Word::default(), Word::default());
        words.say(&first, "a");
        words.say(&second, "b");
        assert_eq!(words.settle(&second, true), Some("b"));
        assert_eq!(words.settle(&first, true), Some("a"));
    }
}
