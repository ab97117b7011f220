//! Names of volumes that an engine knows by its own numbers, or by their UUIDs.

use crate::supervisor::table::{VolumeEntry, VolumeState};
use bcached_control::sizes::human;
use bcached_control::status::{DirtyData, UnservedVolume};
use bcached_engine::{LostAcks, VolumeId, VolumeInfo};

/// Returns the name of the volume that the set of `cache` calls `volume`, or else its UUID. `infos`
/// is what the set reports of its volumes.
pub fn name_of(volumes: &[VolumeEntry], cache: usize, volume: VolumeId, infos: &[VolumeInfo]) -> String {
    let is_it =
        |entry: &&VolumeEntry| matches!(&entry.state, VolumeState::Served(served) if served.id == volume);
    let entry = volumes.iter().filter(|entry| entry.cache == Some(cache)).find(is_it);
    let uuid = || infos.iter().find(|info| info.id == volume).map(|info| info.uuid.to_string());
    entry.and_then(|entry| entry.name.clone()).or_else(uuid).unwrap_or_default()
}

/// Returns which data of which volumes a failure of a cache device has made void; empty if none.
pub fn given_up(volumes: &[VolumeEntry], given_up: &[LostAcks]) -> String {
    let told: Vec<_> = given_up.iter().map(|lost| lost_of(volumes, lost)).collect();
    told.join(", and ")
}

/// Checks whether all of these volumes have been seen here.
pub fn are_known(volumes: &[VolumeEntry], given_up: &[LostAcks]) -> bool {
    given_up.iter().all(|lost| entry_of(volumes, lost).is_some())
}

fn entry_of<'a>(volumes: &'a [VolumeEntry], lost: &LostAcks) -> Option<&'a VolumeEntry> {
    volumes.iter().find(|entry| entry.uuid == Some(lost.uuid))
}

fn lost_of(volumes: &[VolumeEntry], lost: &LostAcks) -> String {
    let entry = entry_of(volumes, lost);
    let unserved = || {
        let (uuid, label) = (lost.uuid.to_string(), lost.label.to_string());
        UnservedVolume { uuid, label, dirty: DirtyData::default(), flash_size_bytes: None }.name()
    };
    let name = entry.and_then(|entry| entry.name.clone()).unwrap_or_else(unserved);
    let amount = format!("up to {} of {name}", human(lost.sectors * 512));
    // The engine counts sectors from the start of the device. Only the entry knows where the
    // volume's data begins.
    let offset = entry.and_then(|entry| if entry.is_flash_only() { Some(0) } else { entry.data_offset });
    let Some(offset) = offset else { return amount };
    let (start, end) = (lost.start.saturating_sub(offset), lost.end.saturating_sub(offset));
    match lost.ranges {
        1 => format!("{amount} (sectors {start} to {end})"),
        ranges => format!("{amount} ({ranges} ranges within sectors {start} to {end})"),
    }
}
