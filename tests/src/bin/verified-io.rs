//! `verified-io DEVICE KEY=NUMBER..`: runs a workload on a block device, in a guest or on the host.
//!
//! Prints `flushed N` after each flush that was acknowledged, and `workload finished` at the end.
//! Any failure is reported as one sentence on stderr, with exit status 1.

use std::env;
use std::error::Error;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use bcached_tests::workload::{Workload, run_on_device};

fn main() -> ExitCode {
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint!("verified-io: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprint!(": {cause}");
                source = cause.source();
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}

fn work() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let device = PathBuf::from(arguments.next().ok_or("usage: verified-io DEVICE KEY=NUMBER..")?);
    let workload: Workload = arguments.collect::<Vec<_>>().join(" ").parse()?;
    let mut output = io::stdout().lock();
    let mut broken = None;
    run_on_device(&workload, &device, &mut |number| {
        // Each line is a single write, so that a console shared with other processes keeps it
        // whole.
        let line = format!("flushed {number}\n");
        if let Err(error) = output.write_all(line.as_bytes()).and_then(|()| output.flush()) {
            broken.get_or_insert(error);
        }
    })?;
    if let Some(error) = broken {
        return Err(error.into());
    }
    output.write_all(b"workload finished\n")?;
    Ok(())
}
