//! Another process takes over from the daemon while clients work: they notice a pause, whoever is killed in the middle of it.

mod common;

use common::{Daemon, Images, Last, Ran, ask, bcached, control, done, json, limited, pid, refused, wrapped};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// What takes longer does not end.
const LIMIT: Duration = Duration::from_secs(60);
/// Clients, each with a part of the volume for itself.
const CLIENTS: usize = 3;
/// Blocks of 4 KiB of each.
const BLOCKS: usize = 256;
const BLOCK: usize = 4096;

fn configured() -> Images {
    let images = Images::new();
    images.configure_pair(64 * MIB, 20 * MIB, "cache_mode = \"writeback\"\n");
    std::fs::create_dir(images.path("run")).expect("a folder");
    images
}

/// A client of `tank` that can do no more than it must.
struct Client(UnixStream);

impl Client {
    fn connect(images: &Images) -> io::Result<Self> {
        let stream = UnixStream::connect(images.path("run/nbd.sock"))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let mut client = Self(stream);
        client.receive(18)?;
        let name = b"tank";
        let length = u32::try_from(name.len() + 6).expect("short");
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(0x4948_4156_454F_5054_u64.to_be_bytes());
        hello.extend(7_u32.to_be_bytes());
        hello.extend(length.to_be_bytes());
        hello.extend(4_u32.to_be_bytes());
        hello.extend(name);
        hello.extend([0, 0]);
        client.0.write_all(&hello)?;
        loop {
            let reply = client.receive(20)?;
            let word = |at: usize| u32::from_be_bytes(reply[at..at + 4].try_into().expect("of that length"));
            client.receive(word(16) as usize)?;
            match word(12) {
                1 => return Ok(client),
                3 => {}
                other => return Err(io::Error::other(format!("refused with {other:#x}"))),
            }
        }
    }

    fn receive(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        let mut received = vec![0; bytes];
        self.0.read_exact(&mut received)?;
        Ok(received)
    }

    fn ask(&mut self, command: u16, block: usize, payload: &[u8]) -> io::Result<()> {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(command.to_be_bytes());
        request.extend(7_u64.to_be_bytes());
        request.extend((block as u64 * BLOCK as u64).to_be_bytes());
        request.extend(u32::try_from(BLOCK).expect("small").to_be_bytes());
        request.extend(payload);
        self.0.write_all(&request)?;
        let reply = self.receive(16)?;
        assert_eq!(reply[4..8], [0; 4], "no error is ever answered");
        Ok(())
    }

    fn write(&mut self, block: usize, value: u32) -> io::Result<()> {
        self.ask(1, block, &value.to_le_bytes().repeat(BLOCK / 4))
    }

    fn read(&mut self, block: usize) -> io::Result<u32> {
        self.ask(0, block, &[])?;
        let bytes = self.receive(BLOCK)?;
        let value = u32::from_le_bytes(bytes[..4].try_into().expect("of that length"));
        assert!(bytes.chunks(4).all(|word| word == value.to_le_bytes()), "block {block} is in pieces");
        Ok(value)
    }
}

/// What a client has written, and what has been answered.
#[derive(Clone)]
struct Model {
    first: usize,
    values: Vec<u32>,
    /// Asked for and not answered.
    doubt: Option<(usize, u32)>,
    last: u32,
    /// What a request has taken at most.
    longest: Duration,
}

impl Model {
    fn new(part: usize) -> Self {
        Self { first: part * BLOCKS, values: vec![0; BLOCKS], doubt: None, last: 0, longest: Duration::ZERO }
    }

    /// Works until it is told to end, or its daemon has gone.
    fn work(&mut self, client: &mut Client, ends: &AtomicBool) -> io::Result<()> {
        while !ends.load(Ordering::SeqCst) {
            self.last += 1;
            let block = (self.last as usize * 97) % BLOCKS;
            self.doubt = Some((block, self.last));
            let asked = Instant::now();
            client.write(self.first + block, self.last)?;
            let written = Instant::now();
            (self.values[block], self.doubt) = (self.last, None);
            let other = (self.last as usize * 31) % BLOCKS;
            assert_eq!(client.read(self.first + other)?, self.values[other], "block {other}");
            self.longest = self.longest.max(written - asked).max(written.elapsed());
        }
        Ok(())
    }

    /// All that has been answered is there; what was under way is there or not, and stays so.
    fn check(&mut self, client: &mut Client) {
        for block in 0..BLOCKS {
            let found = client.read(self.first + block).expect("it is served");
            let is_doubtful = self.doubt == Some((block, found));
            assert!(
                found == self.values[block] || is_doubtful,
                "block {block}: {found}, not {}",
                self.values[block]
            );
            self.values[block] = found;
        }
        self.doubt = None;
    }
}

/// Also when the test fails meanwhile.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Clients work on while `act` runs. How each of them has fared.
fn at_work<T>(images: &Images, models: &mut [Model], act: impl FnOnce() -> T) -> (T, Vec<io::Result<()>>) {
    let ends = AtomicBool::new(false);
    let mut clients: Vec<_> = models.iter().map(|_| Client::connect(images).expect("it is served")).collect();
    std::thread::scope(|scope| {
        let ends = &ends;
        let workers: Vec<_> = models
            .iter_mut()
            .zip(&mut clients)
            .map(|(model, client)| scope.spawn(move || model.work(client, ends)))
            .collect();
        let at_last = Ends(ends);
        std::thread::sleep(Duration::from_millis(100));
        let done = act();
        std::thread::sleep(Duration::from_millis(100));
        drop(at_last);
        (done, workers.into_iter().map(|worker| worker.join().expect("nothing is lost")).collect())
    })
}

fn check_all(images: &Images, models: &mut [Model]) {
    for model in models {
        model.check(&mut Client::connect(images).expect("it is served"));
    }
}

fn take_over(images: &Images, words: &[&str]) -> Ran {
    bcached(&[&["take-over", "--json", "--control", &control(images)], words].concat())
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn clients_notice_a_pause_and_nothing_else() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    let mut former = daemon.id();
    let (pauses, fared) = at_work(&images, &mut models, || {
        let mut pauses = Vec::new();
        for _ in 0..5 {
            let ran = take_over(&images, &[]);
            assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
            let told = json(&ran.out);
            assert_eq!(
                (&told["progress"], told["former_pid"].as_u64()),
                (&"done".into(), Some(former.into()))
            );
            assert_eq!(told["connections"], CLIENTS, "all of them go on: {}", daemon.log());
            assert_eq!(told["reconnect"], serde_json::json!([]));
            former = u32::try_from(told["pid"].as_u64().expect("a process")).expect("a number");
            let asked = UnixStream::connect(images.path("run/control.sock")).expect("it is there");
            let peer = rustix::net::sockopt::socket_peercred(&asked).expect("a process").pid;
            assert_eq!(peer.as_raw_nonzero().get().unsigned_abs(), former, "who is asked is seen");
            assert_ne!(former, daemon.id());
            pauses.push(told["paused_seconds"].as_f64().expect("it is known"));
        }
        pauses
    });
    println!("pauses: {pauses:?}");
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
    assert!(done(&daemon, &["stop"]).contains("has stopped"));
    assert!(
        !images.path("run/control.sock").exists() && !images.path("run/nbd.sock").exists(),
        "all goes at last"
    );
    let check = bcached(&[
        "check",
        images.path("fast").to_str().expect("text"),
        images.path("tank").to_str().expect("text"),
    ]);
    assert_eq!(check.exit, 0, "{}{}", check.out, check.err);
}

/// As many keys as a cache of 4 GiB gets by 400 MiB of small writes, with `BCACHED_LONG=1`.
fn keys() -> usize {
    if std::env::var_os("BCACHED_LONG").is_some() { 100_000 } else { 2000 }
}

/// Prints what a client waits for at most: with nothing in the cache, with many keys in it, and with as many that are dirty. All that was written
/// before is there.
#[test]
fn how_long_clients_wait_at_most() {
    for (what, mode, keys) in
        [("empty", "writeback", 0), ("clean", "writethrough", keys()), ("dirty", "writeback", keys())]
    {
        let images = Images::new();
        images.configure_pair(
            4096 * MIB,
            8192 * MIB,
            &format!("cache_mode = {mode:?}\nwriteback_running = false\n"),
        );
        std::fs::create_dir(images.path("run")).expect("a folder");
        let daemon = Daemon::configured(&images);
        let _last = Last(&images);
        // One after the other leaves a key for each.
        let block_of = |key: usize| CLIENTS * BLOCKS + (key * 7919) % (2048 * 1000);
        let value_of = |key: usize| u32::try_from(key + 1).expect("few");
        let mut client = Client::connect(&images).expect("it is served");
        (0..keys).for_each(|key| client.write(block_of(key), value_of(key)).expect("it is served"));
        drop(client);
        for _ in 0..4 {
            let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
            for model in &mut models {
                let mut client = Client::connect(&images).expect("it is served");
                for block in 0..BLOCKS {
                    model.values[block] = client.read(model.first + block).expect("it is served");
                }
                model.last = model.values.iter().copied().max().expect("some");
            }
            let (ran, fared) = at_work(&images, &mut models, || take_over(&images, &[]));
            assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
            fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
            let longest = models.iter().map(|model| model.longest).max().expect("some");
            let told = json(&ran.out)["paused_seconds"].as_f64().expect("it is known");
            println!(
                "{what}, {keys} keys: a request took {:.3} s at most; told: {told:.3} s",
                longest.as_secs_f64()
            );
        }
        let mut client = Client::connect(&images).expect("it is served");
        for key in (0..keys).step_by(41) {
            assert_eq!(client.read(block_of(key)).expect("it is served"), value_of(key), "key {key}");
        }
    }
}

/// A program that is none, one that ends at once, and one that cannot read its configuration: the daemon goes on as if nobody had asked.
#[test]
fn who_cannot_take_over_does_not() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let (_, fared) = at_work(&images, &mut models, || {
        refused(
            &daemon,
            &["take-over", "--program", "/nowhere/bcached"],
            2,
            "no program is /nowhere/bcached",
        );
        refused(&daemon, &["take-over", "--program", "/bin/true"], 4, "/bin/true cannot take over");
        images.configure(&format!("{config}nonsense = 1\n"));
        refused(&daemon, &["take-over"], 2, "nonsense");
        images.configure(&config);
        let planned = json(&ask(&daemon, &["take-over", "--dry-run", "--json"]).out);
        assert_eq!(planned["progress"], "would-be");
        assert_eq!(pid(&images).and_then(|pid| u32::try_from(pid).ok()), Some(daemon.id()));
    });
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
    drop(daemon);
}

/// How take-overs have ended in which one of the two was killed.
#[derive(Default, Debug)]
struct Ended {
    /// The new one serves, and had heard all from the old one.
    by_new: usize,
    /// The new one serves, and the old one had died before.
    by_new_alone: usize,
    by_old: usize,
    /// The new one was killed when the old one had gone, as any daemon may be.
    nobody: usize,
}

/// Whoever is killed, and at whichever step: the other one goes on with all that was answered.
fn killed_at_every_step(script: impl Fn(&str) -> String) -> Ended {
    let images = configured();
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    let mut ends = Ended::default();
    let mut daemon = Daemon::configured(&images);
    let _last = Last(&images);
    for step in 0_u32..16 {
        let delay = format!("0.{:03}", step * 4);
        let program = wrapped(&images, &script(&delay));
        let (ran, fared) = at_work(&images, &mut models, || {
            let ran = take_over(&images, &["--program", &program, "--timeout", "50s"]);
            // Whoever is to be killed is, by then.
            std::thread::sleep(Duration::from_millis(700));
            ran
        });
        assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
        if pid(&images).is_none() {
            ends.nobody += 1;
            daemon.kill();
            daemon = Daemon::configured(&images);
            check_all(&images, &mut models);
            continue;
        }
        let told = if ran.exit == 0 { json(&ran.out) } else { serde_json::Value::Null };
        let has_died = told["former_died"] == true;
        match ran.exit {
            0 if has_died => ends.by_new_alone += 1,
            0 => ends.by_new += 1,
            _ => ends.by_old += 1,
        }
        // A connection that had not been passed on ends with its process.
        let all = fared.into_iter().collect::<io::Result<Vec<_>>>();
        assert!(has_died || all.is_ok(), "step {step}: a client has noticed: {all:?}\n{}", daemon.log());
        check_all(&images, &mut models);
    }
    println!("{ends:?}");
    ends
}

#[test]
fn the_new_one_may_be_killed_at_any_step() {
    let ends = killed_at_every_step(|delay| format!("(sleep {delay}; kill -9 $$) & "));
    assert!(ends.by_old > 0, "some take-overs have been taken back");
}

#[test]
fn the_old_one_may_be_killed_at_any_step() {
    let ends =
        killed_at_every_step(|delay| format!("old=$BCACHED_TAKES_OVER; (sleep {delay}; kill -9 $old) & "));
    assert!(ends.by_new_alone > 0 && ends.nobody == 0, "the new one goes on alone: {ends:?}");
}

/// A process that stands still for a second (a machine that swaps, a debugger) is waited for, whichever it is.
#[test]
fn either_may_stand_still_for_a_while() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    for (who, delay) in
        ["$$", "$BCACHED_TAKES_OVER"].into_iter().flat_map(|who| [0, 8, 16, 32].map(|delay| (who, delay)))
    {
        let stands = format!("who={who}; (sleep 0.{delay:03}; kill -STOP $who; sleep 1; kill -CONT $who) & ");
        let program = wrapped(&images, &stands);
        let (ran, fared) = at_work(&images, &mut models, || take_over(&images, &["--program", &program]));
        assert_eq!(ran.exit, 0, "{who} after {delay} ms: {}\n{}", ran.err, daemon.log());
        fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
        check_all(&images, &mut models);
    }
    drop(daemon);
}

/// Sets that cannot be opened by the new one: the old one has them back, with its clients.
#[test]
fn what_the_new_one_cannot_serve_the_old_one_serves_on() {
    let images = configured();
    images.configure_wait("1s");
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    done(&daemon, &["set", "tank", "writeback_percent=23"]);
    // It can write nothing (its log would be the first), and so opens no set.
    let program = wrapped(&images, "exec 2> /dev/null; ulimit -f 1");
    let (ran, fared) = at_work(&images, &mut models, || take_over(&images, &["--program", &program]));
    assert_eq!(ran.exit, 4, "{}", ran.err);
    assert!(ran.err.contains("not all is served that was: tank"), "{}\n{}", ran.err, daemon.log());
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
    let option = json(&ask(&daemon, &["get", "tank", "writeback_percent", "--json"]).out);
    assert_eq!(option["options"][0]["value"], "23", "what was set since the start is still so: {option}");
    let again = take_over(&images, &[]);
    assert_eq!(again.exit, 0, "{}", again.err);
    check_all(&images, &mut models);
    drop(daemon);
}

/// Whether a process runs, and is not about to be waited for.
fn lives(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|state| !state.is_empty() && !state.starts_with('Z'))
}

/// It took the sockets of both along, and nobody could ask the daemon anything, or connect, ever again.
#[test]
fn the_new_one_may_be_told_to_end_at_any_step() {
    for step in 0_u32..10 {
        let images = configured();
        let daemon = Daemon::configured(&images);
        let _last = Last(&images);
        let mut client = Client::connect(&images).expect("it is served");
        client.write(1, 7).expect("it is served");
        let ends = format!("(sleep 0.{:03}; kill -TERM $$) & ", step * 8);
        let ran = take_over(&images, &["--program", &wrapped(&images, &ends), "--timeout", "50s"]);
        std::thread::sleep(Duration::from_millis(300));
        let told = || format!("step {step}: {ran:?}\n{}", daemon.log());
        if lives(daemon.id()) {
            assert_eq!(pid(&images).and_then(|pid| u32::try_from(pid).ok()), Some(daemon.id()), "{}", told());
            assert_eq!(client.read(1).expect("no client has noticed"), 7, "{}", told());
            Client::connect(&images).expect("whoever comes is let in");
        }
    }
}

/// Each connection took a second descriptor for a moment, and those were lost for which there was none.
#[test]
fn no_client_is_lost_for_want_of_descriptors() {
    const LIMIT: usize = 64;
    let images = configured();
    let config = images.path("config.toml");
    let command = Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]);
    let daemon = Daemon::start_command(&images, limited(&command, &format!("ulimit -n {LIMIT}")));
    let _last = Last(&images);
    let taken = || std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).expect("it runs").count();
    let mut clients = Vec::new();
    while taken() < LIMIT - 10 {
        clients.push(Client::connect(&images).expect("there is room"));
    }
    assert!(clients.len() > 10, "more than are left: {}", clients.len());
    let ran = take_over(&images, &[]);
    assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
    assert_eq!(json(&ran.out)["connections"], clients.len(), "{}", daemon.log());
    for client in &mut clients {
        client.read(0).expect("no client has noticed");
    }
}

/// Clients of all volumes waited for a minute until the old one went on, without what the files did not name any more.
#[test]
fn what_the_files_name_no_more_is_not_handed_over() {
    let images = configured();
    let (tank, other) = (images.path("tank"), images.blank("other", 20 * MIB));
    let made = bcached(&["make", "--backing", &other, "--for", images.path("fast").to_str().expect("text")]);
    assert_eq!(made.exit, 0, "{}", made.err);
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let both = format!("{config}[volume.other]\nbacking = {other:?}\n");
    images.configure(&both);
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    let (_, fared) = at_work(&images, &mut models, || {
        images.configure(&config);
        refused(&daemon, &["take-over"], 4, "the configuration has no volume other any more");
        // Who only asks hears the same, and of what the other process would find in the files.
        refused(&daemon, &["take-over", "--dry-run"], 4, "the configuration has no volume other any more");
        images.configure(&format!("{both}cache_mod = 1\n"));
        refused(&daemon, &["take-over", "--dry-run"], 2, "cache_mod");
        images.configure(&format!("{both}served = false\n"));
        refused(&daemon, &["take-over"], 4, "the configuration has no volume other any more");
        images.configure(&both);
        // The path of a device leads to another one, and to none.
        let aside = images.path("aside");
        std::fs::rename(&tank, &aside).expect("ours");
        std::fs::copy(&aside, &tank).expect("a copy");
        let elsewhere = format!("{} does not lead to the device any more that is served", tank.display());
        refused(&daemon, &["take-over"], 4, &elsewhere);
        std::fs::remove_file(&tank).expect("ours");
        refused(&daemon, &["take-over"], 4, &elsewhere);
        std::fs::rename(&aside, &tank).expect("ours");
        assert_eq!(pid(&images).and_then(|pid| u32::try_from(pid).ok()), Some(daemon.id()));
    });
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
    assert_eq!(take_over(&images, &[]).exit, 0);
    check_all(&images, &mut models);
}

/// It ended with the one that could not take over.
#[test]
fn a_way_that_cannot_begin_again_does_not_end_who_goes_on() {
    let images = configured();
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let machines = images.path("machines");
    images.configure(&format!(
        "{config}export = [\"nbd\", \"vhost-user\"]\n[vhost-user]\ndirectory = {machines:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    let (_, fared) = at_work(&images, &mut models, || {
        std::fs::remove_dir_all(&machines).expect("ours");
        std::fs::write(&machines, "").expect("a file");
        refused(&daemon, &["take-over"], 2, "cannot serve disks of virtual machines");
    });
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
    std::fs::remove_file(&machines).expect("ours");
    wait_until("the disk", || machines.join("tank.sock").exists());
}

/// The folder of a socket may be gone: nobody comes there any more, and those who have come go on.
#[test]
fn a_socket_whose_folder_is_gone_is_passed_on() {
    let images = configured();
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let folder = images.path("sockets");
    std::fs::create_dir(&folder).expect("a folder");
    let (gone, stays) = (folder.join("nbd.sock"), images.path("run/nbd.sock"));
    images.configure(&format!("{config}[nbd]\nlisten = [{stays:?}, {gone:?}]\n"));
    let daemon = Daemon::configured(&images);
    let _last = Last(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(Model::new).collect();
    let (ran, fared) = at_work(&images, &mut models, || {
        std::fs::remove_dir_all(&folder).expect("ours");
        take_over(&images, &[])
    });
    assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
}
