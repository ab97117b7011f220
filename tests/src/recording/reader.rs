//! Opens the images of cuts with the kernel or our daemon and reads the volumes: first as they come
//! up, then from the backing devices alone, after the cache is detached.
//!
//! Several sets go through one boot of the kernel, one after the other. They are copies of one set,
//! and a kernel can have only one of them registered at a time.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;

use super::writer::Writer;
use crate::guest::{self, GuestError, Job, Machine as _};
use crate::set::CacheSet;
use crate::side::{Daemon, LegError, Ours};
use crate::uml::Uml;

/// The line the job prints when it has read a set; the set's number follows.
const READ: &str = "read set ";

/// The result of opening a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reading {
    /// The whole volume, read twice.
    Volume {
        /// When it came up.
        with_cache: Vec<u8>,
        /// After the cache was detached.
        alone: Vec<u8>,
    },
    /// The volume did not come up, could not be read, or could not be detached; with the reason.
    Refused(String),
}

/// Opens sets of the same geometry with the kernel or with our daemon. The daemon cannot detach, so
/// the kernel does that after it.
///
/// # Errors
/// A failure on the host. A set that could not be opened is a [`Reading`], also if the kernel died
/// or hung on an earlier one.
pub fn read(reader: Writer, uml: &Uml, ours: &Ours, sets: &[CacheSet]) -> Result<Vec<Reading>, LegError> {
    let mut by_us = Vec::new();
    if reader == Writer::Ours {
        for set in sets {
            match read_by_us(ours, set) {
                Ok(content) => by_us.push(Ok(content)),
                Err(error @ LegError::Daemon { .. }) => by_us.push(Err(error.to_string())),
                Err(error) => return Err(error),
            }
        }
    }
    let mut readings = read_by_kernel(uml, sets)?;
    for (reading, by_us) in readings.iter_mut().zip(by_us) {
        match (reading, by_us) {
            (Reading::Volume { with_cache, .. }, Ok(content)) => *with_cache = content,
            (reading, Err(words)) => *reading = Reading::Refused(words),
            (Reading::Refused(_), Ok(_)) => {}
        }
    }
    Ok(readings)
}

fn read_by_us(ours: &Ours, set: &CacheSet) -> Result<Vec<u8>, LegError> {
    let daemon = Daemon::start(ours.program(), set)?;
    let mut client = daemon.connect(set, 0)?;
    let mut content = Vec::new();
    client
        .read_whole(|bytes| {
            content.extend_from_slice(bytes);
            Ok(())
        })
        .map_err(|error| LegError::Daemon { what: format!("read: {error}"), said: daemon.said() })?;
    drop(client);
    daemon.stop()?;
    Ok(content)
}

fn read_by_kernel(uml: &Uml, sets: &[CacheSet]) -> Result<Vec<Reading>, GuestError> {
    let Some(first) = sets.first() else { return Ok(Vec::new()) };
    let volume_bytes = first.geometry.volume_sectors * 512;
    let content = first.directory().join("content");
    File::create(&content)
        .and_then(|file| file.set_len(2 * volume_bytes * sets.len() as u64))
        .map_err(GuestError::host("make a file for the contents"))?;
    let own = sets.iter().flat_map(CacheSet::images);
    let images: Vec<&Path> = own.chain([content.as_path()]).collect();
    let script = script(uml, sets.len(), volume_bytes >> 20);
    let said = match uml.run(&Job { images: &images, script: &script, crash_at: None, limit: guest::LIMIT }) {
        Ok(report) => report.to_string(),
        Err(error @ (GuestError::Job { .. } | GuestError::Ended { .. } | GuestError::Limit { .. })) => {
            error.to_string()
        }
        Err(error) => return Err(error),
    };
    let contents = fs::read(&content).map_err(GuestError::host("read the contents"))?;
    let halves = usize::try_from(volume_bytes).expect("a volume fits in memory");
    let readings = contents.chunks_exact(2 * halves).enumerate().map(|(number, content)| {
        let (with_cache, alone) = content.split_at(halves);
        if was_read(&said, number) {
            Reading::Volume { with_cache: with_cache.to_vec(), alone: alone.to_vec() }
        } else {
            Reading::Refused(format!("set {number} of {}: {said}", sets.len()))
        }
    });
    Ok(readings.collect())
}

/// Returns whether the job printed on the console that it has read this set.
fn was_read(said: &str, number: usize) -> bool {
    said.lines().any(|line| line.strip_prefix(READ) == Some(&number.to_string()))
}

/// Returns a job that reads `sets` sets, of two images each, into the image after them.
fn script(uml: &Uml, sets: usize, mebibytes: u64) -> String {
    let output = uml.device(2 * sets);
    let mut script = format!(
        "copy() {{ dd if=/dev/bcache0 of={output} bs=1M seek=$1 iflag=direct conv=fsync,notrunc 2>/dev/null; }}\n"
    );
    for number in 0..sets {
        let (cache, backing) = (uml.device(2 * number), uml.device(2 * number + 1));
        let seek = 2 * mebibytes * number as u64;
        // As the condition of an `if`, a failure does not end the job.
        let _ = write!(
            script,
            "if register {cache} && register {backing} && wait_for 100 test -b /dev/bcache0 && copy {seek} &&\n\
            detach 0 && copy {} && stop_everything\n\
            then echo {READ}{number}; else stop_everything; fi\n",
            seek + mebibytes,
        );
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_set_that_the_job_has_read_counts() {
        let said = "the job:\nread set 1\nread set 12\nkernel> read set 3\n";
        assert_eq!([1, 2, 3, 12].map(|number| was_read(said, number)), [true, false, false, true]);
    }
}
