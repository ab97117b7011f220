//! The options that choose what to run: a system, and a workload of some shape.

use crate::names::unknown;
use anyhow::{Context as _, Result};
use bcached_sim::system::{System, system_named, system_names};
use bcached_sim::workload::{Shape, Workload};
use std::rc::Rc;

/// Maximum number of steps that are drawn: all that a workload does stays in memory.
const STEPS_MAX: u64 = 100_000;

/// Options that name the system and the shape.
#[derive(clap::Args, Clone)]
pub struct SystemArgs {
    /// The system under test.
    #[arg(long, default_value = "engine")]
    pub system: String,
    /// The workload's shape.
    #[arg(long, default_value = "mixed")]
    workload: String,
    /// Number of steps, instead of the shape's default.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=STEPS_MAX))]
    length: Option<u64>,
}

/// Returns the system of this name.
pub fn system(name: &str) -> Result<Rc<dyn System>> {
    let names = system_names();
    system_named(name).with_context(|| unknown("system", name, names.iter().map(String::as_str)))
}

impl SystemArgs {
    /// Returns the system under test.
    pub fn system(&self) -> Result<Rc<dyn System>> {
        system(&self.system)
    }

    /// Returns the shape, with the requested length.
    pub fn shape(&self) -> Result<Shape> {
        let names = Shape::all().iter().map(|shape| shape.name);
        let shape =
            Shape::named(&self.workload).with_context(|| unknown("workload", &self.workload, names))?;
        let steps = self.length.and_then(|length| usize::try_from(length).ok());
        Ok(steps.map_or(shape.clone(), |steps| shape.with_steps(steps)))
    }

    /// Returns the workload of this seed.
    pub fn draw(&self, seed: u64) -> Result<Workload> {
        Ok(self.shape()?.draw(seed))
    }
}
