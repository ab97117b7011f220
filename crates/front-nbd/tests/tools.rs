//! Third-party clients as judges: nbdinfo, nbdsh, nbdcopy and qemu-io. If a tool is not installed,
//! its test is skipped with a line that says so.

mod support;

use support::tools::{has, run, succeed};
use support::{TANK, TANK_SECTORS, TestServer, image, serve};

fn nbdsh(served: &TestServer, export: &str, script: &str) -> String {
    let connect = format!("h.add_meta_context('base:allocation')\nh.connect_uri('{}')", served.uri(export));
    succeed("nbdsh", &["-c", &connect, "-c", script])
}

#[test]
fn nbdinfo_sees_both_exports_as_they_are() {
    if !has("nbdinfo") {
        return;
    }
    let served = serve();
    let listed = succeed("nbdinfo", &["--list", "--json", &served.uri("")]);
    assert!(listed.contains("\"tank\"") && listed.contains("\"archive\""), "{listed}");
    let tank = succeed("nbdinfo", &["--json", &served.uri("tank")]);
    for fact in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"export-size\": 67108864",
        "\"base:allocation\"",
        "\"is_read_only\": false",
        "\"can_cache\": false",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"is_rotational\": false",
        "\"block_size_minimum\": 512",
        "\"block_size_preferred\": 8192",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(tank.contains(fact), "{fact} is not in {tank}");
    }
    assert_eq!(succeed("nbdinfo", &["--size", &served.uri("fast")]), "67108864\n", "by label");
    let uuid = "02020202-0202-0202-0202-020202020202";
    assert_eq!(succeed("nbdinfo", &["--is", "read-only", &served.uri(uuid)]), "", "by UUID");
    assert!(!run("nbdinfo", &[&served.uri("nothing")]).status.success());
}

#[test]
fn nbdinfo_maps_what_is_allocated() {
    if !has("nbdinfo") || !has("nbdsh") {
        return;
    }
    let served = serve();
    nbdsh(&served, "tank", "h.pwrite(b'x' * 65536, 1 << 20)");
    let map = succeed("nbdinfo", &["--map", &served.uri("tank")]);
    let rows: Vec<Vec<&str>> =
        map.lines().map(|line| line.split_ascii_whitespace().take(3).collect()).collect();
    assert_eq!(rows, [["0", "1048576", "3"], ["1048576", "65536", "0"], ["1114112", "65994752", "3"]]);
}

#[test]
fn nbdsh_does_every_command() {
    if !has("nbdsh") {
        return;
    }
    let served = serve();
    let script = "
assert h.get_protocol() == 'newstyle-fixed' and h.get_structured_replies_negotiated()
pattern = bytes(range(256)) * 32
h.pwrite(pattern, 4096, nbd.CMD_FLAG_FUA)
assert h.pread(8192, 4096) == pattern
chunks = []
def chunk(data, offset, status, error): chunks.append((bytes(data), offset, status))
assert h.pread_structured(512, 4096 + 512, chunk, nbd.CMD_FLAG_DF) == pattern[512:1024]
assert chunks == [(pattern[512:1024], 4096 + 512, nbd.READ_DATA)]
h.flush()
h.zero(1024, 4096)
assert h.pread(8192, 4096) == bytes(1024) + pattern[1024:]
h.zero(1024, 8192, nbd.CMD_FLAG_NO_HOLE)
h.trim(1024, 4096)
assert not h.can_cache(), 'nothing would act on it'
seen = []
h.block_status(16384, 0, lambda context, offset, extents, error: seen.append((context, offset, extents)))
assert seen == [('base:allocation', 0, [5120, 3, 7168, 0, 4096, 3])], seen
seen.clear()
h.block_status(16384, 5120, lambda c, o, extents, e: seen.append(extents), nbd.CMD_FLAG_REQ_ONE)
assert seen == [[7168, 0]], seen
h.set_strict_mode(0)
def fails(errno, call):
    try: call()
    except nbd.Error as error: assert error.errno == errno, error
    else: assert False, 'must fail'
fails('ENOTSUP', lambda: h.zero(1024, 0, nbd.CMD_FLAG_FAST_ZERO))
fails('EINVAL', lambda: h.pread(100, 0))
fails('EINVAL', lambda: h.pread(512, h.get_size()))
fails('ENOSPC', lambda: h.pwrite(bytes(512), h.get_size()))
fails('EINVAL', lambda: h.pwrite(bytes(512), 1))
assert h.pread(512, 0) == bytes(512)
print('done')
h.shutdown()
";
    assert_eq!(nbdsh(&served, "tank", script), "done\n");
    let read_only = "
assert h.is_read_only()
h.set_strict_mode(0)
for call in [lambda: h.pwrite(bytes(512), 0), lambda: h.trim(512, 0), lambda: h.zero(512, 0)]:
    try: call()
    except nbd.Error as error: assert error.errno == 'EPERM', error
    else: assert False, 'must fail'
print(len(h.pread(1 << 20, 0)))
";
    assert_eq!(nbdsh(&served, "archive", read_only), "1048576\n");
}

#[test]
fn nbdsh_keeps_sixty_four_requests_in_flight() {
    if !has("nbdsh") {
        return;
    }
    let served = serve();
    let script = "
import random
random.seed(7)
model = bytearray(4 << 20)
slots = list(range(1024))
for turn in range(8):
    random.shuffle(slots)
    waiting = []
    for slot in slots[:64]:
        data = bytes([random.randrange(256)]) * 4096
        model[slot * 4096:(slot + 1) * 4096] = data
        waiting.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), slot * 4096))
    assert h.aio_in_flight() == 64
    while h.aio_in_flight() > 0: h.poll(-1)
    for cookie in waiting: assert h.aio_command_completed(cookie)
    reads = [(slot, buffer, h.aio_pread(buffer, slot * 4096))
             for slot in slots[:64] for buffer in [nbd.Buffer(4096)]]
    while h.aio_in_flight() > 0: h.poll(-1)
    for slot, buffer, cookie in reads:
        assert h.aio_command_completed(cookie)
        assert buffer.to_bytearray() == model[slot * 4096:(slot + 1) * 4096]
print('done')
";
    assert_eq!(nbdsh(&served, "tank", script), "done\n");
}

#[test]
fn nbdcopy_moves_an_image_over_several_connections_both_ways() {
    if !has("nbdcopy") {
        return;
    }
    let served = serve();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    let image = image();
    std::fs::write(&from, &image).expect("written");
    let (from, to) = (from.to_str().expect("text"), to.to_str().expect("text"));
    succeed("nbdcopy", &["--connections=4", "--requests=64", "--flush", from, &served.uri("tank")]);
    assert!(served.ram.content(TANK, 0, TANK_SECTORS) == image, "everything arrived");
    succeed("nbdcopy", &["--connections=4", "--requests=64", &served.uri("tank"), to]);
    assert!(std::fs::read(to).expect("read back") == image, "everything came back");
}

#[test]
fn qemu_io_reads_and_verifies_what_it_wrote() {
    if !has("qemu-io") {
        return;
    }
    let served = serve();
    let commands = [
        "write -P 0x5a 0 1M",
        "read -P 0x5a 0 1M",
        "write -f -P 0xa5 64k 64k",
        "flush",
        "write -z 128k 64k",
        "write -z -u 192k 64k",
        "discard 512k 128k",
        "read -P 0xa5 64k 64k",
        "read -P 0 128k 128k",
        "read -P 0x5a 256k 256k",
        "write -P 7 1000k 512",
        "read -P 7 1000k 512",
        "aio_write -P 9 2M 64k",
        "aio_write -P 8 3M 64k",
        "aio_flush",
        "read -P 9 2M 64k",
        "read -P 8 3M 64k",
    ];
    let uri = served.uri("tank");
    let mut arguments = vec!["-f", "raw", "-t", "none"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    let said = succeed("qemu-io", &arguments);
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    assert_eq!(said.matches("read ").count(), 7, "{said}");
    assert_eq!(served.ram.content(TANK, 128, 1), [0xa5; 512]);
}
