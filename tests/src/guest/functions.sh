# What jobs inside a guest may call. POSIX sh: dash in User-Mode Linux, busybox in qemu.
# A job runs under `set -e`; the last words of a failing one are its own.

bcache=/sys/fs/bcache

# wait_for SECONDS COMMAND..: until the command succeeds; fails when the time is over.
wait_for() {
	tenths=$(($1 * 10)); shift
	until "$@"; do
		tenths=$((tenths - 1))
		if [ "$tenths" -le 0 ]; then echo "waited too long for: $*"; return 1; fi
		sleep 0.1
	done
}

# register DEVICE..: give devices to the kernel's bcache; returns when each is up.
register() {
	for device in "$@"; do
		# A set that was stopped is known for longer than it is seen on a busy machine: one with its UUID is refused until it has gone.
		wait_for 10 registers "$device"
	done
}
registers() { { echo "$1" > $bcache/register; } 2> /dev/null; }

# set_directory: the one registered set.
set_directory() { echo $bcache/*-*-*-*-*; }

# no_bypass N..: cache everything on /dev/bcacheN: no bypass for sequential or congested access.
no_bypass() {
	for n in "$@"; do echo 0 > /sys/block/bcache$n/bcache/sequential_cutoff; done
	echo 0 > "$(set_directory)/congested_read_threshold_us"
	echo 0 > "$(set_directory)/congested_write_threshold_us"
}

# keep_dirty N..: dirty data stays where it is.
keep_dirty() {
	for n in "$@"; do echo 0 > /sys/block/bcache$n/bcache/writeback_running; done
}

# write_back N: everything that is dirty of /dev/bcacheN, as fast as it goes.
write_back() {
	echo 0 > "/sys/block/bcache$1/bcache/writeback_percent"
	wait_for 200 written_back "$1"
}

written_back() { [ "$(cat "/sys/block/bcache$1/bcache/dirty_data")" = 0.0k ]; }

# written_mib: what the kernel has written into the cache's buckets, in whole MiB. It says "29.7M", and from a gigabyte on "1.2G".
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

# stop_everything: the clean stop. Dirty data stays in the cache.
stop_everything() {
	sync
	for entry in $bcache/*-*-*-*-*; do if [ -e "$entry" ]; then echo 1 > "$entry/stop"; fi; done
	# The set stops its volumes too, and then nobody hears this.
	for entry in /sys/block/bcache*; do if [ -e "$entry" ]; then { echo 1 > "$entry/bcache/stop"; } 2> /dev/null || true; fi; done
	wait_for 200 nothing_registered
}

# collect_garbage: let the kernel collect garbage, whole; returns after the first time of this boot.
collect_garbage() {
	echo 1 > "$(set_directory)/internal/trigger_gc"
	wait_for 200 garbage_collected
}

garbage_collected() { [ "$(cat "$(set_directory)/internal/btree_gc_last_sec")" -ge 0 ]; }

# attach N: put the one cache in front of /dev/bcacheN, which has none.
attach() {
	set=$(set_directory)
	echo "${set##*/}" > "/sys/block/bcache$1/bcache/attach"
	wait_for 200 attached "$1"
}

attached() { ! detached "$1"; }

# detach N: take the cache from /dev/bcacheN; returns when all its dirty data has been written back.
detach() {
	echo 1 > "/sys/block/bcache$1/bcache/detach"
	wait_for 400 detached "$1"
}

detached() { [ "$(cat "/sys/block/bcache$1/bcache/state")" = "no cache" ]; }
