# Functions for the daemon in a guest. It runs with the configuration that the job writes to
# /run/b/config.toml, unless $options holds other options, and must be ready within $patience
# seconds.
mkdir -p /run/b /mnt /dev/shm
mount -t tmpfs shm /dev/shm
export BCACHED_NOTES=/run/b BCACHED_STATE=/run/b BCACHED_CONTROL=/run/b/control.sock

options="--config /run/b/config.toml" patience=90

# For the section of a cache: emulated devices are slow, and congestion must not make requests
# bypass the cache.
uncongested="congested_read_threshold_us = 0
congested_write_threshold_us = 0"

# serve: starts the daemon and waits until it is ready; its process is $server.
serve() {
	# Clears the output of the previous daemon, so that it is not taken for that of this one.
	: > /tmp/out; : > /tmp/log
	bcached serve $options > /tmp/out 2> /tmp/log &
	server=$!
	wait_for $patience grep -q '^ready' /tmp/out || { cat /tmp/log; return 1; }
}

# serve_device: like serve, for a single volume; its block device is $device.
serve_device() {
	serve
	device=$(sed -n 's/.*available as the block device \([^ ]*\).*/\1/p' /tmp/log | tail -n 1)
	test -n "$device" && wait_for 20 test -b $device || { cat /tmp/log; return 1; }
}

# two_volumes FIRST SECOND: formats and configures two volumes over ublk, on /dev/vdb and /dev/vdc,
# in write-back mode behind the cache /dev/vda.
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

# answering: prints the process of the daemon that answers; fails if none does.
answering() {
	bcached status --json 2> /dev/null | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' | head -n 1 | grep .
}

# over_slow DEVICE: makes $below a device over DEVICE that can be suspended and resumed.
over_slow() {
	dmsetup create --noudevsync --noudevrules slow --table "0 $(blockdev --getsz $1) linear $1 0"
	below=/dev/dm-$(dmsetup info -c --noheadings -o minor slow)
}
stands_still() { dmsetup suspend --noflush --nolockfs slow; }
goes_on_again() { dmsetup resume --noudevsync slow; }

# killed: kills the daemon with SIGKILL.
killed() {
	kill -9 $server
	wait_for 20 test ! -d /proc/$server
}

# ends PROCESS: waits for the process, which must succeed.
ends() { wait $1 || { echo "exit $?: $2"; cat /tmp/log; return 1; }; }

# load DEVICE-OR-FILE SIZE NAME [FIO-ARGUMENT..]: repeatedly writes all of it in random order and
# reads it back, with different bytes in each pass, until /tmp/enough exists. An error or a wrong
# byte ends it. passes NAME prints the number of completed passes.
load() {
	place=$1 size=$2 name=$3; shift 3
	until test -e /tmp/enough; do
		written $place $size $(($(passes $name) + 1)) "$@" || { echo "$name failed"; : > /tmp/$name.failed; return 1; }
		echo pass >> /tmp/$name.passes
	done
}
passes() { cat /tmp/$1.passes 2> /dev/null | wc -l; }

# goes_on NAME: waits until the load of that name has completed another pass.
goes_on() {
	wanted=$(($(passes $1) + 1))
	wait_for 120 passed_or_failed $1 $wanted && test ! -e /tmp/$1.failed || { cat /tmp/log; return 1; }
}
passed_or_failed() { test -e /tmp/$1.failed || test $(passes $1) -ge $2; }

# written DEVICE-OR-FILE SIZE PASS [FIO-ARGUMENT..]: writes and verifies it once. With
# --verify_only, it is only read, and must contain what that pass has written. Each byte encodes its
# position and its pass. A checksum stored with the data would not suffice: data of an earlier pass
# has a valid checksum, too.
written() {
	verified_place=$1 verified_size=$2 seed=$3; shift 3
	fio --name=verified --filename=$verified_place --size=$verified_size --rw=randwrite --bsrange=4k-32k --ioengine=libaio --iodepth=8 --direct=1 \
		--thread --eta=never --randseed=$seed --verify=pattern --verify_pattern=%o0x$(printf %08x $seed) --verify_fatal=1 \
		--output=/tmp/fio.$seed "$@" || { cat /tmp/fio.$seed; return 1; }
}
