//! `bcached dump`: prints a set's metadata, record by record, as lines or as NDJSON. Each record is
//! printed as soon as it is read: a tree can be larger than memory.

use crate::device::{self, Access};
use crate::failure::{Failure, Kind};
use crate::flags::{self, DumpPart};
use crate::image::Image;
use crate::output::Report;
use crate::superblock::{self, SuperblockProbe};
use bcached_check::{Record, dump};
use bcached_format::Superblock;
use serde::Serialize;
use std::io::{self, BufWriter, Write};

/// The first line of the NDJSON form.
#[derive(Serialize)]
struct DumpHeader {
    schema: &'static str,
    schema_version: u32,
    bcached: &'static str,
    device: String,
}

/// Dumps the device.
pub fn run(flags: &flags::DumpArgs, json: bool) -> Result<Report, Failure> {
    let name = flags.device.display().to_string();
    let device = device::open(&flags.device, Access::Check)?;
    let refuse = |why: &str| Failure::new(Kind::NotBcache, format!("cannot dump {name}")).why(why);
    match superblock::read(&device)? {
        SuperblockProbe::Absent => return Err(refuse("it has no bcache superblock")),
        SuperblockProbe::Valid(Superblock::Backing(_)) => {
            return Err(refuse("it is a backing device, which has only a superblock")
                .next("`bcached show` prints that; for the metadata, dump its cache device"));
        }
        SuperblockProbe::Valid(Superblock::Cache(_)) | SuperblockProbe::Invalid(_) => {}
    }
    let image = Image::of(&device);
    let mut out = DumpWriter { writer: BufWriter::new(io::stdout().lock()), json, outcome: Ok(()) };
    if json {
        out.json(&DumpHeader {
            schema: "bcached.dump",
            schema_version: 1,
            bcached: env!("CARGO_PKG_VERSION"),
            device: name.clone(),
        });
    }
    let mut damaged = 0_u64;
    dump(&image, &mut |record| {
        if let Record::Damaged { .. } = record {
            damaged += 1;
        } else if !is_part(&record, flags.part) {
            return;
        }
        out.record(&record);
    });
    out.finish()?;
    if let Some(failure) = image.failure() {
        return Err(failure);
    }
    if damaged > 0 {
        let structures = if damaged == 1 { "structure" } else { "structures" };
        return Err(Failure::new(Kind::Damaged, format!("cannot read {damaged} {structures} of {name}"))
            .next("`bcached check` reports the damage"));
    }
    Ok(Report::silent())
}

fn is_part(record: &Record, part: Option<DumpPart>) -> bool {
    let Some(part) = part else { return true };
    match record {
        Record::Superblock { .. } => part == DumpPart::Superblock,
        Record::JournalEntry { .. } => part == DumpPart::Journal,
        Record::PriorityChain { .. } | Record::Bucket { .. } => part == DumpPart::Prios,
        Record::UuidSlot { .. } => part == DumpPart::Uuids,
        Record::Node(_) => part == DumpPart::Tree,
        // A kind of record that is newer than this list: better shown than lost.
        _ => true,
    }
}

/// Standard output. The walk cannot be cancelled, so the first error is kept and the remaining
/// records are dropped.
struct DumpWriter<W: Write> {
    writer: W,
    json: bool,
    outcome: io::Result<()>,
}

impl<W: Write> DumpWriter<W> {
    fn record(&mut self, record: &Record) {
        if self.json {
            self.json(record);
        } else if self.outcome.is_ok() {
            self.outcome = writeln!(self.writer, "{record}");
        }
    }

    fn json(&mut self, value: &impl Serialize) {
        if self.outcome.is_ok() {
            self.outcome = serde_json::to_writer(&mut self.writer, value)
                .map_err(io::Error::from)
                .and_then(|()| self.writer.write_all(b"\n"));
        }
    }

    /// Returns the first error. A broken pipe is not a failure: the reader has closed it.
    fn finish(mut self) -> Result<(), Failure> {
        match self.outcome.and_then(|()| self.writer.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::new(Kind::Io, "cannot write standard output").why(error.to_string()))
            }
            _ => Ok(()),
        }
    }
}
