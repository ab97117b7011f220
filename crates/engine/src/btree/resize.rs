//! More or less memory for nodes, while the set is served.
//!
//! Memory is given up as an attempt takes it: a ticket, then what a node may take, set aside; then both are gone for good. One node
//! at a time, so nobody who waits for tickets in between waits for longer than for any attempt.

use crate::btree::load;
use crate::error::Error;
use crate::set::CacheSet;

impl CacheSet {
    /// Gives nodes `wanted` bytes of memory from now on, or as much of what they have as they need. How many they have then.
    ///
    /// # Errors
    /// The set has failed: then it has given up less, or nothing.
    pub async fn set_node_budget(&self, wanted: usize) -> Result<usize, Error> {
        let _alone = self.inner.resizing.acquire(1).await;
        while let Some((upto, tickets)) = self.next_less(wanted) {
            let (had, ticket) = (self.inner.shares.get().budget, self.inner.tickets.acquire(tickets).await);
            let memory = load::set_aside(self, had - upto).await?;
            let less = self.with(|s| {
                // The tree may have grown meanwhile.
                let less = self.inner.shares.get().with_budget(upto, s.root.level).ok()?;
                drop(memory);
                s.nodes.set_budget(upto);
                Some(less)
            });
            let Some(less) = less else { break };
            ticket.retire();
            self.inner.shares.set(less);
        }
        let had = self.inner.shares.get();
        if let Ok(more) = had.with_budget(wanted.max(had.budget), self.with(|s| s.root.level)) {
            self.with(|s| s.nodes.set_budget(more.budget));
            self.inner.shares.set(more);
            self.inner.tickets.add(more.tickets - had.tickets);
        }
        Ok(self.inner.shares.get().budget)
    }

    /// The next smaller budget on the way to `wanted`, and the tickets that go with it; `None`: it is reached, or as small as it can be.
    fn next_less(&self, wanted: usize) -> Option<(usize, usize)> {
        let shares = self.inner.shares.get();
        if shares.budget <= wanted {
            return None;
        }
        let upto = shares.budget.saturating_sub(shares.node_bytes).max(wanted);
        let less = shares.with_budget(upto, self.with(|s| s.root.level)).ok()?;
        Some((upto, shares.tickets - less.tickets))
    }
}
