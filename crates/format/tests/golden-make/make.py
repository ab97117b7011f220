#!/usr/bin/env python3
"""Makes the golden sectors of ../golden: superblocks of bcache-tools and of a 6.1 kernel, and a kernel's metadata.

Needs user-mode-linux, bcache-tools, gcc. Run it by hand; the sectors are in the repository. It knows just enough of
the format to cut the structures out of an image, and to write the superblock versions that no tool formats."""
import os, pathlib, struct, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
golden = here.parent / "golden"
shim_source = here.parents[3] / "tests/src/uml/shim.c"
modules = next(pathlib.Path("/usr/lib/uml/modules").iterdir()) / "kernel"
SECTOR, SB, BUCKET, BLOCK = 512, 4096, 4096, 512


def crc64(data, state=0xFFFFFFFFFFFFFFFF):
    for byte in data:
        state ^= byte << 56
        for _ in range(8):
            state = (state << 1 ^ (0x42F0E1EBA9EA3693 if state >> 63 else 0)) & 0xFFFFFFFFFFFFFFFF
    return state ^ 0xFFFFFFFFFFFFFFFF


def reseal(image, changes):
    """Changes fields of a superblock that a tool formatted."""
    with open(image, "r+b") as file:
        file.seek(SB)
        block = bytearray(file.read(4096))
        for offset, form, value in changes:
            struct.pack_into("<" + form, block, offset, value)
        count, = struct.unpack_from("<H", block, 206)
        struct.pack_into("<Q", block, 0, crc64(block[8:208 + 8 * count]))
        file.seek(SB)
        file.write(block)


def image(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    return str(path)


def run(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def boot(work, images):
    shim, init = work / "xstate.so", work / "init"
    run("gcc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(shim_source))
    init.write_text(f"""#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run
for m in lib/crc64 drivers/md/bcache/bcache; do busybox insmod {modules}/$m.ko; done
mount -t devtmpfs dev /dev 2>/dev/null
sh {here}/job.sh; sync; busybox poweroff -f
""")
    init.chmod(0o755)
    disks = [f"ubd{index + 1}={path}" for index, path in enumerate(images)]
    subprocess.run(
        ["linux.uml", "mem=512M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}",
         "con=null", "con0=null,fd:1", "quiet", *disks],
        check=True, timeout=300, stdin=subprocess.DEVNULL, env={**os.environ, "LD_PRELOAD": str(shim)})


def superblock(path):
    with open(path, "rb") as file:
        file.seek(SB)
        return file.read(4096)


def save(name, data):
    (golden / name).write_bytes(data)
    print(f"{name}: {len(data)} bytes")


def journal(disk, first, count):
    """All valid entries, (seq, bytes), of a small-geometry cache."""
    magic = 0x245235C1A3625032 ^ struct.unpack_from("<Q", disk, SB + 56)[0]
    for bucket in range(first, first + count):
        at = bucket * BUCKET
        while at + 240 <= (bucket + 1) * BUCKET:
            found, seq, _, keys = struct.unpack_from("<QQII", disk, at + 8)
            end = at + 240 + 8 * keys
            if found != magic or end > (bucket + 1) * BUCKET:
                break
            if crc64(disk[at + 8:end]) != struct.unpack_from("<Q", disk, at)[0]:
                break
            yield seq, disk[at:end]
            at += -(-(end - at) // BLOCK) * BLOCK


def bucket_of(pointer):
    return ((pointer >> 8) & (1 << 43) - 1) * SECTOR // BUCKET


def node_sets(node):
    seq, at, sets = struct.unpack_from("<Q", node, 16)[0], 0, []
    while at < len(node) and struct.unpack_from("<Q", node, at + 16)[0] == seq:
        words, = struct.unpack_from("<I", node, at + 28)
        sets.append(struct.unpack_from(f"<{words}Q", node, at + 32))
        at += -(-(32 + 8 * words) // BLOCK) * BLOCK
    return sets


def metadata(path):
    disk = pathlib.Path(path).read_bytes()
    first, count = struct.unpack_from("<HH", disk, SB + 204)
    entries = dict(journal(disk, first, count))
    newest = max(entries)
    last_seq, = struct.unpack_from("<Q", entries[newest], 32)
    print(f"journal {min(entries)}..{newest}, last_seq {last_seq}")
    save("jset-newest.bin", entries[newest])
    empty = [seq for seq in entries if len(entries[seq]) == 240]
    save("jset-without-keys.bin", entries[max(empty)])
    largest = max(entries, key=lambda seq: len(entries[seq]))
    save("jset-with-many-keys.bin", entries[largest])
    entry = entries[newest]
    cut = lambda bucket: disk[bucket * BUCKET:(bucket + 1) * BUCKET]
    save("uuids.bin", cut(bucket_of(struct.unpack_from("<Q", entry, 56)[0])))
    prio, = struct.unpack_from("<Q", entry, 176)
    for index in range(2):
        save(f"prio-{index}.bin", cut(prio))
        prio, = struct.unpack_from("<Q", cut(prio), 32)
    root = cut(bucket_of(struct.unpack_from("<Q", entry, 120)[0]))
    level, = struct.unpack_from("<H", entry, 168)
    print(f"root level {level}")
    save("node-root.bin", root)
    children = [words[at + 2] for words in node_sets(root) for at in range(0, len(words), 3) if words[at + 1]]
    leaves = {pointer: cut(bucket_of(pointer)) for pointer in children}
    # Some children are dead and their buckets reused: a live one's first sum is good under its pointer.
    live = {p: leaf for p, leaf in leaves.items() if struct.unpack_from("<I", leaf, 28)[0] < 500
            and crc64(leaf[8:32 + 8 * struct.unpack_from("<I", leaf, 28)[0]], p) == struct.unpack_from("<Q", leaf)[0]}
    pointer = max(live, key=lambda p: len(node_sets(live[p])))
    print(f"leaf of {len(node_sets(live[pointer]))} sets under pointer {pointer:#x}")
    save("node-leaf.bin", live[pointer])


def main():
    golden.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        cache, backing = image(work / "cache", 8 << 20), image(work / "backing", 8 << 20)
        offset, large = image(work / "offset", 8 << 20), image(work / "large", 64 << 20)
        run("make-bcache", "-b", "4k", "-w", "512", "-C", cache, "-B", backing)
        run("make-bcache", "-w", "512", "-o", "2048", "--writeback", "-B", offset)
        run("make-bcache", "-b", "64k", "-w", "512", "--discard", "--cache_replacement_policy=fifo", "-C", large)
        save("superblock-cache-formatted.bin", superblock(cache))
        save("superblock-cache-formatted-fifo.bin", superblock(large))
        save("superblock-backing-formatted.bin", superblock(backing))
        save("superblock-backing-formatted-offset.bin", superblock(offset))
        # Version 6 and version 5 with the large bucket feature (2^7 sectors), as newer tools would format them.
        reseal(offset, [(16, "Q", 6)])
        reseal(large, [(16, "Q", 5), (128, "Q", 2), (194, "H", 7)])
        boot(work, [cache, backing, offset, large])
        save("superblock-cache-running.bin", superblock(cache))
        save("superblock-cache-running-large.bin", superblock(large))
        save("superblock-backing-dirty.bin", superblock(backing))
        save("superblock-backing-version-6.bin", superblock(offset))
        metadata(cache)


sys.exit(main())
