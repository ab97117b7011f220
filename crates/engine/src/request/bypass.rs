//! Whether a request adds to the cache, and if not, why: the first of these that is so. The order is that of Linux bcache.
//!
//! | reason | when |
//! |---|---|
//! | attaching or detaching | the volume is being detached or attached |
//! | failing | the cache device has failed too often ([`Options::io_error_limit`]); the kernel would have given the set up |
//! | full | so much of the cache cannot be had without writing dirty data back ([`Options::cutoff_cache_add`]) |
//! | mode | `none`; `writearound`, of what is written |
//! | sequential | the client streams ([`VolumeOptions::sequential_cutoff`]) |
//! | congested | the cache device is slow, and the client streams at least so much as that allows |
//!
//! Not among them, other than in the kernel: a request that is not of whole blocks. Here such requests are made whole, so they
//! are cached like any other; the kernel has to pass them by. And a hint that a request reads ahead, or in the background:
//! between mode and sequential, as soon as a front end has one. NBD has none, so nothing carries it.
//!
//! Discards and zeroings are not asked about: they add nothing in any case, and are no reads, writes or streams.
//!
//! What is bypassed is still read from the cache where that has it, and goes there over older data that is dirty. Asked
//! once a request, when that begins. A volume that has left the cache bypasses nothing, and neither does one that is nowhere
//! else.
//!
//! [`Options::cutoff_cache_add`]: crate::Options::cutoff_cache_add
//! [`Options::io_error_limit`]: crate::Options::io_error_limit
//! [`VolumeOptions::sequential_cutoff`]: crate::VolumeOptions::sequential_cutoff

use crate::policy::Client;
use crate::request::{Range, Request, Target};
use crate::state::State;
use bcached_format::CacheMode;

/// Why a request adds nothing to the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bypass {
    /// The volume is being detached or attached.
    OnItsWay,
    /// The cache device has failed too often.
    Failing,
    /// The cache is full of what must be written back first.
    Full,
    /// The cache mode.
    Mode,
    /// It is part of a stream.
    Sequential,
    /// The cache device is slow.
    Congested,
}

impl Bypass {
    /// All of them, in the order in which they are asked for.
    pub const ALL: [Self; 6] =
        [Self::OnItsWay, Self::Failing, Self::Full, Self::Mode, Self::Sequential, Self::Congested];

    /// In a word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OnItsWay => "attaching_or_detaching",
            Self::Failing => "failing",
            Self::Full => "full",
            Self::Mode => "mode",
            Self::Sequential => "sequential",
            Self::Congested => "congested",
        }
    }
}

/// Whether `request` on `range` adds to the cache; counted if not.
pub(super) fn decide(
    s: &mut State,
    target: &Target,
    client: Client,
    request: &Request,
    range: Range,
) -> Result<(), Bypass> {
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
    client: Client,
    request: &Request,
    range: Range,
) -> Result<(), Bypass> {
    let (in_use, is_worn) = (s.in_use_percent(), s.is_worn());
    let Some(volume) = s.volumes.get_mut(target.id) else { return Ok(()) };
    if target.inode.is_none() || target.backing.is_none() {
        return Ok(());
    }
    if volume.is_bypassed() {
        return Err(Bypass::OnItsWay);
    }
    if is_worn {
        return Err(Bypass::Failing);
    }
    if in_use >= s.options.cutoff_cache_add {
        return Err(Bypass::Full);
    }
    let is_read = matches!(request, Request::Read { .. });
    match target.mode {
        CacheMode::None => return Err(Bypass::Mode),
        CacheMode::Writearound if !is_read => return Err(Bypass::Mode),
        CacheMode::Writearound | CacheMode::Writethrough | CacheMode::Writeback => {}
    }
    let cutoff = volume.options.sequential_cutoff;
    let limit = s.options.tracks_congestion().then(|| s.congestion.limit(s.now)).flatten();
    if cutoff == 0 && limit.is_none() {
        return Ok(());
    }
    let streamed = volume.streams.take_in(s.now, client, range.start, range.end);
    if cutoff > 0 && streamed >= cutoff {
        return Err(Bypass::Sequential);
    }
    match limit {
        Some(limit) if streamed / 512 >= limit => Err(Bypass::Congested),
        _ => Ok(()),
    }
}
