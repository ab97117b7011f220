//! What a device will do wrong, and when: rules that a workload or scenario sets beforehand.

use std::ops::Range;

/// Kinds of operation a rule can name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OpKind {
    /// A read.
    Read,
    /// A write, with FUA or without; in a rule a zeroing, too.
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
pub enum Landed {
    /// None of it.
    Nothing,
    /// The first half.
    Part,
    /// All of it.
    Everything,
}

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The operation fails; of a write this much has landed, a flush drops what it covered.
    Fail(Landed),
    /// It ends this many nanoseconds late.
    Late(u64),
    /// It never ends.
    Never,
    /// It fails as unreachable, with nothing landed.
    Unreachable,
    /// A read fails, and what it asked for cannot be read any more until it is written. Other operations fail with nothing
    /// landed.
    Decayed,
}

/// A fault for some operations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Which kind.
    pub on: OpKind,
    /// Only those that touch these sectors of the device (a flush touches all).
    pub sectors: Range<u64>,
    /// Lets this many pass first.
    pub skip: u32,
    /// Then strikes this many.
    pub count: u32,
    /// What they suffer.
    pub fault: Fault,
}

impl Rule {
    /// For the next `count` operations of this kind, wherever they are.
    #[must_use]
    pub const fn next(on: OpKind, count: u32, fault: Fault) -> Self {
        Self { on, sectors: 0..u64::MAX, skip: 0, count, fault }
    }
}

/// The rules of one device, the first that matches decides.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    rules: Vec<Rule>,
    failures: u64,
}

impl Faults {
    /// Adds a rule behind the others.
    pub fn add(&mut self, rule: Rule) {
        self.rules.push(rule);
    }

    /// How many operations have failed, or never end: all that have suffered a fault but the late ones.
    #[must_use]
    pub const fn failures(&self) -> u64 {
        self.failures
    }

    /// Whether something is still to fail, or to be never answered.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.rules.iter().any(|rule| rule.count > 0 && !matches!(rule.fault, Fault::Late(_)))
    }

    /// Operations fail for another reason than a rule.
    pub const fn note_failure(&mut self) {
        self.failures += 1;
    }

    /// What the operation of this kind on `range` suffers.
    pub fn strike(&mut self, kind: OpKind, range: &Range<u64>) -> Option<Fault> {
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
            self.failures += u64::from(!matches!(rule.fault, Fault::Late(_)));
            return Some(rule.fault);
        }
        None
    }
}
