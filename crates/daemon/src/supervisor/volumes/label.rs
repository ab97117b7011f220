//! Changes the labels of volumes. A backing device keeps its own label; that of a flash-only volume
//! is in the cache's volume table.
//!
//! A volume's name never changes while the daemon runs, wherever it came from, because exports,
//! sections and scripts depend on it. The next start names a volume without a section after its new
//! label.

use crate::supervisor::Supervisor;
use crate::supervisor::options::owner::LABEL;
use crate::supervisor::table::{VolumeEntry, VolumeState};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names;
use bcached_engine::Error;
use bcached_format::Label;

/// Parses a label.
pub fn read(typed: &str, runtime: bool) -> Result<Label, Failure> {
    let refused = |why: &str| Failure::new(Kind::Usage, "cannot set label").why(why).option(LABEL);
    if runtime {
        return Err(refused("the label is stored on the device, so it cannot be set for this run only")
            .next("leave out --runtime"));
    }
    if typed.contains(names::is_unseen) {
        return Err(refused("it contains a control character or another invisible character"));
    }
    Label::from_text(typed)
        .ok_or_else(|| refused("it is longer than 32 bytes").next("choose a shorter label"))
}

impl Supervisor {
    /// Returns the label to be written, or `None` if the volume has it already.
    pub fn judge_label(
        &self,
        entry: &VolumeEntry,
        label: Label,
        notes: &mut Vec<String>,
    ) -> Result<Option<Label>, Failure> {
        let name = entry.display_name();
        let VolumeState::Served(info) = &entry.state else {
            let failure = Failure::new(Kind::NotFound, format!("cannot set the label of {name}"))
                .why("the label is written to its device, and the volume is not served");
            return Err(match &entry.state {
                VolumeState::Stopped => failure.next(format!("`bcached add {name}` serves it again")),
                _ => failure.next("`bcached status` shows why it is not served"),
            });
        };
        if let Some(other) = self.other_called(entry, label) {
            notes.push(format!(
                "{other} has that name or label, too: refer to these volumes by their names or UUIDs"
            ));
        }
        let is_named = self.config.volumes.iter().any(|volume| volume.name.as_deref() == Some(name))
            || self.config.flash.iter().any(|flash| flash.name == name);
        if !is_named && label.to_string() != name && info.label != label {
            notes.push(format!("{name} keeps this name until the next start"));
        }
        Ok(Some(label).filter(|label| info.label != *label))
    }

    /// The name of another volume that has this label or name.
    fn other_called(&self, entry: &VolumeEntry, label: Label) -> Option<String> {
        let text = label.to_string();
        let is_called = |other: &&VolumeEntry| {
            let has = match &other.state {
                VolumeState::Served(info) => Some(info.label),
                _ => other.label,
            };
            other.display_name() == text || has == Some(label)
        };
        let shared = self.shared();
        let mut others =
            shared.table.volumes.iter().filter(|other| other.uuid != entry.uuid && !other.is_removed());
        if text.is_empty() {
            None
        } else {
            others.find(is_called).map(|other| other.display_name().to_owned())
        }
    }

    /// Warns if a served volume's label may be taken for another volume. Two devices that have
    /// exchanged their paths look like that.
    pub fn tell_label_of_another(&self, entry: &VolumeEntry) {
        let VolumeState::Served(info) = &entry.state else { return };
        let (name, label) = (entry.display_name(), info.label.to_string());
        if name == label {
            return;
        }
        if let Some(other) = self.other_called(entry, info.label) {
            tracing::warn!(
                event = "label-of-another",
                "{name}: its label {label:?} is also the name or the label of volume {other}. If two devices have \
                 exchanged their paths, stop bcached and name them by UUID= in the configuration; otherwise give one \
                 of the volumes another label"
            );
        }
    }

    /// Handles the engine's answer: it has written the label, or failed.
    pub fn labelled(&self, volume: usize, label: Label, outcome: Result<(), Error>) -> Result<(), Failure> {
        let entry = {
            let mut shared = self.shared();
            let entry = &mut shared.table.volumes[volume];
            if outcome.is_ok() {
                entry.label = Some(label);
                if let VolumeState::Served(info) = &mut entry.state {
                    info.label = label;
                }
            }
            entry.clone()
        };
        let name = entry.display_name();
        outcome.map_err(|error| {
            let failure = Failure::new(Kind::Io, format!("cannot write the label of {name}"))
                .why(error.to_string())
                .next("`bcached show` on its device shows which label it has");
            tracing::error!(event = "label-failed", "{failure}");
            failure
        })?;
        self.publish(&entry);
        tracing::info!(event = "label-set", "{name}: its label is now {label:?}");
        Ok(())
    }
}
