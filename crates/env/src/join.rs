//! Waiting for several futures at once.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::future::Future;
use core::pin::Pin;
use core::task::Poll;

/// Runs all futures to their end and returns their results in order. Each wake-up polls those not
/// yet done; meant for the few pieces of one request.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    enum JoinSlot<F: Future> {
        Running(Pin<Box<F>>),
        Done(Option<F::Output>),
    }
    let mut slots: Vec<JoinSlot<F>> =
        futures.into_iter().map(|future| JoinSlot::Running(Box::pin(future))).collect();
    core::future::poll_fn(|context| {
        let mut all_done = true;
        for slot in &mut slots {
            if let JoinSlot::Running(future) = slot {
                match future.as_mut().poll(context) {
                    Poll::Ready(output) => *slot = JoinSlot::Done(Some(output)),
                    Poll::Pending => all_done = false,
                }
            }
        }
        if all_done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let done = slots.into_iter().map(|slot| match slot {
        JoinSlot::Done(output) => output.expect("an output is taken once"),
        JoinSlot::Running(_) => unreachable!("all futures have ended"),
    });
    done.collect()
}

/// Runs two futures to their end.
pub async fn join_two<A: Future, B: Future>(first: A, second: B) -> (A::Output, B::Output) {
    let (mut first, mut second) = (core::pin::pin!(first), core::pin::pin!(second));
    let (mut first_done, mut second_done) = (None, None);
    core::future::poll_fn(|context| {
        if first_done.is_none()
            && let Poll::Ready(output) = first.as_mut().poll(context)
        {
            first_done = Some(output);
        }
        if second_done.is_none()
            && let Poll::Ready(output) = second.as_mut().poll(context)
        {
            second_done = Some(output);
        }
        if first_done.is_some() && second_done.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (first_done.expect("both futures have ended"), second_done.expect("both futures have ended"))
}
