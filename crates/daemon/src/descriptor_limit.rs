//! Raises the limit of open files to the maximum, and refuses to start with fewer than the
//! configuration needs. A daemon with too few would report that it is ready and serve no client.

use bcached_config::Config;
use bcached_control::failure::{Failure, Kind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a daemon without devices has open: standard streams, sockets, and the descriptors that its
/// threads wait on. Seventeen, plus some reserve.
const OWN: u64 = 20;

/// A cache: its device and the device below it, its note, its engine's ring and bell, and the
/// device that replaces one that is gone.
const OF_CACHE: u64 = 6;

/// A volume: its device and the device below it, and the one that replaces it.
const OF_VOLUME: u64 = 3;

/// Clients, commands, and files that are read at the same time: the fewest that allow any work.
const OF_OTHERS: u64 = 12;

/// Raises the limit as far as allowed.
///
/// # Errors
/// It is too low for the configuration.
pub fn provide(config: &Config) -> Result<(), Failure> {
    let limits = getrlimit(Resource::Nofile);
    let most = limits.maximum;
    if limits.current != most {
        let _stays_as_it_is = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    }
    judge(config, getrlimit(Resource::Nofile).current)
}

fn judge(config: &Config, allowed: Option<u64>) -> Result<(), Failure> {
    let count = |all: usize| u64::try_from(all).unwrap_or(u64::MAX);
    let caches = count(config.caches.len()).saturating_mul(OF_CACHE);
    let volumes = count(config.volumes.len()).saturating_mul(OF_VOLUME);
    let needed = caches.saturating_add(volumes).saturating_add(OWN + OF_OTHERS);
    match allowed.filter(|allowed| *allowed < needed) {
        None => Ok(()),
        Some(allowed) => Err(Failure::new(Kind::Io, format!("the limit of {allowed} open files is too low"))
            .why(format!(
                "the configured caches ({}) and volumes ({}) need {needed}, including some for clients",
                config.caches.len(),
                config.volumes.len()
            ))
            .next(format!(
                "raise it: `ulimit -n {}`, or LimitNOFILE= in the unit",
                needed.next_power_of_two().max(1024)
            ))),
    }
}
