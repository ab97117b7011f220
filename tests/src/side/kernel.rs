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
    /// Runs a leg on backing devices that have no cache: they are served as they are, their content
    /// is checked, and then they are attached.
    ///
    /// # Errors
    /// [`LegError`], as in a leg.
    pub fn attach(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError> {
        let attach = (0..set.backings.len()).fold(String::new(), |script, n| format!("{script}attach {n}\n"));
        self.leg_asking(set, &[&attach], workloads, ending).map(|_report| ())
    }

    /// Makes the kernel create a flash-only volume of `sectors` sectors, as the set's last one. It
    /// is blank. The set is then stopped cleanly.
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

    /// Runs a leg in which a script queries the kernel before each of the workloads and, if there
    /// is one script more, after the last. Returns the output.
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

/// A message that a kernel logs about a set left by a kernel. A kernel does not journal that data
/// has become clean, so a replay makes the data dirty again. If its bucket has been reused
/// meanwhile, the key is stale. The data is on the backing device, as the comparison of the content
/// shows. We never leave such a key.
const STALE_DIRTY: &str = "bcache: bch_extent_bad() stale dirty pointer, *";

/// The clean end of a job.
const STOP: &str = "stop_everything\n";

impl Kernel<'_> {
    /// Lets the kernel take over the set permanently. It checks the content, collects garbage,
    /// writes, and detaches every backing device. After that, each backing device must hold its
    /// whole volume alone.
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

    /// Runs a job that begins with [`Kernel::opening`], and compares the content that it read with
    /// the models.
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

    /// Returns shell commands that register the devices and read every whole volume into the
    /// content file, the last of the job's images.
    fn opening(&self, set: &CacheSet) -> String {
        let own = set.images().len();
        let mut devices: Vec<String> = (0..own).map(|index| self.0.device(index)).collect();
        if set.models.len() > set.backings.len() {
            // The kernel numbers volumes in the order of registration. Flash-only volumes appear
            // with the cache and are the set's last, so the cache is registered last.
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
                // A kernel may let write-back that is in progress land after a discard of the same
                // data (`docs/compat.md`), and it finishes the write-back it has begun, whatever
                // its settings. So everything is written back before the discards.
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

/// Compares a file's content, from byte `start` on, with a model.
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

/// Returns where each volume's content begins in the content file, in MiB.
fn content_starts(set: &CacheSet) -> impl Iterator<Item = u64> {
    set.models.iter().scan(0, |end, model| {
        let start = *end;
        *end += (model.sectors() * 512).div_ceil(MIB);
        Some(start)
    })
}

/// Creates an empty file as long as all volumes together, for what the kernel reads from them. It
/// is a single file because a guest has at most sixteen disks.
fn content_file(set: &CacheSet) -> std::io::Result<PathBuf> {
    let path = set.directory().join("contents");
    let length: u64 = set.models.iter().map(|model| (model.sectors() * 512).div_ceil(MIB)).sum();
    File::create(&path)?.set_len(length * MIB)?;
    Ok(path)
}
