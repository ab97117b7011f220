//! The status as text for people.

use super::{CacheStatus, ClientStatus, LogStatus, Status, VolumeCounts, VolumeStatus};
use crate::sizes::human;
use crate::statistics::CacheStatistics;
use std::fmt::Write as _;

impl Status {
    /// Formats the status as lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("daemon {}, {}", self.pid, self.state);
        // While the daemon stops, it listens nowhere.
        if !self.nbd.is_empty() {
            let _ = write!(text, " (NBD: {})", self.nbd.join(", "));
        }
        text.push('\n');
        for warning in &self.warnings {
            let _ = writeln!(text, "warning: {warning}");
        }
        if let Some(told) = self.log.and_then(|log| log.trouble()) {
            text.push_str(&told);
        }
        for cache in &self.caches {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "cache {} on {}: {}", cache.name, cache.device, cache.line());
            let numbers = cache.counts.as_ref().and_then(|counts| counts.numbers.as_ref());
            if let Some(written) = numbers.and_then(CacheStatistics::sentence) {
                let _ = writeln!(text, "cache {}: {written}", cache.name);
            }
            let ownerless = cache.ownerless_dirty_bytes();
            if ownerless > 0 {
                let dirty = human(ownerless);
                let _ = writeln!(
                    text,
                    "cache {}: {dirty} of dirty data belongs to no known volume, and is kept; \
                     add the volume that it may belong to: docs/failures.md (a lost table of volumes)",
                    cache.name
                );
            }
            for left in &cache.unserved {
                let (dirty, name) = (&left.dirty, left.name());
                let _ = match left.flash_size_bytes.map(human) {
                    None => writeln!(text, "cache {}: {name} is not served: {dirty}", cache.name),
                    Some(size) => writeln!(
                        text,
                        "cache {}: flash-only volume {name} is not served: {} of {size} used",
                        cache.name,
                        left.used()
                    ),
                };
            }
        }
        for name in &self.released {
            let _ = writeln!(
                text,
                "cache {name}: released (served = false); `bcached import {name}` serves it again"
            );
        }
        for volume in &self.volumes {
            let _ = writeln!(text, "volume {}: {}", volume.name, volume.line());
            let numbers = volume.facts.as_ref().and_then(|facts| facts.numbers.as_ref());
            if let Some(hits) = numbers.and_then(|numbers| numbers.windows.sentence()) {
                let _ = writeln!(text, "volume {}: {hits}", volume.name);
            }
        }
        write_clients(&mut text, &self.clients);
        for job in &self.jobs {
            text.push_str(&job.text());
        }
        text
    }
}

/// Writes one line for each client of a volume, however many connections it has.
fn write_clients(text: &mut String, clients: &[ClientStatus]) {
    let mut told: Vec<(&ClientStatus, usize, bool, bool)> = Vec::new();
    for client in clients {
        let is_it = |(other, ..): &&mut (&ClientStatus, usize, bool, bool)| {
            (&other.peer, &other.volume, &other.way) == (&client.peer, &client.volume, &client.way)
        };
        match told.iter_mut().find(is_it) {
            Some((_, count, writes, only_looks)) => {
                *count += 1;
                *writes |= client.writing;
                *only_looks &= client.read_only;
            }
            None => told.push((client, 1, client.writing, client.read_only)),
        }
    }
    for (client, count, writes, only_looks) in told {
        let doing = match (writes, only_looks) {
            (true, _) => "writing",
            (false, true) => "reading (read-only)",
            (false, false) => "reading",
        };
        let times = if count > 1 { format!(" x{count}") } else { String::new() };
        let peer = &client.peer;
        let _ = match &client.volume {
            Some(volume) => writeln!(text, "client of {volume}: {peer}{times}, {doing}"),
            None => writeln!(text, "client without a volume yet: {peer}{times}"),
        };
    }
}

impl LogStatus {
    /// Describes the trouble of the log, in a line.
    fn trouble(self) -> Option<String> {
        let lost = self.lines_lost;
        match self.stuck_seconds {
            Some(seconds) => Some(format!(
                "log: its reader has read nothing for {seconds} s; lines lost since the start: {lost}\n"
            )),
            None if lost > 0 => Some(format!("log: lines lost since the start: {lost}\n")),
            None => None,
        }
    }
}

impl CacheStatus {
    fn line(&self) -> String {
        let mut line = self.state.clone();
        if let Some(progress) = &self.opening {
            let _ = write!(line, ": {progress}");
        }
        if let Some(counts) = &self.counts {
            let asked = counts.hits + counts.misses;
            let ratio = match asked {
                0 => "no reads yet".to_owned(),
                _ => format!("{}% of {asked} reads hit", counts.hits * 100 / asked),
            };
            let counting = match counts.walked_percent {
                Some(percent) if percent < 100 => format!(" (its index is {percent}% read)"),
                _ => String::new(),
            };
            // The amount is not known before the index has been read.
            if let Some(cached) = counts.cached_bytes.filter(|_| counting.is_empty()) {
                let size = counts.buckets * counts.bucket_bytes;
                let _ = write!(line, ", {} of {} cached", human(cached), human(size));
            }
            let _ = write!(line, ", {}{counting}, {ratio}", counts.dirty);
        }
        if let Some(reason) = &self.reason {
            let _ = write!(line, ": {reason}");
        }
        line
    }
}

impl VolumeStatus {
    /// Describes the volume, in a line.
    #[must_use]
    pub fn line(&self) -> String {
        let mut line = self.state.clone();
        if let Some(facts) = &self.facts {
            let blocks = match facts.block_bytes {
                0 => String::new(),
                bytes => format!(" in blocks of {}", human(bytes)),
            };
            let size = human(facts.size_bytes);
            let _ = write!(line, ", {size}{blocks}, {}, {}", facts.cache_mode, facts.dirty);
            for exported in &self.exports {
                let Some(place) = exported.told_place() else { continue };
                let _ = write!(line, ", {place}");
                if let Some(transfer) = &exported.transfer {
                    let _ = write!(line, " ({transfer})");
                }
                if let Some(link) = exported.link.as_ref().or(exported.no_link.as_ref()) {
                    let _ = write!(line, ", {link}");
                }
            }
            if facts.flash_only {
                line.push_str(", flash-only");
            }
            if facts.attached == Some(false) {
                line.push_str(", no cache");
            }
            if facts.writeback.as_ref().is_some_and(|now| now.writeback_running == Some(false)) {
                line.push_str(", write-back is off (writeback_running)");
            }
            if let Some(bypassed) = facts.counts.as_ref().and_then(VolumeCounts::bypassed) {
                let _ = write!(line, ", {bypassed}");
            }
        }
        if let Some(reason) = &self.reason {
            let _ = write!(line, ": {reason}");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client with several connections to a volume has a single line.
    #[test]
    fn a_client_has_one_line() {
        let client = |peer: &str, volume: &str, writing, read_only| ClientStatus {
            peer: peer.to_owned(),
            volume: Some(volume.to_owned()),
            writing,
            read_only,
            tls: false,
            way: Some("nbd".to_owned()),
        };
        let clients = [
            client("process 7 (nbdcopy)", "media", false, false),
            client("process 8 (qemu)", "media", false, true),
            client("process 7 (nbdcopy)", "media", true, false),
            client("process 7 (nbdcopy)", "tank", false, false),
            client("process 7 (nbdcopy)", "media", false, false),
        ];
        let mut text = String::new();
        write_clients(&mut text, &clients);
        assert_eq!(
            text,
            "client of media: process 7 (nbdcopy) x3, writing\n\
             client of media: process 8 (qemu), reading (read-only)\n\
             client of tank: process 7 (nbdcopy), reading\n"
        );
    }
}
