//! Catches signals on one thread for the life of the process, whichever part of the daemon acts on
//! them at the time.

use super::server::{Signal, spare_descriptors};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use tokio::signal::unix::{SignalKind, signal};

/// Acts on a signal. Returns false if no handler is installed any more.
type SignalHandler = Box<dyn Fn(Signal) -> bool + Send>;

/// The signals of this process. Clones share their state.
#[derive(Clone, Default)]
pub struct Signals(Arc<Mutex<SignalState>>);

#[derive(Default)]
struct SignalState {
    act: Option<SignalHandler>,
    /// A stop was requested while no handler was installed.
    stops: bool,
}

impl Signals {
    /// Catches signals from now on.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn catch() -> io::Result<Self> {
        spare_descriptors()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // Signals are caught from here on, not only when the thread first runs.
        let streams = {
            let _entered = runtime.enter();
            // A write beyond the file size limit raises SIGXFSZ, which ends a process that does not
            // catch it. If it is caught, the write fails instead, as on a full file system. The
            // handler stays installed without this stream.
            drop(signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
            [
                (signal(SignalKind::terminate())?, Signal::Stop),
                (signal(SignalKind::interrupt())?, Signal::Stop),
                (signal(SignalKind::hangup())?, Signal::Reload),
            ]
        };
        let signals = Self::default();
        let heard = signals.clone();
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for (mut stream, signal) in streams {
                let heard = heard.clone();
                runtime.spawn(async move {
                    while stream.recv().await.is_some() {
                        heard.hear(signal);
                    }
                });
            }
            runtime.block_on(std::future::pending::<()>());
        })?;
        Ok(signals)
    }

    /// Installs `act`, which must not wait. It is called at once if a stop was requested while no
    /// handler was installed.
    pub fn lead_to(&self, act: impl Fn(Signal) -> bool + Send + 'static) {
        let mut heard = self.lock();
        if std::mem::take(&mut heard.stops) {
            act(Signal::Stop);
        }
        heard.act = Some(Box::new(act));
    }

    fn hear(&self, signal: Signal) {
        let mut heard = self.lock();
        let is_heard = heard.act.as_ref().is_some_and(|act| act(signal));
        heard.stops |= !is_heard && signal == Signal::Stop;
    }

    fn lock(&self) -> MutexGuard<'_, SignalState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_stop_that_nobody_hears_is_not_lost() {
        let signals = Signals::default();
        signals.hear(Signal::Reload);
        signals.hear(Signal::Stop);
        let (tell, told) = channel();
        signals.lead_to(move |signal| tell.send(signal).is_ok());
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [Signal::Stop]);
        signals.hear(Signal::Reload);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [Signal::Reload]);
        drop(told);
        signals.hear(Signal::Stop);
        let (tell, told) = channel();
        signals.lead_to(move |signal| tell.send(signal).is_ok());
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [Signal::Stop]);
    }
}
