//! Sets that our daemon wrote, opened by a real kernel: every geometry, after a clean stop and
//! after a crash. Also sets with several volumes, there and back.

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::kernel_image::{Scenario, kernel_image};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel, Ours, Side as _};
use bcached_tests::uml::Uml;

/// Number of writes in a turn.
const WRITES: u64 = 400;

/// Tests two cases: after a clean stop and after a crash.
fn cells(bucket_kib: u64, block_bytes: u64) -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let geometry = Geometry::small(bucket_kib << 10, block_bytes);
    for ending in [Ending::CleanStop, Ending::CrashAfterFlush(10)] {
        let mut set = CacheSet::make(geometry, 1, Maker::Ours(ours.program()))?;
        let workload = set.further(0, 32, WRITES);
        ours.leg(&mut set, &[workload], ending).context(format_args!("ours, {ending:?}"))?;
        kernel.leg(&mut set, &[], Ending::CleanStop).context(format_args!("after our {ending:?}"))?;
    }
    Ok(())
}

#[test]
fn bucket_64k_block_512() -> Outcome {
    cells(64, 512)
}

#[test]
fn bucket_64k_block_4k() -> Outcome {
    cells(64, 4096)
}

#[test]
fn bucket_512k_block_512() -> Outcome {
    cells(512, 512)
}

#[test]
fn bucket_512k_block_4k() -> Outcome {
    cells(512, 4096)
}

#[test]
fn bucket_1m_block_512() -> Outcome {
    cells(1024, 512)
}

#[test]
fn bucket_1m_block_4k() -> Outcome {
    cells(1024, 4096)
}

/// The kernel made and wrote a flash-only volume. We serve it and write to it, and the kernel finds
/// the result.
#[test]
fn a_flash_only_volume_of_the_kernel_s() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let ours = Ours::find()?;
    let mut set = kernel_image(&uml, Geometry::small(512 << 10, 4096), Scenario::FlashOnly)?.set;
    let workload = set.further(0, 32, WRITES);
    ours.leg(&mut set, &[workload], Ending::CrashAfterFlush(5)).context("ours")?;
    let workload = set.further(0, 32, WRITES);
    ours.leg(&mut set, &[workload], Ending::CleanStop).context("ours again")?;
    Kernel(&uml).leg(&mut set, &[], Ending::CleanStop).context("after us")
}

/// Two backing devices on one cache, dirty when the kernel was killed.
#[test]
fn two_backing_devices_of_the_kernel_s() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let ours = Ours::find()?;
    let mut set = kernel_image(&uml, Geometry::small(64 << 10, 512), Scenario::TwoBackingsCrash)?.set;
    let workloads = [set.further(0, 32, WRITES), set.further(1, 33, WRITES)];
    ours.leg(&mut set, &workloads, Ending::CleanStop).context("ours")?;
    Kernel(&uml).take_over(&mut set, &[]).context("after us")
}
