//! Explains where the data of one sector of a volume is. This changes nothing, not even the age of
//! a bucket.

use crate::btree::{Content, pointer_to_read};
use crate::error::Error;
use crate::request::Target;
use crate::request::ranges::SectorActivity;
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::vec::Vec;
use bcached_format::{Inode, Pointers};

/// How far around the sector to look, in sectors: no key is longer.
const AROUND_SECTORS: u64 = 1 << 16;

/// Where the data of a sector is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// First sector of the range with the same answer, in the volume; as far as was looked.
    pub start: u64,
    /// End of that range (exclusive).
    pub end: u64,
    /// Where its data is.
    pub whereabouts: DataLocation,
    /// Operations in progress there.
    pub claims: SectorActivity,
    /// The sector on the backing device, if there is one.
    pub backing_sector: Option<u64>,
}

/// Where data is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataLocation {
    /// On the backing device: the volume is served without the cache.
    Uncached,
    /// On the backing device, never cached: behind the last whole block, or the volume is off the
    /// block grid.
    OffGrid,
    /// Not in the cache: on the backing device, or all zeroes in a flash-only volume.
    NotCached,
    /// In the cache and on the backing device, which has yet to be flushed. Reads find it in the
    /// cache; after a crash it is not there any more.
    Parked(CacheLocation),
    /// In the cache and on the backing device.
    Clean(CacheLocation),
    /// Only in the cache.
    Dirty(CacheLocation),
}

/// A location on the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheLocation {
    /// The requested sector, on the cache device.
    pub sector: u64,
    /// Its bucket.
    pub bucket: u64,
    /// The generation of the bucket that the data belongs to.
    pub generation: u8,
}

impl CacheSet {
    /// Returns where the data of a sector of a volume is.
    ///
    /// # Errors
    /// There is no such volume, or it has no such sector; the index cannot be read there.
    pub async fn explain(&self, id: VolumeId, sector: u64) -> Result<Explanation, Error> {
        let target = self.with(|s| s.hold(id))?;
        let explained = self.explain_of(&target, sector).await;
        self.let_go(id);
        explained
    }

    async fn explain_of(&self, target: &Target, sector: u64) -> Result<Explanation, Error> {
        if sector >= target.sectors {
            return Err(Error::Range { sector, sectors: 1, volume_sectors: target.sectors });
        }
        let at = target.data_offset + sector;
        let volume_end = target.data_offset + target.sectors;
        let (start, end, whereabouts) = match target.inode {
            None => (target.data_offset, volume_end, DataLocation::Uncached),
            Some(_) if at >= target.cacheable_end => {
                (target.cacheable_end.max(target.data_offset), volume_end, DataLocation::OffGrid)
            }
            Some(inode) => self.look_up(target, inode, at).await?,
        };
        let claims = self.with(|s| s.volumes.get(target.id).map(|volume| volume.ranges.claims_at(at)));
        Ok(Explanation {
            start: start.max(target.data_offset) - target.data_offset,
            end: end.min(volume_end) - target.data_offset,
            whereabouts,
            claims: claims.unwrap_or_default(),
            backing_sector: target.backing.is_some().then_some(at),
        })
    }

    async fn look_up(
        &self,
        target: &Target,
        inode: Inode,
        sector: u64,
    ) -> Result<(u64, u64, DataLocation), Error> {
        let from = sector.saturating_sub(AROUND_SECTORS).max(target.data_offset);
        let end = sector.saturating_add(AROUND_SECTORS).min(target.cacheable_end);
        let mut pieces: Vec<(u64, u64, Content)> = Vec::new();
        let mut at = from;
        while at < end {
            let mut found: Vec<(u64, u64, Content)> = Vec::new();
            at = self
                .attempt_reading(|s| {
                    found.clear();
                    s.lookup(inode, at, end, &mut |piece| found.push((piece.start, piece.end, piece.content)))
                })
                .await?;
            for (start, end, content) in found {
                match pieces.last_mut() {
                    // A leaf ends in the middle of a range that is not cached.
                    Some((_, last, Content::Hole)) if content == Content::Hole && *last == start => {
                        *last = end;
                    }
                    _ => pieces.push((start, end, content)),
                }
            }
        }
        let piece = pieces.into_iter().find(|(start, end, _)| *start <= sector && sector < *end);
        let (start, end, content) = piece.unwrap_or((sector, sector + 1, Content::Hole));
        let place = |pointers: &Pointers, start: u64| {
            let pointer = pointer_to_read(&pointers.advanced(sector - start))?;
            let bucket = self.with(|s| s.buckets.of(pointer))?;
            Some(CacheLocation {
                sector: pointer.sector(),
                bucket: bucket.index,
                generation: pointer.generation().0,
            })
        };
        let parked = self.with(|s| {
            let volume = s.volumes.get(target.id)?;
            volume.ranges.parked_in(sector, sector + 1).next()
        });
        let whereabouts = match (content, parked) {
            (Content::Hole, Some((start, parked))) => {
                let found = place(&parked.pointers, start).map(DataLocation::Parked);
                return Ok((start, parked.end, found.unwrap_or(DataLocation::NotCached)));
            }
            (Content::Hole, None) => DataLocation::NotCached,
            (Content::Cached { pointers, dirty }, _) => match place(&pointers, start) {
                Some(found) if dirty => DataLocation::Dirty(found),
                Some(found) => DataLocation::Clean(found),
                None => DataLocation::NotCached,
            },
        };
        Ok((start, end, whereabouts))
    }
}
