//! Turns the errors of an engine into the messages and exit statuses of the program.

use bcached_control::failure::{CANNOT_OPEN, Failure, Kind, cannot_open};
use bcached_control::jobs::JobKind;
use bcached_control::sizes::{exact, human, typed};
use bcached_engine::{Error, ErrorContext};
use bcached_env::IoErrorKind;
use bcached_offline::bucket_memory;
use bcached_uring::note::NoteError;
use std::path::Path;

/// The end of an advice to do by hand what the daemon does not do itself.
pub const START_AGAIN: &str = ", then start the daemon again";

/// The machine lacks something that an engine needs.
pub fn of_machine(why: String) -> Failure {
    Failure::new(Kind::Io, CANNOT_OPEN).why(why)
}

/// Why the note of the set cannot be opened; on the cache device at `device`, unless the set was
/// open before.
pub fn of_note(device: Option<&Path>, error: &NoteError) -> Failure {
    let failure = |kind| {
        Failure::new(kind, device.map_or_else(|| CANNOT_OPEN.to_owned(), cannot_open)).why(error.to_string())
    };
    match error {
        // The cache device itself could be claimed.
        NoteError::InUse(_) => failure(Kind::InUse).next(
            "stop the other daemon; if it serves another device with the same UUID, one is a copy of the other; nothing \
             overrides this",
        ),
        NoteError::Io { source, .. } | NoteError::BootId(source)
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            failure(Kind::Permission)
        }
        NoteError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            failure(Kind::Scarce).next("free space on the note's file system: the note records acknowledged writes")
        }
        NoteError::Io { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory => {
            failure(Kind::Scarce).next("free memory on this machine, or raise the daemon's memory limit")
        }
        _ => failure(Kind::Io),
    }
}

/// The device at `device` holds a new cache whose set UUID has a note with keys of a killed
/// process. If it were served, it would take the note from the set that can replay it.
pub fn of_foreign_note(device: &Path, note: &Path) -> Failure {
    let note = note.display();
    Failure::new(Kind::DataLoss, cannot_open(device))
        .why(format!(
            "it is new, but the note {note} may hold writes that a killed bcached acknowledged for the cache set with \
             this UUID"
        ))
        .next(format!(
            "serve the cache device that the set was on, which replays them; if that is impossible, move the note away \
             (`mv {note} DIR`): writes that only the note holds are then lost"
        ))
}

/// The engine has not answered in time.
pub fn silent(name: &str) -> Failure {
    Failure::new(Kind::Io, format!("the engine of {name} does not answer"))
        .next("`bcached status` shows which device does not answer; then try again")
}

/// The first error, of which a later one is a consequence.
fn first(error: &Error) -> &Error {
    match error {
        Error::Failed(before) => first(before),
        error => error,
    }
}

/// True if the file system below a file, or the pool below a volume, has no room for a write.
pub fn is_full(error: &Error) -> bool {
    match error {
        Error::Io { source, .. } => source.kind == IoErrorKind::NoSpace,
        Error::Failed(first) => is_full(first),
        _ => false,
    }
}

/// The same as [`of_open`]. If the set is damaged, the details go to the log.
pub fn of_open_logged(device: &Path, table: u64, error: &Error) -> Failure {
    if is_damage(error) {
        tracing::error!(event = "set-damaged", "{}: {error}", device.display());
    }
    of_open(device, table, error)
}

/// Why the set on the cache device at `device` cannot be opened. `table` is how much of its share
/// of the memory the bucket table takes, in bytes.
pub fn of_open(device: &Path, table: u64, error: &Error) -> Failure {
    let failure = |kind| Failure::new(kind, cannot_open(device)).why(error.to_string());
    let device = device.display();
    match error {
        error if is_full(error) => failure(Kind::DeviceFails)
            .next(format!("free space on the file system below {device}{START_AGAIN}")),
        Error::NodeBudget { needed, .. } => {
            failure(Kind::Config).next(bucket_memory::more((*needed as u64).saturating_add(table)))
        }
        Error::BucketMemory { buckets, needed } => failure(Kind::Scarce)
            .why(format!("no memory for the table of its {buckets} buckets, which needs {}", human(*needed)))
            .next(
                "free memory on this machine, or raise the daemon's memory limit (`ulimit -v`, `MemoryMax=`)",
            ),
        Error::Sizes { .. } => failure(Kind::Geometry).next("make the cache again with a larger --bucket"),
        error if is_damage(error) => failure(Kind::Damaged)
            .why(damage(error))
            .next("keep its devices as they are; `bcached check` shows the extent of the damage, and writes nothing"),
        Error::NotACache => failure(Kind::NotBcache),
        error if error.may_pass() => failure(Kind::DeviceFails).next("check the device for errors"),
        // What a failed flush has dropped, or what a missing end of the device held, is unknown,
        // and another opening would not notice it.
        Error::Io { .. } | Error::Failed(_) => {
            failure(Kind::Damaged).next("check the device for errors, then start the daemon again")
        }
        _ => failure(Kind::Io),
    }
}

/// Why a set was not stopped in order, and what that means for its next start. `what` says which
/// set.
pub fn of_stop(what: String, error: &Error) -> Failure {
    let failure = Failure::new(Kind::Io, what).why(error.to_string());
    match first(error) {
        Error::Io { doing: ErrorContext::Backing | ErrorContext::BackingFlush, .. } | Error::LostWrites => {
            failure.next("check the backing device and the data on it: acknowledged writes may be lost")
        }
        Error::Io { doing: ErrorContext::CacheFlush, .. } => failure.next(
            "check the device for errors; the next start recovers the set as after a power cut, without writes that were \
             acknowledged and not flushed, and logs which volumes lost some (writes-given-up)",
        ),
        Error::Io { source, .. } if matches!(source.kind, IoErrorKind::Shrunk { .. }) => {
            failure.next("restore the device's former size before the next start")
        }
        error if is_full(error) => failure.next(
            "free space on the file system or in the pool below its device; the next start recovers the set as after a crash",
        ),
        Error::Io { source, .. } if source.kind == IoErrorKind::Gone => failure.next(
            "when its device is back, the next start recovers the set: as after a power cut of the device, unless that has no \
             volatile cache",
        ),
        error if error.may_pass() => {
            failure.next("when its device works again, the next start recovers the set as after a crash")
        }
        error if is_damage(error) => Failure { kind: Kind::Damaged, ..failure }.next(
            "the next start finds the same damage and repairs nothing: keep its devices as they are; `bcached check` examines \
             the whole set and writes nothing",
        ),
        _ => failure.next(RECOVERS),
    }
}

/// What becomes of a set that was not stopped in order, if nothing is known to be wrong with it.
pub const RECOVERS: &str = "the next start recovers the set as after a crash";

/// True if the set's metadata are invalid, or contradict each other.
fn is_damage(error: &Error) -> bool {
    matches!(
        error,
        Error::Inconsistent(_)
            | Error::Node { .. }
            | Error::Format { .. }
            | Error::NoJournal
            | Error::JournalGap { .. }
            | Error::JournalHidden { .. }
    )
}

/// What is damaged, for users: the exact bytes are for the log.
pub fn damage(error: &Error) -> String {
    match error {
        Error::Node { .. } => "its index is damaged".to_owned(),
        Error::NoJournal => "its journal is damaged: it has no valid entry".to_owned(),
        Error::Format { doing: ErrorContext::Priorities, .. } => {
            "its bucket generations are damaged".to_owned()
        }
        Error::Format { doing: ErrorContext::Uuids, .. } => "its table of volumes is damaged".to_owned(),
        Error::Format { doing: ErrorContext::Journal, .. } => "its journal is damaged".to_owned(),
        error => error.to_string(),
    }
}

/// Why a job on a volume has failed.
pub fn of_job(verb: JobKind, name: &str, error: &Error) -> Failure {
    let what = match verb {
        JobKind::Flush => format!("not all dirty data of {name} could be written back"),
        JobKind::Detach => format!("{name} could not be detached"),
        JobKind::Attach => format!("{name} could not be attached"),
        JobKind::Remove => format!("{name} could not be removed"),
        JobKind::Stop => format!("{name} could not be stopped"),
        JobKind::Add => format!("{name} could not be added"),
        JobKind::Forget => format!("{name} could not be forgotten"),
        JobKind::Grow | JobKind::Shrink => format!("the size of {name} could not be changed"),
        JobKind::Release => format!("{name} could not be released"),
        JobKind::Import => format!("{name} could not be imported"),
        JobKind::Replace => format!("{name} could not be detached from its cache"),
    };
    match error {
        Error::NoRoom { sectors_max, .. } => {
            return Failure::new(Kind::NoRoom, what)
                .why(format!("its cache has room for at most {} of it", exact(sectors_max * 512)))
                .next(format!("the largest that fits is `--size {}`", typed(sectors_max * 512)));
        }
        Error::NotWalked { percent } => {
            return Failure::new(Kind::InUse, what)
                .why(format!("the index of its cache is still being read ({percent}%)"))
                .next("try again in a moment");
        }
        Error::Reopened => {
            return Failure::new(Kind::Io, what)
                .why(error.to_string())
                .next("repeat the command: it starts from the beginning");
        }
        _ => {}
    }
    // Only an error of the backing device leaves the cache as it is.
    let is_of_cache = !matches!(
        error,
        Error::Io { doing: ErrorContext::Backing | ErrorContext::BackingFlush, .. }
            | Error::LostWrites
            | Error::Cancelled
    );
    let next = match verb {
        _ if is_of_cache => "`bcached status` shows its state",
        JobKind::Flush => "its dirty data stays in the cache, and is safe there",
        JobKind::Detach => "it is still attached, and its dirty data is safe in the cache",
        JobKind::Attach => "it is still served without a cache",
        JobKind::Grow | JobKind::Shrink => "its size is unchanged, and its dirty data is safe in the cache",
        JobKind::Replace => {
            "it is still attached, and its dirty data is safe in the cache; repeat the command to continue"
        }
        JobKind::Remove
        | JobKind::Stop
        | JobKind::Add
        | JobKind::Forget
        | JobKind::Release
        | JobKind::Import => "`bcached status` shows its state",
    };
    let kind = if *error == Error::Cancelled { Kind::Cancelled } else { Kind::Io };
    Failure::new(kind, what).why(error.to_string()).next(next)
}

/// What to do if the volume table of a set has no free slot.
const FREES_SLOTS: &str = "give up a volume that is no longer needed (`bcached detach`, `bcached forget`), then start the daemon again, which frees its \
    slot; a cache with larger buckets has more slots";

/// Why a flash-only volume is not made, or not served.
pub fn of_flash(name: &str, error: &Error) -> Failure {
    let failure = |kind, why: String| Failure::new(kind, format!("cannot add {name}")).why(why);
    match error {
        Error::NoRoom { sectors, sectors_max } => failure(
            Kind::NoRoom,
            format!(
                "a size of {} was requested, and the cache has room for {} ({sectors_max} sectors) beside its dirty \
                 data and the space promised to other volumes",
                human(sectors * 512),
                exact(sectors_max * 512)
            ),
        )
        .next(format!("the largest that fits is `--size {}`; nothing overrides this", typed(sectors_max * 512)))
        .option("--size"),
        Error::NotWholeBlocks { block_sectors, .. } => failure(
            Kind::Geometry,
            format!("its size must be a whole number of blocks of {}, at least one", human(block_sectors * 512)),
        )
        .option("--size"),
        Error::NoSlot(_) => failure(Kind::NoRoom, error.to_string()).next(FREES_SLOTS),
        _ => failure(Kind::Io, error.to_string()).next("`bcached status` shows its state"),
    }
}

/// Why a backing device is refused.
pub fn of_attach(name: &str, error: &Error) -> Failure {
    let (kind, next) = match error {
        Error::DirtyElsewhere(_) => {
            (Kind::WrongSet, Some("serve it with that cache; nothing overrides this"))
        }
        Error::OtherSet(_) => (
            Kind::WrongSet,
            Some(
                "serve it with that cache; nothing overrides this; if that cache is dead, docs/failures.md (clean: nothing is \
                 lost) describes how to move the device to a new cache with all of its data",
            ),
        ),
        Error::TooSmall { .. } => {
            (Kind::Damaged, Some("restore the device's former size; nothing was written to it"))
        }
        Error::DirtyUnknown => (
            Kind::WrongSet,
            Some(
                "if the log has `table-damaged`, or `status` shows dirty data of no known volume, that is probably its data: \
                 keep both devices as they are (docs/failures.md, a lost table of volumes); otherwise, look for the cache that \
                 it was used with; if its dirty data there was given up (`bcached forget`), the device is old and has holes \
                 (docs/failures.md, dirty: the newest data was on the cache)",
            ),
        ),
        Error::OlderCache { .. } => (
            Kind::WrongSet,
            Some(
                "serve it with the newer cache device; if that is lost, `bcached forget` of this volume drops its data from the \
                 older cache device, and the backing device is attached anew",
            ),
        ),
        Error::LostNumber { .. } => (
            Kind::WrongSet,
            Some(
                "save an image of both devices; with `cache = \"none\"` in its section, the device is served as it is, and the \
                 data in the cache stays there",
            ),
        ),
        Error::OlderBacking => (
            Kind::WrongSet,
            Some(
                "serve the newer device; to continue with this one, use `bcached forget` of this volume: it drops the newer data \
                 from the cache, and this device is attached anew",
            ),
        ),
        Error::BlockSize { .. } => (
            Kind::Geometry,
            Some("make the cache with `bcached make --for` this backing device, or with --block"),
        ),
        Error::Duplicate => (
            Kind::SameDevice,
            Some("one is a copy of the other: serve only the one that was in use, never both with one cache"),
        ),
        Error::NoSlot(_) => (Kind::NoRoom, Some(FREES_SLOTS)),
        Error::NotABacking | Error::NotACache => (Kind::NotBcache, None),
        Error::Format { .. } => (Kind::Damaged, None),
        error if is_full(error) => (
            Kind::DeviceFails,
            Some("free space on the file systems below it and below its cache, then start the daemon again"),
        ),
        error if error.may_pass() => (Kind::DeviceFails, Some("check the device for errors")),
        _ => (Kind::Io, None),
    };
    let failure = Failure::new(kind, format!("cannot serve {name}")).why(error.to_string());
    match next {
        Some(next) => failure.next(next),
        None => failure,
    }
}

/// Why the device at `path` does not replace the former backing device of the volume.
pub fn of_return(name: &str, path: &Path, error: &Error) -> Failure {
    let failure = not_taken_up(name, path);
    match error {
        Error::DeviceMismatch(_) => Failure { kind: Kind::WrongSet, ..failure }
            .why(error.to_string())
            .next(format!(
                "check the data on it; `bcached remove {name}` and then `bcached add {name}` serve it as a start would"
            )),
        _ => failure.why(error.to_string()).next("bcached tries again"),
    }
}

/// Why the device at `path` does not replace the former cache device.
pub fn of_cache_return(name: &str, path: &Path, error: &Error) -> Failure {
    let failure = not_taken_up(name, path);
    match error {
        Error::DeviceMismatch(_) => Failure { kind: Kind::WrongSet, ..failure }.why(error.to_string()).next(
            "start the daemon again when no other process uses the device: it then takes the device as it is",
        ),
        _ => failure.why(error.to_string()).next("bcached tries again"),
    }
}

/// The same failure, without a reason yet.
pub fn not_taken_up(name: &str, path: &Path) -> Failure {
    Failure::new(Kind::Io, format!("cannot use {} for {name}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_control::failure::RetryClass;
    use bcached_engine::ErrorContext;
    use bcached_env::{DiskId, IoError};
    use std::path::PathBuf;

    #[test]
    fn each_reason_has_its_exit_status() {
        let ssd = Path::new("/dev/ssd");
        let in_use = of_note(Some(ssd), &NoteError::InUse(PathBuf::from("/run/bcached/x.note")));
        assert_eq!((in_use.kind, in_use.kind.exit()), (Kind::InUse, 3), "{in_use}");
        let budget = of_open(ssd, 0, &Error::NodeBudget { budget: 64 << 20, needed: 200 << 20 });
        assert_eq!((budget.kind.exit(), budget.to_string().contains("400M or more")), (2, true), "{budget}");
        let budget = of_open(ssd, 100 << 20, &Error::NodeBudget { budget: 64 << 20, needed: 200 << 20 });
        assert!(budget.to_string().contains("600M or more"), "with the table of buckets: {budget}");
        let memory = of_open(ssd, 0, &Error::BucketMemory { buckets: 1 << 24, needed: 400 << 20 });
        assert_eq!((memory.kind, memory.retry_class()), (Kind::Scarce, RetryClass::Backoff), "{memory}");
        let gap = of_open(ssd, 0, &Error::JournalGap { from: 3, to: 5 });
        assert_eq!((gap.kind, gap.kind.exit()), (Kind::Damaged, 4), "{gap}");
        let hidden = of_open(ssd, 0, &Error::JournalHidden { sequence: 44, found: 36 });
        assert_eq!((hidden.kind.exit(), hidden.to_string().contains("44")), (4, true), "{hidden}");
        assert!(gap.to_string().starts_with("cannot open the cache set on /dev/ssd: "), "{gap}");
        for doing in [
            ErrorContext::Superblock,
            ErrorContext::Journal,
            ErrorContext::Priorities,
            ErrorContext::Node,
            ErrorContext::Uuids,
        ] {
            let source = IoError { kind: IoErrorKind::Io, disk: DiskId(0), sector: 8 };
            let fails = of_open(ssd, 0, &Error::Io { doing, source });
            assert_eq!((fails.kind, fails.kind.exit()), (Kind::DeviceFails, 4), "{fails}");
        }
        let source = IoError { kind: IoErrorKind::Io, disk: DiskId(0), sector: 0 };
        let flush = of_open(ssd, 0, &Error::Io { doing: ErrorContext::CacheFlush, source });
        assert_eq!(flush.kind, Kind::Damaged, "it is not tried again: {flush}");
        let source = IoError { kind: IoErrorKind::NoSpace, disk: DiskId(0), sector: 8 };
        let full = Error::Failed(Box::new(Error::Io { doing: ErrorContext::Journal, source }));
        assert!(of_attach("tank", &full).to_string().contains("free space on the file systems below"));
        assert!(!is_full(&Error::NoSpace), "buckets are another matter");
    }
    /// What a failed stop promises is what the next start does. It once promised recovery also of a
    /// damaged set.
    #[test]
    fn what_a_failed_stop_promises_is_what_the_next_start_does() {
        let told = |error| of_stop("it could not be stopped in order".to_owned(), &error).to_string();
        let io = |doing, kind| Error::Io { doing, source: IoError { kind, disk: DiskId(0), sector: 8 } };
        let failed = |error| Error::Failed(Box::new(error));
        for damaged in
            [Error::JournalGap { from: 3, to: 5 }, failed(Error::Inconsistent("a key")), Error::NoJournal]
        {
            let said = told(damaged);
            assert!(
                !said.contains("recovers") && said.contains("the next start finds the same damage"),
                "{said}"
            );
        }
        let journal = told(failed(io(ErrorContext::Journal, IoErrorKind::Io)));
        assert!(
            journal.contains("when its device works again, the next start recovers the set as after a crash"),
            "{journal}"
        );
        let full = told(failed(io(ErrorContext::Journal, IoErrorKind::NoSpace)));
        assert!(
            full.contains("free space on the file system") && full.contains("recovers the set"),
            "{full}"
        );
        let flush = told(failed(io(ErrorContext::CacheFlush, IoErrorKind::Io)));
        assert!(flush.contains("without writes that were acknowledged and not flushed"), "{flush}");
        let gone = told(failed(io(ErrorContext::Journal, IoErrorKind::Gone)));
        assert!(
            gone.contains("when its device is back, the next start recovers the set: as after a power cut"),
            "{gone}"
        );
        let cut = told(failed(io(ErrorContext::Journal, IoErrorKind::Shrunk { expected: 9, found: 8 })));
        assert!(cut.contains("restore the device's former size") && !cut.contains("recovers"), "{cut}");
        for backing in [Error::LostWrites, io(ErrorContext::BackingFlush, IoErrorKind::Io)] {
            let said = told(backing);
            assert!(said.contains("acknowledged writes may be lost") && !said.contains("recovers"), "{said}");
        }
    }
}
