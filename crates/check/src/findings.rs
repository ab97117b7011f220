//! Collects the findings of a check: bounded, counted, and with what they leave unknown.

use crate::damage::{Damage, DamageKind, Location, Severity};
use crate::known::Unknowns;
use serde::Serialize;
use std::collections::BTreeMap;

/// How many findings there are of one kind.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FindingCount {
    /// How bad it is.
    pub severity: Severity,
    /// Name of the kind: [`DamageKind::name`].
    pub kind: String,
    /// The number of findings, including those that were left out.
    pub count: u64,
}

/// The findings so far. Their number is bounded, so that a device full of nonsense does not fill
/// the memory.
#[derive(Debug)]
pub(crate) struct Findings {
    list: Vec<Damage>,
    limit: usize,
    left_out: u64,
    counts: BTreeMap<(Severity, String), u64>,
    doubts: Unknowns,
}

impl Findings {
    pub fn new(limit: usize) -> Self {
        let (list, counts, doubts) = (Vec::new(), BTreeMap::new(), Unknowns::default());
        Self { list, limit, left_out: 0, counts, doubts }
    }

    pub fn error(&mut self, place: Location, kind: DamageKind) {
        self.add(Severity::Error, place, kind);
    }

    pub fn warn(&mut self, place: Location, kind: DamageKind) {
        self.add(Severity::Warning, place, kind);
    }

    fn add(&mut self, severity: Severity, place: Location, kind: DamageKind) {
        self.doubts.add(&place, &kind);
        if self.limit == 0 {
            // The caller discards the findings.
            self.left_out += 1;
            return;
        }
        let count = self.counts.entry((severity, kind.name())).or_insert(0);
        *count += 1;
        // The first finding of each kind is always kept: the number of kinds is small.
        if self.list.len() < self.limit || *count == 1 {
            self.list.push(Damage { severity, place, kind });
        } else {
            self.left_out += 1;
        }
    }

    /// Returns what the findings leave unknown.
    pub const fn doubts(&self) -> &Unknowns {
        &self.doubts
    }

    /// Returns the findings, the number that were left out, and the count of each kind, worst
    /// first.
    pub fn into_parts(self) -> (Vec<Damage>, u64, Vec<FindingCount>) {
        let counts = self.counts.into_iter().rev();
        let counts = counts.map(|((severity, kind), count)| FindingCount { severity, kind, count });
        (self.list, self.left_out, counts.collect())
    }
}
