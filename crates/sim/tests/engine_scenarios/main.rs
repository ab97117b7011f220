//! Named disasters of the engine: the story first, then exactly that, then one check.
//!
//! | file | stories of |
//! |---|---|
//! | `flushes` | flushes that fail, that are left out, and what they covered |
//! | `clean_modes` | write-through, write-around, none: the cache may lose, hide or change nothing |
//! | `devices` | devices that die, come back, are renamed, cut short or outdated |
//! | `journal` | what a crash leaves of the journal, and the note |
//! | `metadata` | damaged nodes, priorities, superblocks |
//! | `space` | buckets, generations, and who reuses them when |
//! | `limits` | sizes at the edge, and what does not fit |
//!
//! What is refused is refused in words, and leaves the devices as they were. A scenario that cannot fail is worth nothing:
//! each was seen to fail with the line broken that it guards.

#[cfg(test)]
mod bench;
#[cfg(test)]
mod image;
#[cfg(test)]
mod stage;

#[cfg(test)]
mod clean_modes;
#[cfg(test)]
mod devices;
#[cfg(test)]
mod flushes;
#[cfg(test)]
mod journal;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod metadata;
#[cfg(test)]
mod space;
