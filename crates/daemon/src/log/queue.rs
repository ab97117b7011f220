//! The queue of log lines on their way to the log's reader.
//!
//! A thread that logs never waits: it leaves its line here, and one thread writes them. If the
//! reader is too slow, lines are dropped and counted, and the log reports their number at that
//! place.
//!
//! This is not `tracing-appender`, because that bounds lines and not bytes, does not count lines
//! whose writing fails, and cannot mark a gap in the log.

use super::prefix;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::Level;

/// Bytes that may be queued: more than the lines of a start or a stop of many volumes.
const BYTES_MAX: usize = 1 << 20;

/// Memory that a line takes beside its bytes.
const LINE_BYTES: usize = 64;

/// A write that takes longer is stuck: the reader does not read.
const STUCK: Duration = Duration::from_secs(1);

/// The queued lines, and the progress of the writer.
#[derive(Default)]
pub struct Queue {
    state: Mutex<QueueState>,
    /// Notified when an entry is added or written.
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    entries: VecDeque<Entry>,
    /// Bytes of the queued lines.
    bytes: usize,
    /// Since when the writer has been writing its current entry.
    writing: Option<Instant>,
    /// Lines that were pushed, and lines that are written or lost.
    came: u64,
    settled: u64,
    /// Lines that are lost.
    lost: u64,
}

/// An entry for the writer.
#[derive(Debug, PartialEq, Eq)]
enum Entry {
    Line(Box<[u8]>),
    /// This many lines were dropped here.
    Gap(u64),
}

/// The condition of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Condition {
    /// Lines that were dropped since the start, or could not be written.
    pub lost: u64,
    /// For how long the reader has taken nothing; `None` if it reads.
    pub stuck: Option<Duration>,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a line, with its newline, or drops and counts it.
    pub fn push(&self, line: &[u8]) {
        let mut state = self.state();
        state.came += 1;
        if state.bytes + line.len() + LINE_BYTES > BYTES_MAX {
            state.lost += 1;
            state.settled += 1;
            match state.entries.back_mut() {
                Some(Entry::Gap(lines)) => *lines += 1,
                _ => state.entries.push_back(Entry::Gap(1)),
            }
        } else {
            state.bytes += line.len() + LINE_BYTES;
            state.entries.push_back(Entry::Line(line.into()));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the next entry, once there is one.
    fn take(&self) -> Entry {
        let mut state = self.state();
        loop {
            if let Some(entry) = state.entries.pop_front() {
                state.writing = Some(Instant::now());
                return entry;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that the current entry is written, or that its line is lost.
    fn done(&self, entry: &Entry, is_lost: bool) {
        let mut state = self.state();
        state.writing = None;
        if let Entry::Line(line) = entry {
            state.bytes -= line.len() + LINE_BYTES;
            state.settled += 1;
            state.lost += u64::from(is_lost);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the condition of the log.
    pub fn condition(&self) -> Condition {
        let state = self.state();
        Condition { lost: state.lost, stuck: state.stuck() }
    }

    /// Returns a mark after all lines until now, for [`Queue::is_behind`].
    pub fn mark(&self) -> u64 {
        self.state().came
    }

    /// Whether a line before `mark` is not written yet, and is about to be.
    pub fn is_behind(&self, mark: u64) -> bool {
        let state = self.state();
        state.settled < mark && state.stuck().is_none()
    }

    /// Waits until every line is written, at most for `limit`; returns whether they are.
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        while !state.entries.is_empty() || state.writing.is_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Writes entries forever. `write` writes a whole line; `told` is called for gaps once they are
    /// in the log.
    pub fn write_all(
        &self,
        mut write: impl FnMut(&[u8]) -> Result<(), Errno>,
        priorities: bool,
        told: impl Fn(u64),
    ) -> ! {
        // Lines lost that the log does not report yet.
        let mut untold = 0;
        loop {
            let entry = self.take();
            if let Entry::Gap(lines) = &entry {
                untold += lines;
            }
            if untold > 0 {
                let line = format!("{}{} [event={GAP}]\n", prefix(priorities, Level::WARN), gap(untold));
                if write(line.as_bytes()).is_ok() {
                    told(untold);
                    untold = 0;
                }
            }
            let mut is_lost = false;
            if let Entry::Line(line) = &entry {
                is_lost = write(line).is_err();
                untold += u64::from(is_lost);
            }
            self.done(&entry, is_lost);
        }
    }
}

impl QueueState {
    fn stuck(&self) -> Option<Duration> {
        self.writing.map(|since| since.elapsed()).filter(|lasts| *lasts >= STUCK)
    }
}

/// The event of [`gap`].
pub const GAP: &str = "log-lines-lost";

/// The log's line about missing lines.
pub fn gap(lines: u64) -> String {
    let s = if lines == 1 { "" } else { "s" };
    format!("the log lost {lines} line{s} here: its reader was too slow, or could not be written to")
}

/// Writes all of `line` to `fd`, even if another process has made that non-blocking.
pub fn write_whole(fd: impl rustix::fd::AsFd, mut line: &[u8]) -> Result<(), Errno> {
    while !line.is_empty() {
        match rustix::io::write(&fd, line) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => line = &line[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let _or_tries_again = poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::sync::{Arc, atomic::AtomicBool, atomic::Ordering};
    use std::thread;

    /// A queue whose writer sends lines into a channel, and fails on demand.
    struct TestQueue {
        queue: Arc<Queue>,
        written: mpsc::Receiver<String>,
        fails: Arc<AtomicBool>,
    }

    /// The writer blocks on each line until the test receives it from `written`.
    fn site() -> TestQueue {
        let (queue, fails) = (Arc::new(Queue::default()), Arc::new(AtomicBool::new(false)));
        let (send, written) = mpsc::sync_channel(0);
        let (writer, is_failing) = (Arc::clone(&queue), Arc::clone(&fails));
        thread::spawn(move || {
            let write = |line: &[u8]| {
                if is_failing.load(Ordering::SeqCst) {
                    return Err(Errno::NOSPC);
                }
                send.send(String::from_utf8_lossy(line).into_owned()).map_err(|_| Errno::PIPE)
            };
            writer.write_all(write, false, |_| ())
        });
        TestQueue { queue, written, fails }
    }

    #[test]
    fn who_logs_does_not_wait_for_the_reader_and_the_gap_is_told_in_its_place() {
        let TestQueue { queue, written, .. } = site();
        let line = [b'x'; 1000];
        let fits = BYTES_MAX / (line.len() + LINE_BYTES);
        for _ in 0..fits + 7 {
            queue.push(&line);
        }
        assert_eq!(queue.condition().lost, 7);
        assert!(!queue.flush(Duration::ZERO), "nobody has read");
        for _ in 0..fits {
            assert_eq!(written.recv().unwrap().len(), line.len());
        }
        let told = written.recv().unwrap();
        assert!(told.contains("lost 7 lines") && told.contains("[event=log-lines-lost]"), "{told}");
        queue.push(b"after\n");
        assert_eq!(written.recv().unwrap(), "after\n");
        assert!(queue.flush(Duration::from_secs(60)));
        assert_eq!(queue.condition(), Condition { lost: 7, stuck: None });
    }

    #[test]
    fn lines_that_could_not_be_written_are_counted_and_told() {
        let TestQueue { queue, written, fails } = site();
        fails.store(true, Ordering::SeqCst);
        queue.push(b"one\n");
        queue.push(b"two\n");
        assert!(queue.flush(Duration::from_secs(60)));
        assert_eq!(queue.condition().lost, 2);
        fails.store(false, Ordering::SeqCst);
        queue.push(b"three\n");
        assert!(written.recv().unwrap().contains("lost 2 lines"));
        assert_eq!(written.recv().unwrap(), "three\n");
    }

    #[test]
    fn a_mark_is_passed_once_its_lines_are_written_or_lost() {
        let TestQueue { queue, written, fails } = site();
        queue.push(b"one\n");
        let mark = queue.mark();
        assert!(queue.is_behind(mark));
        assert_eq!(written.recv().unwrap(), "one\n");
        assert!(queue.flush(Duration::from_secs(60)));
        assert!(!queue.is_behind(mark));
        fails.store(true, Ordering::SeqCst);
        queue.push(b"two\n");
        assert!(queue.flush(Duration::from_secs(60)));
        assert!(!queue.is_behind(queue.mark()));
    }
}
