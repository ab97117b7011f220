//! The ring's clients: their turns, their commands, and their end.
#![allow(
    unsafe_code,
    reason = "their commands and the polls of their rings are submitted, which refer to no memory"
)]

use super::{Ring, client_reads::ClientInputs, poll_in};
use crate::ring_client::RingClient;
use crate::ring_lifetime::DedicatedRing;
use bcached_env::BufferSlot;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Marks the `user_data` of a ring client's command. The ring client's number is below, and the
/// command's tag is in the lowest 16 bits.
pub(super) const OF_CLIENT: u64 = 1 << 62;

/// Marks the `user_data` of a poll of a ring client's dedicated ring; the ring's number is below.
/// Number 0 is not used by a ring: it marks the removal of such a poll.
pub(super) const OF_DEDICATED: u64 = 1 << 61;

/// How long nothing must have arrived at a ring client before it is at rest. Clients that wait for
/// answers which the ring client holds back send no further requests, and others send them rarely.
const REST: Duration = Duration::from_millis(20);

/// A ring ends after this time even if requests still arrive.
const REST_MAX: Duration = Duration::from_millis(500);

/// A ring client and its state in the kernel.
pub(super) struct HostedClient {
    pub client: Box<dyn RingClient>,
    /// Stays open as long as one of the ring client's commands is in the kernel.
    device: Arc<dyn AsFd + Send + Sync>,
    pub in_kernel: usize,
    /// The first of its buffer slots, if it has some.
    slots: Option<u16>,
    /// The ring that its commands are on, if it has a dedicated one.
    pub dedicated: Option<DedicatedRing>,
    /// Its device is among the inputs.
    is_watched: bool,
}

impl Ring {
    /// Adds a ring client, which gets its first turn with the next [`Ring::submit`].
    pub(crate) fn take_in(&mut self, mut client: Box<dyn RingClient>) {
        let (device, wanted) = (client.device(), client.slots_wanted());
        let slots = if wanted > 0 { self.slots.take(&self.ring, wanted) } else { None };
        if let Some(first) = slots {
            client.slots_from(BufferSlot { ring: self.number, number: first });
        }
        // If the system grants no further ring, the ring client uses this one as others do. Only a
        // kernel with the fault that `ring_lifetime.rs` describes depends on a dedicated ring.
        let dedicated = client.ends_at_rest().and_then(|commands| {
            self.dedicated_count += 1;
            DedicatedRing::new(self.dedicated_count, commands).ok()
        });
        self.clients.insert(HostedClient {
            client,
            device,
            in_kernel: 0,
            slots,
            dedicated,
            is_watched: false,
        });
    }

    /// Gives every ring client its turn; returns false if there was no room for all their commands.
    /// Ring clients that are over are removed.
    pub(super) fn turn_clients(&mut self) -> bool {
        let (main, table, mut has_room) = (&mut *self.ring, &mut self.slots, true);
        let inputs = &mut self.inputs;
        self.clients.retain(|number, hosted| {
            let HostedClient { client, device, in_kernel, slots, dedicated, .. } = hosted;
            let ring = dedicated.as_mut().map_or(&mut *main, |dedicated| &mut *dedicated.ring);
            client.turn(&mut |command| {
                let data = OF_CLIENT | (number as u64) << 16 | u64::from(command.tag());
                // SAFETY: the entry refers to no memory, and `device` keeps the descriptor open
                // until the command has been reaped.
                let is_in =
                    unsafe { ring.submission().push(&command.entry(device.as_fd()).user_data(data)) }.is_ok();
                *in_kernel += usize::from(is_in);
                has_room &= is_in;
                is_in
            });
            let stays = *in_kernel > 0 || !client.is_over();
            if let Some(dedicated) = dedicated {
                has_room &= tend_dedicated(main, dedicated, stays);
            }
            if !stays {
                slots.iter().for_each(|first| table.give_back(*first));
            }
            hosted.tend_input(inputs, (number, stays));
            stays
        });
        has_room
    }

    /// Handles the completion of a ring client's command.
    pub(super) fn guest_completed(&mut self, data: u64, result: i32) {
        let number =
            usize::try_from((data & !OF_CLIENT) >> 16).expect("numbers of ring clients are slab indices");
        let hosted =
            self.clients.get_mut(number).expect("a ring client stays until its last command has ended");
        hosted.completed(data, result);
    }

    /// Passes completions of dedicated rings to their ring clients; returns true if there were any.
    pub(super) fn reap_aparts(&mut self) -> bool {
        let mut has_any = false;
        for (_, hosted) in &mut self.clients {
            while let Some(entry) =
                hosted.dedicated.as_mut().and_then(|dedicated| dedicated.ring.completion().next())
            {
                hosted.completed(entry.user_data(), entry.result());
                has_any = true;
            }
        }
        has_any
    }

    /// Tells the ring clients that the thread stops busy-polling; returns false if one of them
    /// needs a turn first.
    pub(crate) fn clients_may_sleep(&mut self) -> bool {
        // A fold, not `all`: every ring client must be told.
        self.clients.iter_mut().fold(true, |may, (_, hosted)| hosted.client.may_sleep() && may)
    }

    /// Waits until nothing arrives at ring clients whose kernel does not tolerate it while a ring
    /// ends: see [`RingClient::ends_at_rest`].
    pub(super) fn let_guests_rest(&mut self) {
        let (began, mut last) = (Instant::now(), Instant::now());
        let waits = |hosted: &HostedClient| hosted.in_kernel > 0 && hosted.dedicated.is_some();
        while self.clients.iter().any(|(_, hosted)| waits(hosted))
            && last.elapsed() < REST
            && began.elapsed() < REST_MAX
        {
            if self.take_last(REST) {
                last = Instant::now();
            }
        }
        for dedicated in self.clients.iter_mut().filter_map(|(_, hosted)| hosted.dedicated.as_mut()) {
            dedicated.ring.last();
            self.ring.last();
        }
    }

    /// Handles news from a ring client's dedicated ring; if `more` is false, that ring is no longer
    /// polled.
    pub(super) fn apart_told(&mut self, data: u64, more: bool) {
        let mut dedicated_rings = self.clients.iter_mut().filter_map(|(_, hosted)| hosted.dedicated.as_mut());
        if let Some(dedicated) = dedicated_rings.find(|dedicated| dedicated.number == data & !OF_DEDICATED) {
            dedicated.is_polled = more;
        }
    }
}

impl HostedClient {
    /// Watches the ring client's device while the ring client waits to read from it and `stays`.
    fn tend_input(&mut self, inputs: &mut ClientInputs, (number, stays): (usize, bool)) {
        let is_awaited = stays && self.client.awaits_input();
        if is_awaited == self.is_watched {
            return;
        }
        let device = (*self.device).as_fd();
        self.is_watched = is_awaited && inputs.watch(number, device);
        if !is_awaited {
            inputs.unwatch(device);
        } else if !self.is_watched {
            self.client.input_refused();
        }
    }

    /// Handles the completion of a command.
    fn completed(&mut self, data: u64, result: i32) {
        self.in_kernel -= 1;
        self.client.completed(u16::try_from(data & 0xffff).expect("the data has 16 bits"), result);
    }
}

/// Submits the entries of a ring client's dedicated ring. The engine's ring polls it as long as the
/// ring client `stays`. Returns false if there was no room for the poll.
fn tend_dedicated(main: &mut IoUring, dedicated: &mut DedicatedRing, stays: bool) -> bool {
    dedicated.submit();
    if stays == dedicated.is_polled {
        return true;
    }
    let data = OF_DEDICATED | dedicated.number;
    let entry = if stays {
        let poll = opcode::PollAdd::new(Fd(dedicated.ring.as_raw_fd()), poll_in()).multi(true);
        poll.build().user_data(data)
    } else {
        opcode::PollRemove::new(data).build().user_data(OF_DEDICATED)
    };
    // SAFETY: neither entry refers to memory, and the kernel keeps the polled file open.
    let is_in = unsafe { main.submission().push(&entry) }.is_ok();
    dedicated.is_polled = stays == is_in;
    is_in
}
