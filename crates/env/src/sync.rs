//! Synchronisation between tasks on one thread: no locks, no atomics, no lost wake-ups.

use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};

/// Wakes all waiters. Use it as `loop { if condition { break } notify.wait().await }`: on one
/// thread nothing can happen between the check and the wait, so no wake-up is lost.
#[derive(Default)]
pub struct Notify {
    epoch: Cell<u64>,
    waiters: RefCell<Vec<Waker>>,
}

impl Notify {
    /// Creates one without waiters.
    #[must_use]
    pub const fn new() -> Self {
        Self { epoch: Cell::new(0), waiters: RefCell::new(Vec::new()) }
    }

    /// Reserves space for this many waiters, which then wait without an allocation.
    pub fn reserve(&self, waiters: usize) {
        self.waiters.borrow_mut().reserve(waiters);
    }

    /// Wakes all current waiters.
    #[inline]
    pub fn notify_all(&self) {
        self.epoch.set(self.epoch.get() + 1);
        // Usually there are none.
        if !self.waiters.borrow().is_empty() {
            self.wake();
        }
    }

    fn wake(&self) {
        for waker in self.waiters.borrow_mut().drain(..) {
            waker.wake();
        }
    }

    /// Waits for the next notification after this call.
    pub fn wait(&self) -> Notified<'_> {
        Notified { notify: self, epoch: self.epoch.get() }
    }
}

/// The future of [`Notify::wait`].
pub struct Notified<'a> {
    notify: &'a Notify,
    epoch: u64,
}

impl Future for Notified<'_> {
    type Output = ();
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.notify.epoch.get() != self.epoch {
            return Poll::Ready(());
        }
        let mut waiters = self.notify.waiters.borrow_mut();
        // A spurious poll (a join, a reused task number) must not register twice.
        if !waiters.iter().any(|waker| waker.will_wake(context.waker())) {
            waiters.push(context.waker().clone());
        }
        Poll::Pending
    }
}

/// A value that one task delivers and another waits for.
pub struct OneShot<T> {
    value: Cell<Option<T>>,
    here: Notify,
}

impl<T> Default for OneShot<T> {
    fn default() -> Self {
        Self { value: Cell::new(None), here: Notify::new() }
    }
}

impl<T> OneShot<T> {
    /// Delivers the value.
    pub fn bring(&self, value: T) {
        self.value.set(Some(value));
        self.here.notify_all();
    }

    /// Waits for the value.
    pub async fn comes(&self) -> T {
        loop {
            if let Some(value) = self.value.take() {
                return value;
            }
            self.here.wait().await;
        }
    }
}

struct SemaphoreInner {
    free: Cell<usize>,
    queue: RefCell<VecDeque<(u64, usize, Option<Waker>)>>,
    next: Cell<u64>,
}

/// Counted permits, granted strictly in order of request.
#[derive(Clone)]
pub struct Semaphore {
    inner: Rc<SemaphoreInner>,
}

impl Semaphore {
    /// Creates a semaphore with `permits` free.
    #[must_use]
    pub fn new(permits: usize) -> Self {
        let inner = SemaphoreInner {
            free: Cell::new(permits),
            queue: RefCell::new(VecDeque::new()),
            next: Cell::new(0),
        };
        Self { inner: Rc::new(inner) }
    }

    /// Returns the number of free permits.
    #[must_use]
    pub fn available(&self) -> usize {
        self.inner.free.get()
    }

    /// Waits for `count` permits; they are returned when the [`Permit`] is dropped.
    pub fn acquire(&self, count: usize) -> Acquire {
        Acquire { inner: Rc::clone(&self.inner), count, ticket: None }
    }

    /// Adds `count` permits.
    pub fn add(&self, count: usize) {
        drop(Permit { inner: Rc::clone(&self.inner), count });
    }

    /// Takes `count` permits if they are free and no task waits.
    #[must_use]
    pub fn try_acquire(&self, count: usize) -> Option<Permit> {
        if !self.inner.queue.borrow().is_empty() || self.inner.free.get() < count {
            return None;
        }
        self.inner.free.set(self.inner.free.get() - count);
        Some(Permit { inner: Rc::clone(&self.inner), count })
    }
}

/// Permits held.
#[must_use = "dropping a permit returns it"]
pub struct Permit {
    inner: Rc<SemaphoreInner>,
    count: usize,
}

impl Permit {
    /// Removes these permits permanently.
    pub fn retire(mut self) {
        self.count = 0;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.inner.free.set(self.inner.free.get() + self.count);
        self.inner.wake_first();
    }
}

impl SemaphoreInner {
    /// Wakes the first waiter if it can be served; it wakes the next in turn.
    fn wake_first(&self) {
        if let Some((_, count, waker)) = self.queue.borrow_mut().front_mut()
            && *count <= self.free.get()
            && let Some(waker) = waker.take()
        {
            waker.wake();
        }
    }
}

/// The future of [`Semaphore::acquire`].
pub struct Acquire {
    inner: Rc<SemaphoreInner>,
    count: usize,
    ticket: Option<u64>,
}

impl Future for Acquire {
    type Output = Permit;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Permit> {
        let inner = Rc::clone(&self.inner);
        let mut queue = inner.queue.borrow_mut();
        let count = self.count;
        let ticket = *self.ticket.get_or_insert_with(|| {
            let ticket = inner.next.get();
            inner.next.set(ticket + 1);
            queue.push_back((ticket, count, None));
            ticket
        });
        let first = queue.front().is_some_and(|(number, ..)| *number == ticket);
        if first && inner.free.get() >= self.count {
            queue.pop_front();
            drop(queue);
            inner.free.set(inner.free.get() - self.count);
            self.ticket = None;
            inner.wake_first();
            return Poll::Ready(Permit { inner, count: self.count });
        }
        let place = queue.iter_mut().find(|(number, ..)| *number == ticket);
        place.expect("the ticket was queued above").2 = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        self.inner.queue.borrow_mut().retain(|(number, ..)| *number != ticket);
        self.inner.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::pin::pin;

    #[test]
    fn who_waits_in_a_room_asks_for_no_memory() {
        let notify = Notify::new();
        notify.reserve(1);
        let room = notify.waiters.borrow().capacity();
        let context = &mut Context::from_waker(Waker::noop());
        for _again in 0..3 {
            assert!(pin!(notify.wait()).poll(context).is_pending());
            notify.notify_all();
        }
        assert!(notify.waiters.borrow().is_empty());
        assert_eq!((room > 0, notify.waiters.borrow().capacity()), (true, room));
    }
}
