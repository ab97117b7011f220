//! More or less memory for nodes, while the set is served.
//!
//! Memory is given up as an attempt takes it: tickets, then what their nodes may take, set aside; then both are gone for good. A quarter
//! at a time: who waits for tickets behind that waits for those who hold some to end, and there are enough for others meanwhile; node by
//! node it would stand in line behind all requests as often as there are nodes.

use crate::btree::budget::node_budget_min;
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
        let level = self.with(|s| s.root.level);
        let upto =
            (shares.budget - shares.budget / 4).max(wanted).max(node_budget_min(shares.node_sectors, level));
        let less = shares.with_budget(upto, level).ok().filter(|less| less.budget < shares.budget)?;
        Some((upto, shares.tickets - less.tickets))
    }
}
