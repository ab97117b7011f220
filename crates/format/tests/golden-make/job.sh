# Runs as root inside User-Mode Linux; ubdb, ubdc, ubdd, ubde: cache, its backing device, an offset one, a large-bucket cache.
ms() { busybox usleep $(($1 * 1000)); }
register() { echo "$1" > /sys/fs/bcache/register; ms 500; }
echo 3 > /proc/sys/kernel/printk
register /dev/ubdb; register /dev/ubdc; register /dev/ubdd; register /dev/ubde
set=$(ls -d /sys/fs/bcache/*-* | while read -r s; do [ -e "$s/bdev0" ] && echo "$s"; done | head -1)
echo "set $set"
[ -e /dev/bcache0 ] || busybox mdev -s
b=/sys/block/bcache0/bcache
echo 0 > $b/sequential_cutoff; echo 0 > $b/writeback_percent
echo writeback > $b/cache_mode; echo golden > $b/label
echo 2M > $set/flash_vol_create; ms 300
echo 1M > $set/flash_vol_create; ms 300
# Scattered writes make a tree of two levels with several sets in a leaf, a flush each few a journal with keys.
i=0; while [ $i -lt 600 ]; do
	n=$(((i * 7919 + 13) % 1600)); dd if=/dev/urandom of=/dev/bcache0 bs=4k count=1 seek=$n oflag=direct status=none
	i=$((i + 1)); [ $((i % 40)) = 0 ] && sync /dev/bcache0 && ms 100
done
for f in /sys/block/bcache*/bcache; do case $(readlink -f $f/..) in */bcache0|*/bcache1) ;; *) dd if=/dev/urandom of=/dev/$(basename $(dirname $f)) bs=4k count=30 oflag=direct status=none;; esac; done
dd if=/dev/bcache0 of=/dev/null bs=64k iflag=direct status=none
echo 1 > $set/internal/trigger_gc; ms 1500
i=0; while [ $i -lt 50 ]; do
	dd if=/dev/urandom of=/dev/bcache0 bs=4k count=1 seek=$(((i * 31) % 1600)) oflag=direct status=none; i=$((i + 1))
done
ls /sys/block | grep bcache; cat $b/state $b/dirty_data; cat $set/internal/btree_nodes
