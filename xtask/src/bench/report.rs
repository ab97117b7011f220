//! Prints the measurements as tables.

use super::fio::{FioLoad, Measurement};
use super::servers::Servers;

/// The measurements of one server at one load, one per round.
#[derive(Default)]
pub struct Measurements(pub Vec<Measurement>);

/// Prints a table. Returns false if a bound is not met.
pub fn print(what: &str, servers: &Servers, loads: &[FioLoad], cells: &[Measurements]) -> bool {
    println!("\n{what}\n");
    println!(
        "| load | server | requests a second | µs of CPU each | requests, ours / its, median (range) | bound | CPU, ours / its | |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---|");
    let mut reached = true;
    for (load, row) in loads.iter().zip(cells.chunks(servers.all().len())) {
        for (server, cell) in servers.all().iter().zip(row) {
            let rate = median(cell.0.iter().map(|measured| measured.rate));
            let cpu = median(cell.0.iter().map(|measured| measured.cpu));
            let ratios: Vec<f64> =
                row[0].0.iter().zip(&cell.0).map(|(ours, its)| ours.rate / its.rate).collect();
            let is_ours = std::ptr::eq(cell, &raw const row[0]);
            let ratio = if is_ours { String::new() } else { spread(&ratios) };
            let bound = load.bounds.iter().find(|(name, _)| *name == server.name).map(|(_, least)| *least);
            let costs: Vec<f64> =
                row[0].0.iter().zip(&cell.0).map(|(ours, its)| ours.cpu / its.cpu).collect();
            let cost_most = load.cpu_most.filter(|_| bound.is_some());
            let holds = bound.is_none_or(|least| median(ratios.iter().copied()) >= least)
                && cost_most.is_none_or(|most| median(costs.iter().copied()) <= most);
            reached &= holds;
            println!(
                "| {} | {} | {rate:.0} | {cpu:.1} | {ratio} | {} | {} | {} |",
                load.name,
                server.name,
                bound.map_or_else(String::new, |least| format!("{least:.2}")),
                cost_most.map_or_else(String::new, |most| format!("{} <= {most:.2}", spread(&costs))),
                if holds { "" } else { "**not reached**" }
            );
        }
    }
    reached
}

fn spread(ratios: &[f64]) -> String {
    let (least, most) =
        ratios.iter().fold((f64::MAX, 0_f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
    format!("{:.2} ({least:.2}-{most:.2})", median(ratios.iter().copied()))
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = figures.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        even if even % 2 == 0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert!((median([3.0, 1.0, 2.0].into_iter()) - 2.0).abs() < f64::EPSILON);
        assert!((median([4.0, 1.0, 2.0, 3.0].into_iter()) - 2.5).abs() < f64::EPSILON);
        assert_eq!(spread(&[2.0, 1.0, 4.0]), "2.00 (1.00-4.00)");
    }
}
