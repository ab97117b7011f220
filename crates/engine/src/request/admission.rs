//! Decides whether a request adds to the cache, and if not, why: the first reason that applies. The
//! order is that of Linux bcache.
//!
//! | reason | when |
//! |---|---|
//! | attaching or detaching | the volume is being detached or attached |
//! | failing | the cache device has failed too often ([`Options::io_error_limit`]) |
//! | full | too much of the cache needs write-back first ([`Options::cutoff_cache_add`]) |
//! | mode | `none`; `writearound` for writes |
//! | sequential | the client streams ([`VolumeOptions::sequential_cutoff`]) |
//! | congested | the cache device is slow, and the client streams at least as much as that allows |
//!
//! The cache is *full* when at least that much of it cannot be allocated without writing back dirty
//! data. When the cache device is *failing*, the kernel would have given the set up.
//!
//! Unlike the kernel, bcached does not bypass requests that are not of whole blocks. It widens them
//! to whole blocks, so they are cached like any other; the kernel has to bypass them. Hints that a
//! request is read-ahead or background I/O are not used either. They would rank between mode and
//! sequential, as soon as a front end has them; NBD has none, so nothing carries them.
//!
//! Discards and zeroings are not considered: they add nothing in any case, and are no reads, writes
//! or streams.
//!
//! A bypassed request is still read from the cache where the cache has the data, and written there
//! over older dirty data. The decision is made once, when the request begins. A volume that has
//! left the cache bypasses nothing, and neither does a flash-only volume.
//!
//! [`Options::cutoff_cache_add`]: crate::Options::cutoff_cache_add
//! [`Options::io_error_limit`]: crate::Options::io_error_limit
//! [`VolumeOptions::sequential_cutoff`]: crate::VolumeOptions::sequential_cutoff

use crate::policy::ClientId;
use crate::request::{Request, SectorRange, Target};
use crate::state::State;
use bcached_format::CacheMode;

/// Why a request adds nothing to the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BypassReason {
    /// The volume is being detached or attached.
    VolumeBusy,
    /// The cache device has failed too often.
    Failing,
    /// The cache is full of data that must be written back first.
    Full,
    /// The cache mode.
    Mode,
    /// The request is part of a stream.
    Sequential,
    /// The cache device is slow.
    Congested,
}

impl BypassReason {
    /// All reasons, in the order in which they are checked.
    pub const ALL: [Self; 6] =
        [Self::VolumeBusy, Self::Failing, Self::Full, Self::Mode, Self::Sequential, Self::Congested];

    /// Returns the reason's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VolumeBusy => "attaching_or_detaching",
            Self::Failing => "failing",
            Self::Full => "full",
            Self::Mode => "mode",
            Self::Sequential => "sequential",
            Self::Congested => "congested",
        }
    }
}

/// Decides whether `request` on `range` adds to the cache, and counts it if not.
pub(super) fn decide(
    s: &mut State,
    target: &Target,
    client: ClientId,
    request: &Request,
    range: SectorRange,
) -> Result<(), BypassReason> {
    if !matches!(request, Request::Read { .. } | Request::Write { .. }) {
        return Ok(());
    }
    let decided = admit(s, target, client, request, range);
    if let Err(reason) = decided {
        let bytes = range.sectors() * 512;
        let (stats, volume) = s.stats_of(target.id);
        stats.bypassed.add(reason, bytes);
        if let Some(volume) = volume {
            volume.bypassed.add(reason, bytes);
        }
    }
    decided
}

fn admit(
    s: &mut State,
    target: &Target,
    client: ClientId,
    request: &Request,
    range: SectorRange,
) -> Result<(), BypassReason> {
    let (in_use, is_worn) = (s.in_use_percent(), s.is_worn());
    let Some(volume) = s.volumes.get_mut(target.id) else { return Ok(()) };
    if target.inode.is_none() || target.backing.is_none() {
        return Ok(());
    }
    if volume.is_bypassed() {
        return Err(BypassReason::VolumeBusy);
    }
    if is_worn {
        return Err(BypassReason::Failing);
    }
    if in_use >= s.options.cutoff_cache_add {
        return Err(BypassReason::Full);
    }
    let is_read = matches!(request, Request::Read { .. });
    match target.mode {
        CacheMode::None => return Err(BypassReason::Mode),
        CacheMode::Writearound if !is_read => return Err(BypassReason::Mode),
        CacheMode::Writearound | CacheMode::Writethrough | CacheMode::Writeback => {}
    }
    let cutoff = volume.options.sequential_cutoff;
    let limit = s.options.tracks_congestion().then(|| s.congestion.limit(s.now)).flatten();
    if cutoff == 0 && limit.is_none() {
        return Ok(());
    }
    let streamed = volume.streams.take_in(s.now, client, range.start, range.end);
    if cutoff > 0 && streamed >= cutoff {
        return Err(BypassReason::Sequential);
    }
    match limit {
        Some(limit) if streamed / 512 >= limit => Err(BypassReason::Congested),
        _ => Ok(()),
    }
}
