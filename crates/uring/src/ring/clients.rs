//! The ring's guests: their turns, their commands, and their end.
#![allow(
    unsafe_code,
    reason = "their commands and the polls of their rings are submitted, which refer to no memory"
)]

use super::{Ring, client_reads::Inputs, poll_in};
use crate::ring_client::Guest;
use crate::ring_lifetime::Apart;
use bcached_env::Slot;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Marks the `user_data` of a guest's command. The guest's number is below, and the command's tag
/// is in the lowest 16 bits.
pub(super) const OF_GUEST: u64 = 1 << 62;

/// Marks the `user_data` of a poll of a guest's dedicated ring; the ring's number is below. Number
/// 0 is not used by a ring: it marks the removal of such a poll.
pub(super) const OF_APART: u64 = 1 << 61;

/// How long nothing must have arrived at a guest before it is at rest. Clients that wait for
/// answers which the guest holds back send no further requests, and others send them rarely.
const REST: Duration = Duration::from_millis(20);

/// A ring ends after this time even if requests still arrive.
const REST_MAX: Duration = Duration::from_millis(500);

/// A guest and its state in the kernel.
pub(super) struct Hosted {
    pub guest: Box<dyn Guest>,
    /// Stays open as long as one of the guest's commands is in the kernel.
    device: Arc<dyn AsFd + Send + Sync>,
    pub in_kernel: usize,
    /// The first of its buffer slots, if it has some.
    slots: Option<u16>,
    /// The ring that its commands are on, if it has a dedicated one.
    pub apart: Option<Apart>,
    /// Its device is among the inputs.
    is_watched: bool,
}

impl Ring {
    /// Adds a guest, which gets its first turn with the next [`Ring::submit`].
    pub(crate) fn take_in(&mut self, mut guest: Box<dyn Guest>) {
        let (device, wanted) = (guest.device(), guest.slots_wanted());
        let slots = if wanted > 0 { self.slots.take(&self.ring, wanted) } else { None };
        if let Some(first) = slots {
            guest.slots_from(Slot { ring: self.number, number: first });
        }
        // If the system grants no further ring, the guest uses this one as others do. Only a kernel
        // with the fault that `ring_lifetime.rs` describes depends on a dedicated ring.
        let apart = guest.ends_at_rest().and_then(|commands| {
            self.aparts += 1;
            Apart::new(self.aparts, commands).ok()
        });
        self.guests.insert(Hosted { guest, device, in_kernel: 0, slots, apart, is_watched: false });
    }

    /// Gives every guest its turn; returns false if there was no room for all their commands.
    /// Guests that are over are removed.
    pub(super) fn turn_guests(&mut self) -> bool {
        let (main, table, mut has_room) = (&mut *self.ring, &mut self.slots, true);
        let inputs = &mut self.inputs;
        self.guests.retain(|number, hosted| {
            let Hosted { guest, device, in_kernel, slots, apart, .. } = hosted;
            let ring = apart.as_mut().map_or(&mut *main, |apart| &mut *apart.ring);
            guest.turn(&mut |command| {
                let data = OF_GUEST | (number as u64) << 16 | u64::from(command.tag());
                // SAFETY: the entry refers to no memory, and `device` keeps the descriptor open
                // until the command has been reaped.
                let is_in =
                    unsafe { ring.submission().push(&command.entry(device.as_fd()).user_data(data)) }.is_ok();
                *in_kernel += usize::from(is_in);
                has_room &= is_in;
                is_in
            });
            let stays = *in_kernel > 0 || !guest.is_over();
            if let Some(apart) = apart {
                has_room &= tend_apart(main, apart, stays);
            }
            if !stays {
                slots.iter().for_each(|first| table.give_back(*first));
            }
            hosted.tend_input(inputs, (number, stays));
            stays
        });
        has_room
    }

    /// Handles the completion of a guest's command.
    pub(super) fn guest_completed(&mut self, data: u64, result: i32) {
        let number = usize::try_from((data & !OF_GUEST) >> 16).expect("numbers of guests are slab indices");
        let hosted = self.guests.get_mut(number).expect("a guest stays until its last command has ended");
        hosted.completed(data, result);
    }

    /// Passes completions of dedicated rings to their guests; returns true if there were any.
    pub(super) fn reap_aparts(&mut self) -> bool {
        let mut has_any = false;
        for (_, hosted) in &mut self.guests {
            while let Some(entry) = hosted.apart.as_mut().and_then(|apart| apart.ring.completion().next()) {
                hosted.completed(entry.user_data(), entry.result());
                has_any = true;
            }
        }
        has_any
    }

    /// Tells the guests that the thread stops busy-polling; returns false if one of them needs a
    /// turn first.
    pub(crate) fn guests_may_sleep(&mut self) -> bool {
        // A fold, not `all`: every guest must be told.
        self.guests.iter_mut().fold(true, |may, (_, hosted)| hosted.guest.may_sleep() && may)
    }

    /// Waits until nothing arrives at guests whose kernel does not tolerate it while a ring ends:
    /// see [`Guest::ends_at_rest`].
    pub(super) fn let_guests_rest(&mut self) {
        let (began, mut last) = (Instant::now(), Instant::now());
        let waits = |hosted: &Hosted| hosted.in_kernel > 0 && hosted.apart.is_some();
        while self.guests.iter().any(|(_, hosted)| waits(hosted))
            && last.elapsed() < REST
            && began.elapsed() < REST_MAX
        {
            if self.take_last(REST) {
                last = Instant::now();
            }
        }
        for apart in self.guests.iter_mut().filter_map(|(_, hosted)| hosted.apart.as_mut()) {
            apart.ring.last();
            self.ring.last();
        }
    }

    /// Handles news from a guest's dedicated ring; if `more` is false, that ring is no longer
    /// polled.
    pub(super) fn apart_told(&mut self, data: u64, more: bool) {
        let mut aparts = self.guests.iter_mut().filter_map(|(_, hosted)| hosted.apart.as_mut());
        if let Some(apart) = aparts.find(|apart| apart.number == data & !OF_APART) {
            apart.is_polled = more;
        }
    }
}

impl Hosted {
    /// Watches the guest's device while the guest waits to read from it and `stays`.
    fn tend_input(&mut self, inputs: &mut Inputs, (number, stays): (usize, bool)) {
        let is_awaited = stays && self.guest.awaits_input();
        if is_awaited == self.is_watched {
            return;
        }
        let device = (*self.device).as_fd();
        self.is_watched = is_awaited && inputs.watch(number, device);
        if !is_awaited {
            inputs.unwatch(device);
        } else if !self.is_watched {
            self.guest.input_refused();
        }
    }

    /// Handles the completion of a command.
    fn completed(&mut self, data: u64, result: i32) {
        self.in_kernel -= 1;
        self.guest.completed(u16::try_from(data & 0xffff).expect("the data has 16 bits"), result);
    }
}

/// Submits the entries of a guest's dedicated ring. The engine's ring polls it as long as the guest
/// `stays`. Returns false if there was no room for the poll.
fn tend_apart(main: &mut IoUring, apart: &mut Apart, stays: bool) -> bool {
    apart.submit();
    if stays == apart.is_polled {
        return true;
    }
    let data = OF_APART | apart.number;
    let entry = if stays {
        let poll = opcode::PollAdd::new(Fd(apart.ring.as_raw_fd()), poll_in()).multi(true);
        poll.build().user_data(data)
    } else {
        opcode::PollRemove::new(data).build().user_data(OF_APART)
    };
    // SAFETY: neither entry refers to memory, and the kernel keeps the polled file open.
    let is_in = unsafe { main.submission().push(&entry) }.is_ok();
    apart.is_polled = stays == is_in;
    is_in
}
