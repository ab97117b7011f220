//! `recorded-io VOLUME WITNESS SEED REQUESTS SECTORS BLOCK_SECTORS`: runs the clients of a recorded
//! run, in a guest.
//!
//! VOLUME is a block device or `nbd:SOCKET:EXPORT`. Any failure is reported as one sentence on
//! stderr, with exit status 1.

use std::env;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use bcached_tests::recording::client::{Plan, run};

fn main() -> ExitCode {
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            eprintln!("recorded-io: {error}{cause}");
            ExitCode::FAILURE
        }
    }
}

fn work() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [volume, witness, seed, requests, sectors, block_sectors] = arguments.as_slice() else {
        return Err("usage: recorded-io VOLUME WITNESS SEED REQUESTS SECTORS BLOCK_SECTORS".into());
    };
    let plan = Plan {
        seed: seed.parse()?,
        requests: requests.parse()?,
        sectors: sectors.parse()?,
        block_sectors: block_sectors.parse()?,
    };
    run(&plan, volume, Path::new(witness))?;
    Ok(())
}
