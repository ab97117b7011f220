//! Plots the samples as SVG: the dirty data of each volume over time, the share of its reads that
//! hit below it, and the events.

use super::{COUNT, LOADS, Sample};
use std::fmt::Write as _;

/// Sizes in units of the SVG.
const WIDTH: u64 = 1000;
const PANEL: u64 = 260;
const MARGIN: u64 = 60;

/// One colour for each volume.
const COLOURS: [&str; COUNT] = [
    "#1f77b4", "#aec7e8", "#17becf", "#2ca02c", "#98df8a", "#bcbd22", "#9467bd", "#c5b0d5", "#d62728",
    "#ff7f0e",
];

/// A panel of the plot.
struct Panel<'a> {
    title: &'a str,
    /// Its upper edge, from the top.
    top: u64,
    /// The value at its upper edge.
    most: u64,
    unit: &'a str,
}

/// Returns the plot of `samples`.
#[must_use]
pub fn svg(samples: &[Sample]) -> String {
    let height = 2 * PANEL + 3 * MARGIN;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        WIDTH + 3 * MARGIN
    );
    let end = samples.last().map_or(1, |sample| sample.now.max(1));
    let across = |now: u64| MARGIN + now * WIDTH / end;
    let dirty_max = samples.iter().flat_map(|sample| &sample.volumes).map(|volume| volume.dirty_bytes).max();
    let dirty_max = dirty_max.unwrap_or(0).max(1);
    let dirty = Panel { title: "dirty data", top: MARGIN, most: dirty_max / 1024, unit: "KiB" };
    let hits = Panel { title: "reads that hit", top: 2 * MARGIN + PANEL, most: 100, unit: "%" };
    for panel in [&dirty, &hits] {
        frame(&mut text, panel);
    }
    for (now, event) in samples.iter().filter_map(|sample| Some((sample.now, sample.event?))) {
        let (x, top, bottom) = (across(now), MARGIN, height - MARGIN);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"#888\" \
             stroke-dasharray=\"3,3\"><title>{}</title></line>",
            event.name()
        );
    }
    for (number, colour) in COLOURS.iter().enumerate() {
        let of_dirty = samples.iter().map(|sample| {
            let bytes = sample.volumes[number].dirty_bytes;
            (across(sample.now), dirty.top + PANEL - bytes * PANEL / dirty_max)
        });
        line(&mut text, colour, of_dirty);
        let of_hits = samples.iter().filter_map(|sample| {
            let percent = sample.volumes[number].hit_percent()?;
            Some((across(sample.now), hits.top + PANEL - percent * PANEL / 100))
        });
        line(&mut text, colour, of_hits);
        let (x, y) = (MARGIN + WIDTH + 10, MARGIN + 18 * number as u64);
        let load = LOADS[number].name();
        let _ = writeln!(text, "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{number} {load}</text>");
    }
    text.push_str("</svg>\n");
    text
}

fn frame(text: &mut String, panel: &Panel<'_>) {
    let Panel { title, top, most, unit } = panel;
    let label = top - 8;
    let upper = top + 10;
    let _ = writeln!(
        text,
        "<rect x=\"{MARGIN}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{PANEL}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{MARGIN}\" y=\"{label}\">{title}</text>\n<text x=\"4\" y=\"{upper}\">{most} {unit}</text>"
    );
}

fn line(text: &mut String, colour: &str, points: impl Iterator<Item = (u64, u64)>) {
    let points: Vec<_> = points.map(|(x, y)| format!("{x},{y}")).collect();
    let points = points.join(" ");
    let _ = writeln!(text, "<polyline fill=\"none\" stroke=\"{colour}\" points=\"{points}\"/>");
}
