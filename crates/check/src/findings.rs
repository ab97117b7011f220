//! The findings of a check, as they come: bounded, counted, and with what they leave unknown.

use crate::damage::{Damage, DamageKind, Place, Severity};
use crate::known::Doubts;
use serde::Serialize;
use std::collections::BTreeMap;

/// How often one kind of finding was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Count {
    /// How bad it is.
    pub severity: Severity,
    /// Name of the kind: [`DamageKind::name`].
    pub kind: String,
    /// How often, those included that there was no room for.
    pub count: u64,
}

/// The findings so far: bounded, so that a device full of nonsense does not fill the memory.
#[derive(Debug)]
pub(crate) struct Findings {
    list: Vec<Damage>,
    limit: usize,
    left_out: u64,
    counts: BTreeMap<(Severity, String), u64>,
    doubts: Doubts,
}

impl Findings {
    pub fn new(limit: usize) -> Self {
        let (list, counts, doubts) = (Vec::new(), BTreeMap::new(), Doubts::default());
        Self { list, limit, left_out: 0, counts, doubts }
    }

    pub fn error(&mut self, place: Place, kind: DamageKind) {
        self.add(Severity::Error, place, kind);
    }

    pub fn warn(&mut self, place: Place, kind: DamageKind) {
        self.add(Severity::Warning, place, kind);
    }

    fn add(&mut self, severity: Severity, place: Place, kind: DamageKind) {
        self.doubts.add(&place, &kind);
        if self.limit == 0 {
            // Nobody is going to look at them.
            self.left_out += 1;
            return;
        }
        let count = self.counts.entry((severity, kind.name())).or_insert(0);
        *count += 1;
        // The first of its kind is kept in any case: there are only so many kinds.
        if self.list.len() < self.limit || *count == 1 {
            self.list.push(Damage { severity, place, kind });
        } else {
            self.left_out += 1;
        }
    }

    /// What they leave unknown.
    pub const fn doubts(&self) -> &Doubts {
        &self.doubts
    }

    /// The findings, how many there was no room for, and how often each kind was found, the worst first.
    pub fn into_parts(self) -> (Vec<Damage>, u64, Vec<Count>) {
        let counts = self.counts.into_iter().rev();
        let counts = counts.map(|((severity, kind), count)| Count { severity, kind, count });
        (self.list, self.left_out, counts.collect())
    }
}
