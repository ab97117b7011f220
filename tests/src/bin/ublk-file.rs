//! Serves a file as a block device of the kernel, through the engine's I/O driver but without an
//! engine. Tests of the ublk front end run it in a guest.
//!
//! Usage: `ublk-file FILE`. It prints `here PATH` when the device exists and `missing WHY` when it
//! does not. It obeys the lines `remove` and `resize SECTORS` on its standard input. If it is
//! killed, it leaves the device to the next instance.

use bcached_env::{Disk, Env, Executor, RunOrder};
use bcached_front_ublk::table::BeforeStateChange;
use bcached_front_ublk::{DeviceState, DriverFeatures, ServedVolume, UblkServer};
use bcached_port::{Export, Operation, Reply, Request, Route, Server, Uuid, VolumeId, open as open_port};
use bcached_uring::{Access, Device, DriverOptions, open_driver};
use std::error::Error;
use std::io::BufRead as _;
use std::path::Path;
use std::process::exit;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const NAME: &str = "file";
const LIMIT: Duration = Duration::from_secs(60);

fn main() {
    let Some(file) = std::env::args().nth(1) else {
        eprintln!("usage: ublk-file FILE");
        exit(2);
    };
    if let Err(error) = run(Path::new(&file)) {
        eprintln!("ublk-file: {error}");
        exit(4);
    }
}

fn run(file: &Path) -> Result<(), Box<dyn Error>> {
    DriverFeatures::probe()?;
    let driver = open_driver(&DriverOptions::default())?;
    let disks = driver.disks.clone();
    let disk = disks.add(Device::open(file, Access::Own)?);
    let bell = driver.bell.clone();
    let (connector, server) = open_port(64, Arc::new(move || bell.ring()));
    let mut executor = Executor::new(driver.driver, RunOrder::Fifo, 1);
    let env = executor.env();
    let disk = env.disk(disk);
    let sectors = disk.info().sectors;
    let export = move |sectors| {
        let served = Some(Route::new(VolumeId(0), &connector));
        let (uuid, label) = (Uuid([0x5a, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]), String::new());
        let (read_only, shared) = (false, false);
        Arc::new(Export {
            name: NAME.into(),
            uuid,
            label,
            sectors,
            block_sectors: 8,
            read_only,
            shared,
            frontends: bcached_port::FrontendSet::default(),
            served,
        })
    };
    let news: BeforeStateChange = Arc::new(|_, state| match state {
        DeviceState::Creating => {}
        DeviceState::Ready { path, transfer } => {
            transfer.iter().for_each(|transfer| println!("transfer {}", transfer.word()));
            println!("here {}", path.display());
        }
        DeviceState::Missing(why) => println!("missing {why}"),
    });
    let devices = UblkServer::new(news, std::sync::Arc::new(|| ()), None);
    let ring_handle = driver.ring_handle;
    let serve = move |devices: &UblkServer, sectors| {
        devices.serve(ServedVolume {
            export: export(sectors),
            ring_handle: ring_handle.clone(),
            number: None,
        })
    };
    serve(&devices, sectors)?;
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let mut words = line.split_whitespace();
            match (words.next(), words.next().and_then(|word| word.parse().ok())) {
                (Some("remove"), _) => exit(match devices.remove(&[NAME.to_owned()], LIMIT) {
                    Ok(()) => {
                        println!("bounced {}", disks.counts().bounced);
                        0
                    }
                    Err(error) => {
                        println!("still {error}");
                        1
                    }
                }),
                (Some("resize"), Some(sectors)) => drop(serve(&devices, sectors)),
                _ => println!("what is {line:?}?"),
            }
        }
        // The input has ended; the device is served on.
        loop {
            thread::park();
        }
    });
    executor.block_on(pump(env, disk, server));
    Ok(())
}

async fn pump(env: Env, disk: Disk, mut server: Server) {
    loop {
        let bell = env.bell();
        while let Some(request) = server.take() {
            let disk = disk.clone();
            env.spawn(async move { answer(&disk, request).await });
        }
        bell.await;
    }
}

async fn answer(disk: &Disk, request: Request) {
    let kind = |error: bcached_env::IoError| match error.kind {
        bcached_env::IoErrorKind::NoSpace => bcached_port::ErrorKind::NoSpace,
        _ => bcached_port::ErrorKind::Io,
    };
    let done = |result: Result<(), bcached_env::IoError>| match result {
        Ok(()) => Reply::done(),
        Err(error) => Reply::failed(kind(error), None),
    };
    let reply = match request.operation {
        Operation::Read { sector, buffer } => match disk.read(sector, buffer).await {
            (Ok(()), buffer) => Reply::content(buffer),
            (Err(error), buffer) => Reply::failed(kind(error), Some(buffer)),
        },
        Operation::Write { sector, payload, fua: true } => done(disk.write_fua(sector, payload).await),
        Operation::Write { sector, payload, fua: false } => done(disk.write(sector, payload).await),
        Operation::Flush => done(disk.flush().await),
        Operation::Discard { sector, sectors, .. } => done(disk.discard(sector, sectors).await),
        // Every file system that this is tested on supports punching holes.
        Operation::WriteZeroes { sector, sectors, .. } => done(disk.zero(sector, sectors, true).await),
        Operation::BlockStatus { .. } => Reply::failed(bcached_port::ErrorKind::Unsupported, None),
    };
    request.reply_to.send(reply);
}
