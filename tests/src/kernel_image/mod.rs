//! Cache sets made by real kernels, with the model of what their volumes hold.
//!
//! Each call formats fresh image files with `make-bcache`, boots a machine, and lets its kernel
//! bring them into one named state ([`Scenario`]). This takes seconds, so no image is kept in the
//! repository.

mod scenario;

use std::io;

pub use scenario::{Scenario, base_workload};

use crate::guest::{self, GuestError, Job, Machine, Report};
use crate::offline;
use crate::set::{CacheSet, Geometry, Maker};
use crate::workload::{Fate, Model};

/// A set that a kernel brought into a state.
#[derive(Debug)]
pub struct KernelImage {
    /// The images and models.
    pub set: CacheSet,
    /// The output of the kernel's run.
    pub report: Report,
}

/// Makes one kernel image.
///
/// # Errors
/// [`GuestError`]: `make-bcache` or the guest failed, or the kernel logged an unexpected line.
pub fn kernel_image(
    machine: &dyn Machine,
    geometry: Geometry,
    scenario: Scenario,
) -> Result<KernelImage, GuestError> {
    let mut set = CacheSet::make(geometry, scenario.backings(), Maker::Tools)
        .map_err(GuestError::host("make the images"))?;
    let plan = scenario.plan(machine, &geometry);
    let crash_at = plan.crash_at.as_deref();
    let job = Job { images: &set.images(), script: &plan.script, crash_at, limit: guest::LIMIT };
    let report = machine.run(&job)?;
    report.expect_allowed_log()?;

    if scenario == Scenario::FlashOnly {
        set.models.push(Model::blank(0, geometry.volume_sectors));
    }
    let ran = report.output.iter().filter(|line| *line == scenario::RAN).count();
    // A killed guest may have reached the end of its last workload.
    let started = if crash_at.is_some() { plan.workloads.len() } else { ran };
    for (index, workload) in plan.workloads[..started].iter().enumerate() {
        let model = set.models.iter_mut().find(|model| model.volume() == workload.volume);
        // Only the plan's last workload is running when a guest is killed.
        let crashed = crash_at.is_some() && index + 1 == started;
        let fate = if crashed { Fate::CrashedAfterFlush(report.last_flush()) } else { Fate::Finished };
        model.expect("a plan writes to its own volumes").apply(workload, fate);
    }
    if crash_at.is_some() {
        // Where a crash of the kernel leaves different content on the backing device under a clean
        // copy in the cache, that content becomes visible when the copy is evicted.
        let differing = offline::note_differing_copies(&mut set);
        differing.map_err(io::Error::other).map_err(GuestError::host("look at the images"))?;
    }
    Ok(KernelImage { set, report })
}
