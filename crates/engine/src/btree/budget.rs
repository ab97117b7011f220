//! Shares out the memory for nodes, so that a hard limit can never cause a deadlock.
//!
//! The limit is [`crate::Options::node_budget_bytes`]. It covers the memory that nodes really take,
//! and the memory reserved for nodes in flight. No task keeps a node in memory across a wait
//! without a **ticket** for it. A ticket stands for the most that a node may take
//! ([`bcached_node::memory_bytes_limit`]; a node that would outgrow it is rewritten). There are
//! only as many tickets as the limit has room for, less one for the pinned root. So a task with
//! tickets gets its memory as soon as the nodes that no task holds have been written and evicted,
//! which needs neither memory nor a ticket.
//!
//! An attempt takes tickets for one path; a rewrite takes them for a path and the nodes that it
//! makes. Each takes all of them at once, and never while holding others. A coalesce takes as many
//! as a rewrite and does not need one of them. A rewrite may hold its tickets while it waits for
//! buckets that only other attempts can free, so there are tickets for both.

use crate::btree::cache::NODE_OVERHEAD_BYTES;
use crate::error::Error;

/// Nodes that one rewrite makes: two, and a new root.
pub const REWRITE_NODES: usize = 3;

/// Nodes that a coalesce holds besides the path to the left node: the right node, and the node made
/// of both.
const COALESCE_NODES: usize = 2;

const _: () = assert!(COALESCE_NODES <= REWRITE_NODES, "a coalesce takes the tickets of a rewrite");

/// Levels above the leaves to which an opened tree may grow. A tree that already has more may grow
/// by one.
const LEVELS_AHEAD: u8 = 4;

/// How a budget is shared out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeBudget {
    /// The most memory that a node takes, in bytes.
    pub node_bytes: usize,
    /// Number of nodes that may be held across waits.
    pub tickets: usize,
    /// The whole budget, in bytes.
    pub budget: usize,
    /// Size of the largest node that this supports, in sectors.
    pub node_sectors: u64,
}

impl NodeBudget {
    /// Shares out `budget` bytes for a tree whose root is at `level` and whose nodes have at most
    /// `node_sectors` sectors.
    ///
    /// # Errors
    /// [`Error::NodeBudget`] if the budget is too small for that tree and the levels it may gain.
    pub fn new(budget: usize, node_sectors: u64, level: u8) -> Result<Self, Error> {
        let node_bytes = node_bytes(node_sectors);
        let tickets = (budget / node_bytes).saturating_sub(1);
        let shares = Self { node_bytes, tickets, budget, node_sectors };
        shares.check(level_ahead(level))?;
        Ok(shares)
    }

    /// Shares out another budget for the same node size.
    ///
    /// # Errors
    /// As for [`NodeBudget::new`].
    pub fn with_budget(&self, budget: usize, level: u8) -> Result<Self, Error> {
        Self::new(budget, self.node_sectors, level)
    }

    /// Checks whether the tree may have its root at `level`.
    ///
    /// # Errors
    /// [`Error::NodeBudget`] if not.
    pub const fn check(&self, level: u8) -> Result<(), Error> {
        if self.tickets < tickets_needed(level) {
            let needed = bytes_needed(self.node_bytes, level);
            return Err(Error::NodeBudget { budget: self.budget, needed });
        }
        Ok(())
    }
}

/// Returns the tickets that an attempt takes on a tree whose root is at `level`.
#[must_use]
pub const fn attempt_tickets(level: u8) -> usize {
    level as usize + 1
}

/// Returns the tickets that a rewrite takes on a tree whose root is at `level`.
#[must_use]
pub const fn rewrite_tickets(level: u8) -> usize {
    level as usize + 1 + REWRITE_NODES
}

/// Returns the smallest node memory with which a set can be opened, in bytes, for nodes of
/// `node_sectors` sectors and a root at `level`. Opening with less is refused.
#[must_use]
pub fn node_budget_min(node_sectors: u64, level: u8) -> usize {
    bytes_needed(node_bytes(node_sectors), level_ahead(level))
}

const fn tickets_needed(level: u8) -> usize {
    attempt_tickets(level) + rewrite_tickets(level)
}

/// One node more than there are tickets: the pinned root.
const fn bytes_needed(node_bytes: usize, level: u8) -> usize {
    (tickets_needed(level) + 1) * node_bytes
}

fn level_ahead(level: u8) -> u8 {
    level.saturating_add(1).max(LEVELS_AHEAD)
}

/// Returns the most memory that one node takes in the cache, including its cache entry.
fn node_bytes(node_sectors: u64) -> usize {
    let sectors = u16::try_from(node_sectors).expect("node sizes fit a key");
    bcached_node::memory_bytes_limit(sectors) + NODE_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_budget_holds_an_attempt_a_rewrite_and_the_root() {
        for (node_sectors, level) in [(8, 0), (512, 2), (2048, 9)] {
            let least = node_budget_min(node_sectors, level);
            let shares = NodeBudget::new(least, node_sectors, level).expect("it suffices");
            let ahead = level_ahead(level);
            assert!(ahead > level);
            let needed = attempt_tickets(ahead) + rewrite_tickets(ahead);
            assert_eq!(shares.tickets, needed);
            assert!((shares.tickets + 1) * shares.node_bytes <= least, "tickets and the root fit the budget");
            let refused = NodeBudget::new(least - 1, node_sectors, level);
            assert_eq!(refused, Err(Error::NodeBudget { budget: least - 1, needed: least }));
            assert!(shares.check(ahead + 1).is_err(), "a taller tree than was shared out for");
        }
    }

    #[test]
    fn usual_nodes_leave_the_default_budget_with_tickets_for_a_deep_queue() {
        let shares =
            NodeBudget::new(crate::Options::default().node_budget_bytes, 512, 1).expect("it suffices");
        assert!(shares.tickets >= 64, "{} tickets", shares.tickets);
    }
}
