//! Metrics as JSON: the content of the text, metric by metric.

use crate::failure::Failure;
use crate::output::{Printable, Report};
use serde::Serialize;
use std::collections::BTreeMap;

/// All metrics.
#[derive(Serialize)]
struct MetricsReport {
    metrics: Vec<Metric>,
    /// The text as the daemon wrote it.
    #[serde(skip)]
    text: String,
}

#[derive(Default, Serialize)]
struct Metric {
    name: String,
    /// `gauge`, `counter` or `histogram`.
    kind: String,
    help: String,
    samples: Vec<Sample>,
}

#[derive(Serialize)]
struct Sample {
    /// The metric's name, followed by `_bucket`, `_sum` or `_count` for a histogram.
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// Returns the report of `text`, which is in the format of Prometheus.
pub fn report(text: String) -> Result<Report, Failure> {
    let mut metrics: Vec<Metric> = Vec::new();
    for line in text.lines() {
        let described = ["HELP", "TYPE"].into_iter().find_map(|what| {
            let (name, told) = line.strip_prefix("# ")?.strip_prefix(what)?.trim_start().split_once(' ')?;
            Some((what, name, told))
        });
        if let Some((what, name, told)) = described {
            if metrics.last().is_none_or(|metric| metric.name != name) {
                metrics.push(Metric { name: name.to_owned(), ..Metric::default() });
            }
            if let Some(metric) = metrics.last_mut() {
                let field = if what == "HELP" { &mut metric.help } else { &mut metric.kind };
                told.clone_into(field);
            }
        } else if let (Some(sample), Some(metric)) = (sample(line), metrics.last_mut()) {
            metric.samples.push(sample);
        }
    }
    Report::of(&MetricsReport { metrics, text })
}

/// Parses `name{label="value",..} number`.
fn sample(line: &str) -> Option<Sample> {
    let (what, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, mut rest)) = what.split_once('{') else {
        return Some(Sample { name: what.to_owned(), labels: BTreeMap::new(), value });
    };
    let mut labels = BTreeMap::new();
    while let Some((label, quoted)) = rest.split_once("=\"") {
        let (text, behind) = unquoted(quoted)?;
        labels.insert(label.trim_start_matches(',').to_owned(), text);
        rest = behind;
    }
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Returns the text up to the closing quotation mark, and what follows it.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut letters) = (String::new(), text.char_indices());
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

impl Printable for MetricsReport {
    const SCHEMA: &'static str = "bcached.metrics";

    fn text(&self) -> String {
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::sample;

    #[test]
    fn a_sample_has_its_labels() {
        let plain = sample("up 1").expect("a sample");
        assert_eq!((plain.name.as_str(), plain.labels.len(), plain.value), ("up", 0, 1.0));
        let told = sample(r#"a_bucket{volume="a \"b\", \\c",le="+Inf"} 2.5e3"#).expect("a sample");
        assert_eq!((told.name.as_str(), told.value), ("a_bucket", 2500.0));
        let labels: Vec<_> =
            told.labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(labels, [("le", "+Inf"), ("volume", r#"a "b", \c"#)]);
        assert!(sample("# HELP up x").is_none() && sample("").is_none());
    }
}
