//! Socket activation: sockets that systemd has bound and passes to the daemon that it starts
//! (sd_listen_fds(3)). A client that connects before the daemon runs, or between two of its runs,
//! waits and is not turned away. The name of a socket says what it is for: `nbd`, of which there
//! may be several, `control` and `monitor`.

use bcached_control::failure::{Failure, Kind};
use bcached_port::socket::{ListenAddress, PassedSocket};
use bcached_uring::passed_fds::descriptors;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

/// The sockets that were passed.
#[derive(Debug, Default)]
pub struct PassedSockets {
    /// Where NBD is served; if there are any, it is served nowhere else.
    pub nbd: Vec<Arc<PassedSocket>>,
    /// The control socket.
    pub control: Option<PassedSocket>,
    /// The read-only socket.
    pub monitor: Option<PassedSocket>,
}

const USES: &str = "name it `nbd`, `control` or `monitor` (FileDescriptorName= of its unit)";

/// Takes the sockets that were passed to this process, before anything else is opened.
///
/// # Errors
/// A socket does not fit its name.
pub fn take() -> Result<PassedSockets, Failure> {
    let named = descriptors().map_err(|error| {
        Failure::new(Kind::Usage, "cannot use the sockets that were passed")
            .why(format!("LISTEN_FDS and LISTEN_FDNAMES are invalid: {error}"))
    })?;
    let mut sockets = PassedSockets::default();
    named.into_iter().try_for_each(|(name, fd)| sockets.add(&name, fd))?;
    Ok(sockets)
}

impl PassedSockets {
    fn add(&mut self, name: &str, fd: OwnedFd) -> Result<(), Failure> {
        let number = fd.as_raw_fd();
        let cannot = |why: &str| {
            let what = format!("cannot use the socket `{name}` that was passed (descriptor {number})");
            Failure::new(Kind::Usage, what).why(why)
        };
        if !matches!(name, "nbd" | "control" | "monitor") {
            return Err(cannot("its purpose is unknown").next(USES));
        }
        let passed = PassedSocket::new(fd).map_err(|why| cannot(&why.to_string()))?;
        let place = match name {
            "nbd" => {
                self.nbd.push(Arc::new(passed));
                return Ok(());
            }
            _ if matches!(passed.at(), ListenAddress::Tcp(_)) => {
                return Err(cannot("commands are accepted on unix sockets only"));
            }
            "control" => &mut self.control,
            _ => &mut self.monitor,
        };
        match place.replace(passed) {
            None => Ok(()),
            Some(_) => Err(cannot("another socket has this name already").next("pass only one")),
        }
    }
}
