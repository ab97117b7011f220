//! Decides which client may write: one at a time, unless the volume is shared.
//!
//! The rule holds across front ends: they share a [`crate::ExportTable`], which has the only table
//! of writers.
//!
//! **What counts as one client.**
//! - NBD on a unix socket: the process that connected, by its number and start time, so that a
//!   reused number is not mistaken for it. The several connections of `nbdcopy` or of a virtual
//!   machine are one client.
//! - NBD on TCP: each connection, since nothing there distinguishes processes. So CAN_MULTI_CONN is
//!   announced to writers on unix sockets only, and on TCP if the volume is shared or the client
//!   may not write anyway.
//! - A process that forwards for others (a proxy, a tunnel) is one client: what is behind it is not
//!   visible from here.
//! - FUSE: each open file, with all descriptors duplicated from it.
//! - vhost-user: the socket. Virtual machines connect to it one after the other, and one that
//!   reconnects while its requests are in flight is the same client.
//! - A block device of the kernel: one client for its whole life, since its users at any moment are
//!   unknown.
//!
//! **When writing begins.** With the first request that changes something, not with the connection:
//! a client that only reads (`nbdinfo`, a copy of the volume) must not keep the next client from
//! writing. It ends when the last connection of the client that wrote is gone and all its requests
//! have completed.
//! - A client that connects while another is writing is told that the export is read-only.
//! - A client that connected earlier and has not written gets EPERM, and *keeps* getting it after
//!   the other one has left: what it read before is out of date, and its writes would destroy those
//!   of the other client. It must reconnect and read again.
//!
//! The latter is decided by counting how often writing has begun, also by a client that wrote
//! before: a connection may begin to write if no other client has begun since it was established.
//!
//! **Right after a writer.** A program that has written exits, and the next one connects before the
//! end of the former connection has been seen, or while its last requests are in flight. The next
//! one waits for such a writer ([`WriterTable::await_leavers`]) if the writer's front end can tell
//! that it has left; NBD and vhost-user can. Otherwise consecutive commands of a script would
//! sometimes find the volume read-only.

use crate::export::Uuid;
use crate::lock::lock;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Identity of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// A process on this machine.
    Process {
        /// Its number.
        pid: u32,
        /// When it started, in ticks since boot.
        started: u64,
    },
    /// Only the connection is known, by its server's number for it.
    Connection(u64),
    /// An open file, by a number unique in this process.
    File(u64),
    /// The virtual machines on one of our sockets, one after the other, by a number unique to that
    /// socket in this process.
    Machine(u64),
    /// The kernel, through a block device: its users cannot be distinguished, and any may write at
    /// any moment.
    Kernel,
}

/// How long to wait for a writer that has left: its last requests may be slow, or never complete.
const LEAVING_MAX: Duration = Duration::from_secs(5);
/// How often a waiter checks whether it should still wait.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Returns whether the client of a connection has left although the connection has not ended. Must
/// not block.
pub type PeerGoneCheck = Arc<dyn Fn() -> bool + Send + Sync>;

/// All volumes' writers. Clones share one table.
#[derive(Clone, Default)]
pub struct WriterTable {
    table: Arc<VolumeWriters>,
}

#[derive(Default)]
struct VolumeWriters {
    volumes: Mutex<BTreeMap<Uuid, WriterHistory>>,
    /// A connection of a writer has ended.
    ended: Condvar,
}

/// A volume that has been written to. The table holds at most one of these for each volume there
/// ever was.
#[derive(Default)]
struct WriterHistory {
    /// How often writing has begun, each time after no client or another client was writing.
    changes: u64,
    /// The value of `changes` when `last` took over.
    taken_at: u64,
    /// The client that began to write last.
    last: Option<Peer>,
    /// Connections of `last` that have written and are not done, by number, with the check for
    /// whether the client has left.
    connections: BTreeMap<u64, Option<PeerGoneCheck>>,
    /// The number of the next one.
    next: u64,
}

/// A moment in the history of a volume's writers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WriterGeneration(u64);

/// The right to write, held by one connection until it is dropped.
pub struct WriteClaim {
    writing: WriterTable,
    volume: Uuid,
    number: u64,
}

impl WriterTable {
    /// Returns the present moment, and whether another client than `peer` is writing.
    #[must_use]
    pub fn look(&self, volume: Uuid, peer: Peer) -> (WriterGeneration, bool) {
        self.lock().get(&volume).map_or((WriterGeneration::default(), false), |volume| {
            (WriterGeneration(volume.changes), volume.is_taken(peer))
        })
    }

    /// Waits for a writer that has left with all of its connections while its requests are still in
    /// flight; a few seconds at most, and only while `goes_on` returns true. Does not wait for a
    /// writer that is still connected.
    pub fn await_leavers(&self, id: Uuid, peer: Peer, goes_on: impl Fn() -> bool) {
        let deadline = Instant::now() + LEAVING_MAX;
        while self.is_leaving(id, peer) && Instant::now() < deadline && goes_on() {
            let volumes = self.lock();
            if volumes.get(&id).is_some_and(|volume| volume.is_taken(peer)) {
                drop(
                    self.table
                        .ended
                        .wait_timeout(volumes, LOOK_AGAIN)
                        .unwrap_or_else(PoisonError::into_inner),
                );
            }
        }
    }

    /// Returns true if another client than `peer` has written and left, and is not done.
    fn is_leaving(&self, id: Uuid, peer: Peer) -> bool {
        self.lock().get(&id).is_some_and(|volume| volume.is_taken(peer) && volume.is_leaving())
    }

    /// Returns whether [`WriterTable::claim`] would succeed.
    #[must_use]
    pub fn may_begin(&self, id: Uuid, peer: Peer, since: WriterGeneration) -> bool {
        self.lock().get(&id).is_none_or(|volume| volume.may_begin(peer, since))
    }

    /// Begins to write, for a connection of `peer` that was established at `since`. Returns `None`
    /// if another client is writing, or has written since.
    #[must_use]
    pub fn claim(&self, id: Uuid, peer: Peer, since: WriterGeneration) -> Option<WriteClaim> {
        let mut volumes = self.lock();
        let volume = volumes.entry(id).or_default();
        if !volume.may_begin(peer, since) {
            return None;
        }
        if volume.last == Some(peer) {
            // Clients that have looked since it ended do not know what is written now.
            volume.changes += u64::from(volume.connections.is_empty());
        } else {
            volume.changes += 1;
            volume.taken_at = volume.changes;
            volume.last = Some(peer);
        }
        let number = volume.next;
        volume.next += 1;
        volume.connections.insert(number, None);
        drop(volumes);
        Some(WriteClaim { writing: self.clone(), volume: id, number })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, WriterHistory>> {
        lock(&self.table.volumes)
    }
}

impl WriteClaim {
    /// Lets clients that connect while `has_left` returns true wait for this claim to be dropped.
    pub fn ends_after(&self, has_left: PeerGoneCheck) {
        let mut volumes = self.writing.lock();
        let volume = volumes.get_mut(&self.volume).expect("a claim's volume stays in the table");
        volume.connections.insert(self.number, Some(has_left));
    }
}

impl WriterHistory {
    /// Returns true if another client than `peer` is writing.
    fn is_taken(&self, peer: Peer) -> bool {
        !self.connections.is_empty() && self.last != Some(peer)
    }

    fn is_leaving(&self) -> bool {
        self.connections.values().all(|has_left| has_left.as_ref().is_some_and(|has_left| has_left()))
    }

    fn may_begin(&self, peer: Peer, since: WriterGeneration) -> bool {
        if self.last == Some(peer) {
            // No client, or only this one, has begun since.
            self.taken_at <= since.0 + 1
        } else {
            self.connections.is_empty() && self.changes == since.0
        }
    }
}

impl Drop for WriteClaim {
    fn drop(&mut self) {
        let mut volumes = self.writing.lock();
        let volume = volumes.get_mut(&self.volume).expect("a claim's volume stays in the table");
        volume.connections.remove(&self.number);
        drop(volumes);
        self.writing.table.ended.notify_all();
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, .. } => write!(f, "process {pid}"),
            Self::Connection(number) => write!(f, "connection {number}"),
            Self::File(number) => write!(f, "open file {number}"),
            Self::Kernel => f.write_str("the kernel"),
            Self::Machine(number) => write!(f, "virtual machine {number}"),
        }
    }
}

impl fmt::Debug for WriterTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriterTable").field("volumes", &self.lock().len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for WriteClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteClaim").field("volume", &self.volume).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TANK: Uuid = Uuid([1; 16]);
    const ONE: Peer = Peer::Process { pid: 10, started: 5 };
    const OTHER: Peer = Peer::Connection(3);

    /// A client writes and leaves, another one looks, the first returns and writes: the other one's
    /// view is out of date.
    #[test]
    fn who_has_an_old_view_does_not_write_though_the_writer_is_who_it_was() {
        let writing = WriterTable::default();
        let (first, _) = writing.look(TANK, ONE);
        drop(writing.claim(TANK, ONE, first).expect("nobody writes"));
        let (seen, _) = writing.look(TANK, OTHER);
        let (again, _) = writing.look(TANK, ONE);
        drop(writing.claim(TANK, ONE, again).expect("nobody else has written"));
        assert!(writing.claim(TANK, OTHER, seen).is_none());
        // Connections of one client share their view, however often one of them has begun.
        for _ in 0..3 {
            drop(writing.claim(TANK, ONE, first).expect("only itself has written since"));
        }
        let (now, _) = writing.look(TANK, OTHER);
        drop(writing.claim(TANK, OTHER, now).expect("it has looked again"));
        assert!(writing.claim(TANK, ONE, again).is_none(), "another one has written since");
    }

    #[test]
    fn connections_of_one_client_write_together_and_shut_others_out() {
        let writing = WriterTable::default();
        let (now, taken) = writing.look(TANK, ONE);
        assert!(!taken);
        let first = writing.claim(TANK, ONE, now).expect("nobody writes");
        let second = writing.claim(TANK, ONE, now).expect("the same client");
        assert!(writing.claim(TANK, OTHER, now).is_none());
        assert!(writing.look(TANK, OTHER).1 && !writing.look(TANK, ONE).1);
        assert!(!writing.look(Uuid([2; 16]), OTHER).1, "another volume");
        drop(first);
        assert!(writing.look(TANK, OTHER).1, "the second still writes");
        drop(second);
        let (now, taken) = writing.look(TANK, OTHER);
        assert!(!taken);
        assert!(writing.claim(TANK, OTHER, now).is_some());
    }

    /// An NBD connection and an open file of FUSE may have the same number.
    #[test]
    fn clients_of_two_front_ends_shut_each_other_out() {
        let writing = WriterTable::default();
        let (connection, file) = (Peer::Connection(3), Peer::File(3));
        let claim = writing.claim(TANK, connection, WriterGeneration::default()).expect("nobody writes");
        assert!(writing.look(TANK, file).1 && !writing.look(TANK, connection).1);
        assert!(writing.claim(TANK, file, WriterGeneration::default()).is_none());
        drop(claim);
        let (now, _) = writing.look(TANK, file);
        assert!(writing.claim(TANK, file, now).is_some());
    }

    /// Regression: a script's next command connected before the end of the previous connection was
    /// seen, and was told that the volume is read-only.
    #[test]
    fn who_comes_after_a_writer_that_has_left_waits_until_it_is_done() {
        let writing = WriterTable::default();
        let claims = [0, 1]
            .map(|_| writing.claim(TANK, ONE, WriterGeneration::default()).expect("nobody else writes"));
        let until = |goes_on: &dyn Fn() -> bool| {
            writing.await_leavers(TANK, OTHER, goes_on);
            writing.look(TANK, OTHER).1
        };
        let never_asked = || unreachable!("it does not wait");
        assert!(until(&never_asked), "nobody can tell whether it has left");
        claims[0].ends_after(Arc::new(|| true));
        claims[1].ends_after(Arc::new(|| false));
        assert!(until(&never_asked), "one of its connections stays");
        claims[1].ends_after(Arc::new(|| true));
        assert!(until(&|| false), "who waits may go");
        let ends = Mutex::new(Some(claims));
        assert!(!until(&|| lock(&ends).take().is_none_or(|claims| claims.len() == 2)), "it has waited");
    }

    #[test]
    fn a_reused_process_number_is_another_client() {
        let writing = WriterTable::default();
        let _claim = writing.claim(TANK, ONE, WriterGeneration::default()).expect("nobody writes");
        assert!(
            writing.claim(TANK, Peer::Process { pid: 10, started: 6 }, WriterGeneration::default()).is_none()
        );
    }

    /// The other client mounted the volume; this one wrote to it and left. Now the other one's
    /// cached blocks are out of date, and it must not write them back.
    #[test]
    fn who_looked_before_another_wrote_may_not_write_after() {
        let writing = WriterTable::default();
        let (before, _) = writing.look(TANK, OTHER);
        drop(writing.claim(TANK, ONE, before).expect("nobody writes"));
        assert!(writing.claim(TANK, OTHER, before).is_none(), "the view is old");
        assert!(writing.claim(TANK, ONE, before).is_some(), "its own writes do not make a client's view old");
        let (after, _) = writing.look(TANK, OTHER);
        drop(writing.claim(TANK, OTHER, after).expect("connected again"));
        assert!(writing.claim(TANK, ONE, before).is_none(), "now the one's view is old");
        assert!(writing.claim(TANK, ONE, after).is_none());
    }

    #[test]
    fn a_client_that_wrote_before_and_after_another_cannot_use_its_oldest_view() {
        let writing = WriterTable::default();
        let moment = |peer| writing.look(TANK, peer).0;
        let oldest = moment(ONE);
        drop(writing.claim(TANK, ONE, oldest));
        drop(writing.claim(TANK, OTHER, moment(OTHER)));
        drop(writing.claim(TANK, ONE, moment(ONE)).expect("a fresh view"));
        assert!(writing.claim(TANK, ONE, oldest).is_none());
    }
}
