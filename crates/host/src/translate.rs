//! Translates between the port and the engine: requests in, replies out. No other module knows
//! both.

use bcached_engine::{Error, Reply as EngineReply, Request};
use bcached_env::{IoErrorKind, Time};
use bcached_port::{ErrorKind, Operation, Reply, StatusExtent};

/// The engine's work for an operation.
pub enum EngineWork {
    /// One request.
    Request(Request),
    /// A request, and a flush after it: the engine has no durable form of it.
    Durable(Request),
    /// Answered without the engine.
    Answered(Reply),
}

/// Returns the engine's form of `operation`. `asked` is when a flush was requested.
pub fn work_of(operation: Operation, asked: Time) -> EngineWork {
    match operation {
        Operation::Read { sector, buffer } => EngineWork::Request(Request::Read { sector, buffer }),
        Operation::Write { sector, payload, fua } => {
            EngineWork::Request(Request::Write { sector, payload, fua })
        }
        Operation::Flush => EngineWork::Request(Request::FlushRequestedAt(asked)),
        Operation::Discard { sector, sectors, fua } => {
            let request = Request::Discard { sector, sectors };
            if fua { EngineWork::Durable(request) } else { EngineWork::Request(request) }
        }
        Operation::WriteZeroes { sector, sectors, fua, may_discard } => {
            EngineWork::Request(Request::WriteZeroes { sector, sectors, fua, may_unmap: may_discard })
        }
        // The location of data does not tell which parts read as zeroes, so all of it is reported
        // as data.
        Operation::BlockStatus { sectors, .. } => {
            EngineWork::Answered(Reply::extents(vec![StatusExtent { sectors, hole: false, zero: false }]))
        }
    }
}

/// Returns the port's form of the engine's reply.
pub fn reply_of(reply: EngineReply) -> Reply {
    match (reply.result, reply.buffer) {
        (Ok(()), Some(buffer)) => Reply::content(buffer),
        (Ok(()), None) => Reply::done(),
        (Err(error), buffer) => Reply::failed(kind_of(&error), buffer),
    }
}

/// Returns what a client may know of an error.
pub fn kind_of(error: &Error) -> ErrorKind {
    match error {
        Error::Io { source, .. } => match source.kind {
            IoErrorKind::NoSpace => ErrorKind::NoSpace,
            IoErrorKind::Unreachable => ErrorKind::TimedOut,
            _ => ErrorKind::Io,
        },
        Error::NoSpace => ErrorKind::NoSpace,
        Error::Range { .. } => ErrorKind::Invalid,
        Error::Stopping | Error::NoVolume => ErrorKind::Gone,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves that the permission to discard is passed on. It was once dropped, so each hole became
    /// written zeroes.
    #[test]
    fn leave_to_give_space_up_is_passed_on() {
        for (fua, may_discard) in [(false, false), (false, true), (true, false), (true, true)] {
            let wanted = Operation::WriteZeroes { sector: 8, sectors: 16, fua, may_discard };
            let EngineWork::Request(Request::WriteZeroes { sector, sectors, fua: durable, may_unmap }) =
                work_of(wanted, Time(0))
            else {
                unreachable!("it is one request of the engine")
            };
            assert_eq!((sector, sectors, durable, may_unmap), (8, 16, fua, may_discard));
        }
    }
}
