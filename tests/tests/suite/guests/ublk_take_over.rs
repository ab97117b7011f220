//! Hand-over of volumes over ublk to another process, in a guest, while `fio` writes to one volume
//! and a file system is on the other. Either process may be killed in the middle of it. Nothing
//! above sees an error, and the devices stay the same. While a disk stalls, no process takes over,
//! and again nothing above sees an error.

use bcached_tests::failure::{Failure, Outcome};
use bcached_tests::vm::Vm;
use bcached_tests::vm::devices::{all_is_well, new_vm_having, vm_having};

const DRIVERS: &[&str] = &["drivers/block/ublk_drv"];

/// Both volumes are under load from here on.
const BEGINS: &str = r#"
two_volumes raw files
serve
here=/dev/bcache/by-label
raw=$(readlink $here/raw) files=$(readlink $here/files)
mkfs.ext4 -q $files; mount -t ext4 -o errors=panic $files /mnt
( load $raw 2m raw --offset=16m ) & writer=$!
( load /mnt/file 2m file --fallocate=none ) & filer=$!
# Both have come through another pass since.
go_on() {
	goes_on raw; goes_on file
	test $(readlink $here/raw) = $raw && test $(readlink $here/files) = $files
}
# The process that answers is $server; none: fails.
who() { server=$(answering); }
# taken_over: by another process, and everything goes on.
taken_over() {
	former=$server
	bcached take-over > /tmp/told || { cat /tmp/told /tmp/log; return 1; }
	cat /tmp/told
	who && test $server != $former || return 1
	wait_for 20 test ! -d /proc/$former
	go_on
}
go_on
"#;

/// Either process is killed at some moments of a hand-over.
const KILLED_AT_MOMENTS: &str = r#"
for round in 1 2; do taken_over; done
# killed_at DELAY WHOM: a take-over in which one of both is killed after that. It goes on, by the other one, or by the next start if the new one was
# alone by then.
killed_at() {
	who
	# The killer is no child of whom it kills, nor has it what that holds.
	cat > /tmp/wrapped <<end
#!/bin/sh
new=\$\$ old=\$BCACHED_TAKES_OVER
( sleep $1; kill -9 \$$2; : > /tmp/killed ) > /dev/null 2>&1 < /dev/null &
exec bcached "\$@"
end
	chmod +x /tmp/wrapped
	rm -f /tmp/killed
	former=$server
	if bcached take-over --program /tmp/wrapped --timeout 60s > /tmp/told 2>&1; then told=done; else told="exit $?"; fi
	wait_for 20 test -e /tmp/killed || { cat /tmp/told /tmp/log; return 1; }
	# What is ending has not ended yet.
	sleep 1
	# Without the old one the new one goes on, at whichever step.
	if [ $2 = old ]; then wait_for 20 who && test $server != $former || { cat /tmp/told /tmp/log; return 1; }; fi
	if who; then
		if [ $server = $former ]; then end=old; else end=new; fi
	else
		end=nobody
		serve
	fi
	echo "killed $2 after $1: $told, $end"
	go_on
}
for seconds in 0.1 0.6 1.2; do
	for whom in new old; do killed_at $seconds $whom; done
done
"#;

/// Many repetitions. A process ends at a random moment of the commands that arrive for two devices.
const OVER_AND_OVER: &str = r"
for round in 1 2 3 4 5 6 7 8; do
	taken_over
	killed; serve
	go_on
done
";

/// Everything that was written must be there.
const ENDS: &str = r#"
: > /tmp/enough
ends $writer; ends $filer
umount /mnt; mount -t ext4 $files /mnt
written /mnt/file 2m $(passes file) --verify_only
written $raw 2m $(passes raw) --offset=16m --verify_only
umount /mnt
who
kill -TERM $server
wait_for 60 test ! -d /proc/$server
test -z "$(ls /sys/class/ublk-char)"
bcached check --backing /dev/vdb --backing /dev/vdc /dev/vda > /dev/null"#;

/// One of two disks stalls before another process is to take over.
const STANDS_STILL: &str = r#"
two_volumes quick slow
over_slow /dev/vdc
sed -i "s|/dev/vdc|$below|" /run/b/config.toml
serve
here=/dev/bcache/by-label
quick=$(readlink $here/quick) slow=$(readlink $here/slow)
piece() { dd if=$1 of=$2 bs=4k count=1 skip=$3 iflag=direct 2> /dev/null; }
piece $quick /tmp/piece 16
# waits_for_it PLACE: a read of what is not cached does, for a disk that stands still from now on.
waits_for_it() {
	stands_still
	piece $slow /dev/null $1 & reader=$!
}
is_told() { bcached status > /tmp/status || true; grep -q 'has not answered for' /tmp/status; }

waits_for_it 1000
wait_for 20 is_told
code=0; bcached take-over > /tmp/told 2>&1 || code=$?
cat /tmp/told
test $code = 6
grep "^bcached: no process can take over from this daemon now: $below has not answered for .* operations in flight: .*; try again" /tmp/told
test $(answering) = $server
piece $quick /tmp/again 16; cmp /tmp/piece /tmp/again
goes_on_again
ends $reader "a read before"

bcached take-over > /dev/null
former=$server; server=$(answering); test $server != $former
piece $slow /tmp/again 3000

# A device that was made to be written is not, from when the volume is not to be.
sed -i 's|^\[volume.quick\]|&\nread_only = true|' /run/b/config.toml
killed; serve
test $(readlink $here/quick) = $quick
if dd if=/dev/zero of=$quick bs=4k count=1 seek=16 oflag=direct 2> /tmp/refused; then cat /run/b/config.toml; exit 1; fi
piece $quick /tmp/again 16; cmp /tmp/piece /tmp/again
kill -TERM $server; wait $server
"#;

#[test]
fn nobody_takes_over_while_a_disk_stands_still_and_nothing_is_lost_by_asking() -> Outcome {
    let drivers = [DRIVERS, &["drivers/md/dm-mod"]].concat();
    let Some(vm) = vm_having("bcached", &["dmsetup"], &drivers) else { return Ok(()) };
    all_is_well(&vm, &[64, 64, 64], STANDS_STILL)
}

fn passes(vm: Vm, processors: u32, between: &str) -> Outcome {
    all_is_well(&vm.sized(1024, processors), &[128, 128, 128], &format!("{BEGINS}{between}{ENDS}"))
}

#[test]
fn whoever_takes_over_and_whoever_is_killed_nobody_above_sees_an_error() -> Outcome {
    let Some(vm) = new_vm_having("bcached", &["fio"], DRIVERS) else { return Ok(()) };
    passes(vm, 1, KILLED_AT_MOMENTS)
}

/// Returns whether the failure is the kernel's own: it used memory that it had freed, and crashed
/// on it. An error that reached a file system above is ours; it also ends the guest
/// (`errors=panic`).
fn is_the_kernels_own(why: &Failure) -> bool {
    const STUMBLES: [&str; 5] =
        ["refcount_t: ", "BUG: ", "Oops: ", "general protection fault", "io_ring_exit_work"];
    STUMBLES.iter().any(|words| why.mentions(words))
        && !["EXT4-fs error", "I/O error", "panic forced after error"].iter().any(|words| why.mentions(words))
}

/// Tests decision 0020. With the commands of both devices on one ring, this kernel crashed within a
/// few hand-overs, twenty at most. It may still crash, about once in some hundred ends: on a busy
/// host, a processor of a guest may stall in the microseconds that are left. It does not crash
/// every time.
#[test]
fn a_kernel_that_may_end_commands_twice_bears_it_over_and_over() -> Outcome {
    const ATTEMPTS: u32 = 3;
    for attempt in 1..=ATTEMPTS {
        let Some(vm) = vm_having("bcached", &["fio"], DRIVERS) else { return Ok(()) };
        match passes(vm, 3, OVER_AND_OVER) {
            Err(why) if attempt < ATTEMPTS && is_the_kernels_own(&why) => eprintln!("{why:?}"),
            ended => return ended,
        }
    }
    unreachable!("the last attempt returns")
}
