//! The methods of providing a block device, best first. Each is probed by trying it, which takes
//! moments.

use crate::{loop_devices, nbd};
use bcached_front_ublk::DriverFeatures;
use std::fmt;

/// A method of providing a block device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DeviceMethod {
    /// The kernel's driver for block devices served from user space. Its devices outlive their
    /// server.
    Ublk,
    /// The kernel's NBD client, with a connection to this process.
    Nbd,
    /// A loop device over a file of a FUSE mount.
    Loop,
}

/// Why the machine supports none of the methods.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this machine cannot provide a block device: {}", sentence(reasons))]
pub struct NoMethodError {
    /// The reason for each method, best first.
    pub reasons: Vec<(DeviceMethod, String)>,
}

/// The best available method, and why the better ones are unavailable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MethodChoice {
    /// The chosen method.
    pub method: DeviceMethod,
    /// The better methods, each with the reason why it is unavailable.
    pub missed: Vec<(DeviceMethod, String)>,
}

impl DeviceMethod {
    /// All methods, best first.
    pub const ALL: [Self; 3] = [Self::Ublk, Self::Nbd, Self::Loop];

    /// Its identifier in machine-readable output.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Loop => "loop",
        }
    }

    /// Checks whether this machine supports the method.
    ///
    /// # Errors
    /// Why not, and how to fix it, in one sentence.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Self::Ublk => DriverFeatures::probe().map(drop).map_err(|why| why.to_string()),
            Self::Nbd => nbd::probe(),
            Self::Loop => loop_devices::probe(),
        }
    }
}

impl MethodChoice {
    /// Why the better methods are unavailable, as one clause. Empty if the best method was chosen.
    #[must_use]
    pub fn missed(&self) -> String {
        sentence(&self.missed)
    }
}

/// Returns the best method that this machine supports.
///
/// # Errors
/// It supports none.
pub fn choose() -> Result<MethodChoice, NoMethodError> {
    choose_by(DeviceMethod::probe)
}

fn choose_by(probe: impl Fn(DeviceMethod) -> Result<(), String>) -> Result<MethodChoice, NoMethodError> {
    let mut missed = Vec::new();
    for method in DeviceMethod::ALL {
        match probe(method) {
            Ok(()) => return Ok(MethodChoice { method, missed }),
            Err(why) => missed.push((method, why)),
        }
    }
    Err(NoMethodError { reasons: missed })
}

fn sentence(reasons: &[(DeviceMethod, String)]) -> String {
    let each: Vec<_> = reasons.iter().map(|(method, why)| format!("{method}: {why}")).collect();
    each.join("; ")
}

/// Its name in messages for people.
impl fmt::Display for DeviceMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ublk => "ublk",
            Self::Nbd => "kernel nbd",
            Self::Loop => "FUSE + loop",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_that_is_there_is_chosen_and_the_others_are_named() {
        let only = |there: &'static [DeviceMethod]| {
            choose_by(
                move |method| {
                    if there.contains(&method) { Ok(()) } else { Err(format!("no {}", method.word())) }
                },
            )
        };
        for (there, best, missed) in [
            (&DeviceMethod::ALL[..], DeviceMethod::Ublk, ""),
            (&[DeviceMethod::Loop, DeviceMethod::Nbd], DeviceMethod::Nbd, "ublk: no ublk"),
            (&[DeviceMethod::Loop], DeviceMethod::Loop, "ublk: no ublk; kernel nbd: no nbd"),
        ] {
            let chosen = only(there).expect("there is one");
            assert_eq!((chosen.method, chosen.missed().as_str()), (best, missed));
        }
        let none = only(&[]).expect_err("there is none").to_string();
        assert_eq!(
            none,
            "this machine cannot provide a block device: ublk: no ublk; kernel nbd: no nbd; FUSE + \
             loop: no loop"
        );
    }
}
