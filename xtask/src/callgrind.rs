//! Reads a file of callgrind: the cost of each function by itself, and with all that it calls.

use std::collections::{BTreeMap, HashMap};

/// Instruction counts of a function.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct FunctionCost {
    own: u64,
    /// Including the functions it calls. Recursive calls are counted again.
    all: u64,
}

/// Returns the costs by function. The file gives each name at its first use only, and a number
/// after that.
fn costs(dump: &str) -> BTreeMap<String, FunctionCost> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut costs: BTreeMap<String, FunctionCost> = BTreeMap::new();
    let (mut function, mut callee, mut is_call) = ("", "", false);
    for line in dump.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            function = named(&mut names, name);
        } else if let Some(name) = line.strip_prefix("cfn=") {
            callee = named(&mut names, name);
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let count = line.split_whitespace().nth(1).and_then(|count| count.parse().ok()).unwrap_or(0_u64);
            let cost = costs.entry(function.to_owned()).or_default();
            let is_within = !is_call || callee != function;
            cost.own += if is_call { 0 } else { count };
            cost.all += if is_within { count } else { 0 };
            is_call = false;
        }
    }
    costs
}

fn named<'a>(names: &mut HashMap<&'a str, &'a str>, name: &'a str) -> &'a str {
    let (number, text) = name.split_once(' ').unwrap_or((name, ""));
    if !text.is_empty() {
        names.insert(number, text);
    }
    names.get(number).copied().unwrap_or(number)
}

/// Prints the functions of a phase with the highest cost by themselves.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn print(phase: &str, dump: &str, depth: usize, requests: f64, functions: usize) {
    let mut costs: Vec<(String, FunctionCost)> = costs(dump).into_iter().collect();
    costs.sort_by_key(|(_, cost)| std::cmp::Reverse(cost.own));
    println!("\n{phase}, depth {depth}\n\n| function | by itself | with what it calls |\n|---|---:|---:|");
    for (name, cost) in costs.iter().take(functions) {
        println!("| `{name}` | {:.0} | {:.0} |", cost.own as f64 / requests, cost.all as f64 / requests);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_and_inclusive_costs_are_told_apart() {
        let dump = "fn=(1) main\n1 10\ncfn=(2) work\ncalls=3 7\n2 90\n+1 5\nfn=(2)\n7 60\ncfn=(2)\ncalls=1 7\n* 30\n";
        let costs = costs(dump);
        assert_eq!(costs["main"], FunctionCost { own: 15, all: 105 });
        assert_eq!(costs["work"], FunctionCost { own: 60, all: 60 });
    }
}
