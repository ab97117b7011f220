//! The pump between port and engine. It takes requests and commands until there is nothing left,
//! lets other tasks run in between, then waits for the bell.

use super::machine::LocalMachine;
use super::{
    AddRequest, AddedVolume, Command, ModePersistence, ReleasedVolume, ReplyCallback, ServeMode, StoppedSet,
    VolumeJob, reconnect, resize,
};
use bcached_engine::{CacheSet, CancelToken, Error, RemovedVolume, VolumeId};
use bcached_env::Env;
use bcached_env::sync::Semaphore;
use bcached_format::CacheMode;
use bcached_host::dispatch::Dispatcher;
use bcached_host::workers::{HostRequest, IN_FLIGHT_MAX, Workers};
use bcached_host::{Host, reopen};
use bcached_port::{ReplyTo, Server};
use bcached_uring::Disks;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::task::Poll;
use std::time::Duration;

/// Requests that are begun before other tasks run, whether they are carried out or refused.
const AT_ONCE_MAX: usize = 256;

/// Takes from port and channel; begins requests, and tasks for commands.
pub struct Pump {
    host: Host,
    machine: LocalMachine,
    workers: Rc<Workers<ReplyTo>>,
    /// The jobs that run, by number.
    jobs: Rc<RefCell<BTreeMap<u64, CancelToken>>>,
}

impl Pump {
    pub fn new(host: Host, machine: LocalMachine) -> Self {
        let dispatcher = Dispatcher::new(host.clone(), Semaphore::new(IN_FLIGHT_MAX));
        let workers = Workers::new(host.inner().env.clone(), dispatcher);
        Self { host, machine, workers, jobs: Rc::default() }
    }

    pub async fn run(self, mut server: Server, commands: Receiver<Command>) {
        let env = self.env();
        env.spawn(reopen::run(self.host.clone()));
        loop {
            // Commands are obeyed even while all permits are taken, perhaps by requests to a device
            // that hangs, and while requests keep coming.
            let is_all = self.begin_requests(&mut server);
            let mut stop = None;
            while let Ok(command) = commands.try_recv() {
                match command {
                    Command::Stop(answer) => stop = Some(answer),
                    command => self.obey(command),
                }
            }
            if let Some(answer) = stop {
                return self.stop(server, answer).await;
            }
            match is_all {
                true => self.bell_or_freed().await,
                false => env.yield_now().await,
            }
        }
    }

    /// Begins the requests that have arrived, as far as there is room. Returns false if other tasks
    /// are to run before the rest. A bell that rings meanwhile need not be heard: what rang it is
    /// looked for again.
    fn begin_requests(&self, server: &mut Server) -> bool {
        for _ in 0..AT_ONCE_MAX {
            let Some(permit) = self.workers.dispatcher().find_room() else { return true };
            let Some(request) = server.take() else { return true };
            self.workers.begin(HostRequest::from_port(request, &self.host.inner().env), permit);
            // Requests that wait for a task would make those behind them wait for one, too.
            if !self.host.inner().env.has_breath() || self.workers.has_queued() {
                return false;
            }
        }
        false
    }

    fn env(&self) -> Env {
        self.host.inner().env.clone()
    }

    async fn bell_or_freed(&self) {
        let env = self.env();
        let (mut bell, mut freed) = (pin!(env.bell()), pin!(self.workers.dispatcher().freed.wait()));
        poll_fn(|context| {
            let rung = bell.as_mut().poll(context).is_ready();
            let is_freed = freed.as_mut().poll(context).is_ready();
            if rung || is_freed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn obey(&self, command: Command) {
        let (host, machine, env) = (self.host.clone(), self.machine.clone(), self.env());
        match command {
            Command::UnderlyingDevice(volume, answer) => {
                answer(host.settled(volume).ok().and_then(|set| resize::under(&set, &machine.disks, volume)));
            }
            Command::Status(answer) => {
                let status = host.status();
                if status.failed.is_some() {
                    host.alarm();
                }
                answer(status);
            }
            Command::Ages(answer) => {
                // Without a set there are no ages, which the caller learns from the missing answer.
                if let Ok(set) = host.main() {
                    env.spawn(async move { answer(set.ages().await) });
                }
            }
            Command::Nodes(wanted, answer) => set_node_budget(host, &env, wanted, answer),
            Command::Task(work) => {
                // The same as for ages.
                if let Ok(set) = host.main() {
                    work(set, &env);
                }
            }
            Command::FallibleTask(work) => work(host.main(), &env),
            Command::KeepNote => env.spawn(async move {
                // Reported separately: a set that cannot write its journal has failed, and a note
                // that cannot be replaced is looked after by the supervisor.
                let _until_the_next_file = host.keep_note().await;
            }),
            Command::ChangeCache(change) => host.change_cache(&change),
            Command::SetOptions(volume, new, answer) => {
                answer(host.change_options(volume, new));
                // Requests that wait may not have to any more.
                host.change(|_| ());
            }
            Command::SetCacheMode(volume, mode, keep, answer) => {
                set_cache_mode(&host, &env, volume, (mode, keep), answer);
            }
            Command::AddBacking(adding, answer) => env.spawn(async move {
                let owes = adding.owes;
                let added = host.add(|set| add_backing(set, machine.disks, adding)).await;
                if let (Ok(added), true) = (&added, owes) {
                    host.has_lost([added.volume.id]);
                }
                answer(added);
            }),
            Command::Release(volume, answer) => env.spawn(async move {
                let removed = host.remove_volume(volume).await;
                answer(take_device((&host, &machine), removed).await);
            }),
            Command::HandOver(volume, answer) => env.spawn(async move {
                let removed = host.hand_over(volume).await;
                answer(take_device((&host, &machine), removed).await);
            }),
            Command::TakeBack(volume, device, answer) => env.spawn(async move {
                answer(reconnect::take_back(&host, &machine, volume, device).await);
            }),
            Command::TakeBackCache(cache, answer) => {
                reconnect::take_back_cache(&host, &machine, *cache, answer);
            }
            Command::VolumeJob(number, job, volume, answer) => match host.settled(volume) {
                Ok(set) => self.begin_volume_job(set, (number, job), volume, answer),
                Err(error) => answer(Err(error)),
            },
            Command::BeginShrinking(number, volume, sectors, answer) => match host.settled(volume) {
                Ok(set) => self.begin_job(number, async move |cancel| {
                    answer(set.begin_shrinking(volume, sectors, &cancel).await);
                }),
                Err(error) => answer(Err(error)),
            },
            Command::Cancel(number) => self.cancel_job(number),
            Command::Stop(_) => unreachable!("the loop handles it"),
        }
    }

    fn begin_volume_job(
        &self,
        set: CacheSet,
        (number, job): (u64, VolumeJob),
        volume: VolumeId,
        answer: ReplyCallback<Result<(), Error>>,
    ) {
        let disks = self.machine.disks.clone();
        self.begin_job(number, async move |cancel| {
            answer(match job {
                VolumeJob::Flush => set.write_back(volume, &cancel).await,
                VolumeJob::Detach => set.detach(volume, &cancel).await,
                VolumeJob::Attach => set.attach(volume, &cancel).await,
                VolumeJob::Grow(sectors) => resize::grow(&set, &disks, volume, sectors, &cancel).await,
                VolumeJob::Shrink(sectors) => resize::shrink(&set, &disks, volume, sectors, &cancel).await,
            });
        });
    }

    /// Begins a job with this number, by which it can be cancelled until its end.
    fn begin_job(&self, number: u64, work: impl AsyncFnOnce(CancelToken) + 'static) {
        let (jobs, cancel) = (Rc::clone(&self.jobs), CancelToken::default());
        jobs.borrow_mut().insert(number, cancel.clone());
        self.env().spawn(async move {
            work(cancel).await;
            jobs.borrow_mut().remove(&number);
        });
    }

    fn cancel_job(&self, number: u64) {
        if let (Some(cancel), Ok(set)) = (self.jobs.borrow().get(&number), self.host.main()) {
            set.cancel(cancel);
        }
    }

    /// Stops the set. Requests that the engine has begun are answered. Those that still lie in the
    /// port, or arrive later, are not begun: their clients learn that the engine is gone. So do
    /// those that wait for a cache that fails.
    async fn stop(self, mut server: Server, answer: ReplyCallback<StoppedSet>) {
        server.close();
        while let Some(request) = server.take() {
            drop(request.reply_to);
        }
        let outcome = self.host.stop().await;
        let _all_answered = self.workers.dispatcher().room.acquire(IN_FLIGHT_MAX).await;
        if outcome.is_ok() {
            // The note is empty now and of no use to any process. The device is still claimed, so
            // no other process has opened the note.
            if let Some(note) = &self.machine.note {
                bcached_uring::note::remove(&note.path);
            }
        }
        answer(StoppedSet { outcome, volumes: self.host.status().volumes });
    }
}

fn set_cache_mode(
    host: &Host,
    env: &Env,
    volume: VolumeId,
    (mode, keep): (CacheMode, ModePersistence),
    answer: ReplyCallback<Result<(), Error>>,
) {
    if keep == ModePersistence::Temporary {
        return answer(host.change_mode_for_now(volume, mode));
    }
    let host = host.clone();
    env.spawn(async move { answer(host.change_mode(volume, mode).await) });
}

/// Sets the memory for nodes, also for when the set is opened again.
fn set_node_budget(host: Host, env: &Env, wanted: usize, answer: ReplyCallback<Option<usize>>) {
    let Ok(set) = host.main() else { return answer(None) };
    env.spawn(async move {
        let has = set.set_node_budget(wanted).await.ok();
        if let Some(has) = has {
            host.inner().opening.options.borrow_mut().node_budget_bytes = has;
        }
        answer(has);
    });
}

/// How long the driver may take to release a device that was given up.
const LET_GO_LIMIT: Duration = Duration::from_secs(5);

/// Takes from the driver the device of a volume that the set has released.
async fn take_device(
    (host, machine): (&Host, &LocalMachine),
    removed: Result<RemovedVolume, Error>,
) -> Result<ReleasedVolume, Error> {
    let RemovedVolume { disk, lost } = removed?;
    let (disks, env) = (&machine.disks, &host.inner().env);
    let mut device = disk.and_then(|disk| disks.remove(disk));
    let limit = env.now() + LET_GO_LIMIT;
    // The driver releases it when it next looks at its list.
    while device.as_ref().is_some_and(|device| Arc::strong_count(device) > 1) && env.now() < limit {
        env.sleep(Duration::from_millis(1)).await;
    }
    Ok(ReleasedVolume { device: device.take().and_then(Arc::into_inner), lost })
}

async fn add_backing(set: CacheSet, disks: Disks, adding: AddRequest) -> Result<AddedVolume, Error> {
    let AddRequest { device, mode, options, serve_mode, .. } = adding;
    let disk = disks.add(device);
    let added = match serve_mode {
        ServeMode::Cached => set.add_backing(disk, mode).await,
        ServeMode::Adopted => set.adopt_backing(disk, mode).await,
        ServeMode::Uncached => set.add_uncached(disk).await,
    };
    if added.is_err() {
        // Nothing will use it: its claim is released.
        drop(disks.remove(disk));
    }
    let id = added?;
    set.change_volume_options(id, |begun| *begun = options)?;
    let volume = set.volumes().into_iter().find(|info| info.id == id).ok_or(Error::NoVolume)?;
    // An index that cannot be read is reported by the requests that need it.
    let cut_short = set.give_up_behind_end(id).await.unwrap_or(false);
    Ok(AddedVolume { volume, cut_short })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_engine::Options;
    use bcached_env::{Buffer, Executor, RunOrder, RunOutcome};
    use bcached_host::{Limits, NullNote, OpenParams, SetNote};
    use bcached_offline::devices::memory;
    use bcached_port::Operation;
    use bcached_uring::{DriverOptions, open_driver};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};

    /// Opens a set without volumes.
    fn opened() -> (Executor, Pump) {
        let driver = open_driver(&DriverOptions::default()).expect("a driver");
        let cache = memory::make(8).expect("memory");
        let nodes = bcached_engine::node_budget_min(cache.superblock.bucket_sectors(), 1);
        let options = Options { node_budget_bytes: nodes, ..Options::default() };
        let disk = driver.disks.add(cache.device);
        let mut executor = Executor::new(driver.driver, RunOrder::Fifo, 1);
        let note = SetNote::new(Box::new(NullNote));
        let opening = CacheSet::open(executor.env(), disk, note.lend(), options.clone());
        let set = executor.block_on(opening).expect("a driver").expect("it is whole");
        let set_uuid = cache.superblock.set_uuid();
        let (options, limits) = (options.into(), Limits::default());
        let opening = OpenParams { cache: disk.into(), set_uuid, note, options, limits };
        let machine = LocalMachine { disks: driver.disks, note: None };
        let host = Host::new(executor.env(), Box::new(machine.clone()), opening, set);
        (executor, Pump::new(host, machine))
    }

    /// Commands are obeyed between requests without an end. A refused request takes no measured
    /// time and no permit.
    #[test]
    fn commands_are_obeyed_between_requests_without_an_end() {
        const REQUESTS: usize = 1000;
        let (mut executor, pump) = opened();
        let (connector, server) = bcached_port::open(REQUESTS, Arc::new(|| ()));
        let (requests, mut replies) = connector.connect(REQUESTS);
        for number in 0..REQUESTS {
            let operation = Operation::Read { sector: 0, buffer: Buffer::zeroed(512) };
            requests.submit(number, bcached_port::VolumeId(77), operation);
        }
        let (commands, receiver) = mpsc::channel();
        let (answered, told_at) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let count = Arc::new(Mutex::new(move || {
            let came = std::iter::from_fn(|| replies.try_next()).count();
            answered.fetch_add(came, Ordering::Relaxed) + came
        }));
        let (tells, counts) = (Arc::clone(&told_at), Arc::clone(&count));
        let look = move |_status| tells.store(counts.lock().expect("one thread")(), Ordering::Relaxed);
        commands.send(Command::Status(Box::new(look))).expect("the pump is there");
        executor.env().spawn(async move {
            let _stays = pump.run(server, receiver).await;
        });
        assert_eq!(executor.run_until(|| count.lock().expect("one thread")() == REQUESTS), RunOutcome::Done);
        let told_at = told_at.load(Ordering::Relaxed);
        assert!((1..REQUESTS).contains(&told_at), "the command was obeyed after {told_at} of {REQUESTS}");
    }
}
