//! The client that sends requests: one at a time, waiting for each reply.

use std::fs::{File, OpenOptions, metadata};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const BLOCK_BYTES: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);

/// A block of data, aligned for direct I/O.
#[repr(align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// The kind of request sent for a block.
#[derive(Clone, Copy)]
pub enum Ask {
    Read,
    Write,
    /// Flushes the whole volume.
    Flush,
}

pub struct Client {
    way: Way,
    block: Block,
}

enum Way {
    /// An NBD server, without structured replies.
    Nbd(UnixStream),
    /// A file or a block device, bypassing the page cache.
    Direct(File),
}

impl Client {
    /// Opens the volume at `place`: a file, a block device, or the Unix socket of an NBD server
    /// that exports it as `tank`.
    pub fn open(place: &Path) -> io::Result<Self> {
        let way = if metadata(place)?.file_type().is_socket() {
            Way::Nbd(connect(place)?)
        } else {
            let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
            Way::Direct(OpenOptions::new().read(true).write(true).custom_flags(direct).open(place)?)
        };
        Ok(Self { way, block: Block([7; BLOCK_BYTES]) })
    }

    pub fn ask(&mut self, ask: Ask, block: u64) -> io::Result<()> {
        let Self { way, block: Block(data) } = self;
        let offset = block * BLOCK_BYTES as u64;
        match (way, ask) {
            (Way::Direct(file), Ask::Read) => file.read_exact_at(data, offset),
            (Way::Direct(file), Ask::Write) => file.write_all_at(data, offset),
            (Way::Direct(file), Ask::Flush) => file.sync_all(),
            (Way::Nbd(stream), Ask::Read) => {
                send(stream, 0, offset, BLOCK_BYTES, &[])?;
                answered(stream)?;
                stream.read_exact(data)
            }
            (Way::Nbd(stream), Ask::Write) => {
                send(stream, 1, offset, BLOCK_BYTES, data)?;
                answered(stream)
            }
            (Way::Nbd(stream), Ask::Flush) => {
                send(stream, 3, 0, 0, &[])?;
                answered(stream)
            }
        }
    }
}

/// Negotiates `NBD_OPT_EXPORT_NAME`, after which only requests follow.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.read_exact(&mut [0; 18])?;
    let mut hello = Vec::from(3_u32.to_be_bytes());
    hello.extend_from_slice(b"IHAVEOPT");
    hello.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 4]);
    hello.extend_from_slice(b"tank");
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 10])?;
    Ok(stream)
}

/// Sends a request of the given `kind` for `bytes` bytes at byte `offset`.
fn send(stream: &mut UnixStream, kind: u16, offset: u64, bytes: usize, data: &[u8]) -> io::Result<()> {
    let mut request = [0; 28 + BLOCK_BYTES];
    request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    request[6..8].copy_from_slice(&kind.to_be_bytes());
    request[16..24].copy_from_slice(&offset.to_be_bytes());
    request[24..28].copy_from_slice(&u32::try_from(bytes).map_err(io::Error::other)?.to_be_bytes());
    request[28..][..data.len()].copy_from_slice(data);
    stream.write_all(&request[..28 + data.len()])
}

fn answered(stream: &mut UnixStream) -> io::Result<()> {
    let mut reply = [0; 16];
    stream.read_exact(&mut reply)?;
    if reply[4..8] != [0; 4] {
        return Err(io::Error::other("the server answers with an error"));
    }
    Ok(())
}
