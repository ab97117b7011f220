//! What is run: a system, and a workload of some shape.

use crate::names::unknown;
use anyhow::{Context as _, Result};
use bcached_sim::system::{System, system_named, system_names};
use bcached_sim::workload::{Shape, Workload};
use std::rc::Rc;

/// Most steps that are drawn: what a workload does stays in memory.
const STEPS_MAX: u64 = 100_000;

/// Options that name system and shape.
#[derive(clap::Args, Clone)]
pub struct What {
    /// The system under test.
    #[arg(long, default_value = "engine")]
    pub system: String,
    /// The workload's shape.
    #[arg(long, default_value = "mixed")]
    workload: String,
    /// Number of steps instead of the shape's own.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=STEPS_MAX))]
    length: Option<u64>,
}

/// The system of this name.
pub fn system(name: &str) -> Result<Rc<dyn System>> {
    let names = system_names();
    system_named(name).with_context(|| unknown("system", name, names.iter().map(String::as_str)))
}

impl What {
    /// The system under test.
    pub fn system(&self) -> Result<Rc<dyn System>> {
        system(&self.system)
    }

    /// The shape, as long as asked for.
    pub fn shape(&self) -> Result<Shape> {
        let names = Shape::all().iter().map(|shape| shape.name);
        let shape =
            Shape::named(&self.workload).with_context(|| unknown("workload", &self.workload, names))?;
        let steps = self.length.and_then(|length| usize::try_from(length).ok());
        Ok(steps.map_or(shape.clone(), |steps| shape.with_steps(steps)))
    }

    /// The workload of this seed.
    pub fn draw(&self, seed: u64) -> Result<Workload> {
        Ok(self.shape()?.draw(seed))
    }
}
