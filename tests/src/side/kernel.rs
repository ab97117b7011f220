//! A leg on a real kernel: one boot.

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Ending, LegError, Side};
use crate::guest::{GuestError, Job, Machine};
use crate::set::CacheSet;
use crate::workload::{Fate, Workload};

/// A leg that takes longer is stuck.
const LIMIT: Duration = Duration::from_secs(600);

/// The kernel of a machine.
pub struct Kernel<'a>(pub &'a dyn Machine);

impl Side for Kernel<'_> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn leg(&self, set: &mut CacheSet, workloads: &[Workload], ending: Ending) -> Result<(), LegError> {
        let contents = content_files(set).map_err(GuestError::host("make files for the content"))?;
        let images: Vec<&Path> =
            set.images().into_iter().chain(contents.iter().map(PathBuf::as_path)).collect();
        let script = self.script(set, workloads, ending);
        let crash_at = match ending {
            Ending::CleanStop => None,
            Ending::CrashAfterFlush(number) => Some(format!("flushed {number}")),
        };
        let job = Job { images: &images, script: &script, crash_at: crash_at.as_deref(), limit: LIMIT };
        let report = self.0.run(&job)?;
        report.expect_allowed_log()?;
        for (model, path) in set.models.iter_mut().zip(&contents) {
            let file = File::open(path).map_err(LegError::host("open the content"))?;
            let volume = model.volume();
            model.check(BufReader::with_capacity(1 << 20, file)).map_err(|source| LegError::Content {
                side: self.0.name(),
                volume,
                source,
                said: report.to_string(),
            })?;
        }
        for (index, workload) in workloads.iter().enumerate() {
            let crashed = ending != Ending::CleanStop && index + 1 == workloads.len();
            let fate = if crashed { Fate::CrashedAfterFlush(report.last_flush()) } else { Fate::Finished };
            super::apply(set, workload, fate);
        }
        Ok(())
    }
}

impl Kernel<'_> {
    fn script(&self, set: &CacheSet, workloads: &[Workload], ending: Ending) -> String {
        let own = set.images().len();
        let devices: Vec<String> = (0..own).map(|index| self.0.device(index)).collect();
        let mut script = format!("register {}\n", devices.join(" "));
        for (n, model) in set.models.iter().enumerate() {
            let (sectors, output) = (model.sectors(), self.0.device(own + n));
            let _ = write!(
                script,
                "wait_for 200 test -b /dev/bcache{n}\n\
                test $(cat /sys/block/bcache{n}/size) = {sectors}\n\
                dd if=/dev/bcache{n} of={output} bs=1M conv=fsync 2>/dev/null\n"
            );
        }
        for n in 0..set.backings.len() {
            let _ = writeln!(script, "no_bypass {n}");
        }
        for (index, workload) in workloads.iter().enumerate() {
            // Only the last workload's flushes may be taken for the marker.
            let quiet = if index + 1 == workloads.len() { "" } else { " > /dev/null" };
            let _ = writeln!(script, "$verified_io /dev/bcache{} {workload}{quiet}", workload.volume);
        }
        script + if ending == Ending::CleanStop { "stop_everything\n" } else { "sleep 600\n" }
    }
}

/// Empty files as long as the volumes, for what the kernel reads from them.
fn content_files(set: &CacheSet) -> std::io::Result<Vec<PathBuf>> {
    let files = set.models.iter().map(|model| {
        let path = set.directory().join(format!("content{}", model.volume()));
        File::create(&path)?.set_len(model.sectors() * 512)?;
        Ok(path)
    });
    files.collect()
}
