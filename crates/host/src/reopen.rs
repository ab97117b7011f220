//! Reopens a failed set once its device works, and brings its volumes back.
//!
//! The set is not closed before the device has proved that it works: the block at which it last
//! failed is read and written back. Then the set is closed, and opened as after a crash, from its
//! journal and its note, so that all acknowledged data is there. Each volume is added under its own
//! number, and the requests that waited for it proceed. A failed step is retried with increasing
//! back-off.

use crate::host::HostState;
use crate::quiesce::quiesce;
use crate::{Host, cache_reconnect, without_cache};
use bcached_engine::{CacheSet, Error, Options, VolumeId};
use bcached_env::{Buffer, Time};
use bcached_format::BackingState;

/// Runs the task that reopens the set, until the host stops.
pub async fn run(host: Host) {
    let (env, limits) = (host.inner().env.clone(), host.inner().opening.limits);
    let (mut pause, mut well_since) = (limits.pause_min, None::<Time>);
    // The first attempt with a cache device that has come back is made at once.
    let mut is_tried = false;
    loop {
        while !is_wanted(&host) {
            if host.with(|state| state.is_stopping) {
                return;
            }
            host.alarmed(None).await;
        }
        if well_since.take().is_some_and(|since| env.now() - since >= limits.works_after) {
            pause = limits.pause_min;
        }
        let until = env.now() + pause;
        let is_back = |state: &mut HostState| state.is_urgent || state.returned.is_some() && !is_tried;
        while env.now() < until && !host.with(|state| state.is_stopping || is_back(state)) {
            host.alarmed(Some(until)).await;
        }
        if host.with(|state| state.is_stopping) {
            return;
        }
        pause = (pause * 2).min(limits.pause_max);
        let was_well = host.works();
        host.with(|state| (state.is_trying, state.is_urgent) = (true, false));
        let is_well = attempt(&host).await;
        is_tried = host.change(|state| {
            state.is_trying = false;
            state.returned.is_some()
        });
        if is_well && !was_well {
            well_since = Some(env.now());
            tracing::info!(
                event = "cache-works-again",
                "the cache set is open again, and serves all of its volumes"
            );
        }
    }
}

/// Returns whether an attempt may help.
fn is_wanted(host: &Host) -> bool {
    if host.with(|state| state.returned.is_some()) {
        return true;
    }
    let (main, is_lost, is_owed) = host.with(|state| {
        let is_owed = !state.away.is_empty() || !state.owed_modes.is_empty();
        (state.main.clone(), state.is_lost, is_owed)
    });
    match main {
        None => !is_lost,
        Some(set) => set.failure().map_or(is_owed, |error| error.may_pass()),
    }
}

/// Makes an attempt. Returns true if the set works and has all of its volumes. Cache modes that
/// could not be written are retried after a pause.
async fn attempt(host: &Host) -> bool {
    if host.is_open_and_well() {
        cache_reconnect::decline(host);
    } else if !close_and_reopen(host).await {
        return false;
    }
    let all = bring_back(host).await;
    if all {
        without_cache::close(host).await;
    }
    write_owed_modes(host).await;
    all
}

async fn close_and_reopen(host: &Host) -> bool {
    let is_back = host.with(|state| state.returned.is_some());
    if !is_back && !answers(host).await || !without_cache::is_ready(host).await || !quiesce(host).await {
        return false;
    }
    without_cache::take_volumes(host).await;
    if is_back {
        cache_reconnect::exchange(host);
    }
    if host.with(|state| state.is_lost) {
        return false;
    }
    let Err(error) = reopen(host).await else { return true };
    tracing::warn!(event = "cache-not-opened-again", "the cache set cannot be reopened: {error}");
    let is_lost = !error.may_pass();
    host.change(|state| {
        state.is_lost = is_lost;
        state.why = Some(error.clone());
        if let Some(before) = &mut state.before {
            before.failed = Some(error);
        }
    });
    false
}

/// Returns whether the cache device reads and writes the block at which it last failed. This is the
/// only writer: a failed set does not write.
async fn answers(host: &Host) -> bool {
    let inner = host.inner();
    let disk = inner.env.disk(inner.opening.cache.get());
    let health = disk.health();
    if health.waiting > 0 {
        return false;
    }
    let block = disk.info().logical_block_sectors.max(1);
    let sector = health.last_error.map_or(0, |error| error.sector - error.sector % u64::from(block));
    let bytes = usize::try_from(block).expect("a block is small") * 512;
    let (read, buffer) = disk.read(sector, Buffer::zeroed(bytes)).await;
    if read.is_err() {
        return false;
    }
    let written = host.take_written();
    host.put_written(written.map(|written| written + bytes as u64));
    disk.write(sector, buffer.freeze()).await.is_ok()
}

/// Opens the set as after a crash.
pub(crate) async fn reopen(host: &Host) -> Result<(), Error> {
    let inner = host.inner();
    let note = inner.opening.note.lend_again();
    // Progress counters are for one opening only, so this opening gets new ones.
    let options = Options { opening: Options::default().opening, ..inner.opening.options.borrow().clone() };
    let written = host.take_written();
    let set = CacheSet::open(inner.env.clone(), inner.opening.cache.get(), note, options).await?;
    host.put_written(written);
    host.reopened(set.clone());
    // The note's file may have been removed while the set was closed.
    let _until_the_next_file = set.keep_note().await;
    Ok(())
}

/// Adds the volumes that are away to the set. Returns true if the set has all of them.
pub(crate) async fn bring_back(host: &Host) -> bool {
    let away: Vec<_> = host.with(|state| state.away.keys().copied().collect());
    let mut all = true;
    for id in away {
        if host.with(|state| state.is_stopping) {
            return false;
        }
        if let Err(error) = bring_one(host, id).await {
            tracing::warn!(event = "volume-not-back", "a volume could not return to its cache: {error}");
            all = false;
        }
    }
    all
}

async fn bring_one(host: &Host, id: VolumeId) -> Result<(), Error> {
    let Ok(set) = host.main() else { return Ok(()) };
    without_cache::give_back(host, id).await?;
    let found = host.with(|state| {
        let away = state.away.get(&id)?;
        Some((away.disk, away.info.mode, away.info.state, away.info.attached))
    });
    let Some((disk, mode, state, attached)) = found else { return Ok(()) };
    // A volume that was already detached stays without a cache.
    if state == Some(BackingState::None) && !attached {
        set.add_uncached_as(id, disk).await?;
    } else {
        set.add_backing_as(id, disk).await?;
    }
    let options = host.options_of(id);
    set.change_volume_options(id, |begun| *begun = options)?;
    // It may differ from the superblock: a mode can be set until the next start only.
    let mode = host.with(|state| state.away.get(&id).map_or(mode, |away| away.info.mode));
    set.set_cache_mode_for_now(id, mode)?;
    host.is_back(id);
    Ok(())
}

/// Writes cache modes that were set while their volumes were away to the superblocks.
async fn write_owed_modes(host: &Host) {
    let Ok(set) = host.main() else { return };
    let owed: Vec<VolumeId> = host.with(|state| {
        let is_back = |id: &&VolumeId| !state.away.contains_key(*id);
        state.owed_modes.keys().filter(is_back).copied().collect()
    });
    for id in owed {
        // The mode may have been changed while earlier ones were written. A change from here on is
        // written after this one: the engine changes a superblock in the order of the calls.
        let mode = host.with(|state| state.owed_modes.get(&id).copied().filter(|_| !state.is_stopping));
        let Some(mode) = mode else { continue };
        match set.keep_cache_mode(id, mode).await {
            Err(error) if !matches!(error, Error::NoVolume) => {
                let what = "the new cache mode of a volume could not be written to its superblock yet";
                tracing::error!(event = "cache-mode-failed", "{what}: {error}");
            }
            // By now another mode may have to be written.
            _ => host.with(|state| {
                if state.owed_modes.get(&id) == Some(&mode) {
                    state.owed_modes.remove(&id);
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestHost, backing, mode_in, served};
    use bcached_format::CacheMode;
    use rustix::fs::SealFlags;

    /// Proves that a cache mode set while the set is being closed is kept. It was once refused,
    /// although the configuration contained it.
    #[test]
    fn a_cache_mode_said_while_the_set_is_let_go_of_is_kept() {
        let file = backing(3);
        let (TestHost { mut executor, host, .. }, id) = served(&file);
        let env = executor.env();
        let said = host.clone();
        env.spawn(async move {
            said.until(|state| state.main.is_none()).await;
            assert!(said.with(|state| state.away.is_empty()), "it is being closed");
            said.change_mode(id, CacheMode::Writearound).await.expect("it will be so");
            assert!(said.with(|state| state.away.is_empty()), "it still is");
        });
        let ended = executor.block_on(async move {
            assert!(quiesce(&host).await);
            assert_eq!(host.status().volumes[0].mode, CacheMode::Writearound);
            reopen(&host).await.expect("nothing has happened to it");
            assert!(bring_back(&host).await);
            write_owed_modes(&host).await;
            assert!(host.with(|state| state.owed_modes.is_empty()) && host.works());
            let mode = host.status().volumes[0].mode;
            host.stop().await.expect("in order");
            mode
        });
        assert_eq!((ended, mode_in(&file)), (Some(CacheMode::Writearound), CacheMode::Writearound));
    }

    /// Proves that an older cache mode does not overwrite a newer one. The newer one was once set
    /// while the mode of another volume was being written, and then overwritten.
    #[test]
    fn what_was_owed_is_not_written_over_a_newer_word() {
        let files = [backing(3), backing(4)];
        let (mut rig, first) = served(&files[0]);
        let second = rig.add(&files[1]);
        let TestHost { mut executor, host, .. } = rig;
        let env = executor.env();
        let stopped = executor.block_on(async move {
            for id in [first, second] {
                host.with(|state| state.owed_modes.insert(id, CacheMode::Writearound));
            }
            let said = host.clone();
            env.spawn(async move {
                // The first of them is being written by now.
                said.change_mode(second, CacheMode::None).await.expect("it can be written");
            });
            write_owed_modes(&host).await;
            assert!(host.with(|state| state.owed_modes.is_empty()));
            host.stop().await
        });
        assert_eq!(stopped, Some(Ok(())));
        assert_eq!(files.each_ref().map(mode_in), [CacheMode::Writearound, CacheMode::None]);
    }

    /// Proves that a cache mode that could not be written is retried. There was once only one
    /// attempt.
    #[test]
    fn a_cache_mode_that_could_not_be_written_is_still_owed() {
        let file = backing(3);
        let (TestHost { mut executor, host, .. }, id) = served(&file);
        let device = file.try_clone().expect("a descriptor");
        let (owed, left) = executor
            .block_on(async move {
                host.with(|state| state.owed_modes.insert(id, CacheMode::Writearound));
                rustix::fs::fcntl_add_seals(&device, SealFlags::FUTURE_WRITE).expect("nobody has mapped it");
                assert!(is_wanted(&host) && attempt(&host).await && is_wanted(&host), "all are back");
                let owed = host.with(|state| state.owed_modes.get(&id).copied());
                // A newer mode replaces it, and fails in turn, which its caller is told.
                host.change_mode(id, CacheMode::None).await.expect_err("it cannot be written");
                (owed, host.with(|state| state.owed_modes.get(&id).copied()))
            })
            .expect("a driver");
        assert_eq!((owed, left), (Some(CacheMode::Writearound), Some(CacheMode::Writearound)));
        assert_eq!(mode_in(&file), CacheMode::Writeback);
    }
}
