//! Measures how much memory and disk space test programs take while they run. There is a bound for
//! each program, and one for all of them.
//!
//! All processes are scanned several times a second. Memory is the private memory of the processes
//! in the program's group, plus their shared memory, which counts for each of them. The page cache
//! does not count, because the kernel can reclaim it. Disk space is the blocks of files in the
//! program's `TMPDIR`: a sparse file counts as what it holds.

use super::pool;
use rustix::fs::{AtFlags, CWD, StatxFlags, statvfs, statx};
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Interval of the scans. A program may exceed its bound until the next one.
const LOOK: Duration = Duration::from_millis(250);
const MIB: u64 = 1 << 20;

/// The most that a program may take.
#[derive(Clone, Copy)]
pub struct ResourceBounds {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of the disk.
    pub disk: u64,
    /// What must be left of either on the machine. Below it the program that has most is stopped.
    pub left: u64,
}

/// Bytes in use.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ResourceUsage {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of disk space.
    pub disk: u64,
}

impl ResourceUsage {
    fn most(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), disk: self.disk.max(other.disk) }
    }

    fn both(self, other: Self) -> Self {
        Self { memory: self.memory + other.memory, disk: self.disk + other.disk }
    }
}

/// The peak of each program, by the leader of its group, and the peak of all of them together.
#[derive(Default)]
struct PeakUsage {
    each: BTreeMap<i32, ResourceUsage>,
    all: ResourceUsage,
    /// Programs that were stopped, and why.
    stopped: BTreeMap<i32, String>,
}

static PEAKS: Mutex<Option<PeakUsage>> = Mutex::new(None);

fn with<T>(act: impl FnOnce(&mut PeakUsage) -> T) -> T {
    act(PEAKS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Returns the peak of a program that has ended, and why it was stopped, if it was.
pub fn of(group: Pid) -> (ResourceUsage, Option<String>) {
    let group = group.as_raw_nonzero().get();
    with(|peaks| (peaks.each.remove(&group).unwrap_or_default(), peaks.stopped.remove(&group)))
}

/// Returns the peak of all programs together.
pub fn of_all() -> ResourceUsage {
    with(|peaks| peaks.all)
}

/// Starts scanning.
pub fn watch(bounds: ResourceBounds) {
    thread::spawn(move || {
        loop {
            look(bounds);
            thread::sleep(LOOK);
        }
    });
}

fn look(bounds: ResourceBounds) {
    let running = pool::groups();
    let memory = memory_by_group();
    let taken: Vec<(Pid, ResourceUsage)> = running
        .iter()
        .map(|(group, folder)| {
            let memory = memory.get(&group.as_raw_nonzero().get()).copied().unwrap_or_default();
            (*group, ResourceUsage { memory, disk: disk(folder) })
        })
        .collect();
    with(|peaks| {
        peaks.all =
            peaks.all.most(taken.iter().fold(ResourceUsage::default(), |all, (_, one)| all.both(*one)));
        for (group, taken) in &taken {
            let peak = peaks.each.entry(group.as_raw_nonzero().get()).or_default();
            *peak = peak.most(*taken);
        }
    });
    let folder = running.first().map_or_else(std::env::temp_dir, |(_, folder)| folder.clone());
    if let Some((group, why)) = too_much(&taken, left(&folder), bounds) {
        // A program that has just ended has released it.
        if pool::groups().iter().any(|(running, _)| *running == group) {
            with(|peaks| peaks.stopped.insert(group.as_raw_nonzero().get(), why));
            let _it_has_just_gone = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Returns the program to be stopped, and why, if there is one. `left` is what the machine has
/// left.
fn too_much(
    taken: &[(Pid, ResourceUsage)],
    left: ResourceUsage,
    bounds: ResourceBounds,
) -> Option<(Pid, String)> {
    let memory: fn(&ResourceUsage) -> u64 = |taken| taken.memory;
    let disk: fn(&ResourceUsage) -> u64 = |taken| taken.disk;
    let kinds = [("memory", memory, bounds.memory), ("the disk of TMPDIR", disk, bounds.disk)];
    kinds.into_iter().find_map(|(name, of, bound)| {
        let (group, most) = taken.iter().max_by_key(|(_, taken)| of(taken))?;
        let has = format!("it used {} MiB of {name}", of(most) / MIB);
        if of(most) > bound {
            return Some((*group, format!("{has}, and may use {} MiB", bound / MIB)));
        }
        let is_short = of(&left) < bounds.left && of(most) > 0;
        is_short.then(|| {
            let why = format!("{has}, more than any other, and the machine had {} MiB left", of(&left) / MIB);
            (*group, why)
        })
    })
}

/// Returns what is left on the machine, or what the control group of this process may use. The
/// value is unlimited if it cannot be determined.
pub fn left(folder: &Path) -> ResourceUsage {
    let said = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let disk = statvfs(folder).map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize));
    let memory = field(&said, "MemAvailable:").unwrap_or(u64::MAX);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    ResourceUsage { memory: memory.min(group_bound(&groups, Path::new("/sys/fs/cgroup"))), disk }
}

/// Returns the memory limit of the control group of a process in bytes, given the process's list of
/// groups, which may be of version 2 or version 1.
fn group_bound(groups: &str, root: &Path) -> u64 {
    let bound = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        let file = match controllers {
            "" => root.join(path).join("memory.max"),
            "memory" => root.join("memory").join(path).join("memory.limit_in_bytes"),
            _ => return None,
        };
        fs::read_to_string(file).ok()?.trim().parse::<u64>().ok()
    };
    groups.lines().filter_map(bound).min().unwrap_or(u64::MAX)
}

/// Returns the bytes of a field that is given in kB.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn memory_by_group() -> BTreeMap<i32, u64> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let is_process = entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
        // A process that has ended in the meantime has nothing.
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
        let of = || {
            let stat = read("stat")?;
            // After the name, which may contain anything: state, parent, group.
            let group = stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()?;
            let status = read("status")?;
            let parts = ["RssAnon:", "RssShmem:"].map(|name| field(&status, name).unwrap_or_default());
            Some((group, parts.iter().sum::<u64>()))
        };
        if let Some((group, bytes)) = if is_process { of() } else { None } {
            *all.entry(group).or_default() += bytes;
        }
    }
    all
}

/// Returns the bytes of the files in `folder`. File systems mounted below it are skipped: their
/// servers may never answer.
pub fn disk(folder: &Path) -> u64 {
    let mut all = 0;
    let mut folders = vec![folder.to_owned()];
    let mut device = None;
    while let Some(folder) = folders.pop() {
        // With this flag the kernel answers from its cache, and does not ask a server.
        let seen = |path: &Path| {
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
            let seen = statx(CWD, path, flags, StatxFlags::BLOCKS).ok()?;
            Some(((seen.stx_dev_major, seen.stx_dev_minor), seen.stx_blocks))
        };
        let Some((of, _)) = seen(&folder) else { continue };
        if *device.get_or_insert(of) != of {
            continue;
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    let found = seen(&entry.path()).filter(|(on, _)| *on == of);
                    all += found.map_or(0, |(_, blocks)| blocks * 512);
                }
                _ => {}
            }
        }
    }
    all
}

/// A folder for each program, inside one that is removed at the end.
pub struct ProgramFolders(tempfile::TempDir);

impl ProgramFolders {
    /// Creates the parent folder.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn new() -> anyhow::Result<Self> {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::Builder::new().prefix("bt-").tempdir()?;
        // Tests become other users, which must be able to pass through it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self(folder))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Creates a folder of this name, for all users, as `/tmp` is.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn of(&self, name: &str) -> std::io::Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt as _;
        let path = self.0.path().join(name);
        fs::create_dir(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o1777))?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    const BOUNDS: ResourceBounds = ResourceBounds { memory: 100 * MIB, disk: 1000 * MIB, left: 10 * MIB };
    const MUCH: ResourceUsage = ResourceUsage { memory: 1000 * MIB, disk: 1000 * MIB };

    fn pid(raw: i32) -> Pid {
        Pid::from_raw(raw).unwrap()
    }

    fn mib(memory: u64, disk: u64) -> ResourceUsage {
        ResourceUsage { memory: memory * MIB, disk: disk * MIB }
    }

    #[test]
    fn the_one_that_has_too_much_is_stopped() {
        let stopped =
            |two: [ResourceUsage; 2], left| too_much(&[(pid(7), two[0]), (pid(8), two[1])], left, BOUNDS);
        assert_eq!(stopped([mib(100, 1000), mib(1, 1)], MUCH), None);
        let (who, why) = stopped([mib(5, 0), mib(101, 0)], MUCH).expect("too much memory");
        assert_eq!((who, why.as_str()), (pid(8), "it used 101 MiB of memory, and may use 100 MiB"));
        let (who, why) = stopped([mib(0, 1001), mib(5, 0)], MUCH).expect("too much of the disk");
        assert!(who == pid(7) && why.ends_with("and may use 1000 MiB"), "{why}");
        let (who, why) = stopped([mib(20, 0), mib(30, 0)], mib(9, 1000)).expect("nobody has any left");
        let told = "it used 30 MiB of memory, more than any other, and the machine had 9 MiB left";
        assert_eq!((who, why.as_str()), (pid(8), told));
        assert_eq!(stopped([mib(0, 1), mib(0, 0)], mib(9, 1000)), None, "others have it");
    }

    #[test]
    fn a_sparse_file_counts_as_what_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("below");
        fs::create_dir(&below).unwrap();
        let file = fs::File::create(below.join("sparse")).unwrap();
        file.set_len(1 << 40).unwrap();
        assert!(disk(folder.path()) < MIB);
        file.write_all_at(&vec![1; 4 << 20], 1 << 30).unwrap();
        file.sync_all().unwrap();
        let taken = disk(folder.path());
        assert!((4 * MIB..5 * MIB).contains(&taken), "{taken}");
    }

    #[test]
    fn a_control_group_bounds_what_is_left() {
        let root = tempfile::tempdir().expect("a folder");
        let said =
            [("slice/run", "memory.max", "2147483648\n"), ("memory/old", "memory.limit_in_bytes", "4096\n")];
        for (folder, file, text) in said {
            fs::create_dir_all(root.path().join(folder)).expect("a folder");
            fs::write(root.path().join(folder).join(file), text).expect("a file");
        }
        let bound = |groups: &str| group_bound(groups, root.path());
        assert_eq!(bound("0::/slice/run\n"), 2 << 30);
        assert_eq!(bound("5:cpu:/old\n4:memory:/old\n0::/\n"), 4096);
        fs::write(root.path().join("slice/run/memory.max"), "max\n").expect("a file");
        assert_eq!((bound("0::/slice/run\n"), bound("")), (u64::MAX, u64::MAX));
    }

    #[test]
    fn memory_is_told_of_the_whole_group() {
        let own = rustix::process::getpgrp().as_raw_nonzero().get();
        let before = memory_by_group()[&own];
        let held = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = memory_by_group()[&own];
        assert!(after > before + 32 * MIB, "{before} {after}");
        drop(held);
    }
}
