//! Catches a panic of the system under test with its message and without output: it is a fault like
//! any other.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Lives running on this thread; they nest.
    static CATCHING: Cell<u32> = const { Cell::new(0) };
    static MESSAGE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `work`; a panic inside is returned as its message and location.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |info| {
            if CATCHING.get() == 0 {
                return others(info);
            }
            let text = info.payload_as_str().unwrap_or("a panic without a message");
            let place = info.location().map(|place| format!(" ({}:{})", place.file(), place.line()));
            MESSAGE.set(format!("{text}{}", place.unwrap_or_default()));
        }));
    });
    CATCHING.set(CATCHING.get() + 1);
    // What the panic leaves half done belongs to a process that is over; devices change only by
    // whole operations.
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(CATCHING.get() - 1);
    result.map_err(|_| MESSAGE.take())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(caught(|| 1), Ok(1));
        let message = caught(|| assert!(MESSAGE.take().len() > 1000, "too short")).unwrap_err();
        assert!(message.starts_with("too short (") && message.contains("panic.rs:"), "{message}");
    }
}
