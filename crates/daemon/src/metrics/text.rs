//! Writes the text format of Prometheus (version 0.0.4), which its server, node_exporter's textfile
//! collector and all other consumers read.
//!
//! It is written here because the usual library writes `OpenMetrics`, in which that collector does
//! not recognise a counter, and keeps values of its own, which the engine has already.

use std::fmt::{Display, Write as _};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The type of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    /// It only grows, until a restart.
    Counter,
    /// It grows and shrinks.
    Gauge,
    /// Counters by bound, their sum and their number.
    Histogram,
}

impl MetricKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A label: name and value.
pub type Label<'a> = (&'a str, &'a str);

/// The text, family by family.
#[derive(Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a family: all samples of `name` follow. If `help` is empty, there is no HELP line.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: MetricKind, help: &str) -> Family<'a> {
        if !help.is_empty() {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(self.text, "# HELP {name} {}", help.replace('\\', "\\\\").replace('\n', "\\n"));
        }
        let _ = writeln!(self.text, "# TYPE {name} {}", kind.name());
        Family { text: &mut self.text, name }
    }

    /// Returns the whole text.
    pub fn finish(self) -> String {
        self.text
    }
}

/// A family of samples.
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Family<'_> {
    /// Writes one sample.
    pub fn sample(&mut self, labels: &[Label<'_>], value: impl Display) {
        self.line("", labels, value);
    }

    /// Writes one histogram: how many values were at most each bound, their number, and their sum.
    pub fn histogram(&mut self, labels: &[Label<'_>], within: &[(f64, u64)], count: u64, sum: f64) {
        let mut bucket = |bound: &str, within: u64| {
            self.line("_bucket", &[labels, &[("le", bound)]].concat(), within);
        };
        for (bound, within) in within {
            bucket(&bound.to_string(), *within);
        }
        bucket("+Inf", count);
        self.line("_sum", labels, sum);
        self.line("_count", labels, count);
    }

    fn line(&mut self, suffix: &str, labels: &[Label<'_>], value: impl Display) {
        let _ = write!(self.text, "{}{suffix}", self.name);
        for (index, (name, value)) in labels.iter().enumerate() {
            let opening = if index == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{opening}{name}=\"{}\"", escaped(value));
        }
        let closing = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{closing} {value}");
    }
}

/// Escapes quotes, backslashes and line ends in a label's value, which would end it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_and_their_samples() {
        let mut text = Exposition::default();
        let mut family = text.family("a_total", MetricKind::Counter, "What\nit \\ is.");
        family.sample(&[], 1);
        family.sample(&[("x", "1"), ("y", "a\"b\\c\nd")], u64::MAX);
        text.family("b", MetricKind::Gauge, "").sample(&[], 0.5);
        let mut family = text.family("c_seconds", MetricKind::Histogram, "Time.");
        family.histogram(&[("p", "q")], &[(0.000_016, 1), (16.777_216, 3)], 4, 99.25);
        assert_eq!(
            text.finish(),
            "# HELP a_total What\\nit \\\\ is.\n# TYPE a_total counter\na_total 1\n\
             a_total{x=\"1\",y=\"a\\\"b\\\\c\\nd\"} 18446744073709551615\n\
             # TYPE b gauge\nb 0.5\n\
             # HELP c_seconds Time.\n# TYPE c_seconds histogram\n\
             c_seconds_bucket{p=\"q\",le=\"0.000016\"} 1\n\
             c_seconds_bucket{p=\"q\",le=\"16.777216\"} 3\n\
             c_seconds_bucket{p=\"q\",le=\"+Inf\"} 4\n\
             c_seconds_sum{p=\"q\"} 99.25\nc_seconds_count{p=\"q\"} 4\n"
        );
    }
}
