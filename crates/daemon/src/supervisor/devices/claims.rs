//! Claims all devices of a command line, then checks them together before an engine writes to the
//! first of them. If one of them was named by mistake, the others are left as they were.
//!
//! The check covers what the superblocks say. What only the set knows (dirty data beyond the end of
//! a backing device, for one) is refused later by its engine.

use crate::engine_error;
use crate::supervisor::Supervisor;
use crate::supervisor::devices::open_timeout::{OpenError, PendingOpens};
use crate::supervisor::report::reasons;
use bcached_control::failure::{Failure, Kind};
use bcached_engine::Error;
use bcached_format::{BackingState, BackingSuperblock, CacheSuperblock};
use bcached_offline::devices;

/// A device's name and its superblock.
type NamedSuperblock<'a, T> = (&'a str, &'a T);

impl Supervisor {
    /// Claims and checks the devices of the command line. One that cannot be used ends the program.
    /// One that hangs is waited for like any other.
    pub fn claim_devices(&mut self) -> Result<(), Failure> {
        if !self.strict {
            return Ok(());
        }
        let config = &self.config;
        let caches = config.caches.iter().map(|cache| cache.device.as_str());
        let caches = claim(&mut self.slow_caches, caches, devices::open_cache)?;
        let backings = config.volumes.iter().map(|volume| volume.backing.as_str());
        let backings = claim(&mut self.slow_backings, backings, devices::open_backing)?;
        let of_caches: Vec<_> = answers(&caches).map(|(name, cache)| (name, &cache.superblock)).collect();
        let of_backings: Vec<_> =
            answers(&backings).map(|(name, backing)| (name, &backing.superblock)).collect();
        judge_caches(&of_caches)?;
        judge_backings(&of_backings, &of_caches, caches.len())?;
        for (name, cache) in caches {
            if let Some(cache) = cache {
                self.slow_caches.keep(&name, cache);
            }
        }
        for (index, (name, backing)) in backings.into_iter().enumerate() {
            if let Some(backing) = backing {
                let (uuid, label) = (backing.superblock.uuid(), backing.superblock.label());
                let mut shared = self.shared();
                let entry = &mut shared.table.volumes[index];
                (entry.uuid, entry.label) = (Some(uuid), Some(label));
                drop(shared);
                self.slow_backings.keep(&name, backing);
            }
        }
        Ok(())
    }
}

/// Opens all of `names`; `None` for a device that hangs.
fn claim<'a, T: Send + 'static>(
    patience: &mut PendingOpens<T>,
    names: impl Iterator<Item = &'a str>,
    open: fn(&str) -> Result<T, Failure>,
) -> Result<Vec<(String, Option<T>)>, Failure> {
    let claim = |name: &str| match patience.open_of_line(name, open) {
        Ok(opened) => Ok((name.to_owned(), Some(opened))),
        Err(OpenError::NoAnswer(_)) => Ok((name.to_owned(), None)),
        Err(OpenError::Failed(failure)) => Err(failure),
    };
    names.map(claim).collect()
}

/// The devices that are open.
fn answers<T>(all: &[(String, Option<T>)]) -> impl Iterator<Item = NamedSuperblock<'_, T>> {
    all.iter().filter_map(|(name, opened)| Some((name.as_str(), opened.as_ref()?)))
}

fn judge_caches(caches: &[NamedSuperblock<'_, CacheSuperblock>]) -> Result<(), Failure> {
    for (index, (name, superblock)) in caches.iter().enumerate() {
        let is_twin =
            |(_, other): &&NamedSuperblock<'_, CacheSuperblock>| other.set_uuid() == superblock.set_uuid();
        if let Some((other, _)) = caches[..index].iter().find(is_twin) {
            return Err(reasons::two_of_one_set(name, other, superblock.set_uuid()));
        }
    }
    Ok(())
}

/// Checks the backing devices. `named` caches are on the command line, of which `caches` have
/// answered.
fn judge_backings(
    backings: &[NamedSuperblock<'_, BackingSuperblock>],
    caches: &[NamedSuperblock<'_, CacheSuperblock>],
    named: usize,
) -> Result<(), Failure> {
    for (index, (name, superblock)) in backings.iter().enumerate() {
        let refused = |error| Err(engine_error::of_attach(name, &error));
        if backings[..index].iter().any(|(_, other)| other.uuid() == superblock.uuid()) {
            return refused(Error::Duplicate);
        }
        if named == 0 {
            without_a_cache(name, superblock)?;
            continue;
        }
        let set = superblock.set_uuid();
        let is_its_own = |(_, cache): &&NamedSuperblock<'_, CacheSuperblock>| cache.set_uuid() == set;
        // A single cache is meant whatever the device's superblock says.
        let cache = if named == 1 { caches.first() } else { caches.iter().find(is_its_own) };
        let Some((_, cache)) = cache else {
            if caches.len() == named {
                return Err(reasons::no_cache(format!("cannot serve {name}"), superblock)
                    .next("serve it with its own cache only, or name that cache in a configuration"));
            }
            continue;
        };
        let (block, set_block) = (superblock.block_sectors(), cache.block_sectors());
        match superblock.state() {
            BackingState::Dirty if cache.set_uuid() != set => return refused(Error::DirtyElsewhere(set)),
            BackingState::Clean | BackingState::Stale if cache.set_uuid() != set => {
                return refused(Error::OtherSet(set));
            }
            _ if block < set_block => {
                return refused(Error::BlockSize { backing: block, set: set_block });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Refuses a backing device that belongs to a cache that is not named. On its own it may hold only
/// stale data; if not, serving it would invalidate everything that its cache holds.
fn without_a_cache(name: &str, superblock: &BackingSuperblock) -> Result<(), Failure> {
    let refused = |why: String, next: &str| {
        let failure = Failure::new(Kind::WrongSet, format!("cannot serve {name}"));
        Err(failure.why(why).next(next))
    };
    let set = superblock.set_uuid();
    match superblock.state() {
        BackingState::Dirty => refused(
            format!("its newest data is in the cache set {set}, which the command line does not name"),
            "name its cache with --cache; nothing overrides this",
        ),
        BackingState::Clean => refused(
            format!("it belongs to the cache set {set}, which the command line does not name"),
            "name its cache with --cache; to serve it without one, first detach it from that set (`bcached detach`)",
        ),
        BackingState::None | BackingState::Stale => Ok(()),
    }
}
