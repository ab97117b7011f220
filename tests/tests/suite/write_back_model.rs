//! Compares the simulator's model of a kernel's write-back (`bcached_sim::models::kernel`) with the
//! requests that a kernel sends to its disk.

use bcached_sim::models::kernel::{DirtyKey, OrderRecorder, write_back};
use bcached_sim::models::ssd::{Ssd, SsdModel};
use bcached_tests::failure::{Failure, Outcome};
use bcached_tests::recording::client::Plan;
use bcached_tests::recording::cut::BACKING;
use bcached_tests::recording::writer::{Run, WriteBack, Writer, record};
use bcached_tests::recording::{Action, Operation};
use bcached_tests::set::{CacheMode, Geometry};
use bcached_tests::uml::Uml;

const VOLUME_SECTORS: u64 = (16 << 20) / 512;
/// Where a volume's data begins on its backing device, in sectors.
const DATA_START: u64 = 16;

/// Returns what the kernel did to the backing device after the last request of a client: the writes
/// of data, as sector and length in sectors, and the number of flushes between the first and the
/// last of them.
fn written_back(run: &Run) -> (Vec<(u64, u64)>, usize) {
    let (end, _) = run.story.last().expect("clients asked for something");
    let of_backing = |operation: &&Operation| operation.image == BACKING;
    let since: Vec<&Operation> = run.recording.operations[*end..].iter().filter(of_backing).collect();
    let data = |operation: &&Operation| match &operation.action {
        Action::Write { offset, data } if *offset >= DATA_START * 512 => {
            Some((offset / 512, data.len() as u64 / 512))
        }
        _ => None,
    };
    let first = since.iter().position(|operation| data(operation).is_some()).unwrap_or(0);
    let last = since.iter().rposition(|operation| data(operation).is_some()).unwrap_or(0);
    let between = &since[first..=last];
    let flushes = between.iter().filter(|operation| matches!(operation.action, Action::Flush { .. }));
    (between.iter().filter_map(data).collect(), flushes.count())
}

/// The kernel writes dirty keys in address order, each in a write of its own, and does not flush.
/// The model does the same with the same keys.
#[test]
fn a_kernel_writes_back_as_the_model_does() -> Outcome {
    let Some(uml) = Uml::find_recordable() else { return Ok(()) };
    let geometry = Geometry {
        mode: CacheMode::Writeback,
        volume_sectors: VOLUME_SECTORS,
        ..Geometry::small(64 << 10, 512)
    };
    let plan = Plan { seed: 3, requests: 400, sectors: VOLUME_SECTORS, block_sectors: 1 };
    let run = record(&uml, Writer::Kernel, geometry, WriteBack::Afterwards, &plan)?;
    let (seen, flushes) = written_back(&run);
    let mut keys: Vec<DirtyKey> = seen
        .iter()
        .map(|(sector, sectors)| DirtyKey { sector: *sector, cached_at: *sector, sectors: *sectors })
        .collect();
    keys.sort_by_key(|key| key.sector);
    let mut model = OrderRecorder::default();
    write_back((&mut Ssd::new(SsdModel::sata_plp()), &mut model), 0, &keys, None);
    let wanted: Vec<u64> = model.writes.iter().map(|(sector, _)| *sector).collect();
    let found: Vec<u64> = seen.iter().map(|(sector, _)| *sector).collect();
    let neighbours = seen.windows(2).filter(|pair| pair[0].0 + pair[0].1 == pair[1].0).count();
    println!("{} writes, {neighbours} of them beside the one before, {flushes} flushes", seen.len());
    if seen.len() < 100 || found != wanted || flushes > 0 {
        let parts = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
        let words =
            format!("{} writes and {flushes} flushes; the order parts at {parts:?}: {seen:?}", seen.len());
        return Err(Failure::new(words));
    }
    Ok(())
}
