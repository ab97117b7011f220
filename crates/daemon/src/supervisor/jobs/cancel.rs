//! `bcached cancel`: cancels a job, if that is possible.

use crate::control_server::CancelJobHandler;
use crate::engine_thread::Engine;
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::jobs::JobEvent;
use crate::supervisor::jobs::api::{find, lock, show};
use crate::supervisor::jobs::{JobTarget, user};
use crate::supervisor::table::CacheState;
use crate::supervisor::{Event, Shared};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::JobKind;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

/// How a job is cancelled.
enum CancelMethod {
    /// Not at all: it has ended.
    Impossible,
    /// By its engine.
    Engine(Engine),
    /// By the loop: the replacement of the former cache of this index.
    Replacing(usize),
    /// By the loop: the wait for what arrives by itself.
    Waiting,
}

/// Returns the control thread's function that cancels a job.
pub fn ask(shared: Arc<Mutex<Shared>>, events: Sender<Event>) -> CancelJobHandler {
    Box::new(move |number, is_dry_run, uid| {
        let method = judge(&shared, number, is_dry_run).inspect_err(|failure| {
            tracing::info!(event = "job-refused", uid = user(uid), "cancel {number}: {failure}");
        })?;
        let mut shown = show(&shared, number)?;
        if matches!(method, CancelMethod::Impossible) {
            return Ok(shown);
        }
        if is_dry_run {
            shown.notes.push(format!("job {number} would be cancelled"));
            return Ok(shown);
        }
        let (name, verb) = (&shown.volume, shown.verb);
        tracing::info!(event = "job-cancel", uid = user(uid), "{name}: cancelling {verb} (job {number})");
        match method {
            CancelMethod::Impossible => {}
            CancelMethod::Engine(engine) => engine.cancel(number),
            CancelMethod::Replacing(former) => {
                let _stopping = events.send(Event::Cache(former, CacheEvent::StopReplacing));
            }
            CancelMethod::Waiting => {
                let _stopping = events.send(Event::Job(number, JobEvent::StopWaiting));
            }
        }
        show(&shared, number)
    })
}

fn judge(shared: &Mutex<Shared>, number: u64, is_dry_run: bool) -> Result<CancelMethod, Failure> {
    let job = find(shared, number)?;
    let cannot = |why: String, next: &str| {
        Failure::new(Kind::InUse, format!("job {number} cannot be cancelled")).why(why).next(next)
    };
    let wait = "wait for it: repeating the command that began it waits until it has ended";
    match (&job.ended, &job.engine) {
        (Some(_), _) => Ok(CancelMethod::Impossible),
        (None, _) if matches!(job.target, JobTarget::Cache(_)) && job.verb == JobKind::Replace => {
            let JobTarget::Cache(former) = job.target else { return Ok(CancelMethod::Impossible) };
            match lock(shared).table.caches[former].state {
                CacheState::Open { .. } => Ok(CancelMethod::Replacing(former)),
                _ => {
                    let why = "all volumes have moved, and the old device is being released";
                    Err(cannot(why.to_owned(), wait))
                }
            }
        }
        (None, _) if matches!(job.target, JobTarget::Arrivals(_)) => Ok(CancelMethod::Waiting),
        (None, Some(engine)) if job.verb.can_be_cancelled() => {
            let loses = matches!(job.verb, JobKind::Forget | JobKind::Shrink);
            let is_late = loses && if is_dry_run { job.turn.is_late() } else { !job.turn.gives_up() };
            if is_late {
                let why = format!("data of {} in the cache is already being given up", job.name);
                return Err(cannot(why, wait));
            }
            Ok(CancelMethod::Engine(engine.clone()))
        }
        (None, _) => Err(cannot(
            format!("{} always runs to its end", job.verb),
            "wait until it has ended: `bcached status` shows it",
        )),
    }
}
