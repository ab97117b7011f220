//! Waiting for several futures of one kind.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::future::Future;
use core::pin::Pin;
use core::task::Poll;

/// Runs all futures to their end and returns their results in order. Each wake-up polls those not yet done; meant for
/// the few pieces of one request.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    enum Slot<F: Future> {
        Running(Pin<Box<F>>),
        Done(Option<F::Output>),
    }
    let mut slots: Vec<Slot<F>> =
        futures.into_iter().map(|future| Slot::Running(Box::pin(future))).collect();
    core::future::poll_fn(|context| {
        let mut all_done = true;
        for slot in &mut slots {
            if let Slot::Running(future) = slot {
                match future.as_mut().poll(context) {
                    Poll::Ready(output) => *slot = Slot::Done(Some(output)),
                    Poll::Pending => all_done = false,
                }
            }
        }
        if all_done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let done = slots.into_iter().map(|slot| match slot {
        Slot::Done(output) => output.expect("taken once"),
        Slot::Running(_) => unreachable!("all are done"),
    });
    done.collect()
}
