//! The orderly end: nothing new is taken, what is in flight ends, every leaf is written, and a last journal entry
//! says that nothing needs replay. Dirty data stays in the cache.

use crate::btree::write;
use crate::error::Error;
use crate::journal::writer;
use crate::request::flush;
use crate::set::{CacheSet, Duty};
use crate::space::{prios, summaries};
use crate::writeback::task;

impl CacheSet {
    /// Stops the set. Afterwards nothing is written any more, whatever is returned; the devices may be given to somebody
    /// else. An error if something that was acknowledged may not have been made durable.
    pub async fn stop(&self) -> Result<(), Error> {
        self.with(|s| s.stopping = true);
        self.wake_all();
        self.drained().await;
        self.ended(Duty::Changing).await;
        let settled = self.settle().await;
        let finished = self.finish_writing().await;
        self.with(|s| s.stopped = true);
        self.wake_all();
        self.ended(Duty::Writing).await;
        finished.and(settled)
    }

    /// Until no request is being carried out, nor what goes on behind answered ones. Whoever waits for it lets nobody ask any more.
    pub async fn drained(&self) {
        while self.with(|s| s.background > 0 || s.volumes.iter().any(|(_, volume)| volume.requests > 0)) {
            self.signals().ranges.wait().await;
        }
    }

    /// Flushes the backing devices, and waits for what goes on behind answered requests, which may need buckets; then for
    /// the allocator, which may be storing generations and need the journal for it. Ends all that also after a failure;
    /// the first one is returned, as that of a flush that nobody was told of is.
    async fn settle(&self) -> Result<(), Error> {
        let mut settled = Ok(());
        let volumes: alloc::vec::Vec<_> = self.with(|s| s.volumes.iter().map(|(id, _)| id).collect());
        for id in volumes {
            if let Some(target) = self.target(id) {
                settled = settled.and(flush::last_flush(self, &target).await);
                // It stays *dirty* if it cannot be marked: that costs nothing but the freedom to go without the cache.
                if self.with(|s| task::stays_marked(s, id)) {
                    let _ = task::mark_clean(self, id).await;
                }
            }
        }
        while self.with(|s| s.background > 0) {
            self.signals().ranges.wait().await;
        }
        self.seal_attachments().await;
        self.with(|s| s.settled = true);
        self.signals().allocator_work.notify_all();
        self.signals().discard_work.notify_all();
        self.signals().summary_work.notify_all();
        self.ended(Duty::Allocating).await;
        settled
    }

    async fn finish_writing(&self) -> Result<(), Error> {
        self.ended(Duty::Rewriting).await;
        self.with(|s| {
            let crate::state::State { open, buckets, .. } = s;
            open.close_all(buckets);
        });
        self.check_alive()?;
        summaries::write_all(self).await;
        // The keys that wait for an entry first: the last one is to have none. Fills are not journalled, and a replay would lay a
        // hole over those made since.
        writer::commit(self).await?;
        write::write_all(self).await?;
        // The next start is to know a write to a node that was lost.
        if self.with(|s| s.buckets.has_longer_nodes()) {
            return prios::store(self).await;
        }
        writer::commit_now(self).await
    }
}
