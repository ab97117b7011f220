//! What a front end must know about the volumes: identity, size, and which engine serves them.
//!
//! The daemon keeps one [`ExportTable`] and gives clones of it to every front end; volumes appear,
//! disappear and grow while clients are connected. A client keeps the [`Export`] that it was given
//! when it connected. A front end sees only the volumes that are exported through it:
//! [`ExportTable::by`].

use crate::expected_volumes::ExpectedVolumes;
use crate::frontend::{Frontend, FrontendSet};
use crate::lock::lock;
use crate::operation::SECTOR_BYTES;
use crate::route::Route;
use crate::writer_claim::WriterTable;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// A volume's UUID, in the byte order of the superblock; printed in lower case with hyphens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Uuid(pub [u8; 16]);

/// A volume as front ends see it.
#[derive(Clone)]
pub struct Export {
    /// Unique among all volumes of the daemon, not empty.
    pub name: String,
    /// Unique among all volumes of the daemon.
    pub uuid: Uuid,
    /// From the superblock; may be empty, and two volumes may have the same.
    pub label: String,
    /// Capacity in sectors.
    pub sectors: u64,
    /// The volume's logical block in sectors, a power of two up to 8. Every front end reports it,
    /// as the kernel's bcache does: file systems and partition tables are made for one block size.
    /// (Through front ends that cannot enforce it, smaller requests work, and cost more.)
    pub block_sectors: u32,
    /// No client may write.
    pub read_only: bool,
    /// Several clients may write at once; they coordinate among themselves (a cluster file system).
    pub shared: bool,
    /// The front ends that show it.
    pub frontends: FrontendSet,
    /// The route to it. `None`: configured, but not served now (for instance, its devices are
    /// missing). It counts when the empty name is resolved, and cannot be used.
    pub served: Option<Route>,
}

/// Why a name leads to no volume.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    /// No volume has that name, UUID or label.
    #[error("no volume is called {0:?}")]
    Unknown(String),
    /// Several volumes have that label.
    #[error("the label {label:?} belongs to several volumes: {names}")]
    Ambiguous {
        /// The requested label.
        label: String,
        /// The volumes' names, separated by commas.
        names: String,
    },
    /// The empty name means the only volume, and there are several, or none.
    #[error("the name of a volume is needed: {0} volumes are configured")]
    NameNeeded(usize),
    /// There is such a volume, but it is exported through another front end.
    #[error("the volume {name:?} is exported only by {frontends}")]
    OtherFrontend {
        /// Its name.
        name: String,
        /// Its front ends.
        frontends: FrontendSet,
    },
    /// The volume is configured and not served now.
    #[error("the volume {0:?} is not served at present")]
    NotServed(String),
    /// The same, with a known reason.
    #[error("the volume {name:?} is not served: {why}")]
    Absent {
        /// Its name.
        name: String,
        /// A clause.
        why: String,
    },
    /// Waiting for volumes has ended.
    #[error("the daemon is stopping, or another process is taking over: reconnect")]
    Ending,
}

/// All volumes, by name. Clones share one table.
#[derive(Clone, Default)]
pub struct ExportTable {
    by_name: Arc<Mutex<BTreeMap<String, Arc<Export>>>>,
    writing: WriterTable,
    /// The volumes that are expected.
    pub(crate) arrivals: Arc<ExpectedVolumes>,
    /// Only what this front end shows; `None`: all.
    frontend: Option<Frontend>,
}

impl Export {
    /// Capacity in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.sectors * SECTOR_BYTES
    }
}

impl ExportTable {
    /// Creates an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the same table, as a front end sees it.
    #[must_use]
    pub fn by(&self, frontend: Frontend) -> Self {
        Self { frontend: Some(frontend), ..self.clone() }
    }

    /// The same, for a front end used by the kernel. Each volume has been claimed for that
    /// ([`Peer::Kernel`](crate::Peer::Kernel)) before it is exported there, so a writer through it
    /// locks out no other.
    #[must_use]
    pub fn by_kernel(&self, frontend: Frontend) -> Self {
        Self { writing: WriterTable::default(), ..self.by(frontend) }
    }

    fn shows(&self, export: &Export) -> bool {
        self.frontend.is_none_or(|frontend| export.frontends.has(frontend))
    }

    /// Adds a volume, or replaces what is known about the one with its name (connected clients keep
    /// what they were told).
    pub fn insert(&self, export: Export) {
        assert!(!export.name.is_empty(), "the empty name stands for the only volume");
        let came = export.served.is_some().then(|| export.name.clone());
        lock(&self.by_name).insert(export.name.clone(), Arc::new(export));
        if let Some(name) = came {
            self.arrivals.settle(&name);
        }
    }

    /// Removes a volume. Its clients continue until its engine reports that it is gone.
    pub fn remove(&self, name: &str) -> Option<Arc<Export>> {
        let removed = lock(&self.by_name).remove(name);
        self.arrivals.settle(name);
        removed
    }

    /// Returns the route to the volume called `name`, if it is served.
    #[must_use]
    pub fn route(&self, name: &str) -> Option<Route> {
        lock(&self.by_name).get(name).filter(|export| self.shows(export))?.served.clone()
    }

    /// Returns the volume of exactly that name, if it is served.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<Arc<Export>> {
        let by_name = lock(&self.by_name);
        by_name.get(name).filter(|export| export.served.is_some() && self.shows(export)).cloned()
    }

    /// Returns the table of writers, which covers all front ends.
    #[must_use]
    pub const fn writing(&self) -> &WriterTable {
        &self.writing
    }

    /// Returns the volumes that are served now, by name.
    #[must_use]
    pub fn served(&self) -> Vec<Arc<Export>> {
        let by_name = lock(&self.by_name);
        let served = by_name.values().filter(|export| export.served.is_some() && self.shows(export));
        served.cloned().collect()
    }

    /// Returns the served volume that `wanted` refers to: by name, else UUID, else label; the empty
    /// name means the only volume configured.
    ///
    /// # Errors
    /// [`ExportError`] says why there is none.
    pub fn find(&self, wanted: &str) -> Result<Arc<Export>, ExportError> {
        let by_name = lock(&self.by_name);
        let export = if wanted.is_empty() {
            let shown: Vec<_> = by_name.values().filter(|export| self.shows(export)).collect();
            match shown.as_slice() {
                [only] => Arc::clone(only),
                several => return Err(ExportError::NameNeeded(several.len())),
            }
        } else if let Some(export) = by_name.get(wanted) {
            Arc::clone(export)
        } else if let Some(export) = by_uuid(&by_name, wanted) {
            export
        } else {
            by_label(&by_name, wanted)?
        };
        if !self.shows(&export) {
            return Err(ExportError::OtherFrontend {
                name: export.name.clone(),
                frontends: export.frontends,
            });
        }
        if export.served.is_some() { Ok(export) } else { Err(ExportError::NotServed(export.name.clone())) }
    }
}

fn by_uuid(by_name: &BTreeMap<String, Arc<Export>>, wanted: &str) -> Option<Arc<Export>> {
    let uuid = wanted.parse::<Uuid>().ok()?;
    by_name.values().find(|export| export.uuid == uuid).cloned()
}

fn by_label(by_name: &BTreeMap<String, Arc<Export>>, wanted: &str) -> Result<Arc<Export>, ExportError> {
    let labelled: Vec<_> = by_name.values().filter(|export| export.label == wanted).collect();
    match labelled.as_slice() {
        [] => Err(ExportError::Unknown(wanted.to_owned())),
        [only] => Ok(Arc::clone(only)),
        several => {
            let names: Vec<&str> = several.iter().map(|export| export.name.as_str()).collect();
            Err(ExportError::Ambiguous { label: wanted.to_owned(), names: names.join(", ") })
        }
    }
}

/// Not a UUID in the usual form: 32 hexadecimal digits, grouped 8-4-4-4-12 by hyphens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("not a UUID of the form xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")]
pub struct UuidError;

impl FromStr for Uuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let groups: Vec<&str> = text.split('-').collect();
        if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
            return Err(UuidError);
        }
        let digits = groups.concat();
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(UuidError);
        }
        u128::from_str_radix(&digits, 16).map(|number| Self(number.to_be_bytes())).map_err(|_| UuidError)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("name", &self.name)
            .field("uuid", &format_args!("{}", self.uuid))
            .field("label", &self.label)
            .field("sectors", &self.sectors)
            .field("block_sectors", &self.block_sectors)
            .field("read_only", &self.read_only)
            .field("shared", &self.shared)
            .field("served", &self.served.as_ref().map(Route::volume))
            .finish()
    }
}

#[cfg(test)]
impl Export {
    /// A small export without an engine behind it.
    pub(crate) fn sample(name: &str, served: bool) -> Self {
        let (connector, _server) = crate::open(1, Arc::new(|| {}));
        Self {
            name: name.to_owned(),
            uuid: Uuid([1; 16]),
            label: String::new(),
            sectors: 8,
            block_sectors: 8,
            read_only: false,
            shared: false,
            frontends: Frontend::Nbd.into(),
            served: served.then(|| Route::new(crate::operation::VolumeId(0), &connector)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(volumes: &[(&str, u8, &str, bool)]) -> ExportTable {
        let table = ExportTable::new();
        for (name, uuid, label, served) in volumes {
            let label = (*label).to_owned();
            table.insert(Export { uuid: Uuid([*uuid; 16]), label, ..Export::sample(name, *served) });
        }
        table
    }

    fn name_of(found: Result<Arc<Export>, ExportError>) -> String {
        found.expect("there is such a volume").name.clone()
    }

    #[test]
    fn a_name_goes_before_a_uuid_and_a_uuid_before_a_label() {
        let second = "02020202-0202-0202-0202-020202020202";
        let table = table(&[("one", 1, second, true), ("two", 2, "one", true)]);
        assert_eq!(name_of(table.find("one")), "one");
        assert_eq!(name_of(table.find(second)), "two");
        assert_eq!(name_of(table.find(&second.to_uppercase())), "two");
        assert_eq!(table.find("three").unwrap_err(), ExportError::Unknown("three".to_owned()));
    }

    #[test]
    fn a_label_of_two_volumes_is_ambiguous() {
        let table = table(&[("one", 1, "data", true), ("two", 2, "data", true), ("three", 3, "own", true)]);
        assert_eq!(name_of(table.find("own")), "three");
        let names = "one, two".to_owned();
        assert_eq!(
            table.find("data").unwrap_err(),
            ExportError::Ambiguous { label: "data".to_owned(), names }
        );
    }

    #[test]
    fn the_empty_name_is_the_only_volume_configured() {
        assert_eq!(table(&[]).find("").unwrap_err(), ExportError::NameNeeded(0));
        assert_eq!(name_of(table(&[("one", 1, "", true)]).find("")), "one");
        // The second is not served now; it may be tomorrow, and the empty name must not change its
        // meaning.
        let two = table(&[("one", 1, "", true), ("two", 2, "", false)]);
        assert_eq!(two.find("").unwrap_err(), ExportError::NameNeeded(2));
        assert_eq!(two.find("two").unwrap_err(), ExportError::NotServed("two".to_owned()));
        assert_eq!(two.served().len(), 1);
        assert!(two.by_name("one").is_some() && two.by_name("two").is_none());
        assert!(two.remove("two").is_some());
        assert_eq!(name_of(two.find("")), "one");
    }

    #[test]
    fn a_front_end_shows_what_is_to_be_had_by_it() {
        let table = table(&[("one", 1, "data", true), ("two", 2, "", true)]);
        let file =
            Export { frontends: Frontend::Fuse.into(), ..(*table.find("two").expect("it is there")).clone() };
        table.insert(file);
        let (nbd, fuse) = (table.by(Frontend::Nbd), table.by(Frontend::Fuse));
        assert_eq!(name_of(nbd.find("")), "one");
        assert_eq!(name_of(fuse.find("")), "two");
        let refused = ExportError::OtherFrontend { name: "one".to_owned(), frontends: Frontend::Nbd.into() };
        assert_eq!(fuse.find("data").unwrap_err(), refused);
        assert!(fuse.by_name("one").is_none() && fuse.route("one").is_none() && fuse.route("two").is_some());
        assert_eq!((nbd.served().len(), fuse.served().len(), table.served().len()), (1, 1, 2));
        // All front ends share one table of writers.
        let claim = nbd.writing().claim(
            Uuid([2; 16]),
            crate::Peer::Connection(1),
            crate::WriterGeneration::default(),
        );
        assert!(claim.is_some() && fuse.writing().look(Uuid([2; 16]), crate::Peer::File(1)).1);
    }

    #[test]
    fn uuids_print_as_they_are_parsed() {
        let text = "f00dbeef-0123-4567-89ab-cdef01234567";
        assert_eq!(text.parse::<Uuid>().unwrap().to_string(), text);
        for bad in
            ["", "f00dbeef", "f00dbeef-0123-4567-89ab-cdef0123456", "+00dbeef-0123-4567-89ab-cdef01234567"]
        {
            assert_eq!(bad.parse::<Uuid>(), Err(UuidError), "{bad}");
        }
    }
}
