//! Errors for a node whose bytes are damaged or whose keys make no sense.

use bcached_format::{KeyListError, Pointer, Position};
use thiserror::Error;

/// A node that cannot be used: which node, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("btree node at {pointer:?}, level {level}: {fault}")]
pub struct NodeError {
    /// Pointer to the node.
    pub pointer: Pointer,
    /// Level of the node according to its parent; 0 is a leaf.
    pub level: u8,
    /// What is wrong.
    pub fault: NodeFault,
}

/// Why a node cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum NodeFault {
    /// The node's log of sets is damaged.
    #[error(transparent)]
    Log(#[from] bcached_format::NodeError),
    /// A key is invalid in a node of this level, or out of order. (The kernel does not check the
    /// order.)
    #[error("bset at block {block}: {error}")]
    Key {
        /// Block of the node at which the key's set starts.
        block: u32,
        /// Which key, and what is wrong with it.
        error: KeyListError,
    },
    /// A key lies behind the end of the node's range.
    #[error("short btree key: block {block} has a key at {found}, but the node ends at {limit}")]
    BeyondRange {
        /// Block of the node at which the key's set starts.
        block: u32,
        /// The node's own position.
        limit: Position,
        /// Position of the key.
        found: Position,
    },
    /// A key lies before the start of the node's range. (The kernel does not check this.)
    #[error("a key starts at {found}, but the node begins at {limit}")]
    BeforeRange {
        /// Where the node's range begins: the position of its left neighbour.
        limit: Position,
        /// Start of the first key.
        found: Position,
    },
    /// The sets cut each other into more pieces than two nodes can hold. No program writes such
    /// sets, not even one that leaves cutting to the reader: it takes keys with several pointers.
    #[error("its overlapping bsets merge into {found} words of keys, more than the limit of {limit}")]
    TooManyPieces {
        /// Maximum number of words.
        limit: usize,
        /// Words of the merged keys.
        found: usize,
    },
    /// An interior node has no children, or its last child does not reach the end of its range.
    #[error("its children end at {found}, but its range ends at {wanted}")]
    ChildrenEndEarly {
        /// The node's own position.
        wanted: Position,
        /// Position of the last child; zero if there is none.
        found: Position,
    },
    /// The sets take fewer blocks than were known to be durable.
    #[error("its bsets end at block {found}, but {wanted} blocks were durable: a write to the node was lost")]
    SetLost {
        /// Blocks that were durable.
        wanted: u32,
        /// Blocks that the sets take.
        found: u32,
    },
    /// Two living children have the same position.
    #[error("two children have the same position, {position}")]
    TwoChildren {
        /// Position of both.
        position: Position,
    },
}
