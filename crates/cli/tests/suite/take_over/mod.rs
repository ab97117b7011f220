//! Another process takes over from the daemon while clients work: they notice a pause, whichever
//! process is killed during it.

mod clients;
mod failing_devices;
mod steps;

use crate::common::{
    self, Daemon, Images, StopOnDrop, ask, bcached, done, json, limited, pid, refused, wrapped,
};
use clients::{
    BLOCKS, CLIENTS, LIMIT, MIB, TakeOverClient, WrittenModel, at_work, check_all, configured, take_over,
};
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

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
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
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

/// As many keys as 400 MiB of small writes create in a cache of 4 GiB, with `BCACHED_LONG=1`.
fn keys() -> usize {
    if std::env::var_os("BCACHED_LONG").is_some() { 100_000 } else { 2000 }
}

/// Prints the longest wait of a client: with an empty cache, with many keys, and with as many dirty
/// ones. All data written before is there.
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
        let _last = StopOnDrop(&images);
        // Written one by one and spread out, so that each leaves a key of its own.
        let block_of = |key: usize| CLIENTS * BLOCKS + (key * 7919) % (2048 * 1000);
        let value_of = |key: usize| u32::try_from(key + 1).expect("few");
        let mut client = TakeOverClient::connect(&images).expect("it is served");
        (0..keys).for_each(|key| client.write(block_of(key), value_of(key)).expect("it is served"));
        drop(client);
        for _ in 0..4 {
            let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
            for model in &mut models {
                let mut client = TakeOverClient::connect(&images).expect("it is served");
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
        let mut client = TakeOverClient::connect(&images).expect("it is served");
        for key in (0..keys).step_by(41) {
            assert_eq!(client.read(block_of(key)).expect("it is served"), value_of(key), "key {key}");
        }
    }
}

/// A missing program, one that ends at once, and one that cannot read its configuration: the daemon
/// continues as if it had not been asked.
#[test]
fn who_cannot_take_over_does_not() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let (_, fared) = at_work(&images, &mut models, || {
        refused(
            &daemon,
            &["take-over", "--program", "/nowhere/bcached"],
            2,
            "there is no program /nowhere/bcached",
        );
        // A program that starts another and ends: both served, on the same sockets.
        let bcached = common::PROGRAM;
        let forks = wrapped(&images, &format!("exec 3<&0\n{bcached} \"$@\" <&3 3<&- &\nexit 0"));
        for more in [&[][..], &["--dry-run"]] {
            for program in ["/bin/true", &forks] {
                let args = [&["take-over", "--program", program], more].concat();
                refused(&daemon, &args, 4, &format!("{program} cannot take over"));
            }
        }
        assert!(
            daemon.log().contains("a script that starts the daemon must do so with `exec`"),
            "{}",
            daemon.log()
        );
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

/// How the hand-overs ended in which one of the two processes was killed.
#[derive(Default, Debug)]
struct TakeOverCounts {
    /// The new process serves, and had received everything from the old one.
    by_new: usize,
    /// The new process serves, and the old one had died before.
    by_new_alone: usize,
    by_old: usize,
    /// The new process was killed after the old one was gone, as can happen to any daemon.
    nobody: usize,
}

/// A regression: clients waited as long as a start waits for a missing device, 30 s. With a `wait`
/// of more than a minute no hand-over succeeded.
#[test]
fn what_was_not_served_before_keeps_nobody_waiting() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let missing = images.path("missing");
    images.configure(&format!(
        "{config}[volume.new]\nbacking = {missing:?}\ncache = \"none\"\nwait = \"1h\"\n"
    ));
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    for _ in 0..2 {
        let (ran, fared) = at_work(&images, &mut models, || take_over(&images, &[]));
        assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
        fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    }
    println!("clients have waited for {:?}", models.iter().map(|model| model.longest).max());
    // The device is still looked for.
    assert_eq!(bcached(&["make", "-B", &images.blank("missing", 20 << 20)]).exit, 0);
    wait_until("it is there", || TakeOverClient::connect_to(&images, "new").is_ok());
    check_all(&images, &mut models);
}

/// A regression: a stop ended the hand-over, and the daemon that continued knew of no stop: `nobody
/// has asked for a stop`.
#[test]
fn a_stop_that_is_asked_for_meanwhile_stops_who_has_taken_over() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let former = pid(&images).expect("it runs");
    let program = wrapped(&images, "sleep 1");
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| take_over(&images, &["--program", &program]));
        wait_until("it has begun", || daemon.log().contains("event=take-over-asked"));
        let stopped = ask(&daemon, &["stop"]);
        assert_eq!(stopped.exit, 0, "{stopped:?}\n{}", daemon.log());
        assert!(!stopped.out.contains(&format!("daemon {former} ")), "{stopped:?}");
        // This command may get no answer any more.
        taken.join().expect("no panic");
    });
    assert!(daemon.log().contains("event=handed-over"), "{}", daemon.log());
    assert_eq!(pid(&images), None, "{}", daemon.log());
}

/// A regression: a process started only for a dry run continued as the daemon, if the daemon was
/// killed before ending it.
#[test]
fn who_is_only_tried_serves_nothing_whatever_becomes_of_the_daemon() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let (there, tried) = (images.path("there"), images.path("tried"));
    let script = format!("touch {}; sleep 0.5; (sleep 2; touch {}) & ", there.display(), tried.display());
    let program = wrapped(&images, &script);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| take_over(&images, &["--dry-run", "--program", &program]));
        wait_until("it is tried", || there.exists());
        daemon.kill();
        assert_ne!(asked.join().expect("no panic").exit, 0);
    });
    wait_until("it has had its time", || tried.exists());
    assert_eq!(pid(&images), None, "somebody serves");
}

/// Kills one process at many moments: the other one continues with all that was acknowledged. The
/// moments between two messages are covered by that.
fn killed_at_many_moments(script: impl Fn(&str) -> String) -> TakeOverCounts {
    let images = configured();
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    let mut ends = TakeOverCounts::default();
    let mut daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    for step in 0_u32..8 {
        let delay = format!("0.{:03}", step * 9);
        let program = wrapped(&images, &script(&delay));
        let (ran, fared) = at_work(&images, &mut models, || {
            let ran = take_over(&images, &["--program", &program, "--timeout", "50s"]);
            // The process to kill is killed by then.
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
        // A connection that was not passed on ends with its process.
        let all = fared.into_iter().collect::<io::Result<Vec<_>>>();
        assert!(has_died || all.is_ok(), "step {step}: a client has noticed: {all:?}\n{}", daemon.log());
        check_all(&images, &mut models);
    }
    println!("{ends:?}");
    ends
}

#[test]
fn the_new_one_may_be_killed_at_any_moment() {
    let ends = killed_at_many_moments(|delay| format!("(sleep {delay}; kill -9 $$) & "));
    assert!(ends.by_old > 0, "some take-overs have been taken back");
}

#[test]
fn the_old_one_may_be_killed_at_any_moment() {
    let ends =
        killed_at_many_moments(|delay| format!("old=$BCACHED_TAKES_OVER; (sleep {delay}; kill -9 $old) & "));
    assert!(ends.by_new_alone > 0 && ends.nobody == 0, "the new one goes on alone: {ends:?}");
}

/// The other process waits for one that stalls for a second (a machine that swaps, a debugger),
/// whichever of the two it is.
#[test]
fn either_may_stand_still_for_a_while() {
    let images = configured();
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
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

/// Sets that the new process cannot open return to the old one, with its clients.
#[test]
fn what_the_new_one_cannot_serve_the_old_one_serves_on() {
    let images = configured();
    images.configure_wait("1s");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    done(&daemon, &["set", "tank", "writeback_percent=23"]);
    // The program can write nothing, from its log on, and so opens no set.
    let program = wrapped(&images, "exec 2> /dev/null; ulimit -f 1");
    let (ran, fared) = at_work(&images, &mut models, || take_over(&images, &["--program", &program]));
    assert_eq!(ran.exit, 4, "{}", ran.err);
    assert!(ran.err.contains("not all volumes are served as before: tank"), "{}\n{}", ran.err, daemon.log());
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
    let option = json(&ask(&daemon, &["get", "tank", "writeback_percent", "--json"]).out);
    assert_eq!(option["options"][0]["value"], "23", "what was set since the start is still so: {option}");
    let again = take_over(&images, &[]);
    assert_eq!(again.exit, 0, "{}", again.err);
    check_all(&images, &mut models);
    drop(daemon);
}

/// Returns whether a process is running, and is no zombie.
fn lives(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|state| !state.is_empty() && !state.starts_with('Z'))
}

/// A regression: it removed the sockets of both, and clients could never reach the daemon again.
#[test]
fn the_new_one_may_be_told_to_end_at_any_step() {
    for step in 0_u32..10 {
        let images = configured();
        let daemon = Daemon::configured(&images);
        let _last = StopOnDrop(&images);
        let mut client = TakeOverClient::connect(&images).expect("it is served");
        client.write(1, 7).expect("it is served");
        let ends = format!("(sleep 0.{:03}; kill -TERM $$) & ", step * 8);
        let ran = take_over(&images, &["--program", &wrapped(&images, &ends), "--timeout", "50s"]);
        std::thread::sleep(Duration::from_millis(300));
        let told = || format!("step {step}: {ran:?}\n{}", daemon.log());
        if lives(daemon.id()) {
            assert_eq!(pid(&images).and_then(|pid| u32::try_from(pid).ok()), Some(daemon.id()), "{}", told());
            assert_eq!(client.read(1).expect("no client has noticed"), 7, "{}", told());
            TakeOverClient::connect(&images).expect("whoever comes is let in");
        }
    }
}

/// A regression: each connection briefly took a second descriptor, and connections for which there
/// was none were lost.
#[test]
fn no_client_is_lost_for_want_of_descriptors() {
    const LIMIT: usize = 64;
    let images = configured();
    let config = images.path("config.toml");
    let command = Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]);
    let daemon = Daemon::start_command(&images, limited(&command, &format!("ulimit -n {LIMIT}")));
    let _last = StopOnDrop(&images);
    let taken = || std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).expect("it runs").count();
    let mut clients = Vec::new();
    while taken() < LIMIT - 10 {
        clients.push(TakeOverClient::connect(&images).expect("there is room"));
    }
    assert!(clients.len() > 10, "more than are left: {}", clients.len());
    let ran = take_over(&images, &[]);
    assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
    assert_eq!(json(&ran.out)["connections"], clients.len(), "{}", daemon.log());
    for client in &mut clients {
        client.read(0).expect("no client has noticed");
    }
}

/// A regression: clients of all volumes waited for a minute until the old process continued,
/// without the volumes that the files no longer name.
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
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    let (_, fared) = at_work(&images, &mut models, || {
        images.configure(&config);
        refused(&daemon, &["take-over"], 4, "the configuration no longer has the volume other");
        // A dry run gives the same answer, and reports what the other process would find in the
        // files.
        refused(&daemon, &["take-over", "--dry-run"], 4, "the configuration no longer has the volume other");
        images.configure(&format!("{both}cache_mod = 1\n"));
        refused(&daemon, &["take-over", "--dry-run"], 2, "cache_mod");
        images.configure(&format!("{both}served = false\n"));
        refused(&daemon, &["take-over"], 4, "the configuration no longer has the volume other");
        images.configure(&both);
        // The path of a device leads to another device, and then to none.
        let aside = images.path("aside");
        std::fs::rename(&tank, &aside).expect("ours");
        std::fs::copy(&aside, &tank).expect("a copy");
        let elsewhere = format!("{} no longer leads to the device that is served", tank.display());
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

/// A regression: the old daemon ended along with the one that could not take over.
#[test]
fn a_way_that_cannot_begin_again_does_not_end_who_goes_on() {
    let images = configured();
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let machines = images.path("machines");
    images.configure(&format!(
        "{config}export = [\"nbd\", \"vhost-user\"]\n[vhost-user]\ndirectory = {machines:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
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

/// The directory of a socket may be gone: no new client can connect there, and connected ones
/// continue.
#[test]
fn a_socket_whose_folder_is_gone_is_passed_on() {
    let images = configured();
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let folder = images.path("sockets");
    std::fs::create_dir(&folder).expect("a folder");
    let (gone, stays) = (folder.join("nbd.sock"), images.path("run/nbd.sock"));
    images.configure(&format!("{config}[nbd]\nlisten = [{stays:?}, {gone:?}]\n"));
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut models: Vec<_> = (0..CLIENTS).map(WrittenModel::new).collect();
    let (ran, fared) = at_work(&images, &mut models, || {
        std::fs::remove_dir_all(&folder).expect("ours");
        take_over(&images, &[])
    });
    assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
    fared.into_iter().for_each(|fared| fared.expect("no client has noticed"));
    check_all(&images, &mut models);
}
