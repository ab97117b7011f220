//! Orderly stop: no new work is admitted, operations in flight end, every leaf is written, and a
//! last journal entry says that nothing needs replay. Dirty data stays in the cache.

use crate::btree::write;
use crate::error::Error;
use crate::journal::writer;
use crate::request::flush;
use crate::set::{CacheSet, TaskKind};
use crate::space::{prios, summaries};
use crate::writeback::task;

impl CacheSet {
    /// Stops the set. After it returns, whatever the result, nothing is written any more, and the
    /// devices can be handed over. Returns an error if acknowledged writes may not have been made
    /// durable.
    pub async fn stop(&self) -> Result<(), Error> {
        self.with(|s| s.stopping = true);
        self.wake_all();
        self.drained().await;
        self.ended(TaskKind::Changing).await;
        let settled = self.settle().await;
        let finished = self.finish_writing().await;
        self.with(|s| s.stopped = true);
        self.wake_all();
        self.ended(TaskKind::Writing).await;
        finished.and(settled)
    }

    /// Waits until no request is in progress, nor any background work for answered ones. The caller
    /// must ensure that no new requests arrive.
    pub async fn drained(&self) {
        while self.with(|s| s.background > 0 || s.volumes.iter().any(|(_, volume)| volume.requests > 0)) {
            self.signals().ranges.wait().await;
        }
    }

    /// Flushes the backing devices. Then waits for background work of answered requests, which may
    /// need buckets, and for the allocator, which may be storing generations and need the journal
    /// for it. All of these end even after a failure. Returns the first failure, which may be that
    /// of a flush that no client was told of.
    async fn settle(&self) -> Result<(), Error> {
        let mut settled = Ok(());
        let volumes: alloc::vec::Vec<_> = self.with(|s| s.volumes.iter().map(|(id, _)| id).collect());
        for id in volumes {
            if let Some(target) = self.target(id) {
                settled = settled.and(flush::last_flush(self, &target).await);
                // If it cannot be marked clean it stays *dirty*: the only cost is that it cannot be
                // used without the cache.
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
        self.ended(TaskKind::Allocating).await;
        settled
    }

    async fn finish_writing(&self) -> Result<(), Error> {
        self.ended(TaskKind::Rewriting).await;
        self.with(|s| {
            let crate::state::State { open, buckets, .. } = s;
            open.close_all(buckets);
        });
        self.check_alive()?;
        summaries::write_all(self).await;
        // First commit the keys that wait for an entry: the last entry must have none. Fills are
        // not journalled, and a replay of such keys would lay a hole over fills made since.
        writer::commit(self).await?;
        write::write_all(self).await?;
        // The next start must be able to detect a lost write to a node.
        if self.with(|s| s.buckets.has_longer_nodes()) {
            return prios::store(self).await;
        }
        writer::commit_now(self).await
    }
}
