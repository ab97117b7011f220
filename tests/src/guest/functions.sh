# Functions that jobs inside a guest may call. POSIX sh: dash in User-Mode Linux, busybox in qemu.
# A job runs under `set -e`; the last output of a failing job is its own.

bcache=/sys/fs/bcache

# wait_for SECONDS COMMAND..: waits until the command succeeds; fails when the time is over.
wait_for() {
	tenths=$(($1 * 10)); shift
	until "$@"; do
		tenths=$((tenths - 1))
		if [ "$tenths" -le 0 ]; then echo "waited too long for: $*"; return 1; fi
		sleep 0.1
	done
}

# register DEVICE..: registers devices with the kernel's bcache; returns when each is registered.
register() {
	for device in "$@"; do
		# On a busy machine, a stopped set stays known for longer than it is visible. A set with its UUID
		# is refused until it is gone.
		wait_for 10 registers "$device"
	done
}
registers() { { echo "$1" > $bcache/register; } 2> /dev/null; }

# set_directory: prints the sysfs directory of the one registered set.
set_directory() { echo $bcache/*-*-*-*-*; }

# no_bypass N..: caches everything on /dev/bcacheN, without bypass for sequential or congested
# access.
no_bypass() {
	for n in "$@"; do echo 0 > /sys/block/bcache$n/bcache/sequential_cutoff; done
	echo 0 > "$(set_directory)/congested_read_threshold_us"
	echo 0 > "$(set_directory)/congested_write_threshold_us"
}

# keep_dirty N..: stops write-back, so that dirty data stays in the cache.
keep_dirty() {
	for n in "$@"; do echo 0 > /sys/block/bcache$n/bcache/writeback_running; done
}

# write_back N: writes back all dirty data of /dev/bcacheN, as fast as possible.
write_back() {
	echo 0 > "/sys/block/bcache$1/bcache/writeback_percent"
	wait_for 200 written_back "$1"
}

written_back() { [ "$(cat "/sys/block/bcache$1/bcache/dirty_data")" = 0.0k ]; }

# written_mib: prints how much the kernel has written into the cache's buckets, in whole MiB. The
# kernel prints it as "29.7M", and from a gigabyte on as "1.2G".
written_mib() {
	written=$(cat "$(set_directory)/cache0/written")
	case $written in
	*.*M) echo "${written%.*}" ;;
	*M) echo "${written%M}" ;;
	*.*G) echo $((${written%.*} * 1024)) ;;
	*G) echo $((${written%G} * 1024)) ;;
	*) echo 0 ;;
	esac
}

nothing_registered() {
	for entry in $bcache/*-*-*-*-* /sys/block/bcache*; do
		if [ -e "$entry" ]; then return 1; fi
	done
}

# stop_everything: stops cleanly. Dirty data stays in the cache.
stop_everything() {
	sync
	for entry in $bcache/*-*-*-*-*; do if [ -e "$entry" ]; then echo 1 > "$entry/stop"; fi; done
	# The set also stops its volumes; a stop of a volume then fails, which is ignored.
	for entry in /sys/block/bcache*; do if [ -e "$entry" ]; then { echo 1 > "$entry/bcache/stop"; } 2> /dev/null || true; fi; done
	wait_for 200 nothing_registered
}

# collect_garbage: makes the kernel run a whole garbage collection; returns after the first one of
# this boot.
collect_garbage() {
	echo 1 > "$(set_directory)/internal/trigger_gc"
	wait_for 200 garbage_collected
}

garbage_collected() { [ "$(cat "$(set_directory)/internal/btree_gc_last_sec")" -ge 0 ]; }

# attach N: attaches /dev/bcacheN, which has no cache, to the one set.
attach() {
	set=$(set_directory)
	echo "${set##*/}" > "/sys/block/bcache$1/bcache/attach"
	wait_for 200 attached "$1"
}

attached() { ! detached "$1"; }

# detach N: detaches /dev/bcacheN from its cache; returns when all its dirty data has been written
# back.
detach() {
	echo 1 > "/sys/block/bcache$1/bcache/detach"
	wait_for 400 detached "$1"
}

detached() { [ "$(cat "/sys/block/bcache$1/bcache/state")" = "no cache" ]; }
