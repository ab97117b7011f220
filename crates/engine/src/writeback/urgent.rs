//! Write-back that somebody waits for: as fast as the devices go, whatever the options say, and given up if they take no data.

use crate::error::Error;
use crate::request::Target;
use crate::set::CacheSet;
use crate::writeback::batch;
use core::time::Duration;

/// Batches in a row that meet trouble and get nothing done before it is given up.
const FRUITLESS_MAX: u32 = 5;
/// Rest before trouble is met again.
const REST_AFTER_TROUBLE: Duration = Duration::from_secs(1);
/// How often to look at ranges that were being written.
const REST_BESIDE_WRITES: Duration = Duration::from_millis(10);

/// Writes back batch after batch until `is_done` says so, which is asked before each. Holds the volume's write-back meanwhile.
///
/// # Errors
/// What keeps the data from being written back; [`Error::Stopping`], and a set's failure.
pub async fn write_back(
    set: &CacheSet,
    target: &Target,
    mut is_done: impl AsyncFnMut() -> Result<bool, Error>,
) -> Result<(), Error> {
    let lock = set.with(|s| s.volumes.get(target.id).map(|volume| volume.writeback_lock.clone()));
    let _alone = lock.ok_or(Error::NoVolume)?.acquire(1).await;
    let mut fruitless = 0;
    loop {
        set.check_alive()?;
        if set.with(|s| s.stopping) {
            return Err(Error::Stopping);
        }
        if is_done().await? {
            return Ok(());
        }
        let batch = batch::clean_batch(set, target, true).await;
        match batch.trouble {
            _ if batch.sectors > 0 => {
                fruitless = 0;
                set.signals().allocator_work.notify_all();
                set.env().yield_now().await;
            }
            None => {
                let until = set.env().now() + REST_BESIDE_WRITES;
                set.env().wait_until(&set.signals().ranges, until).await;
            }
            Some(error) => {
                fruitless += 1;
                if fruitless == FRUITLESS_MAX {
                    return Err(error);
                }
                rest_after_trouble(set).await;
            }
        }
    }
}

async fn rest_after_trouble(set: &CacheSet) {
    let until = set.env().now() + REST_AFTER_TROUBLE;
    while set.env().now() < until && !set.is_ending() {
        set.env().wait_until(&set.signals().writeback_work, until).await;
    }
}
