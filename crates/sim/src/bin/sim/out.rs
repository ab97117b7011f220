//! Standard output. Who has stopped reading it wants no more of it: the process ends then, without a word.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};
use std::process::exit;

/// As shells report a program that the signal for a closed pipe has ended. It is none of the statuses with which a run says
/// what it has found.
const CLOSED: i32 = 141;

/// Prints a line.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::out::print(format_args!("{}\n", format_args!($($words)*)))
    };
}
pub(crate) use say;

/// Prints `text`, which need not be a whole line, at once.
pub fn print(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    let done = out.write_fmt(text).and_then(|()| out.flush());
    if let Err(error) = done {
        if error.kind() == ErrorKind::BrokenPipe {
            exit(CLOSED);
        }
        let _unread = writeln!(io::stderr(), "sim: cannot write standard output: {error}");
        exit(2);
    }
}
