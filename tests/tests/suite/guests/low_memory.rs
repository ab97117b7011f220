//! A machine of 512 MiB writes far more than that through ext4 to a volume of its own daemon, over
//! ublk, while the backing disk stalls for a while. The kernel then needs the daemon to get memory,
//! so the daemon must not need memory from the kernel. Nothing may hang, and nothing may be killed.

use bcached_tests::failure::Outcome;
use bcached_tests::vm::devices::{DAEMON, Disks, vm_having};
use std::time::Duration;

/// If this is set, the machine writes 4 GiB, for at least ten minutes, during one of which the disk
/// stalls.
const LONG: &str = "BCACHED_LONG";

const JOB: &str = r#"
# What is not the machine's by rights: its first file system lies in memory, and more of it than it would have.
memory() { awk -v of="$1:" '$1 == of {print $2}' /proc/meminfo; }
surplus=$(($(memory MemTotal) - $(du -skx / | cut -f 1) - 512 * 1024))
test $surplus -gt 0
mkdir /ballast; mount -t ramfs ballast /ballast
dd if=/dev/zero of=/ballast/it bs=1k count=$surplus 2> /dev/null

over_slow /dev/vdb
bcached make --writeback -b 64k -C /dev/vda -B $below --label media > /dev/null
cat > /run/b/config.toml <<end
version = 1
[daemon]
memory = "144M"
[cache.fast]
device = "/dev/vda"
[volume.media]
backing = "$below"
export = "ublk"
sequential_cutoff = 0
writeback_percent = 10
end
serve
device=/dev/bcache/by-label/media
mkfs.ext4 -q $device; mount -t ext4 -o errors=panic $device /mnt

# A file of 32 MiB that only this generation has; sixteen of them, over and over.
content() {
	yes "generation $1" | head -c 1048576 > /tmp/piece
	for n in $(seq 32); do cat /tmp/piece; done
}
started=$(cut -d . -f 1 /proc/uptime)
age() { echo $(($(cut -d . -f 1 /proc/uptime) - started)); }
( generation=0
while test $generation -lt $generations || test $(age) -lt $seconds; do
	content $generation > /mnt/$((generation % 16)) || { echo cannot write; exit 1; }
	echo $generation >> /tmp/written
	generation=$((generation + 1))
done ) &
writer=$!
written() { wc -l < /tmp/written; }
has_written() { test $(written) -ge $1; }
: > /tmp/written
wait_for $patience has_written $((generations / 4))
echo the disk stands still after $(written) files
stands_still
sleep $stall
# Whoever wants to know is answered, whatever waits: 1 is for what is not well.
code=0; bcached status > /tmp/status || code=$?
test $code -le 1 || { cat /tmp/status; exit 1; }
goes_on_again
echo it goes on after $(written) files
wait_for $patience has_written $((generations / 2))
ends $writer writing
sync
umount /mnt; mount -t ext4 $device /mnt
last=$(($(written) - 1))
for generation in $(seq $((last + 1 - looks)) $last); do
	content $generation | cmp - /mnt/$((generation % 16))
done
umount /mnt
test -d /proc/$server
dmesg | grep -i 'oom\|out of memory\|blocked for more than' && exit 1
# That the disk stood still is told.
grep -v event=device-trouble /tmp/log | grep -i 'error\|cannot' && exit 1
echo wrote $((32 * $(written))) MiB in $(age) s, the daemon took $(awk '/VmHWM/ {print int($2 / 1024)}' /proc/$server/status) MiB at most
kill -TERM $server; wait $server
echo all is well
"#;

#[test]
fn a_machine_of_512_mib_writes_to_its_own_volume() -> Outcome {
    let Some(vm) = vm_having("bcached", &["dmsetup"], &["drivers/md/dm-mod", "drivers/block/ublk_drv"])
    else {
        return Ok(());
    };
    let (parameters, limit) = if std::env::var_os(LONG).is_some() {
        ("generations=128 seconds=600 stall=60 patience=900 looks=16", 3600)
    } else {
        ("generations=20 seconds=0 stall=10 patience=200 looks=4", 580)
    };
    let script = format!("{DAEMON}\n{parameters}\n{JOB}");
    let limit = Duration::from_secs(limit);
    let said = Disks::blank(&[256, 1024])?.run_within(limit, &vm.sized(960, 1), &script)?;
    assert!(said.iter().any(|line| line == "all is well"), "{said:#?}");
    said.iter().filter(|line| line.starts_with("wrote ")).for_each(|line| println!("{line}"));
    Ok(())
}
