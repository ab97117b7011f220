# The daemon in a guest, with the configuration that the job writes to /run/b/config.toml, unless $options say something else; it is ready within
# $patience seconds.
mkdir -p /run/b /mnt /dev/shm
mount -t tmpfs shm /dev/shm
export BCACHED_NOTES=/run/b BCACHED_STATE=/run/b BCACHED_CONTROL=/run/b/control.sock

options="--config /run/b/config.toml" patience=90

# For the section of a cache: an emulated device is slow, and nothing is to go past it.
uncongested="congested_read_threshold_us = 0
congested_write_threshold_us = 0"

# serve: the daemon, until it is ready; its process is $server.
serve() {
	# What the one before has said is not what this one says.
	: > /tmp/out; : > /tmp/log
	bcached serve $options > /tmp/out 2> /tmp/log &
	server=$!
	wait_for $patience grep -q '^ready' /tmp/out || { cat /tmp/log; return 1; }
}

# serve_device: the same of one volume; its block device is $device.
serve_device() {
	serve
	device=$(sed -n 's/.*it is the block device \([^ ]*\).*/\1/p' /tmp/log | tail -n 1)
	test -n "$device" && wait_for 20 test -b $device || { cat /tmp/log; return 1; }
}

# two_volumes FIRST SECOND: a configuration with volumes over ublk, on /dev/vdb and /dev/vdc, in write-back behind /dev/vda.
two_volumes() {
	bcached make --writeback -b 64k -C /dev/vda -B /dev/vdb --label $1 > /dev/null
	bcached make -B /dev/vdc --for /dev/vda --label $2 > /dev/null
	cat > /run/b/config.toml <<end
version = 1
[cache.fast]
device = "/dev/vda"
[defaults]
export = "ublk"
cache_mode = "writeback"
[volume.$1]
backing = "/dev/vdb"
[volume.$2]
backing = "/dev/vdc"
end
}

# answering: the process that answers. None: fails.
answering() {
	bcached status --json 2> /dev/null | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' | head -n 1 | grep .
}

# over_slow DEVICE: $below is that device from now on, and stands still and goes on when it is told to.
over_slow() {
	dmsetup create --noudevsync --noudevrules slow --table "0 $(blockdev --getsz $1) linear $1 0"
	below=/dev/dm-$(dmsetup info -c --noheadings -o minor slow)
}
stands_still() { dmsetup suspend --noflush --nolockfs slow; }
goes_on_again() { dmsetup resume --noudevsync slow; }

# killed: the daemon is, by SIGKILL.
killed() {
	kill -9 $server
	wait_for 20 test ! -d /proc/$server
}

# ends PROCESS: waits for it, and for its success.
ends() { wait $1 || { echo "exit $?: $2"; cat /tmp/log; return 1; }; }

# load DEVICE-OR-FILE SIZE NAME [FIO-ARGUMENT..]: writes all of it in a random order and reads it again, each time with other bytes, until
# /tmp/enough is there. An error or a wrong byte ends it. How many times that was, passes NAME says.
load() {
	place=$1 size=$2 name=$3; shift 3
	until test -e /tmp/enough; do
		written $place $size $(($(passes $name) + 1)) "$@" || { echo "$name failed"; : > /tmp/$name.failed; return 1; }
		echo pass >> /tmp/$name.passes
	done
}
passes() { cat /tmp/$1.passes 2> /dev/null | wc -l; }

# goes_on NAME: the load of that name comes through once more.
goes_on() {
	wanted=$(($(passes $1) + 1))
	wait_for 120 passed_or_failed $1 $wanted && test ! -e /tmp/$1.failed || { cat /tmp/log; return 1; }
}
passed_or_failed() { test -e /tmp/$1.failed || test $(passes $1) -ge $2; }

# written DEVICE-OR-FILE SIZE PASS [FIO-ARGUMENT..]: once. With --verify_only it is read alone, and must be what that pass has written. Each byte says
# where it is and of which pass: of a checksum that comes along, what an earlier pass has left has a good one, too.
written() {
	verified_place=$1 verified_size=$2 seed=$3; shift 3
	fio --name=verified --filename=$verified_place --size=$verified_size --rw=randwrite --bsrange=4k-32k --ioengine=libaio --iodepth=8 --direct=1 \
		--thread --eta=never --randseed=$seed --verify=pattern --verify_pattern=%o0x$(printf %08x $seed) --verify_fatal=1 \
		--output=/tmp/fio.$seed "$@" || { cat /tmp/fio.$seed; return 1; }
}
