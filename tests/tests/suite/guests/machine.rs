//! A virtual machine whose only disk is a volume over vhost-user. It boots from the volume and
//! installs files while the daemon is killed again and again; then the machine itself is killed.
//! After another boot, it must find every file that had been reported safe.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bcached_tests::apart::isolated;
use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::guest::Job;
use bcached_tests::ready;
use bcached_tests::uml::built_program;
use bcached_tests::vm::bootable::{DISK, ext4_is_in_order};
use bcached_tests::vm::devices::vm_having;

const LIMIT: Duration = Duration::from_secs(150);
/// The daemon is killed when this many files are safe, while the next one is being written.
const KILLS_AFTER: [usize; 5] = [2, 6, 11, 17, 24];
/// The line at which the machine is killed.
const LAST: &str = "file 28 is next";

/// What the machine does at each boot: it reports the files it finds, and installs files in the way
/// of a package manager. Boots after the first one run to their end.
const SCRIPT: &str = r#"
mkdir /mnt
mount -t ext4 -o errors=panic /dev/vda2 /mnt
begins=1
for file in /mnt/file*; do
	if [ -e $file ]; then echo "found ${file##*/} $(md5sum < $file)"; begins=101; fi
done
for n in $(seq $begins 110); do
	echo "file $n is next"
	dd if=/dev/urandom of=/mnt/new bs=4k count=$((3 + n * 37 % 100)) conv=fsync 2> /dev/null
	sum=$(md5sum < /mnt/new)
	mv /mnt/new /mnt/file$n
	sync
	echo "safe file$n $sum"
done
umount /mnt
"#;

/// A daemon with one volume, `disk`.
struct Daemon<'a> {
    directory: &'a Path,
    program: PathBuf,
    child: Child,
}

impl<'a> Daemon<'a> {
    fn make(directory: &'a Path) -> Outcome<Self> {
        let program = built_program("bcached")?;
        let (fast, tank) = (directory.join("fast"), directory.join("tank"));
        File::create(&fast)?.set_len(128 << 20)?;
        File::create(&tank)?.set_len((DISK << 20) + 8192)?;
        let mut make = Command::new(&program);
        isolated(&mut make, directory);
        make.args(["make", "--writeback", "--bucket", "64k", "--block", "512", "--cache"])
            .arg(&fast)
            .arg("--backing")
            .arg(&tank);
        let made = make.output()?;
        if !made.status.success() {
            return Err(Failure::new(String::from_utf8_lossy(&made.stderr)));
        }
        let text = format!(
            "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.disk]\nbacking = {tank:?}\nexport = [\"vhost-user\", \"nbd\"]\n\
            cache_mode = \"writeback\"\nsequential_cutoff = 0\n"
        );
        fs::write(directory.join("config.toml"), text)?;
        fs::create_dir(directory.join("run"))?;
        let child = start(&program, directory)?;
        Ok(Self { directory, program, child })
    }

    fn kill_and_restart(&mut self) -> Outcome {
        self.child.kill()?;
        self.child.wait()?;
        self.child = start(&self.program, self.directory)?;
        Ok(())
    }

    /// Copies with `qemu-img` from one place to the other.
    fn copy(&self, from: &str, to: &str) -> Outcome {
        let mut copy = Command::new("qemu-img");
        copy.args(["convert", "-f", "raw", "-O", "raw"]).args(to.starts_with("nbd").then_some("-n"));
        let copied = copy.args([from, to]).output()?;
        if copied.status.success() {
            return Ok(());
        }
        Err(Failure::new(String::from_utf8_lossy(&copied.stderr))).context("qemu-img")
    }

    fn volume(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.directory.join("run/nbd.sock").display())
    }

    fn said(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the daemon and waits until it is ready.
fn start(program: &Path, directory: &Path) -> Outcome<Child> {
    let log = File::options().create(true).append(true).open(directory.join("log"))?;
    let mut command = Command::new(program);
    isolated(&mut command, directory);
    command.arg("serve").arg("--config").arg(directory.join("config.toml"));
    command.arg("--control").arg(directory.join("run/control.sock"));
    command.env("BCACHED_NOTES", directory.join("run")).env("BCACHED_STATE", directory.join("run"));
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn()?;
    match ready::wait(&mut child, LIMIT) {
        Ok(()) => Ok(child),
        Err(why) => {
            let _ = child.kill();
            let _ = child.wait();
            let said = fs::read_to_string(directory.join("log")).unwrap_or_default();
            Err(Failure::new(format!("{why}\n{said}")))
        }
    }
}

/// Returns the files and their checksums from the lines that start with `begin`.
fn files(lines: &[String], begin: &str) -> BTreeMap<String, String> {
    let words = lines.iter().filter_map(|line| line.strip_prefix(begin)?.trim().split_once(' '));
    words.map(|(name, sum)| (name.to_owned(), sum.to_owned())).collect()
}

#[test]
fn a_machine_that_boots_from_a_volume_finds_what_was_safe() -> Outcome {
    let Some(vm) = vm_having("bcached", &["e2fsck"], &[]) else { return Ok(()) };
    let vm = vm.bare();
    let (work, site) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let Some(disk) = vm.bootable(work.path(), SCRIPT)? else { return Ok(()) };
    let mut daemon = Daemon::make(site.path())?;
    let volume = daemon.volume();
    daemon.copy(disk.to_str().context("a path that is text")?, &volume)?;
    let socket = site.path().join("run/vhost-user/disk.sock");

    let (mut safe, mut trouble, mut kills) = (0, None, 0);
    let mut job = Job { images: &[], script: "", crash_at: Some(LAST), limit: LIMIT };
    let first = vm.boot(&socket, &job, &mut |line| {
        safe += usize::from(line.starts_with("safe "));
        if line.contains(" is next") && KILLS_AFTER.contains(&safe) {
            kills += 1;
            trouble = trouble.take().or(daemon.kill_and_restart().err());
        }
    });
    let first = first.with_context_of(&daemon)?;
    trouble.map_or(Ok(()), Err)?;
    assert_eq!(kills, KILLS_AFTER.len(), "{first}");
    let safe = files(&first.output, "safe ");
    assert!(safe.len() > KILLS_AFTER[4], "{first}");
    assert!(!first.output.iter().any(|line| line.starts_with("found ")), "{first}");

    // The daemon is killed with it: the next boot begins with what is on the devices.
    daemon.kill_and_restart()?;
    job.crash_at = None;
    let second = vm.boot(&socket, &job, &mut |_| {}).with_context_of(&daemon)?;
    let found = files(&second.output, "found ");
    for (name, sum) in &safe {
        assert_eq!(found.get(name), Some(sum), "{name}\n{first}\nand then\n{second}");
    }
    let image = work.path().join("image");
    daemon.copy(&volume, image.to_str().context("a path that is text")?)?;
    assert_eq!(ext4_is_in_order(&image, work.path())?, None);
    Ok(())
}

/// Adds the daemon's log to a failure of its guest.
trait Said<T> {
    fn with_context_of(self, daemon: &Daemon<'_>) -> Outcome<T>;
}

impl<T, E: Into<Failure>> Said<T> for Result<T, E> {
    fn with_context_of(self, daemon: &Daemon<'_>) -> Outcome<T> {
        self.map_err(|error| Failure::new(format!("{:?}\nthe daemon:\n{}", error.into(), daemon.said())))
    }
}
