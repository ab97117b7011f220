//! Announces that the daemon is ready: in the log, on standard output, and to systemd.

use crate::supervisor::{Phase, Supervisor};

use crate::log;
use bcached_config::WAIT_DEFAULT;
use bcached_control::failure::Failure;
use std::io::Write as _;
use std::thread;

impl Supervisor {
    /// Announces it once, when all is served, or refused, or was waited for.
    pub fn announce_if_ready(&mut self) -> Result<(), Failure> {
        let shared = self.shared();
        let elapsed = self.started.elapsed();
        let is_settled = shared.table.is_settled(elapsed) || self.all_is_back(&shared.table, elapsed);
        let are_there = self.fronts.are_settled() || elapsed >= WAIT_DEFAULT;
        if shared.phase != Phase::Starting || !is_settled || !are_there {
            return Ok(());
        }
        drop(shared);
        self.confirm()?;
        self.shared().phase = Phase::Ready;
        self.tell_not_served();
        let engines = self.shared().table.open_engines();
        for (index, engine) in engines {
            if let Some(status) = engine.status() {
                self.tell_unserved(index, &status);
            }
        }
        tracing::info!(event = "ready", "ready");
        if self.is_first {
            announce();
        }
        let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        Ok(())
    }
}

/// Writes `ready` to standard output after flushing the log, since its reader may look there. It
/// does so on a thread of its own, because standard output may have no reader.
fn announce() {
    let say = || {
        log::flush();
        // A closed standard output is no reason to stop.
        let _unread = writeln!(std::io::stdout(), "ready");
    };
    if thread::Builder::new().name("ready".to_owned()).spawn(say).is_err() {
        say();
    }
}
