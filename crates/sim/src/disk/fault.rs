//! Rules that determine which faults a device has and when; a workload or scenario sets them
//! beforehand.

use std::ops::Range;

/// Kinds of operation that a rule can name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OpKind {
    /// A read.
    Read,
    /// A write, with or without FUA; in a rule it also matches a zeroing.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A zeroing.
    Zero,
}

/// How much of a failed write has landed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WrittenPart {
    /// None of it.
    Nothing,
    /// The first half.
    Part,
    /// All of it.
    Everything,
}

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskFault {
    /// The operation fails. Of a write, this much has landed; a flush drops what it covered.
    Fail(WrittenPart),
    /// It completes this many nanoseconds late.
    Late(u64),
    /// It never completes.
    Never,
    /// It fails as unreachable, with nothing landed.
    Unreachable,
    /// A read fails, and its sectors stay unreadable until they are written. Other operations fail
    /// with nothing landed.
    Decayed,
}

/// A fault for some operations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FaultRule {
    /// The kind of operation.
    pub on: OpKind,
    /// Only operations that touch these sectors of the device (a flush touches all).
    pub sectors: Range<u64>,
    /// Lets this many operations pass first.
    pub skip: u32,
    /// Then strikes this many.
    pub count: u32,
    /// The fault that they get.
    pub fault: DiskFault,
}

impl FaultRule {
    /// Creates a rule for the next `count` operations of this kind, wherever they are.
    #[must_use]
    pub const fn next(on: OpKind, count: u32, fault: DiskFault) -> Self {
        Self { on, sectors: 0..u64::MAX, skip: 0, count, fault }
    }
}

/// The rules of one device; the first that matches decides.
#[derive(Clone, Debug, Default)]
pub struct FaultRules {
    rules: Vec<FaultRule>,
    failures: u64,
}

impl FaultRules {
    /// Adds a rule after the others.
    pub fn add(&mut self, rule: FaultRule) {
        self.rules.push(rule);
    }

    /// Returns how many operations have failed or will never complete: every struck operation
    /// except the late ones.
    #[must_use]
    pub const fn failures(&self) -> u64 {
        self.failures
    }

    /// Returns whether a rule will still make an operation fail or never complete.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.rules.iter().any(|rule| rule.count > 0 && !matches!(rule.fault, DiskFault::Late(_)))
    }

    /// Counts a failure that has another cause than a rule.
    pub const fn note_failure(&mut self) {
        self.failures += 1;
    }

    /// Returns the fault that an operation of this kind on `range` gets.
    pub fn strike(&mut self, kind: OpKind, range: &Range<u64>) -> Option<DiskFault> {
        let everywhere = matches!(kind, OpKind::Flush);
        for rule in &mut self.rules {
            let touches = everywhere || (rule.sectors.start < range.end && range.start < rule.sectors.end);
            let is_meant = rule.on == kind || rule.on == OpKind::Write && kind == OpKind::Zero;
            if !is_meant || rule.count == 0 || !touches {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            rule.count -= 1;
            self.failures += u64::from(!matches!(rule.fault, DiskFault::Late(_)));
            return Some(rule.fault);
        }
        None
    }
}
