//! The front ends. Each starts when the first volume is to be available through it. All threads may
//! ask which clients use which volume.
//!
//! NBD and FUSE share a quarter of the daemon's memory for the payloads of requests. Each block
//! device and each disk of a virtual machine takes some of the memory that btree nodes would have
//! (`memory_of` in `config/frontends.rs`).

pub mod dev;
pub mod directories;
pub mod handoff;
pub mod links;
pub mod machine;
pub mod numbered_links;
pub mod users;

use self::dev::{DevFrontend, DeviceServer};
use self::directories::{start_fuse, start_vhost};
use self::numbered_links::NumberedLinks;
pub use self::users::VolumeClient;
use self::users::{tell_cut_off, users_of_device};
use crate::sysfs;
use bcached_config::{Address, Certificates, Config, FrontendConfig, Tls};
use bcached_control::failure::{Failure, Kind};
use bcached_front_dev::DeviceMethod;
use bcached_front_fuse::{self as fuse, FuseServer};
use bcached_front_nbd::{self as nbd, BoundAddress, Endpoint, EndpointAddress, ListenError, NbdServer};
use bcached_front_ublk::{DataTransfer, DeviceState, DriverFeatures, ServedVolume, UblkServer};
use bcached_front_vhost::{self as vhost, VhostServer};
use bcached_port::socket::{PassedSocket, SocketError};
use bcached_port::{BudgetPool, ExportTable, Frontend, FrontendSet, Peer, Uuid, WriteClaim};
use bcached_uring::RingHandle;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that requests in flight may take when a volume is taken away.
const RETIRE_LIMIT: Duration = Duration::from_secs(5);

/// The time that each front end has at least to end, even if others have used up the limit.
const EACH_MIN: Duration = Duration::from_secs(1);

/// All running front ends. Clones share them.
#[derive(Clone, Default)]
pub struct FrontendManager {
    running: Arc<Mutex<FrontendServers>>,
    /// The rings on which connections can be served.
    rings: nbd::VolumeRings,
    /// Called when a block device has appeared, or has failed to.
    wake: Option<WakeCallback>,
    /// Sockets that NBD is served on instead of the configured places, if there are any.
    sockets: Arc<[Arc<PassedSocket>]>,
    /// The control files that are shown beside the volumes in a FUSE mount.
    control_files: Arc<OnceLock<Arc<dyn fuse::ControlTree>>>,
    /// Clients of another process, or of this one before a hand-over, until NBD takes them.
    left: Arc<Mutex<Vec<nbd::HandoffConnection>>>,
    /// The id of that process.
    former: Option<u32>,
    /// The volumes that are to be `/dev/bcacheN`, too.
    numbers: NumberedLinks,
}

type WakeCallback = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct FrontendServers {
    /// Memory for the payloads of NBD and FUSE.
    memory: Option<Arc<BudgetPool>>,
    nbd: Option<NbdServer>,
    vhost: Option<Arc<VhostServer>>,
    fuse: Option<FuseServer>,
    ublk: Option<Arc<UblkServer>>,
    /// Block devices by the best way of this machine (`dev`).
    dev: DevFrontend,
    /// Write claims of volumes that are block devices: no other client writes to them.
    claims: BTreeMap<String, Option<WriteClaim>>,
    /// Why a volume is not available by a way that is configured for it.
    refused: BTreeMap<(String, Frontend), String>,
    /// What is being taken away. It cannot appear again before that has ended.
    retiring: BTreeSet<(String, Frontend)>,
    /// All that was to be served is served, or has a reason why not.
    is_ready: bool,
    /// The number of clients from before a hand-over that were resumed or wait for that.
    resumed: usize,
    /// The daemon ends: nothing starts any more.
    has_ended: bool,
}

impl FrontendServers {
    /// Records why a volume is not available by a way now. Each reason is logged once.
    fn refuse(&mut self, name: &str, way: Frontend, why: String) {
        let key = (name.to_owned(), way);
        if self.refused.get(&key) != Some(&why) {
            tracing::error!(event = "volume-not-exported", "{name}: not available through {way} now: {why}");
            self.refused.insert(key, why);
        }
    }

    /// Returns where a volume is available by a way, or why it is not. `None`: it is not there yet.
    fn place(&self, name: &str, way: Frontend) -> Option<Result<String, String>> {
        if let Some(why) = self.refused.get(&(name.to_owned(), way)) {
            return Some(Err(why.clone()));
        }
        let place = match way {
            Frontend::Nbd => self.nbd.as_ref()?.bound().first()?.to_string(),
            Frontend::Dev if self.dev.is_cut_off(name) => {
                return Some(Err("its FUSE mount was unmounted".to_owned()));
            }
            Frontend::Ublk | Frontend::Dev => match self.device(name)? {
                DeviceState::Creating => return None,
                DeviceState::Ready { path, .. } => path.display().to_string(),
                DeviceState::Missing(why) => return Some(Err(why)),
            },
            Frontend::VhostUser => {
                let vhost = self.vhost.as_ref().filter(|vhost| vhost.serves(name))?;
                vhost.socket_path(name).display().to_string()
            }
            Frontend::Fuse => {
                let fuse = self.fuse.as_ref()?;
                if fuse.has_ended() {
                    return Some(Err("the FUSE mount was unmounted".to_owned()));
                }
                if matches!(name, "." | "..") {
                    return Some(Err("no file can have this name".to_owned()));
                }
                fuse.directory().join("volumes").join(name).display().to_string()
            }
        };
        Some(Ok(place))
    }

    /// Returns the memory for payloads, and its limit in bytes.
    fn payloads(&mut self, config: &Config) -> (Arc<BudgetPool>, u64) {
        let bytes = config.memory_bytes / 4;
        (Arc::clone(self.memory.get_or_insert_with(|| Arc::new(nbd::memory(bytes)))), bytes)
    }

    /// Refuses a way while something of the volume is being taken away there. Returns true if so.
    fn refuse_while_retiring(&mut self, name: &str, way: Frontend) -> bool {
        let is = self.retiring.contains(&(name.to_owned(), way));
        if is {
            let why = "its previous device or disk is still being removed".to_owned();
            self.refused.insert((name.to_owned(), way), why);
        }
        is
    }
}

/// Where a volume is available by a way, or why it is not.
pub struct ExportStatus {
    pub way: Frontend,
    /// The kind of its block device, if the daemon chose it.
    pub by: Option<DeviceMethod>,
    /// How the data of a ublk device is transferred.
    pub transfer: Option<DataTransfer>,
    /// The link to a block device under the volume's number, or why there is none.
    pub link: Option<Result<String, String>>,
    pub place: Result<String, String>,
}

impl FrontendManager {
    /// Creates an instance that runs no front end yet. `wake` is called when a block device has
    /// appeared, or has failed to. NBD is served on `sockets`, if there are any.
    pub fn new(wake: WakeCallback, sockets: Vec<Arc<PassedSocket>>) -> Self {
        Self { wake: Some(wake), sockets: sockets.into(), ..Self::default() }
    }

    /// Checks whether NBD was given sockets.
    pub fn has_sockets(&self) -> bool {
        !self.sockets.is_empty()
    }

    /// Sets the control files, for a mount that is still to be made.
    pub fn tell_of(&self, control_files: Arc<dyn fuse::ControlTree>) {
        let _there_are_some = self.control_files.set(control_files);
    }

    /// Starts a front end, unless it runs.
    ///
    /// # Errors
    /// Why it cannot start.
    pub fn start(&self, way: Frontend, config: &Config, exports: &ExportTable) -> Result<(), Failure> {
        let mut running = self.lock();
        if running.has_ended {
            return Ok(());
        }
        let (places, exports) = (&config.places, exports.by(way));
        let memory = running.payloads(config);
        match way {
            Frontend::Nbd if running.nbd.is_none() => {
                // Clients that connect before the daemon is ready wait, instead of learning that
                // nothing is there yet. A process that may have to give everything back admits no
                // client, either.
                let is_waited_for = self.has_sockets() || self.has_left() || self.former.is_some();
                let closed = is_waited_for && !running.is_ready;
                let rings = self.rings.clone();
                let nbd = start_nbd(places, (&self.sockets, closed), exports, memory, rings)?;
                nbd.keep(self.take_left());
                running.nbd = Some(nbd);
            }
            Frontend::VhostUser if running.vhost.is_none() => {
                running.vhost = Some(Arc::new(start_vhost(places, exports, self.rings.clone())?));
            }
            Frontend::Fuse if running.fuse.is_none() => {
                let trees = self.control_files.get().map(|files| (sysfs::NAME.to_owned(), Arc::clone(files)));
                running.fuse = Some(start_fuse(
                    (&places.fuse, places.fuse_allow_other),
                    exports,
                    memory,
                    trees.into_iter().collect(),
                )?);
            }
            Frontend::Ublk if running.ublk.is_none() => {
                running.ublk = Some(Arc::new(self.start_ublk(exports)?));
            }
            Frontend::Nbd | Frontend::Ublk | Frontend::VhostUser | Frontend::Fuse | Frontend::Dev => {}
        }
        if matches!(way, Frontend::Nbd | Frontend::Fuse) {
            // All volumes are available by it.
            running.refused.retain(|(_, of), _| *of != way);
        }
        Ok(())
    }

    /// Admits the waiting clients. All is served that is going to be without help, or has been
    /// waited for.
    pub fn open(&self) {
        let mut running = self.lock();
        running.is_ready = true;
        let Some(nbd) = &running.nbd else {
            let left = self.take_left().len();
            if left > 0 {
                running.resumed -= left;
                tracing::warn!(event = "clients-cut", "NBD is no longer served; connections closed: {left}");
            }
            return;
        };
        nbd.open();
    }

    /// Checks whether clients are admitted.
    pub fn is_open(&self) -> bool {
        self.lock().is_ready
    }

    /// Replaces the certificate for new clients on TCP, if NBD is served with TLS.
    pub fn renew(&self, tls: nbd::TlsConfig) {
        if let Some(nbd) = &self.lock().nbd {
            nbd.renew(tls);
        }
    }

    fn start_ublk(&self, exports: ExportTable) -> Result<UblkServer, Failure> {
        DriverFeatures::probe().map_err(|why| {
            let failure = |kind| Failure::new(kind, "cannot make block devices").why(why.to_string());
            let failure = match why.mends() {
                Some(mends) => failure(Kind::Permission).next(mends),
                None => failure(Kind::Io),
            };
            failure.option("--export")
        })?;
        let (news, changed) = self.device_news("ublk-device", exports);
        Ok(UblkServer::new(news, changed, self.former))
    }

    /// Claims a volume that is to be a block device before others can find it: no other client
    /// writes to it.
    pub fn reserve(&self, (name, uuid, shared): (&str, Uuid, bool), by: FrontendSet, exports: &ExportTable) {
        let mut running = self.lock();
        let way = if by.has(Frontend::Dev) { Frontend::Dev } else { Frontend::Ublk };
        let there_is = match way {
            Frontend::Dev => running.dev.method(name).is_some(),
            _ => by.has(Frontend::Ublk) && running.ublk.is_some(),
        };
        if !there_is || running.claims.contains_key(name) || running.refuse_while_retiring(name, way) {
            return;
        }
        let (now, _) = exports.writing().look(uuid, Peer::Kernel);
        let claim = if shared { None } else { exports.writing().claim(uuid, Peer::Kernel, now) };
        if shared || claim.is_some() {
            running.refused.remove(&(name.to_owned(), way));
            running.claims.insert(name.to_owned(), claim);
        } else {
            running.refuse(name, way, "another client writes to it".to_owned());
        }
    }

    /// Registers the rings on which connections to this volume can be served.
    pub fn lead(&self, volume: Uuid, ring: &RingHandle) {
        self.rings.insert(volume.0, ring.clone());
    }

    /// Publishes a volume that is served, or whose state has changed.
    pub fn publish(&self, name: &str, ways: FrontendSet, (exports, ring): (&ExportTable, &RingHandle)) {
        self.publish_device(name, exports, ring);
        if !ways.has(Frontend::VhostUser) {
            return;
        }
        let mut running = self.lock();
        let Some(vhost) = running.vhost.clone() else { return };
        if running.refuse_while_retiring(name, Frontend::VhostUser) {
            return;
        }
        if vhost.serves(name) {
            return vhost.changed(name);
        }
        match vhost.serve(name, vhost::VolumeOptions::default()) {
            Ok(()) => drop(running.refused.remove(&(name.to_owned(), Frontend::VhostUser))),
            Err(error) => running.refuse(name, Frontend::VhostUser, sentence(&error)),
        }
    }

    /// Records that a volume is not available because a front end does not start.
    pub fn refuse(&self, name: &str, way: Frontend, failure: &Failure) {
        self.lock().refuse(name, way, failure.to_string());
    }

    /// Returns the volumes that are not available by some way now, and may be at the next attempt.
    pub fn refused(&self) -> BTreeSet<String> {
        self.lock().refused.keys().map(|(name, _)| name.clone()).collect()
    }

    fn publish_device(&self, name: &str, exports: &ExportTable, ring: &RingHandle) {
        let mut running = self.lock();
        if !running.claims.contains_key(name) {
            return;
        }
        if let Some(export) = exports.by(Frontend::Dev).by_name(name) {
            return running.serve_dev(export);
        }
        let Some(ublk) = running.ublk.clone() else { return };
        let Some(export) = exports.by(Frontend::Ublk).by_name(name) else { return };
        match ublk.serve(ServedVolume { export, ring_handle: ring.clone(), number: None }) {
            Ok(()) => drop(running.refused.remove(&(name.to_owned(), Frontend::Ublk))),
            Err(error) => running.refuse(name, Frontend::Ublk, format!("cannot start a thread: {error}")),
        }
    }

    /// Checks whether each expected block device has appeared or failed.
    pub fn are_settled(&self) -> bool {
        let running = self.lock();
        running.claims.keys().all(|name| running.device(name) != Some(DeviceState::Creating))
    }

    /// Takes away the block device, and the disk of a virtual machine, of a volume that is served
    /// no more and does not come back by itself.
    pub fn retire(&self, name: &str) {
        let mut running = self.lock();
        self.numbers.forget(name);
        running.refused.retain(|(of, _), _| of != name);
        let devices = running.devices_of(name);
        running.dev.forget(name);
        let device = devices.zip(running.claims.remove(name));
        let machine = running.vhost.clone().filter(|vhost| vhost.serves(name));
        drop(running);
        let named = name.to_owned();
        if let Some((devices, claim)) = device {
            self.apart((named.clone(), devices.way()), move |name| {
                remove_devices(&devices, &[name], RETIRE_LIMIT);
                // A client that writes by another way must find no device beside it.
                drop(claim);
            });
        }
        if let Some(vhost) = machine {
            self.apart((named, Frontend::VhostUser), move |name| {
                if let Err(busy) = vhost.stop(&name, RETIRE_LIMIT) {
                    tell_cut_off(&busy.volumes);
                }
            });
        }
    }

    /// Takes away something of a volume on a thread of its own. No caller waits for that.
    fn apart(&self, of: (String, Frontend), away: impl FnOnce(String) + Send + 'static) {
        self.lock().retiring.insert(of.clone());
        let (fronts, key) = (self.clone(), of.clone());
        let body = move || {
            away(key.0.clone());
            fronts.lock().retiring.remove(&key);
            fronts.wake.iter().for_each(|wake| wake());
        };
        if let Err(error) = std::thread::Builder::new().name("retire".to_owned()).spawn(body) {
            let (name, way) = &of;
            tracing::error!(
                event = "volume-still-exported",
                "{name}: still available through {way}: cannot start a thread: {error}"
            );
            self.lock().retiring.remove(&of);
        }
    }

    /// Checks whether something of the volume of that name is being taken away.
    pub fn is_retiring(&self, name: &str) -> bool {
        self.lock().retiring.iter().any(|(of, _)| of == name)
    }

    /// Returns where a volume is available, and why not elsewhere.
    pub fn places_of(&self, name: &str, ways: FrontendSet) -> Vec<ExportStatus> {
        let running = self.lock();
        let had = |way| {
            let by = if way == Frontend::Dev { running.dev.method(name) } else { None };
            let way_there = if by == Some(DeviceMethod::Ublk) { Frontend::Ublk } else { way };
            let place = running.place(name, way_there)?;
            let device = if way_there == Frontend::Ublk { running.device(name) } else { None };
            let transfer = device.and_then(|device| device.transfer());
            let is_device = matches!(way_there, Frontend::Ublk | Frontend::Dev) && place.is_ok();
            let link = is_device.then(|| self.numbers.of(name)).flatten();
            Some(ExportStatus { way, by, transfer, link, place })
        };
        ways.iter().filter_map(had).collect()
    }

    /// Returns where NBD is served.
    pub fn nbd_places(&self) -> Vec<String> {
        let running = self.lock();
        let bound = running.nbd.iter().flat_map(|server| server.bound().iter().map(ToString::to_string));
        bound.collect()
    }

    /// Returns the sockets of NBD and vhost-user that have files, each with the number of the
    /// volume's server that made it (0 for NBD).
    pub fn sockets(&self) -> Vec<(PathBuf, u64)> {
        let running = self.lock();
        let bound = running.nbd.iter().flat_map(|server| server.bound());
        let nbd = bound.filter_map(|bound| match bound {
            BoundAddress::Unix(path) => Some((path.clone(), 0)),
            BoundAddress::Tcp(_) => None,
        });
        nbd.chain(running.vhost.iter().flat_map(|server| server.sockets())).collect()
    }

    /// Binds one of these sockets again after its file is gone. Returns the error if that fails,
    /// and `None` if the path is none of them.
    pub fn bind_again(&self, path: &Path) -> Option<Result<(), String>> {
        let running = self.lock();
        let is_at = |server: &&NbdServer| {
            server.bound().iter().any(|bound| matches!(bound, BoundAddress::Unix(at) if at == path))
        };
        if let Some(server) = running.nbd.as_ref().filter(is_at) {
            return Some(server.bind_again(path).map_err(|error| sentence(&error)));
        }
        let vhost = running.vhost.as_ref()?;
        directories::make_again(vhost.directory());
        let bound = vhost.bind_again(path)?;
        Some(bound.map_err(|error| sentence(&error)))
    }

    /// Ends all front ends. Pending replies are sent within `limit` for all together; each front
    /// end has a little time at least.
    pub fn shutdown(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now()).max(EACH_MIN.min(limit));
        self.let_devices_go(limit);
        let ended = FrontendServers { has_ended: true, ..FrontendServers::default() };
        let FrontendServers { nbd, vhost, fuse, ublk, dev, .. } = std::mem::replace(&mut *self.lock(), ended);
        // Otherwise they would be taken up here again when their engine has ended.
        let _ends_with_the_process = ublk.map(|ublk| ublk.leave());
        if let Some(Err(busy)) = nbd.map(|server| server.shutdown(left())) {
            tracing::warn!(event = "clients-cut", "{busy}");
        }
        end_machines_and_files(vhost, fuse, left);
        dev.shutdown(left());
    }

    /// Removes block devices that are not in use. Those of ublk that are in use stay in the kernel,
    /// and requests to them wait for the next start; but not while the machine shuts down, which
    /// would wait forever. Other devices cannot stay: their users are cut off.
    fn let_devices_go(&self, limit: Duration) {
        let (ublk, dev, names) = {
            let running = self.lock();
            (running.ublk.clone(), running.dev.devices(), running.claims.keys().cloned().collect::<Vec<_>>())
        };
        let of_dev = |name: &String| dev.as_ref().is_some_and(|dev| dev.state(name).is_some());
        let (others, names): (Vec<_>, Vec<_>) = names.into_iter().partition(of_dev);
        if let Some(ublk) = ublk.filter(|_| !names.is_empty()) {
            let ublk = DeviceServer::Ublk(ublk);
            let all_go = machine::stops();
            let (go, stay): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| {
                // The users of a device that is being taken over are unknown.
                all_go || ublk.path(name).is_some_and(|path| users_of_device(&path).is_empty())
            });
            for name in stay {
                tracing::warn!(
                    event = "ublk-left",
                    "{name}: its block device is in use or about to appear, and stays: requests to it wait until \
                     bcached serves it again"
                );
            }
            remove_devices(&ublk, &go, limit);
        }
        if let Some(dev) = dev {
            dev::cut(dev, &others, limit);
        }
    }

    fn lock(&self) -> MutexGuard<'_, FrontendServers> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the front ends whose clients no other process can take over, each within the time `left`
/// then.
fn end_machines_and_files(
    vhost: Option<Arc<VhostServer>>,
    fuse: Option<FuseServer>,
    left: impl Fn() -> Duration,
) {
    // Another thread may be about to take a volume from it.
    if let Some(Err(busy)) = vhost.and_then(Arc::into_inner).map(|server| server.shutdown(left())) {
        tell_cut_off(&busy.volumes);
    }
    if let Some(Err(busy)) = fuse.map(|server| server.shutdown(left())) {
        tracing::warn!(event = "clients-cut", "{busy}");
    }
}

/// Removes these volumes' devices and their links.
fn remove_devices(devices: &DeviceServer, names: &[String], limit: Duration) {
    let paths: Vec<_> = names.iter().filter_map(|name| devices.path(name)).collect();
    let gone = devices.remove(names, limit);
    if gone.is_ok() || devices.way() == Frontend::Dev {
        // A device name that is reused must not be reached by an old link.
        paths.iter().for_each(|path| links::remove(path));
    }
    match gone {
        Ok(()) => {}
        Err(still) if devices.way() == Frontend::Ublk => {
            tracing::warn!(event = "ublk-not-removed", "{still}");
        }
        Err(still) => tracing::warn!(event = "device-not-removed", "{still}"),
    }
}

/// Returns an error and its source in one sentence.
fn sentence(error: &dyn Error) -> String {
    let why = error.source().map_or_else(String::new, |source| format!(": {source}"));
    format!("{error}{why}")
}

fn start_nbd(
    places: &FrontendConfig,
    (sockets, closed): (&[Arc<PassedSocket>], bool),
    exports: ExportTable,
    (memory, bytes): (Arc<BudgetPool>, u64),
    rings: nbd::VolumeRings,
) -> Result<NbdServer, Failure> {
    let tls = places.tls.certificates().map(Certificates::read).transpose()?;
    let anywhere = places.tls == Tls::Off;
    let named = places.listen.iter().map(|listen| Endpoint {
        place: match &listen.at {
            Address::Unix(path) => {
                let group = listen.group.as_ref().or(places.nbd_group.as_ref());
                EndpointAddress::Unix { path: path.clone(), group: group.map(|group| group.id) }
            }
            Address::Tcp(address) => EndpointAddress::Tcp { address: *address, anywhere },
        },
        read_only: listen.read_only,
    });
    // A place of the configuration keeps its settings, no matter which process bound it.
    let passed = sockets.iter().map(|socket| Endpoint {
        place: EndpointAddress::Passed { socket: Arc::clone(socket), anywhere },
        read_only: places
            .listen
            .iter()
            .any(|at| at.read_only && at.at.to_string() == socket.at().to_string()),
    });
    let endpoints: Vec<_> = if sockets.is_empty() { named.collect() } else { passed.collect() };
    // This is enough for the largest request, because the minimum of the memory is four times that.
    let limits = nbd::Limits { total_bytes: bytes, ..nbd::Limits::default() };
    let options = nbd::Options { endpoints, closed, limits, tls, rings };
    let server = NbdServer::start_sharing(options, exports, memory).map_err(|error| {
        let kind = match &error {
            nbd::StartError::Listen(ListenError::InUse(_) | ListenError::Unix(SocketError::InUse(_))) => {
                Kind::InUse
            }
            nbd::StartError::Listen(
                ListenError::NotLoopback(_)
                | ListenError::Unix(SocketError::NotSocket(_) | SocketError::TooLong(_)),
            ) => Kind::Usage,
            nbd::StartError::Listen(ListenError::Unix(SocketError::NoDirectory(_))) => Kind::NotFound,
            nbd::StartError::Listen(ListenError::Unix(SocketError::Group(_))) => Kind::Permission,
            _ => Kind::Io,
        };
        let failure = Failure::new(kind, "cannot serve NBD").why(sentence(&error)).option("--export");
        if kind == Kind::InUse {
            failure.next("stop the other server, or choose another place: `listen` in [nbd]")
        } else {
            failure
        }
    })?;
    for bound in server.bound() {
        tracing::info!(event = "nbd-listening", "NBD on {bound}");
    }
    Ok(server)
}
