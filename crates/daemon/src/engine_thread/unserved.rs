//! Requests to an engine about volumes that are not served, from threads that may wait for the
//! answer; and about flash-only volumes.

use super::{Command, Engine, ReplyCallback};
use bcached_engine::{CacheSet, Error, LostRange, PendingForget, VolumeId, VolumeInfo};
use bcached_format::{Label, Uuid};
use std::future::Future;
use std::sync::mpsc;

impl Engine {
    /// Prepares to forget a volume, once the amount of its dirty data is known. Waits.
    pub fn begin_forgetting(&self, uuid: Uuid) -> Result<PendingForget, Error> {
        self.wait_for(move |set| async move {
            set.walked().await?;
            set.begin_forgetting(uuid)
        })
    }

    /// Returns some of the data that would be lost, from sector `at` of the key space on, and where
    /// the rest begins. Waits.
    pub fn lost(&self, of: &PendingForget, at: u64) -> Result<(Vec<LostRange>, Option<u64>), Error> {
        let of = of.clone();
        self.wait_for(move |set| async move { set.lost(&of, at).await })
    }

    /// Forgets the volume. Waits.
    pub fn forget(&self, forgetting: PendingForget) -> Result<(), Error> {
        self.wait_for(move |set| async move { set.forget(forgetting).await })
    }

    /// Abandons the forgetting.
    pub fn keep(&self, forgetting: PendingForget) {
        self.send(Command::Task(Box::new(move |set, _| set.keep(forgetting))));
    }

    /// Makes a flash-only volume of `sectors` sectors, and serves it.
    pub fn create_flash_only(
        &self,
        sectors: u64,
        label: Label,
        answer: ReplyCallback<Result<VolumeInfo, Error>>,
    ) {
        let make = move |set: CacheSet| async move {
            let id = set.create_flash_only(sectors, label).await?;
            info(&set, id)
        };
        self.attempt(make, answer);
    }

    /// Serves a flash-only volume that exists.
    pub fn add_flash_only(&self, uuid: Uuid, answer: ReplyCallback<Result<VolumeInfo, Error>>) {
        let add = move |set: CacheSet| async move { set.add_flash_only(uuid).and_then(|id| info(&set, id)) };
        self.attempt(add, answer);
    }

    /// Runs `work` on the set and waits for its outcome. An engine that is gone is reported as one
    /// that is stopping.
    pub(super) fn wait_for<T, F>(&self, work: impl FnOnce(CacheSet) -> F + Send + 'static) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        let (done, waits) = mpsc::channel();
        self.attempt(work, Box::new(move |outcome| drop(done.send(outcome))));
        waits.recv().unwrap_or(Err(Error::Stopping))
    }
}

fn info(set: &CacheSet, id: VolumeId) -> Result<VolumeInfo, Error> {
    set.volumes().into_iter().find(|info| info.id == id).ok_or(Error::NoVolume)
}
