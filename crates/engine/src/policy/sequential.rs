//! Detection of sequential streams: which requests belong to one stream, and how long the streams
//! of a client are. Reads and writes that continue where another has ended are cheap for the
//! backing device, and would evict data that is not.
//!
//! The numbers are those of Linux bcache where they are right. A request continues the stream that
//! expects its first sector, if that is less than [`STREAM_PAUSE`] old. Any other request begins a
//! new stream, which replaces the one that was longest without a request. When a client begins a
//! new stream, its previous stream enters its average, with a weight of an eighth. So a client that
//! reads a fragmented file counts as streaming too. The result is the greater of the stream and the
//! average.
//!
//! Two things differ from the kernel:
//!
//! - A *client* is the origin of a request (a connection, a queue, a virtual machine). Kernel
//!   bcache uses the task, which is a flusher thread or a server for all clients together, so that
//!   one client's stream penalises another's random requests.
//! - Bytes are counted in 64 bits. In 32 bits an average wraps at 4 GiB, and the next stream is
//!   cached whole.
//!
//! Two streams that end at the same sector cannot be told apart by the next request. The newer one
//! replaces the older one, so a block that is read again and again takes one place, not all of
//! them.

use crate::policy::lists::{Rank, SlotLists};
use crate::sorted_map::SortedMap;
use alloc::vec;
use alloc::vec::Vec;
use bcached_env::Time;
use core::time::Duration;

/// Number of streams remembered per volume (as in the kernel).
const STREAMS_MAX: usize = 128;

/// Number of clients remembered per volume. The average of the client that has been idle for
/// longest is forgotten.
const CLIENTS_MAX: usize = 64;

/// A stream ends when its next request takes this long (as in the kernel).
pub const STREAM_PAUSE: Duration = Duration::from_secs(5);

/// The origin of a request, as distinguished by the code that submits requests: the connection, the
/// queue, the virtual machine. The numbers have no meaning; code with only one client always uses
/// the same one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ClientId(pub u64);

#[derive(Clone, Copy, Default)]
struct Stream {
    /// The sector that the stream expects next.
    end: u64,
    bytes: u64,
    last: Time,
}

#[derive(Clone, Copy, Default)]
struct ClientHistory {
    /// Bytes of the stream that the client's last request belonged to.
    current: u64,
    /// Average of the streams before that, in bytes.
    average: u64,
    /// Sequence number of its last request.
    used: u64,
}

/// The recent streams of one volume, and of its clients. Its memory does not depend on the
/// requests.
pub struct Streams {
    slots: Vec<Stream>,
    /// Slots by the sector that they expect; each sector occurs once.
    by_end: SortedMap<u64, u32>,
    /// A slot without a stream is reused first, then the one that was longest without a request.
    order: SlotLists,
    clients: SortedMap<ClientId, ClientHistory>,
    requests: u64,
}

impl Default for Streams {
    fn default() -> Self {
        let mut order = SlotLists::new(STREAMS_MAX).expect("memory for a few slots");
        (0..).take(STREAMS_MAX).for_each(|slot| order.append(slot, Rank::Empty));
        Self {
            slots: vec![Stream::default(); STREAMS_MAX],
            by_end: SortedMap::with_room_for(STREAMS_MAX),
            order,
            clients: SortedMap::with_room_for(CLIENTS_MAX),
            requests: 0,
        }
    }
}

impl Streams {
    /// Records a request of sectors `[start, end)`. Returns how much its client streams, in bytes:
    /// the length of the stream that the request belongs to, including the request, or the client's
    /// average if that is more.
    pub fn take_in(&mut self, now: Time, client: ClientId, start: u64, end: u64) -> u64 {
        let bytes = end.saturating_sub(start).saturating_mul(512);
        let continued = self.by_end.remove(start).map(|slot| (slot, self.slots[slot as usize])).filter(
            |(slot, stream)| {
                let is_going_on = now.since(stream.last) < STREAM_PAUSE;
                if !is_going_on {
                    self.order.append(*slot, Rank::Empty);
                }
                is_going_on
            },
        );
        let stream = continued.map_or(bytes, |(_, stream)| stream.bytes.saturating_add(bytes));
        let slot = continued.map_or_else(|| self.oldest(), |(slot, _)| slot);
        self.order.append(slot, Rank::Used);
        self.slots[slot as usize] = Stream { end, bytes: stream, last: now };
        if let Some(other) = self.by_end.replace(end, slot).filter(|other| *other != slot) {
            self.order.append(other, Rank::Empty);
        }
        stream.max(self.average(client, stream, continued.is_none()))
    }

    /// Returns a slot for a new stream.
    fn oldest(&mut self) -> u32 {
        let slot = self.order.first(Rank::Empty).or_else(|| self.order.first(Rank::Used));
        let slot = slot.expect("every slot is on a list");
        let end = self.slots[slot as usize].end;
        if self.order.rank(slot) == Some(Rank::Used) {
            self.by_end.remove(end);
        }
        slot
    }

    /// Updates and returns the client's average, now that its last request belongs to a stream of
    /// so many bytes.
    fn average(&mut self, client: ClientId, stream: u64, is_new: bool) -> u64 {
        self.requests += 1;
        let place = self.clients.place(client).unwrap_or_else(|_| self.first_request(client));
        let past = self.clients.at_mut(place);
        if is_new {
            let sum = 7 * u128::from(past.average) + u128::from(past.current);
            past.average = u64::try_from(sum / 8).expect("an eighth of eight numbers of 64 bits");
        }
        past.current = stream;
        past.used = self.requests;
        past.average
    }

    /// Adds a client, if need be in place of the one that was longest without a request. Returns
    /// its index.
    fn first_request(&mut self, client: ClientId) -> usize {
        if self.clients.len() >= CLIENTS_MAX {
            let idle = self.clients.iter().min_by_key(|(_, past)| past.used).map(|(client, _)| *client);
            idle.and_then(|idle| self.clients.remove(idle));
        }
        self.clients.insert(client, ClientHistory::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const KIB: u64 = 1024;
    const MIB: u64 = 1024 * KIB;
    /// The kernel's default of `sequential_cutoff`.
    const CUTOFF: u64 = 4 * MIB;
    const ME: ClientId = ClientId(1);
    const OTHER: ClientId = ClientId(2);

    /// Streams with a clock that advances by a millisecond per request.
    #[derive(Default)]
    struct TimedStreams {
        streams: Streams,
        now: Time,
    }

    impl TimedStreams {
        /// Returns true if a request of `bytes` at `sector` is bypassed.
        fn bypasses(&mut self, client: ClientId, sector: u64, bytes: u64) -> bool {
            self.now = self.now + Duration::from_millis(1);
            self.streams.take_in(self.now, client, sector, sector + bytes / 512) >= CUTOFF
        }

        /// Returns how many requests of a stream are not bypassed; these are the first ones. The
        /// stream has `bytes` from `sector` on, in requests of 64 KiB.
        fn stream(&mut self, client: ClientId, sector: u64, bytes: u64) -> usize {
            let requests = 0..bytes / (64 * KIB);
            let bypassed: Vec<bool> =
                requests.map(|number| self.bypasses(client, sector + number * 128, 64 * KIB)).collect();
            let cached = bypassed.iter().take_while(|bypassed| !**bypassed).count();
            assert!(bypassed[cached..].iter().all(|bypassed| *bypassed), "bypassed to the end");
            cached
        }

        /// Returns how many of 40 requests of 4 KiB that continue nothing are bypassed; these are
        /// the first ones.
        fn random(&mut self, client: ClientId) -> usize {
            let bypassed: Vec<bool> = (1..41)
                .map(|number| self.bypasses(client, number * 1_000_003 % 7_777_777 * 64, 4 * KIB))
                .collect();
            let count = bypassed.iter().take_while(|bypassed| **bypassed).count();
            assert!(!bypassed[count..].contains(&true), "cached to the end");
            count
        }
    }

    #[test]
    fn the_first_63_of_64_kib_are_cached() {
        assert_eq!(TimedStreams::default().stream(ME, 1 << 30, 64 * MIB), 63);
    }

    #[test]
    fn one_request_can_be_a_stream() {
        let mut bench = TimedStreams::default();
        assert!(!bench.bypasses(ME, 0, 4092 * KIB));
        assert!(bench.bypasses(ME, 1 << 30, 4 * MIB));
    }

    #[test]
    fn six_random_requests_after_a_stream_are_bypassed() {
        let mut bench = TimedStreams::default();
        bench.stream(ME, 1 << 40, 64 * MIB);
        assert_eq!(bench.random(ME), 6);
    }

    #[test]
    fn nobody_pays_for_another_clients_stream() {
        let mut bench = TimedStreams::default();
        bench.stream(ME, 1 << 40, 64 * MIB);
        assert_eq!(bench.random(OTHER), 0);
        assert_eq!(bench.random(ME), 6, "the average is its own, whatever others have asked for meanwhile");
    }

    /// The requests of one stream may arrive over several connections.
    #[test]
    fn a_stream_may_have_two_clients() {
        let mut bench = TimedStreams::default();
        let bypassed = |number: u64| {
            bench.bypasses(
                if number.is_multiple_of(2) { ME } else { OTHER },
                (1 << 30) + number * 128,
                64 * KIB,
            )
        };
        assert_eq!((0..100).map(bypassed).filter(|bypassed| *bypassed).count(), 100 - 63);
    }

    #[test]
    fn a_pause_ends_a_stream() {
        for (seconds, goes_on) in [(4, true), (5, false), (6, false)] {
            let mut bench = TimedStreams::default();
            bench.stream(ME, 0, 4 * MIB - 64 * KIB);
            // The bench adds the last millisecond.
            bench.now = bench.now + Duration::from_millis(1000 * seconds - 1);
            assert_eq!(bench.bypasses(ME, 63 * 128, 64 * KIB), goes_on, "{seconds} s");
        }
    }

    /// In 32 bits the average would be about 1 MiB after the second of them, and nothing would be
    /// bypassed.
    #[test]
    fn averages_do_not_begin_again_at_4_gib() {
        let mut bench = TimedStreams::default();
        bench.streams.take_in(bench.now, ME, 1 << 40, (1 << 40) + 4080 * MIB / 512);
        assert_eq!(bench.random(ME), 37, "as many as in the kernel after the first");
        let mut bench = TimedStreams::default();
        for number in 1..3 {
            bench.streams.take_in(bench.now, ME, number << 40, (number << 40) + 4080 * MIB / 512);
        }
        assert!(bench.random(ME) > 37);
        let mut streams = Streams::default();
        assert_eq!(streams.take_in(Time(0), ME, 0, u64::MAX), u64::MAX);
        assert_eq!(streams.take_in(Time(0), ME, 8, 16), u64::MAX / 8, "no overflow");
    }

    #[test]
    fn the_stream_that_was_longest_without_a_request_gives_way() {
        for (others, goes_on) in [(127, true), (128, false)] {
            let mut bench = TimedStreams::default();
            bench.stream(ME, 0, 4 * MIB - 64 * KIB);
            for number in 1..=others {
                bench.bypasses(OTHER, number << 32, 4 * KIB);
            }
            assert_eq!(bench.bypasses(ME, 63 * 128, 64 * KIB), goes_on, "{others} others");
        }
    }

    #[test]
    fn a_block_that_is_read_again_and_again_holds_one_place() {
        let mut bench = TimedStreams::default();
        bench.stream(ME, 0, 4 * MIB - 64 * KIB);
        for _ in 0..1000 {
            bench.bypasses(OTHER, 1 << 32, 4 * KIB);
        }
        assert!(bench.bypasses(ME, 63 * 128, 64 * KIB));
    }

    #[test]
    fn memory_is_bounded() {
        let mut bench = TimedStreams::default();
        for number in 0..10_000 {
            bench.bypasses(ClientId(number), number << 20, 4 * KIB);
            // Some end where others do, and some continue a stream.
            bench.bypasses(ClientId(number % 7), (number % 300) << 20, 4 * KIB);
        }
        let Streams { slots, by_end, clients, order, .. } = &bench.streams;
        assert_eq!((slots.len(), clients.len()), (STREAMS_MAX, CLIENTS_MAX));
        assert!(by_end.len() == order.length(Rank::Used) && by_end.len() <= STREAMS_MAX);
        assert_eq!((by_end.capacity(), clients.capacity()), (STREAMS_MAX, CLIENTS_MAX));
    }
}
