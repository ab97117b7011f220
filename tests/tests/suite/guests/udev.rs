//! A guest with udev, the rules of bcache-tools, the kernel's bcache and our rule. The kernel must
//! take none of our devices, whenever the daemon is killed, and after a boot before the daemon
//! runs. A set of the kernel's own, which it takes each time, shows that udev works.

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::requires;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{DAEMON, Disks, vm_having};
use std::path::{Path, PathBuf};

/// The rules about disks that Debian installs, by file name.
const RULES: [&str; 5] = [
    "50-udev-default.rules",
    "60-block.rules",
    "60-persistent-storage.rules",
    "69-bcache.rules",
    "80-drivers.rules",
];
/// The helper programs that these rules run.
const HELPERS: [&str; 3] = ["probe-bcache", "bcache-register", "bcache-keep-symlinks"];

/// Volume `media` is on `/dev/vda` and `/dev/vdb`; the kernel's set is on `/dev/vdc` and
/// `/dev/vdd`. `/dev/vde` keeps the list of owned devices across a boot.
const COMMON: &str = r#"
options=
mkdir -p /etc/bcached /etc/udev/rules.d /run/udev
cat > /etc/bcached/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
[volume.media]
backing = "/dev/vdb"
cache_mode = "writeback"
export = "ublk"
end
list=/etc/udev/rules.d/67-bcached-owned.rules
# Like a boot: what is there already is told again.
start_udev() {
	/lib/systemd/systemd-udevd --daemon --resolve-names=never
	udevadm trigger --type=subsystems --action=add
	udevadm trigger --type=devices --action=add
	settled
}
settled() { udevadm settle --timeout=60; }
of() { bcached show /dev/$1 | sed -n "s/^$2[^0-9a-f]*//p"; }
known() { our_set=$(of vda cset.uuid) uuid=$(of vdb dev.uuid) its_set=$(of vdc cset.uuid) its_volume=$(of vdd dev.uuid); }
# The kernel has its own set, and nothing of ours.
hands_off() {
	for disk in vda vdb; do test ! -e /sys/block/$disk/bcache || { echo "the kernel has $disk"; return 1; }; done
	test ! -e $bcache/$our_set
	wait_for 20 test -b /dev/bcache0
	test -e /sys/block/vdd/bcache/dev
	test "$(echo /sys/block/bcache*)" = /sys/block/bcache0
	test "$(echo $bcache/*-*-*-*-*)" = $bcache/$its_set
	test $(readlink -f /dev/bcache/by-uuid/$its_volume) = /dev/bcache0
}
linked() {
	for link in by-uuid/$uuid by-label/media; do
		test "$(readlink -f /dev/bcache/$link)" = $device || { echo "$link:"; ls -lR /dev/bcache; return 1; }
	done
	test -b $device
}
# kill_and_restart N: under a load, with events for our devices while nobody has them, and one for each close of them.
kill_and_restart() {
	( dd if=/dev/urandom of=/mnt/$1 bs=16k count=60 conv=fsync 2> /dev/null && md5sum < /mnt/$1 > /tmp/sum.$1 ) &
	writer=$!
	killed
	udevadm trigger --action=change --name-match=/dev/vda --name-match=/dev/vdb
	settled
	hands_off
	serve
	settled
	hands_off
	linked
	ends $writer
	echo "round $1"
}
"#;

const FIRST_BOOT: &str = r#"
bcached make -b 64k -C /dev/vda -B /dev/vdb --label media > /dev/null
make-bcache -b 64k -C /dev/vdc -B /dev/vdd > /dev/null
known
serve
cat $list
device=$(readlink -f /dev/bcache/by-label/media)
start_udev
for disk in vda vdb; do
	udevadm info --query=property /dev/$disk | grep -x ID_FS_TYPE=bcached_member
done
hands_off
linked
mkfs.ext4 -q $device; mount -t ext4 -o errors=panic /dev/bcache/by-label/media /mnt
for round in $(seq 20); do kill_and_restart $round; done
cat /tmp/sum.* > /tmp/sums; cat /mnt/* | md5sum
umount /mnt
dd if=$list of=/dev/vde conv=fsync 2> /dev/null
# The power goes with the daemon running; what it has made dirty is in the cache.
echo "killed 20 times"
"#;

const SECOND_BOOT: &str = r#"
tr -d '\0' < /dev/vde > $list
known
start_udev
hands_off
serve
device=$(readlink -f /dev/bcache/by-label/media)
settled
hands_off
linked
mount -t ext4 -o errors=panic /dev/bcache/by-label/media /mnt
cat /mnt/* | md5sum
for round in 21 22; do kill_and_restart $round; done
umount /mnt
kill -TERM $server; wait $server
settled
hands_off
test ! -e /dev/bcache/by-uuid/$uuid && test ! -L /dev/bcache/by-label/media
echo "and again"
"#;

/// Returns the guest, with all files where Debian installs them. A missing file makes the test
/// count as skipped.
fn vm_with_udev() -> Option<Vm> {
    let vm = vm_having("bcached", &["udevadm"], &["drivers/block/ublk_drv"])?;
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/udev/68-bcached.rules");
    let mut files = vec![
        (requires::program("udevadm")?, "/lib/systemd/systemd-udevd".to_owned()),
        (requires::program("make-bcache")?, "/bin/make-bcache".to_owned()),
        (own, "/etc/udev/rules.d/68-bcached.rules".to_owned()),
    ];
    let rules = RULES.iter().map(|name| format!("/lib/udev/rules.d/{name}"));
    let helpers = HELPERS.iter().map(|name| format!("/lib/udev/{name}"));
    files.extend(rules.chain(helpers).map(|path| (PathBuf::from(&path), path)));
    let missing = files.iter().find(|(path, _)| !path.is_file());
    if let Some((path, _)) = missing {
        requires::skip(&format!("there is no {}", path.display()));
        return None;
    }
    Some(vm.with_files(files))
}

#[test]
fn the_kernel_never_takes_what_is_ours_however_often_the_daemon_is_killed() -> Outcome {
    let Some(vm) = vm_with_udev() else { return Ok(()) };
    let disks = Disks::blank(&[64, 128, 64, 32, 1])?;
    let said = disks.run(&vm, &format!("{DAEMON}{COMMON}{FIRST_BOOT}"))?;
    assert!(said.iter().any(|line| line == "killed 20 times"), "{said:#?}");
    let sum = |said: &[String]| said.iter().rfind(|line| line.ends_with("  -")).cloned();
    let first = sum(&said).context("no sum of the files")?;
    let said = disks.run(&vm, &format!("{DAEMON}{COMMON}{SECOND_BOOT}"))?;
    assert!(said.iter().any(|line| line == "and again"), "{said:#?}");
    assert_eq!(said.iter().find(|line| line.ends_with("  -")), Some(&first), "{said:#?}");
    Ok(())
}
