//! The text of a check's result: a verdict, and the damage grouped by kind, with what each kind
//! costs.

use bcached_check::{
    BackingClaim, Certainty, Damage, DamageKind, DirtyCount, HiddenRange, Report, Severity, Structure, Volume,
};
use bcached_control::sizes::{human, human_range};
use bcached_format::Position;
use bcached_format::units::bytes_of;
use serde::Serialize;
use std::collections::BTreeSet;

/// The findings of one kind.
#[derive(Serialize)]
pub struct FindingGroup {
    /// How bad it is.
    pub severity: Severity,
    /// The number of findings.
    pub count: u64,
    /// One sentence for all of them.
    pub what: String,
}

/// Returns the verdict in one line: what is damaged, and what is known about the dirty data.
pub fn verdict(report: &Report) -> String {
    let dirty = dirty(report);
    let Some(damage) = worst(report) else {
        let tree = report.tree.as_ref().map(|tree| {
            let used = report.volumes.iter().filter(|volume| !volume.invalidated).count();
            let nodes = counted(tree.interior_nodes + tree.leaves, "node");
            format!(", {nodes}, {}", counted(used as u64, "volume"))
        });
        let never = || {
            let is = report.set.as_ref().is_some_and(|set| !set.started);
            if is { ", never started".to_owned() } else { String::new() }
        };
        return format!("sound{}, {dirty}", tree.unwrap_or_else(never));
    };
    let mut letters = dirty.chars();
    let dirty: String = letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect();
    format!("DAMAGED: {damage}. {dirty}.")
}

/// Returns the worst damage; `None` if there is none.
fn worst(report: &Report) -> Option<String> {
    let errors = || report.findings.iter().filter(|damage| damage.severity == Severity::Error);
    let of = |structure| errors().any(|damage| damage.place.structure == structure);
    let any = |is_it: fn(&DamageKind) -> bool| errors().any(|damage| is_it(&damage.kind));
    let is_root = |damage: &Damage| {
        let is_all =
            |node: bcached_check::NodeLocation| node.low == Position::ZERO && node.high == Position::MAX;
        matches!(damage.kind, DamageKind::BadRoot { .. })
            || damage.hides_keys() && report.tree.is_some_and(|tree| tree.leaves + tree.interior_nodes == 0)
            || damage.hides_keys() && damage.place.node.is_some_and(is_all)
    };
    let nodes = damaged_nodes(report);
    let others: u64 =
        report.counts.iter().filter(|one| one.severity == Severity::Error).map(|one| one.count).sum();
    Some(match () {
        () if others == 0 && report.findings_left_out == 0 => return None,
        () if report.set.is_none() => "superblock unreadable".to_owned(),
        () if any(|kind| matches!(kind, DamageKind::NoJournalEntries)) => "journal unreadable".to_owned(),
        () if errors().any(is_root) => "root node unreadable".to_owned(),
        () if of(Structure::Priorities) => "generations of the buckets unreadable".to_owned(),
        () if of(Structure::Journal) && report.dirty.state == Certainty::Unknown => {
            "journal incomplete".to_owned()
        }
        () if any(|kind| matches!(kind, DamageKind::OlderCache { .. })) => {
            "the cache is an older copy of itself".to_owned()
        }
        () if any(|kind| {
            matches!(kind, DamageKind::UuidTableSum { .. } | DamageKind::DoubtedSlot { .. })
        }) =>
        {
            "volume table differs from the one that was written".to_owned()
        }
        () if of(Structure::UuidTable) => "volume table unreadable".to_owned(),
        () if nodes > 0 => format!("{} damaged", counted(nodes, "index node")),
        () if any(|kind| matches!(kind, DamageKind::OlderBacking)) => {
            "a backing device is an older copy of itself".to_owned()
        }
        () if report.dirty.nobodys_sectors > 0 => "volume table incomplete".to_owned(),
        () => counted(others, "error"),
    })
}

/// Returns how much data is dirty, as far as that is known. Adds the state in the backing devices'
/// superblocks if the amount is unknown or the two differ.
fn dirty(report: &Report) -> String {
    let DirtyCount { state, sectors, alone_sectors, nobodys_sectors } = report.dirty;
    let mut text = match state {
        Certainty::Known => with_others(Some(format!("{} dirty", human(bytes_of(sectors)))), &report.dirty),
        Certainty::AtLeast if sectors > 0 => {
            with_others(Some(format!("at least {} dirty", human(bytes_of(sectors)))), &report.dirty)
        }
        Certainty::AtLeast if alone_sectors + nobodys_sectors > 0 => with_others(None, &report.dirty),
        Certainty::Unknown if nobodys_sectors > 0 => {
            format!(
                "{} dirty, of volumes that the volume table does not name",
                human(bytes_of(nobodys_sectors))
            )
        }
        Certainty::AtLeast | Certainty::Unknown => "amount of dirty data unknown".to_owned(),
    };
    let is_odd = |claim: &&BackingClaim| {
        let volume = report.volumes.iter().find(|volume| volume.uuid == claim.uuid);
        let is_none = volume.is_none_or(|volume| volume.dirty_sectors == 0);
        state != Certainty::Known || claim.state == "dirty" && is_none
    };
    for said in ["dirty", "clean", "stale"] {
        let those = report.claims.iter().filter(is_odd).filter(|claim| claim.state == said);
        let those: Vec<_> = those.map(|claim| format!("{}'s", of_claim(claim))).collect();
        text += &match those.as_slice() {
            [] => String::new(),
            [one] => format!("; {one} superblock says {said}"),
            several => format!("; {} superblocks say {said}", listed(several)),
        };
    }
    text
}

/// Joins the dirty data of volumes with backing devices (`None`: none is known of) and that of
/// other volumes.
fn with_others(of_backed: Option<String>, dirty: &DirtyCount) -> String {
    let others = [
        (dirty.alone_sectors, "of flash-only volumes"),
        (dirty.nobodys_sectors, "of volumes that the table does not name"),
    ];
    let others = others.into_iter().filter(|(sectors, _)| *sectors > 0);
    let others: Vec<_> = others.map(|(sectors, of)| format!("{} {of}", human(bytes_of(sectors)))).collect();
    match of_backed {
        Some(of_backed) => std::iter::once(of_backed).chain(others).collect::<Vec<_>>().join(", "),
        None => format!("dirty: at least {}", others.join(", ")),
    }
}

/// Returns one group for each kind of finding, the worst first.
pub fn groups(report: &Report) -> Vec<FindingGroup> {
    let mut groups = Vec::new();
    let nodes = damaged_nodes(report);
    if nodes > 0 {
        let parts: Vec<_> = report.hidden.iter().map(|hidden| stretch(report, hidden)).collect();
        let cost = match parts.as_slice() {
            [] => "it indexes no data of a volume".to_owned(),
            parts => format!("{}{} unreadable from the cache", listed(parts), are(parts)),
        };
        let what =
            if nodes == 1 { "index node damaged".to_owned() } else { format!("{nodes} index nodes damaged") };
        let severity = Severity::Error;
        groups.push(FindingGroup { severity, count: nodes, what: format!("{what}; {cost}") });
    }
    for count in &report.counts {
        let is_it = |damage: &&Damage| damage.severity == count.severity && damage.kind.name() == count.kind;
        let Some(first) = report.findings.iter().find(is_it).filter(|damage| !damage.hides_keys()) else {
            continue;
        };
        let what = match (&first.kind, count.count) {
            (DamageKind::Nobodys { .. }, count) => format!(
                "{} to no volume of the table; {} of that is dirty",
                if count == 1 { "1 extent belongs".to_owned() } else { format!("{count} extents belong") },
                human(bytes_of(report.dirty.nobodys_sectors))
            ),
            (_, 1) => first.to_string(),
            (_, count) => format!("{first} (and {} more of this kind)", count - 1),
        };
        groups.push(FindingGroup { severity: count.severity, count: count.count, what });
    }
    groups
}

/// `a`, `a and b`, `a, b and c`.
fn listed(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

fn are(parts: &[String]) -> &'static str {
    if parts.len() == 1 { " is" } else { " are" }
}

/// Returns the number of damaged index nodes among the listed findings.
fn damaged_nodes(report: &Report) -> u64 {
    let nodes = report.findings.iter().filter(|damage| damage.hides_keys());
    nodes.filter_map(|damage| damage.place.sector).collect::<BTreeSet<_>>().len() as u64
}

/// Returns a range like `media 711-761 MiB`, counted from the start of the volume.
fn stretch(report: &Report, hidden: &HiddenRange) -> String {
    let Some(volume) = report.volumes.iter().find(|volume| volume.inode == hidden.inode) else {
        return format!("volume number {}", hidden.inode);
    };
    let name = name_in(report, volume);
    if hidden.is_all_of(volume) {
        return format!("all of {name}");
    }
    let start = bytes_of(hidden.start.saturating_sub(volume.start));
    match hidden.end.into_iter().chain(volume.end).min() {
        Some(end) => format!("{name} {}", human_range(start, bytes_of(end.saturating_sub(volume.start)))),
        None => format!("{name} from {} on", human(start)),
    }
}

/// Returns the label in the backing device's superblock. The UUID table's copy was written once and
/// may be outdated.
fn name_in(report: &Report, volume: &Volume) -> String {
    let claim = report.claims.iter().find(|claim| claim.uuid == volume.uuid);
    claim.map_or_else(|| name(volume), of_claim)
}

fn of_claim(claim: &BackingClaim) -> String {
    let label = claim.label.to_string();
    if label.is_empty() { claim.uuid.to_string() } else { label }
}

/// Returns the label, or the UUID if there is no label.
pub fn name(volume: &Volume) -> String {
    let label = volume.label.to_string();
    if label.is_empty() { volume.uuid.to_string() } else { label }
}

/// `1 node`, `2 nodes`.
fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
