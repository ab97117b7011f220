//! A leg on a real kernel: one boot.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use super::{Ending, LegError, Side};
use crate::guest::{self, GuestError, Job, Machine, Report};
use crate::offline;
use crate::set::CacheSet;
use crate::workload::{Fate, Model, Workload};

const MIB: u64 = 1 << 20;

/// The kernel of a machine.
pub struct Kernel<'a>(pub &'a dyn Machine);

impl Side for Kernel<'_> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn leg(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError> {
        self.leg_asking(set, &[], workloads, ending).map(|_report| ())
    }
}

impl Kernel<'_> {
    /// A leg on backing devices that no cache has: they are served as they are, proven, and then attached.
    ///
    /// # Errors
    /// [`LegError`], as in a leg.
    pub fn attach(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError> {
        let attach = (0..set.backings.len()).fold(String::new(), |script, n| format!("{script}attach {n}\n"));
        self.leg_asking(set, &[&attach], workloads, ending).map(|_report| ())
    }

    /// A volume of so many sectors that lives in the cache alone, made by the kernel: the set's last, and blank. Stopped in order.
    ///
    /// # Errors
    /// [`LegError`], as in a leg.
    pub fn add_volume(&self, set: &mut CacheSet, sectors: u64) -> Result<(), LegError> {
        let volume = set.models.len();
        let create = format!(
            "echo {} > $(set_directory)/flash_vol_create\nwait_for 200 test -b /dev/bcache{volume}\n",
            sectors * 512
        );
        self.leg_asking(set, &[&create], &[], Ending::CleanStop)?;
        set.models.push(Model::blank(volume as u64, sectors));
        Ok(())
    }

    /// A leg in which the kernel is asked something, as a script, before each of the workloads and, if there is one more, after the last.
    /// Returns what was answered.
    ///
    /// # Errors
    /// [`LegError`], as in a leg, or that a script failed.
    pub fn leg_asking(
        &self,
        set: &mut CacheSet,
        questions: &[&str],
        workloads: &[Workload],
        ending: Ending,
    ) -> Result<Report, LegError> {
        let (end, crash_at) = match ending {
            Ending::CleanStop => (STOP, None),
            Ending::CrashAfterFlush(number) => ("sleep 100000\n", Some(format!("flushed {number}"))),
        };
        let script = self.opening(set) + &Self::writing(set, questions, workloads) + end;
        let report = self.prove(set, &script, crash_at.as_deref())?;
        for (index, workload) in workloads.iter().enumerate() {
            let crashed = ending != Ending::CleanStop && index + 1 == workloads.len();
            let fate = if crashed { Fate::CrashedAfterFlush(report.last_flush()) } else { Fate::Finished };
            super::apply(set, workload, fate);
        }
        if ending != Ending::CleanStop {
            let differing = offline::note_differing_copies(set)?;
            println!("{}: its crash left {differing} sectors that differ below a clean copy", self.name());
        }
        Ok(report)
    }
}

/// What a kernel says of what a kernel left: it does not journal that data has become clean, so a replay makes it dirty again, and when its
/// bucket has been reused meanwhile the key is stale. The data is on the backing device, as the comparison of the content shows. We never leave
/// such a key.
const STALE_DIRTY: &str = "bcache: bch_extent_bad() stale dirty pointer, *";

/// The end of a job in order.
const STOP: &str = "stop_everything\n";

impl Kernel<'_> {
    /// The kernel takes the set for good: it proves the content, collects garbage, writes, detaches every backing device, and after that each
    /// must hold its whole volume by itself.
    ///
    /// # Errors
    /// [`LegError`], as in a leg.
    pub fn take_over(&self, set: &mut CacheSet, workloads: &[Workload]) -> Result<(), LegError> {
        let detach = (0..set.backings.len()).fold(String::new(), |script, n| format!("{script}detach {n}\n"));
        let script =
            self.opening(set) + "collect_garbage\n" + &Self::writing(set, &[], workloads) + &detach + STOP;
        let report = self.prove(set, &script, None)?;
        for workload in workloads {
            super::apply(set, workload, Fate::Finished);
        }
        let start = set.geometry.data_offset_sectors * 512;
        for (model, path) in set.models.iter_mut().zip(&set.backings) {
            compare(model, path, start, "the backing device alone", &report)?;
        }
        Ok(())
    }

    /// Runs a job that begins with [`Kernel::opening`], and compares what it read with the models.
    fn prove(&self, set: &mut CacheSet, script: &str, crash_at: Option<&str>) -> Result<Report, LegError> {
        let content = content_file(set).map_err(GuestError::host("make a file for the content"))?;
        let images: Vec<&Path> = set.images().into_iter().chain([content.as_path()]).collect();
        let report = self.0.run(&Job { images: &images, script, crash_at, limit: guest::LIMIT })?;
        let starts: Vec<u64> = content_starts(set).collect();
        for (model, start) in set.models.iter_mut().zip(starts) {
            compare(model, &content, start * MIB, self.0.name(), &report)?;
        }
        report.expect_log(if set.left_by_kernel { &[STALE_DIRTY] } else { &[] })?;
        set.left_by_kernel = true;
        Ok(report)
    }

    /// Registers the devices and reads every volume whole into the file for the content, the last of the job's images.
    fn opening(&self, set: &CacheSet) -> String {
        let own = set.images().len();
        let mut devices: Vec<String> = (0..own).map(|index| self.0.device(index)).collect();
        if set.models.len() > set.backings.len() {
            // Volumes are numbered as they come: those in the cache alone come with it, and are the set's last.
            devices.rotate_left(1);
        }
        let mut script = format!("register {}\n", devices.join(" "));
        let output = self.0.device(own);
        for ((n, model), start) in set.models.iter().enumerate().zip(content_starts(set)) {
            let sectors = model.sectors();
            let _ = write!(
                script,
                "wait_for 200 test -b /dev/bcache{n}\n\
                test $(cat /sys/block/bcache{n}/size) = {sectors}\n\
                dd if=/dev/bcache{n} of={output} bs=1M seek={start} conv=notrunc,fsync 2>/dev/null\n"
            );
        }
        for n in 0..set.backings.len() {
            let _ = writeln!(script, "no_bypass {n}");
        }
        script
    }

    fn writing(set: &CacheSet, questions: &[&str], workloads: &[Workload]) -> String {
        let mut script = String::new();
        for (index, workload) in workloads.iter().enumerate() {
            script.extend(questions.get(index).copied());
            if workload.discard_every != 0 && workload.volume < set.backings.len() as u64 {
                // A kernel lets what it is just writing back land after the discard of it (`docs/compat.md`), and what it has set out to
                // write back it does, whatever it is told.
                let _ = writeln!(script, "write_back {n}\nkeep_dirty {n}", n = workload.volume);
            }
            // Only the last workload's flushes may be taken for the marker.
            let quiet = if index + 1 == workloads.len() { "" } else { " > /dev/null" };
            let _ = writeln!(script, "$verified_io /dev/bcache{} {workload}{quiet}", workload.volume);
        }
        script.extend(questions.iter().skip(workloads.len()).copied());
        script
    }
}

/// Compares a file's content, from byte `start`, with a model.
fn compare(
    model: &mut Model,
    path: &Path,
    start: u64,
    side: &'static str,
    report: &Report,
) -> Result<(), LegError> {
    let mut file = File::open(path).map_err(LegError::host("open the content"))?;
    file.seek(SeekFrom::Start(start)).map_err(LegError::host("seek in the content"))?;
    let volume = model.volume();
    let content = BufReader::with_capacity(1 << 20, file);
    model.check(content).map_err(|source| LegError::Content {
        side,
        volume,
        source,
        said: report.to_string(),
    })
}

/// Where each volume's content begins in the file for it, in MiB.
fn content_starts(set: &CacheSet) -> impl Iterator<Item = u64> {
    set.models.iter().scan(0, |end, model| {
        let start = *end;
        *end += (model.sectors() * 512).div_ceil(MIB);
        Some(start)
    })
}

/// An empty file as long as all volumes, for what the kernel reads from them. One, because a guest has sixteen disks at most.
fn content_file(set: &CacheSet) -> std::io::Result<PathBuf> {
    let path = set.directory().join("contents");
    let length: u64 = set.models.iter().map(|model| (model.sectors() * 512).div_ceil(MIB)).sum();
    File::create(&path)?.set_len(length * MIB)?;
    Ok(path)
}
