//! A read of what is one piece, in the cache or not: most reads are. It begins in one transition, and ends in another if it was a hit. What is
//! more, or wants something that is not in memory, is read step by step (`read`).

use crate::btree::{Attempt, Content};
use crate::few::Few;
use crate::request::read::{self, Cached, Ended, Planned, Sources};
use crate::request::{Range, Reply, Request, Target};
use crate::set::CacheSet;
use crate::state::State;
use alloc::boxed::Box;
use bcached_env::{Buffer, Time};

impl State {
    /// The plan of a read, if that is of one piece; else nothing has changed.
    pub(super) fn plan_at_once(&mut self, target: &Target, request: &Request) -> Option<Planned> {
        let Request::Read { sector, buffer } = request else { return None };
        let inode = target.inode?;
        let range = target.range(*sector, buffer.len() as u64 / 512).ok()?;
        if target.blocks_around(range) != Some(range) {
            return None;
        }
        let mut pieces = Few::default();
        let looked = self.lookup(inode, range.start, range.end, &mut |piece| pieces.push(piece));
        let (Attempt::Done(_), Ok(piece)) = (looked, pieces.only()) else { return None };
        let is_parked = || {
            let ranges = self.volumes.get(target.id).map(|volume| &volume.ranges);
            ranges.is_none_or(|ranges| ranges.parked_in(range.start, range.end).next().is_some())
        };
        let is_all = (Range { start: piece.start, end: piece.end }) == range;
        if !is_all || piece.content == Content::Hole && is_parked() {
            return None;
        }
        let mut fill_left = read::FILL_SECTORS_MAX;
        Some(read::plan_piece(self, target, piece, &mut fill_left))
    }
}

impl CacheSet {
    /// The rest of such a read, which `began` then.
    pub(super) async fn serve_at_once(
        &self,
        target: Target,
        planned: Planned,
        buffer: Buffer,
        began: Time,
    ) -> Reply {
        let sources = Sources::of(&planned.piece);
        let (result, buffer) = match planned.piece.content {
            Content::Hole => read::read_hole(self, &target, planned, buffer).await,
            Content::Cached { pointers, dirty } => {
                let cached = Cached::new(planned.piece, pointers, dirty);
                let (read, buffer) = self.cache().read(cached.sector(), buffer).await;
                let ended = self.with(|s| {
                    let ended = s.read_ended(&cached, began, &read);
                    if matches!(ended, Ended::Fine) {
                        read::count(s, &target, sources);
                        s.end_read(&target, began, true);
                    }
                    ended
                });
                if matches!(ended, Ended::Fine) {
                    self.signals().ranges.notify_all();
                    return Reply { result: Ok(()), buffer: Some(buffer) };
                }
                Box::pin(read::in_doubt(self, &target, cached, ended, read, buffer)).await
            }
        };
        self.with(|s| {
            if result.is_ok() {
                read::count(s, &target, sources);
            }
            s.end_read(&target, began, result.is_ok());
        });
        self.signals().ranges.notify_all();
        Reply { result, buffer: Some(buffer) }
    }
}
