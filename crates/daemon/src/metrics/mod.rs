//! Metrics: the status in the format of Prometheus. Names are stable, like those of the JSON: they
//! are only added. A scrape costs as much as a status, which does not depend on the size of a
//! cache.
//!
//! | file | what |
//! |---|---|
//! | `text` | the format |
//! | `caches`, `volumes` | bcached's own names, `bcached_..` |
//! | `node_exporter` | node_exporter's names for the kernel's bcache, `node_bcache_..` |

mod caches;
mod node_exporter;
mod text;
mod volumes;

use bcached_control::status::Status;
use text::{Exposition, Label, MetricKind};

pub use node_exporter::text as node_text;
pub use text::CONTENT_TYPE;

/// A metric with one value for each of several things.
struct Metric<T> {
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    value: fn(&T) -> Option<f64>,
}

const fn gauge<T>(name: &'static str, help: &'static str, value: fn(&T) -> Option<f64>) -> Metric<T> {
    Metric { name, kind: MetricKind::Gauge, help, value }
}

const fn counter<T>(name: &'static str, help: &'static str, value: fn(&T) -> Option<f64>) -> Metric<T> {
    Metric { name, kind: MetricKind::Counter, help, value }
}

/// Writes one family for each metric, with a sample for each thing that has a value.
fn tell<T>(text: &mut Exposition, metrics: &[Metric<T>], things: &[(Vec<Label<'_>>, &T)]) {
    for metric in metrics {
        let mut family = text.family(metric.name, metric.kind, metric.help);
        for (labels, thing) in things {
            if let Some(value) = (metric.value)(thing) {
                family.sample(labels, value);
            }
        }
    }
}

/// Returns all metrics under bcached's own names, made of the status alone (invariant N5).
#[must_use]
pub fn text(status: &Status) -> String {
    let mut text = Exposition::default();
    let version = env!("CARGO_PKG_VERSION");
    text.family("bcached_info", MetricKind::Gauge, "The running version.").sample(&[("version", version)], 1);
    let states = ["starting", "ready", "stopping"];
    let mut family =
        text.family("bcached_state", MetricKind::Gauge, "1 for the current state of the daemon.");
    for state in states {
        family.sample(&[("state", state)], u8::from(status.state == state));
    }
    text.family("bcached_uptime_seconds", MetricKind::Gauge, "Time since the daemon started.")
        .sample(&[], status.uptime_seconds);
    text.family("bcached_clients", MetricKind::Gauge, "Connected clients.").sample(&[], status.clients.len());
    if let Some(log) = status.log {
        let help = "Lines that the log lost because its reader was too slow or could not be written to.";
        text.family("bcached_log_lines_lost_total", MetricKind::Counter, help).sample(&[], log.lines_lost);
    }
    caches::tell_all(&mut text, &status.caches);
    volumes::tell_all(&mut text, &status.volumes);
    text.finish()
}

#[cfg(test)]
mod tests;
