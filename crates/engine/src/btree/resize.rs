//! Changes the memory budget for nodes while the set is served.
//!
//! Memory is given up in the way in which an attempt takes it: first tickets, then a reservation of
//! the memory that their nodes may take. Then both are retired permanently. This is done a quarter
//! at a time. A task that waits for tickets behind it then waits only for the current holders to
//! finish, and enough tickets remain for others. Node by node it would queue behind all requests as
//! often as there are nodes.

use crate::btree::budget::node_budget_min;
use crate::btree::load;
use crate::error::Error;
use crate::set::CacheSet;

impl CacheSet {
    /// Changes the node memory to `wanted` bytes, or to as little as the nodes need. Returns the
    /// resulting budget.
    ///
    /// # Errors
    /// The set has failed: it has then given up less memory, or none.
    pub async fn set_node_budget(&self, wanted: usize) -> Result<usize, Error> {
        let _alone = self.inner.resizing.acquire(1).await;
        while let Some((upto, tickets)) = self.next_less(wanted) {
            let (had, ticket) = (self.inner.shares.get().budget, self.inner.tickets.acquire(tickets).await);
            // It is free before anybody else may have it: invariant L3.
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

    /// Returns the next smaller budget on the way to `wanted`, and the tickets that go with it.
    /// `None` if `wanted` is reached, or the budget cannot shrink further.
    fn next_less(&self, wanted: usize) -> Option<(usize, usize)> {
        let shares = self.inner.shares.get();
        if shares.budget <= wanted {
            return None;
        }
        let level = self.with(|s| s.root.level);
        let upto =
            (shares.budget - shares.budget / 4).max(wanted).max(node_budget_min(shares.node_sectors, level));
        let less = shares.with_budget(upto, level).ok().filter(|less| less.budget < shares.budget)?;
        Some((upto, shares.tickets - less.tickets))
    }
}
