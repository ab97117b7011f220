//! Clients that verify what they read while daemon processes replace each other.

use crate::common::{CommandResult, Images, bcached, control};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// The time limit after which an operation counts as hanging.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The number of clients, each of which uses its own part of the volume.
pub const CLIENTS: usize = 3;
/// The number of 4 KiB blocks of each client.
pub const BLOCKS: usize = 256;
const BLOCK: usize = 4096;

pub fn configured() -> Images {
    let images = Images::new();
    images.configure_pair(64 * MIB, 20 * MIB, "cache_mode = \"writeback\"\n");
    std::fs::create_dir(images.path("run")).expect("a folder");
    images
}

/// A minimal NBD client, usually of `tank`.
pub struct TakeOverClient(UnixStream);

impl TakeOverClient {
    pub fn connect(images: &Images) -> io::Result<Self> {
        Self::connect_to(images, "tank")
    }

    pub fn connect_to(images: &Images, volume: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(images.path("run/nbd.sock"))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let mut client = Self(stream);
        client.receive(18)?;
        let name = volume.as_bytes();
        let length = u32::try_from(name.len()).expect("short");
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(0x4948_4156_454F_5054_u64.to_be_bytes());
        hello.extend(7_u32.to_be_bytes());
        hello.extend((length + 6).to_be_bytes());
        hello.extend(length.to_be_bytes());
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

    fn ask(&mut self, (command, flags): (u16, u16), block: usize, payload: &[u8]) -> io::Result<()> {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
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

    pub fn write(&mut self, block: usize, value: u32) -> io::Result<()> {
        self.ask((1, 0), block, &value.to_le_bytes().repeat(BLOCK / 4))
    }

    /// Zeroes a block. With `by_writing`, the space below must be allocated.
    fn zero(&mut self, block: usize, by_writing: bool) -> io::Result<()> {
        self.ask((6, if by_writing { 2 } else { 0 }), block, &[])
    }

    pub fn read(&mut self, block: usize) -> io::Result<u32> {
        self.ask((0, 0), block, &[])?;
        let bytes = self.receive(BLOCK)?;
        let value = u32::from_le_bytes(bytes[..4].try_into().expect("of that length"));
        assert!(bytes.chunks(4).all(|word| word == value.to_le_bytes()), "block {block} is in pieces");
        Ok(value)
    }
}

/// What a client has written, and what was acknowledged.
#[derive(Clone)]
pub struct WrittenModel {
    pub first: usize,
    pub values: Vec<u32>,
    /// Requested and not acknowledged.
    doubt: Option<(usize, u32)>,
    pub last: u32,
    /// The longest time that a request took.
    pub longest: Duration,
}

impl WrittenModel {
    pub fn new(part: usize) -> Self {
        Self { first: part * BLOCKS, values: vec![0; BLOCKS], doubt: None, last: 0, longest: Duration::ZERO }
    }

    /// Works until told to end, or until its daemon is gone.
    fn work(&mut self, client: &mut TakeOverClient, ends: &AtomicBool) -> io::Result<()> {
        while !ends.load(Ordering::SeqCst) {
            self.last += 1;
            let block = (self.last as usize * 97) % BLOCKS;
            // Every fifth request writes zeroes, alternating between the two ways.
            let value = if self.last.is_multiple_of(5) { 0 } else { self.last };
            self.doubt = Some((block, value));
            let asked = Instant::now();
            match value {
                0 => client.zero(self.first + block, self.last.is_multiple_of(2))?,
                value => client.write(self.first + block, value)?,
            }
            let written = Instant::now();
            (self.values[block], self.doubt) = (value, None);
            let other = (self.last as usize * 31) % BLOCKS;
            assert_eq!(client.read(self.first + other)?, self.values[other], "block {other}");
            self.longest = self.longest.max(written - asked).max(written.elapsed());
        }
        Ok(())
    }

    /// Everything acknowledged is there. What was in flight is there or not, consistently.
    fn check(&mut self, client: &mut TakeOverClient) {
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

/// Ends the clients, also if the test fails meanwhile.
struct StopClients<'a>(&'a AtomicBool);

impl Drop for StopClients<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Runs `act` while the clients work; returns its result and that of each client.
pub fn at_work<T>(
    images: &Images,
    models: &mut [WrittenModel],
    act: impl FnOnce() -> T,
) -> (T, Vec<io::Result<()>>) {
    let ends = AtomicBool::new(false);
    let mut clients: Vec<_> =
        models.iter().map(|_| TakeOverClient::connect(images).expect("it is served")).collect();
    std::thread::scope(|scope| {
        let ends = &ends;
        let workers: Vec<_> = models
            .iter_mut()
            .zip(&mut clients)
            .map(|(model, client)| scope.spawn(move || model.work(client, ends)))
            .collect();
        let at_last = StopClients(ends);
        std::thread::sleep(Duration::from_millis(100));
        let done = act();
        std::thread::sleep(Duration::from_millis(100));
        drop(at_last);
        (done, workers.into_iter().map(|worker| worker.join().expect("nothing is lost")).collect())
    })
}

pub fn check_all(images: &Images, models: &mut [WrittenModel]) {
    for model in models {
        model.check(&mut TakeOverClient::connect(images).expect("it is served"));
    }
}

pub fn take_over(images: &Images, words: &[&str]) -> CommandResult {
    bcached(&[&["take-over", "--json", "--control", &control(images)], words].concat())
}
