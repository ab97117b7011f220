//! Standard output. If the reader has closed it, the process exits silently.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};
use std::process::exit;

/// The status that shells report for a program that SIGPIPE has ended. It differs from the statuses
/// that report the result of a run.
const CLOSED: i32 = 141;

/// Prints a line.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::out::print(format_args!("{}\n", format_args!($($words)*)))
    };
}
pub(crate) use say;

/// Prints `text`, which need not be a whole line, and flushes.
pub fn print(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    let done = out.write_fmt(text).and_then(|()| out.flush());
    if let Err(error) = done {
        if error.kind() == ErrorKind::BrokenPipe {
            exit(CLOSED);
        }
        let _unread = writeln!(io::stderr(), "sim: cannot write to standard output: {error}");
        exit(2);
    }
}
