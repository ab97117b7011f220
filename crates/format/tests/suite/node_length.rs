//! Tests how the priority of a node's bucket encodes the node's length.

use bcached_format::prio::{
    NODE_BLOCKS_MAX, PRIO_BTREE, PRIO_FRESH, PRIO_NEVER_USED, PRIO_RESERVE, durable_blocks, prio_of_node,
};

#[test]
fn a_length_is_told_above_all_priorities_of_data() {
    for blocks in [1, 2, 64, 512, NODE_BLOCKS_MAX - 1, NODE_BLOCKS_MAX] {
        let prio = prio_of_node(blocks);
        assert!(prio > PRIO_FRESH && prio < PRIO_BTREE, "{blocks} blocks: {prio}");
        assert_eq!(durable_blocks(prio), blocks);
    }
}

#[test]
fn of_what_is_longer_than_can_be_told_that_much_is() {
    assert_eq!(durable_blocks(prio_of_node(u16::MAX)), NODE_BLOCKS_MAX);
}

#[test]
fn what_a_kernel_stores_of_a_node_tells_no_length() {
    assert_eq!(prio_of_node(0), PRIO_BTREE);
    for prio in [PRIO_BTREE, PRIO_FRESH, PRIO_RESERVE, PRIO_NEVER_USED] {
        assert_eq!(durable_blocks(prio), 0, "{prio}");
    }
}
