//! A shorter selection of tests on kernel 6.12: both directions, clean and crashed, and a turn
//! there and back.

use bcached_check::Options;
use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::kernel_image::{Scenario, base_workload, kernel_image};
use bcached_tests::offline::examine;
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel, Ours, Side as _};
use bcached_tests::vm::Vm;
use bcached_tests::workload::Workload;

#[test]
fn sets_of_kernel_6_12_are_served_here() -> Outcome {
    let Some(vm) = Vm::find() else { return Ok(()) };
    let ours = Ours::find()?;
    for (scenario, bucket, block) in
        [(Scenario::CleanStop, 64 << 10, 4096), (Scenario::Crash, 512 << 10, 512)]
    {
        let mut image = kernel_image(&vm, Geometry::small(bucket, block), scenario)?;
        let set = &mut image.set;
        examine(&set.cache, &set.backings, &mut set.models, Options::default())?;
        ours.leg(set, &[], Ending::CleanStop).context(format_args!("{scenario:?}"))?;
    }
    Ok(())
}

#[test]
fn kernel_6_12_takes_a_set_of_ours_and_gives_it_back() -> Outcome {
    let Some(vm) = Vm::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&vm));
    let geometry = Geometry::small(512 << 10, 4096);
    let mut set = CacheSet::make(geometry, 1, Maker::Ours(ours.program()))?;
    let mut workload = Workload { seed: 41, ..base_workload(&geometry) };
    let crash = Ending::CrashAfterFlush(8);
    for (leg, ending) in [crash, crash, Ending::CleanStop, Ending::CleanStop].into_iter().enumerate() {
        let side: &dyn bcached_tests::side::Side = if leg % 2 == 0 { &ours } else { &kernel };
        side.leg(&mut set, &[workload], ending).context(format_args!("leg {leg}"))?;
        workload.seed += 1;
        workload.first_sequence = workload.next_sequence();
    }
    ours.leg(&mut set, &[], Ending::CleanStop)?;
    Ok(())
}
