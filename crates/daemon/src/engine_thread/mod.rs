//! The thread of one cache set: its driver, its executor, its engine, and the pump between port and
//! engine.
//!
//! | file | what |
//! |---|---|
//! | `pump` | takes requests and commands |
//! | `machine` | what the host of the set needs of this machine |
//! | `reconnect` | a backing device or the cache device returns as another device of the system |
//! | `resize` | other sizes of volumes |
//! | `unserved` | volumes that are not served, and flash-only volumes |
//!
//! `bcached_host` decides which set serves which volume, and what becomes of requests while a
//! device is gone.
//!
//! All other threads talk to the set through an [`Engine`]: requests go through the port, the few
//! things that are not requests are commands. Both ring the same bell. The pump takes until there
//! is nothing left, lets other tasks run in between, then waits for the bell. A bell that rings
//! while the pump is taking is delivered at the next wait, so none is lost.

mod machine;
mod pump;
mod reconnect;
mod resize;
mod unserved;

use crate::engine_error;
use bcached_control::failure::Failure;
use bcached_engine::{
    CacheSet, Error, Explanation, Options, PendingShrink, PriorityStats, Settings, Status, VolumeId,
    VolumeInfo, VolumeOptions,
};
use bcached_env::{Executor, RunOrder};
use bcached_format::{CacheMode, Label, Uuid};
pub use bcached_host::backing_reconnect::ReconnectError;
use bcached_host::{Host, Limits, OpenParams, SetNote, watch};
use bcached_offline::devices::CacheDevice;
use bcached_port::{Connector, Server};
use bcached_uring::{
    Backend, Bell, Device, DriverOptions, NoteContents, NoteReplay, RingHandle, open_driver,
};
use machine::{LocalMachine, NoteLocation, open_note};
use pump::Pump;
use resize::UnderlyingDevice;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Requests that may wait in the port for the engine.
const QUEUE_MAX: usize = 1024;

/// How long a query waits for an engine's answer. An engine answers between two transitions.
const STATUS_LIMIT: Duration = Duration::from_secs(2);

/// What an engine is started with.
pub struct EngineParameters {
    /// The claimed cache device.
    pub device: Device,
    /// UUID of its set.
    pub set_uuid: Uuid,
    /// Path of the note; `None` if nothing is ever written that would have to be noted.
    pub note: Option<PathBuf>,
    /// No cache set has ever run on the device.
    pub is_new: bool,
    /// The engine's options.
    pub options: Options,
    /// How much of the set's memory is for its bucket table, in bytes.
    pub bucket_memory: u64,
}

/// The handle of a running engine. Clones lead to the same one.
#[derive(Clone)]
pub struct Engine {
    /// For front ends.
    pub connector: Connector,
    /// Where queues of block devices join the engine's ring.
    pub ring_handle: RingHandle,
    commands: Sender<Command>,
    bell: Bell,
}

/// A set that has been opened.
pub struct OpenedSet {
    /// Its handle.
    pub engine: Engine,
    /// Its volumes without a backing device.
    pub volumes: Vec<VolumeInfo>,
    /// How I/O is done.
    pub backend: Backend,
    /// What the note held, and what became of that.
    pub note: NoteOutcome,
    /// The path of the note, if there is one.
    pub note_path: Option<PathBuf>,
}

/// A volume that an engine has added.
pub struct AddedVolume {
    /// The volume.
    pub volume: VolumeInfo,
    /// Data is cached that lies beyond the end of its backing device.
    pub cut_short: bool,
}

/// How long a cache mode is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModePersistence {
    /// Durably, in the superblock.
    InSuperblock,
    /// Until the volume is served anew.
    Temporary,
}

/// Takes an answer back to the caller, on the engine's thread: it must not wait.
pub type ReplyCallback<T> = Box<dyn FnOnce(T) + Send>;

/// A backing device to be served.
pub struct AddRequest {
    /// Its claim.
    pub device: Device,
    /// Its new cache mode, if that changes.
    pub mode: Option<CacheMode>,
    /// Its initial options.
    pub options: VolumeOptions,
    /// How it is served.
    pub serve_mode: ServeMode,
    /// Something acknowledged may have been lost on its way here, which its next flush reports.
    pub owes: bool,
}

/// How a backing device is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServeMode {
    /// Through the cache, if it belongs to this cache or to none.
    Cached,
    /// Likewise, but also if it belonged to another cache and has left that with all of its data.
    Adopted,
    /// Past the cache.
    Uncached,
}

/// A job on a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VolumeJob {
    /// Writes its dirty data back.
    Flush,
    /// Detaches it from the cache, with all of its data on its backing device.
    Detach,
    /// Attaches it to the cache that its engine serves.
    Attach,
    /// Grows it to this size, in sectors, which its backing device was seen to have.
    Grow(u64),
    /// Shrinks it to this size, in sectors.
    Shrink(u64),
}

/// A volume that an engine has released.
pub struct ReleasedVolume {
    /// Its device, still claimed. `None` if operations on it hang, or if it has none.
    pub device: Option<Device>,
    /// Something acknowledged may not be durable.
    pub lost: Option<Error>,
}

/// Work that the engine's thread does between two transitions.
type EngineTask = Box<dyn FnOnce(CacheSet, &bcached_env::Env) + Send>;

/// The same, and the answer to the caller if there is no set.
type FallibleTask = Box<dyn FnOnce(Result<CacheSet, Error>, &bcached_env::Env) + Send>;

enum Command {
    AddBacking(AddRequest, ReplyCallback<Result<AddedVolume, Error>>),
    /// Another engine gets it: it must have left a set that has failed.
    HandOver(VolumeId, ReplyCallback<Result<ReleasedVolume, Error>>),
    Release(VolumeId, ReplyCallback<Result<ReleasedVolume, Error>>),
    /// Replaces its backing device with this one.
    TakeBack(VolumeId, Device, ReplyCallback<Result<Option<Error>, ReconnectError>>),
    /// Replaces the cache device with this one.
    TakeBackCache(Box<CacheDevice>, ReplyCallback<Result<bool, Error>>),
    VolumeJob(u64, VolumeJob, VolumeId, ReplyCallback<Result<(), Error>>),
    /// As the job of this number, to this many sectors.
    BeginShrinking(u64, VolumeId, u64, ReplyCallback<Result<PendingShrink, Error>>),
    Cancel(u64),
    UnderlyingDevice(VolumeId, ReplyCallback<Option<UnderlyingDevice>>),
    /// Memory for nodes, in bytes; the answer is how much there is then, `None` if it is unchanged.
    Nodes(usize, ReplyCallback<Option<usize>>),
    /// Something short, or something that begins a task.
    Task(EngineTask),
    FallibleTask(FallibleTask),
    SetCacheMode(VolumeId, CacheMode, ModePersistence, ReplyCallback<Result<(), Error>>),
    SetOptions(VolumeId, VolumeOptions, ReplyCallback<Result<(), Error>>),
    ChangeCache(Box<dyn Fn(&mut Options) + Send>),
    Status(ReplyCallback<Status>),
    Ages(ReplyCallback<PriorityStats>),
    /// The note's file is gone, or another one has been made.
    KeepNote,
    Stop(ReplyCallback<StoppedSet>),
}

/// A set to which nothing is written any more.
pub struct StoppedSet {
    /// On an error, something that was acknowledged may not have been made durable.
    pub outcome: Result<(), Error>,
    /// Its volumes, with the dirty data that remains: write-back goes on until the stop has begun.
    pub volumes: Vec<VolumeInfo>,
}

/// What the thread reports.
pub enum EngineEvent {
    /// Once: the set is open, or why it could not be opened, after which the thread ends.
    Opened(Result<OpenedSet, Failure>),
    /// The set has failed; its status has the details.
    Failed,
    /// The failed set is open again, and may fail anew.
    Recovered,
    /// The thread has ended, in order or by a panic. The last report.
    Ended,
}

/// Starts the thread. `news` is called on it and must not wait.
pub fn start(
    name: &str,
    start: EngineParameters,
    news: impl Fn(EngineEvent) + Clone + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let tell = news.clone();
    spawn(name, news, move |report| run(start, report, tell))
}

/// Starts a thread for `body`, which reports how opening went. The end of the thread, however it
/// comes, is reported too.
pub fn spawn<N: Fn(EngineEvent) + Send + 'static>(
    name: &str,
    news: N,
    body: impl FnOnce(&dyn Fn(Result<OpenedSet, Failure>)) + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    thread::Builder::new().name(format!("engine {name}")).spawn(move || {
        let last = EndNotifier(news);
        body(&|result| last.0(EngineEvent::Opened(result)));
    })
}

/// Dropped also by a panic.
struct EndNotifier<F: Fn(EngineEvent)>(F);

impl<F: Fn(EngineEvent)> Drop for EndNotifier<F> {
    fn drop(&mut self) {
        self.0(EngineEvent::Ended);
    }
}

fn run(
    start: EngineParameters,
    report: &dyn Fn(Result<OpenedSet, Failure>),
    tell: impl Fn(EngineEvent) + 'static,
) {
    let mut thread = match EngineThread::open(start) {
        Ok(thread) => thread,
        Err(failure) => return report(Err(failure)),
    };
    report(Ok(thread.opened()));
    let news = move |change| {
        tell(match change {
            watch::HealthChange::Failed => EngineEvent::Failed,
            watch::HealthChange::Works => EngineEvent::Recovered,
        });
    };
    thread.executor.env().spawn(watch::run(thread.host.clone(), news));
    thread.serve();
}

/// What a former process has left in the note, and what becomes of that.
pub type NoteOutcome = (NoteContents, NoteReplay);

/// The state that the thread owns.
struct EngineThread {
    executor: Executor,
    host: Host,
    machine: LocalMachine,
    server: Option<Server>,
    commands: Option<Receiver<Command>>,
    engine: Engine,
    backend: Backend,
    note: NoteOutcome,
}

impl EngineThread {
    fn open(start: EngineParameters) -> Result<Self, Failure> {
        let driver = open_driver(&DriverOptions::default())
            .map_err(|error| engine_error::of_machine(error.to_string()))?;
        let (device, table) = (start.device.path().to_owned(), start.bucket_memory);
        let cache = driver.disks.add(start.device);
        let (commands, receiver) = mpsc::channel();
        let (told, bell) = (commands.clone(), driver.bell.clone());
        let note = start.note.map(|path| NoteLocation {
            path,
            set_uuid: start.set_uuid,
            gone: Arc::new(move || keep_note(&told, &bell)),
        });
        if let Some(note) = note.as_ref().filter(|note| start.is_new && note.may_hold_anything()) {
            return Err(engine_error::of_foreign_note(&device, &note.path));
        }
        let (opened_note, found) = open_note(note.as_ref(), &device)?;
        let tells = !opened_note.given_up().is_empty();
        let mut executor = Executor::new(driver.driver, RunOrder::Fifo, seed()?);
        let set_note = SetNote::new(opened_note);
        let opening = CacheSet::open(executor.env(), cache, set_note.lend(), start.options.clone());
        let opened = executor
            .block_on(opening)
            .ok_or_else(|| engine_error::of_machine("the I/O driver has stopped".to_owned()))
            .and_then(|set| set.map_err(|error| engine_error::of_open_logged(&device, table, &error)));
        if let (Err(_), Some(note), false) = (&opened, &note, tells) {
            note.remove_unused(&found.0);
        }
        let set = opened?;
        let ring = driver.bell.clone();
        let (connector, server) = bcached_port::open(QUEUE_MAX, Arc::new(move || ring.ring()));
        let engine = Engine { connector, ring_handle: driver.ring_handle, commands, bell: driver.bell };
        let (options, limits) = (start.options.into(), Limits::default());
        let opening =
            OpenParams { cache: cache.into(), set_uuid: start.set_uuid, note: set_note, options, limits };
        let machine = LocalMachine { disks: driver.disks, note };
        let host = Host::new(executor.env(), Box::new(machine.clone()), opening, set);
        let (server, commands) = (Some(server), Some(receiver));
        Ok(Self { executor, host, machine, server, commands, engine, backend: driver.backend, note: found })
    }

    fn opened(&self) -> OpenedSet {
        OpenedSet {
            engine: self.engine.clone(),
            volumes: self.host.status().volumes,
            backend: self.backend.clone(),
            note: self.note.clone(),
            note_path: self.machine.note.as_ref().map(|note| note.path.clone()),
        }
    }

    /// Runs until told to stop.
    fn serve(&mut self) {
        let (Some(server), Some(commands)) = (self.server.take(), self.commands.take()) else { return };
        let pump = Pump::new(self.host.clone(), self.machine.clone());
        self.executor.block_on(pump.run(server, commands));
    }
}

impl Drop for EngineThread {
    /// Runs however the thread ends, also by a panic.
    fn drop(&mut self) {
        self.host.abandon();
    }
}

/// Has the host make sure that nothing depends on the note's file, which is gone.
fn keep_note(commands: &mpsc::Sender<Command>, bell: &Bell) {
    if commands.send(Command::KeepNote).is_ok() {
        bell.ring();
    }
}

impl Engine {
    /// Adds a backing device.
    pub fn add_backing(&self, adding: AddRequest, answer: ReplyCallback<Result<AddedVolume, Error>>) {
        self.send(Command::AddBacking(adding, answer));
    }

    /// Releases a volume.
    pub fn give_up(&self, volume: VolumeId, answer: ReplyCallback<Result<ReleasedVolume, Error>>) {
        self.send(Command::Release(volume, answer));
    }

    /// Likewise, for another engine. That cannot serve a volume that still belongs to a failed set:
    /// such a volume stays.
    pub fn hand_over(&self, volume: VolumeId, answer: ReplyCallback<Result<ReleasedVolume, Error>>) {
        self.send(Command::HandOver(volume, answer));
    }

    /// Begins a job on a volume, under a number that no other job has.
    pub fn begin(
        &self,
        number: u64,
        job: VolumeJob,
        volume: VolumeId,
        answer: ReplyCallback<Result<(), Error>>,
    ) {
        self.send(Command::VolumeJob(number, job, volume, answer));
    }

    /// Cancels a job, if it still runs.
    pub fn cancel(&self, number: u64) {
        self.send(Command::Cancel(number));
    }

    /// Changes a volume's cache mode.
    pub fn set_cache_mode(
        &self,
        volume: VolumeId,
        mode: CacheMode,
        keep: ModePersistence,
        answer: ReplyCallback<Result<(), Error>>,
    ) {
        self.send(Command::SetCacheMode(volume, mode, keep, answer));
    }

    /// Sets the write-back rate of a volume, until its rate controller next sets it.
    pub fn set_writeback_rate(&self, volume: VolumeId, rate: u64, answer: ReplyCallback<Result<(), Error>>) {
        self.attempt(move |set| async move { set.set_writeback_rate(volume, rate) }, answer);
    }

    /// Stores these settings in the superblock of the cache.
    pub fn keep_settings(&self, settings: Settings, answer: ReplyCallback<Result<(), Error>>) {
        self.attempt(move |set| async move { set.keep_settings(settings).await }, answer);
    }

    /// Changes the label of a volume.
    pub fn set_label(&self, volume: VolumeId, label: Label, answer: ReplyCallback<Result<(), Error>>) {
        self.attempt(move |set| async move { set.set_label(volume, label).await }, answer);
    }

    /// Returns where the data of a sector of a volume is, and the state of the volume at that
    /// moment.
    pub fn explain(
        &self,
        volume: VolumeId,
        sector: u64,
        answer: ReplyCallback<(Result<Explanation, Error>, Option<VolumeInfo>)>,
    ) {
        self.send(Command::Task(Box::new(move |set, env| {
            env.spawn(async move {
                let explained = set.explain(volume, sector).await;
                answer((explained, set.volumes().into_iter().find(|info| info.id == volume)));
            });
        })));
    }

    /// Has the set check whether its cache device still accepts writes, and fail if not, which is
    /// reported separately.
    pub fn prove_cache(&self, answer: ReplyCallback<Result<(), Error>>) {
        self.attempt(|set| async move { set.prove_cache().await }, answer);
    }

    /// Has every device of the set answer; what becomes of the set is reported separately.
    pub fn prove_devices(&self, answer: ReplyCallback<Result<(), Error>>) {
        self.attempt(|set| async move { set.prove_devices().await }, answer);
    }

    /// Changes all of a volume's options.
    pub fn set_options(
        &self,
        volume: VolumeId,
        options: VolumeOptions,
        answer: ReplyCallback<Result<(), Error>>,
    ) {
        self.send(Command::SetOptions(volume, options, answer));
    }

    /// Sets the memory for the set's nodes, in bytes. If it is to shrink, the nodes give up as much
    /// as they can do without. The answer is the new amount, `None` if it is unchanged.
    pub fn set_node_budget(&self, wanted: usize, answer: ReplyCallback<Option<usize>>) {
        self.send(Command::Nodes(wanted, answer));
    }

    /// Changes options of the set.
    pub fn change_cache(&self, change: impl Fn(&mut Options) + Send + 'static) {
        self.send(Command::ChangeCache(Box::new(change)));
    }

    /// Returns a snapshot; `None` if the engine is gone or too busy to answer.
    pub fn status(&self) -> Option<Status> {
        Self::status_of_all(&[Some(self.clone())]).pop().flatten()
    }

    /// Returns snapshots of several engines, asked at once: those that do not answer share one time
    /// limit.
    pub fn status_of_all(engines: &[Option<Self>]) -> Vec<Option<Status>> {
        Self::ask_all(engines, &(), Command::Status)
    }

    /// Returns how old the data in the buckets of several engines is. They scan all buckets beside
    /// their work. Each holds a clone of `kept` until it is done, even if no caller waits for it
    /// any more.
    pub fn ages_of_all<K: Clone + Send + 'static>(
        engines: &[Option<Self>],
        kept: &K,
    ) -> Vec<Option<PriorityStats>> {
        Self::ask_all(engines, kept, Command::Ages)
    }

    fn ask_all<T: Send + 'static, K: Clone + Send + 'static>(
        engines: &[Option<Self>],
        kept: &K,
        command: fn(ReplyCallback<T>) -> Command,
    ) -> Vec<Option<T>> {
        let ask = |engine: &Self| {
            let (send, receive) = mpsc::channel();
            let kept = kept.clone();
            engine.send(command(Box::new(move |answer| {
                let _until_now = kept;
                drop(send.send(answer));
            })));
            receive
        };
        let asked: Vec<_> = engines.iter().map(|engine| engine.as_ref().map(ask)).collect();
        let deadline = Instant::now() + STATUS_LIMIT;
        let answer = |receive: Receiver<T>| {
            receive.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
        };
        asked.into_iter().map(|receive| receive.and_then(answer)).collect()
    }

    /// Stops the set; the thread ends after the answer.
    pub fn stop(&self, answer: ReplyCallback<StoppedSet>) {
        self.send(Command::Stop(answer));
    }

    /// Has the set do something; if there is no set, the answer says why.
    fn attempt<T, F>(
        &self,
        work: impl FnOnce(CacheSet) -> F + Send + 'static,
        answer: ReplyCallback<Result<T, Error>>,
    ) where
        T: 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        self.send(Command::FallibleTask(Box::new(move |set, env| match set {
            Err(error) => answer(Err(error)),
            Ok(set) => {
                let work = work(set);
                env.spawn(async move { answer(work.await) });
            }
        })));
    }

    /// Sends a command. A thread that is gone drops the command and with it the answer, by which a
    /// waiting caller notices.
    fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.bell.ring();
        }
    }
}

#[cfg(test)]
impl Engine {
    /// An engine that receives everything and answers nothing, as long as the second value lives.
    pub fn deaf() -> (Self, impl Sized) {
        let driver = open_driver(&DriverOptions::default()).expect("a driver");
        let (commands, heard) = mpsc::channel();
        let (connector, server) = bcached_port::open(1, Arc::new(|| {}));
        (
            Self { connector, ring_handle: driver.ring_handle.clone(), commands, bell: driver.bell.clone() },
            (driver, heard, server),
        )
    }
}

fn seed() -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| engine_error::of_machine(format!("cannot get random numbers: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}
