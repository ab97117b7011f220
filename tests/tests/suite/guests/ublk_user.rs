//! Block devices served by a daemon that does not run as root. Without `CAP_SYS_ADMIN`, the daemon
//! makes none and reports what to use instead, even where every user may open `/dev/ublk-control`
//! (docs/decisions/0021-no-devices-without-privileges.md). With that capability alone, it makes
//! devices that outlive it, provided that its user is given access to the character device.

use bcached_front_ublk::DataTransfer;
use bcached_tests::failure::Outcome;
use bcached_tests::requires;
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{all_is_well, new_vm_having, vm_having};

/// A user 1000 with a set of its own in files. `$as` runs a command as that user; with `$none`,
/// without capabilities.
const USER: &str = r#"
mkdir -p /home/user
chmod 755 /home; chmod 1777 /tmp; chmod 666 /dev/null
chown 1000:1000 /home/user /run/b
# The shell has a program of that name of its own.
as="/bin/setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs"
none="--inh-caps=-all --bounding-set=-all"
truncate -s 48M /home/user/ssd; truncate -s 64M /home/user/hdd
chown 1000:1000 /home/user/*
$as $none bcached make --writeback -b 64k -C /home/user/ssd -B /home/user/hdd --label mine > /dev/null
cd /home/user
"#;

const WITHOUT: &str = r#"
# refused WHY COMMAND..: to serve by ublk is, for that reason and with what to use instead; and nothing is left behind.
refused() {
	why=$1; shift
	code=0; "$@" timeout 60 bcached serve --cache ssd --backing hdd --export ublk > /tmp/told 2>&1 || code=$?
	cat /tmp/told
	test $code = 4
	grep -q "cannot make block devices.*$why" /tmp/told
	grep -q "an ordinary user can have volumes by nbd, fuse and vhost-user" /tmp/told
	"$@" bcached doctor > /tmp/told
	grep -A 3 '^ublk ' /tmp/told
	grep '^ublk ' /tmp/told | grep -q ' WARN '
	tr -s ' \n' ' ' < /tmp/told | grep -q "$why.* an ordinary user can have volumes by nbd, fuse and vhost-user"
	test -z "$(ls /sys/class/ublk-char)"
}
refused "/dev/ublk-control may not be opened" $as $none
chmod 666 /dev/ublk-control
refused "no device is created without CAP_SYS_ADMIN: it would fail when the daemon dies" $as $none
# Root of a user namespace has all capabilities, but none that counts.
refused "no device is created without CAP_SYS_ADMIN: it would fail when the daemon dies" $as $none unshare --user --map-root-user
# What it is told to use works.
$as $none bcached serve --cache ssd --backing hdd --export nbd > /tmp/out 2> /tmp/log & server=$!
wait_for $patience grep -q '^ready' /tmp/out || { cat /tmp/log; exit 1; }
kill -TERM $server; wait $server
"#;

/// Gives the user the device node, after a delay.
const GIVES_LATE: &str = r#"
gives() {
	( while true; do
		if test -e /dev/ublkc0; then sleep 1; chgrp 1000 /dev/ublkc0; chmod 660 /dev/ublkc0; fi
		sleep 0.1
	done ) 2> /dev/null &
}
"#;

/// udev gives the user the device node, by the rules of the guide.
const UDEV_GIVES: &str = r#"
gives() {
	chown 0:0 /dev/ublk-control; chmod 600 /dev/ublk-control
	mkdir -p /etc/udev/rules.d /run/udev
	cat > /etc/udev/rules.d/60-test.rules <<end
KERNEL=="ublk-control", GROUP="1000", MODE="0660"
SUBSYSTEM=="ublk-char", GROUP="1000", MODE="0660"
end
	/lib/systemd/systemd-udevd --daemon --resolve-names=never
	udevadm trigger --type=devices --action=add
	udevadm settle --timeout=60
}
"#;

const WITH_ONE: &str = r#"
chgrp 1000 /dev/ublk-control; chmod 660 /dev/ublk-control
one="--inh-caps=-all,+sys_admin --ambient-caps=-all,+sys_admin --bounding-set=-all,+sys_admin"
options="--cache ssd --backing hdd --export ublk --stop-timeout 1s"
serve() {
	: > /tmp/out; : > /tmp/log; chmod 666 /tmp/out /tmp/log
	$as $one bcached serve $options > /tmp/out 2> /tmp/log & server=$!
	wait_for $patience grep -q '^ready' /tmp/out || { cat /tmp/log; return 1; }
	grep -q "^Uid:	1000	1000" /proc/$server/status
	grep -x 'CapEff:	0000000000200000' /proc/$server/status
}
# Nobody gives it the node: it says so.
serve
wait_for 60 grep 'ublkc0 may not be opened, and this user was not given access within 5 s: .*a udev rule' /tmp/log
test ! -e /dev/ublkb0
killed
wait $server || true
gives
serve_device
first=$device
head -c 8000000 /dev/urandom > /tmp/data
dd if=/tmp/data of=$device bs=64k conv=fsync 2> /dev/null
bcached status | grep "$device ($transfer)"
for round in 1 2; do
	( dd if=/tmp/data of=$device bs=16k seek=1024 conv=fsync 2> /dev/null ) & writer=$!
	killed
	wait $server || true
	serve_device
	test $device = $first
	ends $writer
	head -c 8000000 $device | cmp - /tmp/data
	dd if=$device bs=16k skip=1024 2> /dev/null | head -c 8000000 | cmp - /tmp/data
done
kill -TERM $server; wait $server
test ! -e $device
test -z "$(ls /sys/class/ublk-char)"
$as $none bcached check --backing hdd ssd > /dev/null
"#;

#[test]
fn who_has_no_capability_is_told_what_to_use() -> Outcome {
    let tools = ["setpriv", "unshare"];
    let Some(vm) = vm_having("bcached", &tools, &["drivers/block/ublk_drv"]) else { return Ok(()) };
    all_is_well(&vm, &[], &format!("{USER}{WITHOUT}"))
}

#[test]
fn with_one_capability_a_daemon_of_a_user_has_devices_that_outlive_it() -> Outcome {
    let Some(vm) = vm_having("bcached", &["setpriv"], &["drivers/block/ublk_drv"]) else { return Ok(()) };
    outlives(&vm, DataTransfer::UserCopy, GIVES_LATE)
}

#[test]
fn so_it_has_by_udev_and_where_memory_is_registered() -> Outcome {
    let tools = ["setpriv", "udevadm"];
    let Some(vm) = new_vm_having("bcached", &tools, &["drivers/block/ublk_drv"]) else { return Ok(()) };
    let Some(udev) = requires::program("udevadm") else { return Ok(()) };
    let vm = vm.with_files([(udev, "/lib/systemd/systemd-udevd".to_owned())]);
    outlives(&vm, DataTransfer::ZeroCopy, UDEV_GIVES)
}

fn outlives(vm: &Vm, transfer: DataTransfer, gives: &str) -> Outcome {
    all_is_well(vm, &[], &format!("transfer='{}'\n{gives}{USER}{WITH_ONE}", transfer.word()))
}
