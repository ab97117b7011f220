//! A read of what is one piece, in the cache or not: most reads are. It begins in one transition, and ends in another. What is more, or wants
//! something that is not in memory, is read step by step (`read`).

use crate::btree::Content;
use crate::request::read::{self, Cached, Ended, Sources};
use crate::request::{AtOnce, Reply, Request, Target};
use crate::set::CacheSet;
use crate::state::State;
use alloc::boxed::Box;
use bcached_env::{Buffer, Time};

impl State {
    /// Begins a read, if it is of one piece; else nothing has changed.
    pub(super) fn plan_at_once(&mut self, target: &Target, request: &Request) -> Option<AtOnce> {
        let Request::Read { sector, buffer } = request else { return None };
        let inode = target.inode?;
        let range = target.range(*sector, buffer.len() as u64 / 512).ok()?;
        if target.blocks_around(range) != Some(range) {
            return None;
        }
        let (content, leaf) = self.whole(inode, range.start, range.end)?;
        match content {
            Content::Cached { pointers, dirty } => {
                self.begin_to_read(&pointers);
                Some(AtOnce::Hit(Cached::new(range, pointers, dirty)))
            }
            Content::Hole => self.begin_miss(target, range, leaf).map(AtOnce::Miss),
        }
    }
}

impl CacheSet {
    /// The rest of a read of what is `cached`, which `began` then.
    pub(super) async fn serve_hit(
        &self,
        target: &Target,
        cached: &Cached,
        buffer: Buffer,
        began: Time,
    ) -> Reply {
        let (read, buffer) = self.cache().read(cached.sector(), buffer).await;
        let ended = self.with(|s| {
            let ended = s.read_ended(cached, began, &read);
            if matches!(ended, Ended::Fine) {
                s.end_hit(target, cached, began);
            }
            ended
        });
        let (result, buffer) = match ended {
            Ended::Fine => (Ok(()), buffer),
            _ => {
                let doubted = Box::pin(read::in_doubt(self, target, *cached, ended, read, buffer)).await;
                self.with(|s| match doubted.0 {
                    Ok(()) => s.end_hit(target, cached, began),
                    Err(_) => s.end_read(target, began, false),
                });
                doubted
            }
        };
        self.signals().ranges.notify_all();
        Reply { result, buffer: Some(buffer) }
    }
}

impl State {
    /// Such a read has its data.
    fn end_hit(&mut self, target: &Target, cached: &Cached, began: Time) {
        read::count(self, target, Sources::of_cache(cached.sectors()));
        self.end_read(target, began, true);
    }
}
