//! What can be there once only: a socket, a device. A start would meet it later, in words that name no section.

use super::{Config, Volume};
use crate::failure::{Failure, Kind};
use std::path::Path;

/// Each socket is somebody's own.
pub fn check_sockets(config: &Config, findings: &mut Vec<Failure>) {
    let monitor = config.control.with_file_name("monitor.sock");
    for (index, listen) in config.listen.iter().enumerate() {
        let refused = |why: &str| Failure::new(Kind::Config, format!("{listen} {why}"));
        let path = listen.unix_path();
        if config.listen[..index].contains(listen) {
            findings.push(refused("is listened on twice").next("name it once in `listen`"));
        } else if path == Some(config.control.as_path()) {
            findings.push(refused("is the control socket").next("name another in `listen`"));
        } else if path == Some(monitor.as_path()) {
            findings.push(refused("is the monitor socket").next("name another in `listen`"));
        }
    }
}

/// Each device is one cache or one volume.
pub fn check_devices(config: &Config, from_command_line: bool, findings: &mut Vec<Failure>) {
    let volume = |volume: &Volume| volume.name.clone().unwrap_or_else(|| volume.backing.clone());
    if !from_command_line {
        // Those of a command line are opened at once, and told of by that.
        let caches = config.caches.iter().map(|cache| {
            let name = cache.name.as_deref().unwrap_or_default();
            (cache.device.as_str(), format!("the cache {name}"))
        });
        let caches: Vec<_> = caches.collect();
        let volumes = config.volumes.iter().map(|entry| (entry.backing.as_str(), volume(entry)));
        let all: Vec<_> = caches.iter().cloned().chain(volumes).collect();
        for (index, (device, name)) in all.iter().enumerate() {
            let is_twin = |(other, _): &&(&str, String)| is_same(other, device);
            // Two volumes are told of below.
            if let Some((_, other)) = caches[..index.min(caches.len())].iter().find(is_twin) {
                findings.push(twice(device, other, name));
            }
        }
    }
    for (index, entry) in config.volumes.iter().enumerate() {
        let is_twin = |other: &&Volume| other.backing == entry.backing;
        let Some(other) = config.volumes[..index].iter().find(is_twin) else { continue };
        findings.push(if other.name.is_none() && entry.name.is_none() {
            Failure::new(Kind::Config, format!("{} is named twice", entry.backing))
                .next("name each backing device once")
        } else {
            twice(&entry.backing, &volume(other), &volume(entry))
        });
    }
}

/// What a UUID names, of a cache its set and of a volume its device, is not compared.
fn is_same(one: &str, other: &str) -> bool {
    Path::new(one).is_absolute() && Path::new(one) == Path::new(other)
}

fn twice(device: &str, one: &str, other: &str) -> Failure {
    Failure::new(Kind::Config, format!("{device} is configured twice"))
        .why(format!("as {one} and as {other}"))
}
