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

/// In the `user_data` of a guest's command, above the number of the guest and, in the lowest 16 bits, its tag.
pub(super) const OF_GUEST: u64 = 1 << 62;

/// In the `user_data` of a poll of a guest's own ring, above its number. There is no number 0: it is of the end of such a poll.
pub(super) const OF_APART: u64 = 1 << 61;

/// How long nothing has come to a guest that is at rest: who waits for answers that it keeps back asks for nothing more, and others seldom.
const REST: Duration = Duration::from_millis(20);

/// A ring ends after that even if something still comes.
const REST_MAX: Duration = Duration::from_millis(500);

/// A guest and what of it is in the kernel.
pub(super) struct Hosted {
    pub guest: Box<dyn Guest>,
    /// Open as long as one of its commands is in the kernel.
    device: Arc<dyn AsFd + Send + Sync>,
    pub in_kernel: usize,
    /// The first of its slots, if it has some.
    slots: Option<u16>,
    /// The ring that its commands are on, if that is its own.
    pub apart: Option<Apart>,
    /// Its device is among the inputs.
    is_watched: bool,
}

impl Ring {
    /// Has one more guest, which gets its first turn with the next [`Ring::submit`].
    pub(crate) fn take_in(&mut self, mut guest: Box<dyn Guest>) {
        let (device, wanted) = (guest.device(), guest.slots_wanted());
        let slots = if wanted > 0 { self.slots.take(&self.ring, wanted) } else { None };
        if let Some(first) = slots {
            guest.slots_from(Slot { ring: self.number, number: first });
        }
        // Where the system gives no other ring, it is on this one as others are: nothing depends on that but a kernel with a fault.
        let apart = guest.ends_at_rest().and_then(|commands| {
            self.aparts += 1;
            Apart::new(self.aparts, commands).ok()
        });
        self.guests.insert(Hosted { guest, device, in_kernel: 0, slots, apart, is_watched: false });
    }

    /// Gives every guest its turn; false if there was no room for all that they want. Who has nothing more to do here goes.
    pub(super) fn turn_guests(&mut self) -> bool {
        let (main, table, mut has_room) = (&mut *self.ring, &mut self.slots, true);
        let inputs = &mut self.inputs;
        self.guests.retain(|number, hosted| {
            let Hosted { guest, device, in_kernel, slots, apart, .. } = hosted;
            let ring = apart.as_mut().map_or(&mut *main, |apart| &mut *apart.ring);
            guest.turn(&mut |command| {
                let data = OF_GUEST | (number as u64) << 16 | u64::from(command.tag());
                // SAFETY: the entry refers to no memory, and `device` keeps the descriptor open until the command has been reaped.
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

    /// A guest's command has ended.
    pub(super) fn guest_completed(&mut self, data: u64, result: i32) {
        let number = usize::try_from((data & !OF_GUEST) >> 16).expect("numbers of guests are slab indices");
        let hosted = self.guests.get_mut(number).expect("a guest stays until its last command has ended");
        hosted.completed(data, result);
    }

    /// Tells guests with rings of their own of what has completed there; whether something has.
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

    /// Tells the guests that nobody looks any more; false if one of them is to have a turn first.
    pub(crate) fn guests_may_sleep(&mut self) -> bool {
        // All of them are told.
        self.guests.iter_mut().fold(true, |may, (_, hosted)| hosted.guest.may_sleep() && may)
    }

    /// Waits until nothing comes to guests whose kernel does not bear that: see [`Guest::ends_at_rest`].
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

    /// Something has come to a guest's own ring, or `more` is false and it is polled no longer.
    pub(super) fn apart_told(&mut self, data: u64, more: bool) {
        let mut aparts = self.guests.iter_mut().filter_map(|(_, hosted)| hosted.apart.as_mut());
        if let Some(apart) = aparts.find(|apart| apart.number == data & !OF_APART) {
            apart.is_polled = more;
        }
    }
}

impl Hosted {
    /// Watches its device if it waits to read from it, as long as it `stays`.
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

    /// A command has ended.
    fn completed(&mut self, data: u64, result: i32) {
        self.in_kernel -= 1;
        self.guest.completed(u16::try_from(data & 0xffff).expect("16 bits"), result);
    }
}

/// Gives the kernel what is in a guest's own ring, which the engine's polls as long as the guest `stays`. False if there was no room for that.
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
    // SAFETY: neither entry refers to memory, and the kernel keeps what it polls open.
    let is_in = unsafe { main.submission().push(&entry) }.is_ok();
    apart.is_polled = stays == is_in;
    is_in
}
