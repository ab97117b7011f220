//! Third-party NBD clients on a running daemon, through its unix socket and over TCP with TLS:
//! whole images over several connections, every command, and what is durable after a kill.

use crate::certificates::CertificateAuthority;
use crate::common::{self, Daemon, Images, bytes, pattern, requires, run, tool};
use std::ffi::OsStr;

const MIB: u64 = 1 << 20;
/// More than the cache holds, so that reads come from both devices.
const BACKING_BYTES: u64 = 96 * MIB;

/// Runs a program that must succeed, and returns its output.
#[track_caller]
fn does<A: AsRef<OsStr>>(name: &str, words: impl IntoIterator<Item = A>) -> String {
    let mut command = tool(name);
    // nbdsh runs under the first Python in the path, but its module belongs to the system's Python.
    command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").args(words);
    let ran = run(&mut command);
    assert_eq!(ran.exit, 0, "{command:?}: {ran:?}");
    ran.out
}

/// Makes a volume that is served on both addresses.
fn served() -> (Images, Daemon) {
    let images = Images::new();
    images.configure_pair(36 * MIB, BACKING_BYTES, "");
    let (authority, tls, client) = (CertificateAuthority::new(), images.path("tls"), images.path("client"));
    authority.put_server(&tls);
    authority.put_client(&client, Some(&authority));
    let text = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    let socket = images.path("run/nbd.sock");
    images.configure(&format!("{text}[nbd]\nlisten = [\"127.0.0.1:0\", {socket:?}]\ntls = {tls:?}\n"));
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

/// Returns the URI of an export over TCP with TLS.
fn uri_in_tls(images: &Images, daemon: &Daemon, export: &str) -> String {
    let status = daemon.status();
    let places = status["nbd"].as_array().expect("places").iter().filter_map(|place| place.as_str());
    let port = places.filter_map(|place| place.strip_prefix("127.0.0.1:")).next().expect("a TCP place");
    let certificates = images.path("client");
    format!("nbds://localhost:{port}/{export}?tls-certificates={}", certificates.display())
}

/// On the unix socket one process is one client. Over TCP each connection is one, and only one of
/// them may write.
#[test]
fn whole_images_by_several_connections_both_ways() {
    if !requires("nbdcopy") || !requires("qemu-img") {
        return;
    }
    let (images, daemon) = served();
    let (unix, tls) = (daemon.uri("tank"), uri_in_tls(&images, &daemon, "tank"));
    let size = does("nbdinfo", ["--size", &unix]).trim().parse().expect("a number");
    let image = images.path("image");
    let image_name = image.to_str().expect("text");
    for (to, from, connections, seed) in [(&unix, &tls, "8", 1), (&tls, &unix, "1", 2)] {
        let data = pattern(size, seed);
        std::fs::write(&image, &data).expect("a file");
        let several = format!("--connections={connections}");
        does("nbdcopy", [&several, "--requests=32", "--request-size=65536", "--flush", image_name, to]);
        daemon.wait_for("it has gone", |status| status["clients"] == serde_json::json!([]));
        let found = images.path(&format!("found-{seed}"));
        let name = found.to_str().expect("text");
        does("nbdcopy", ["--connections=8", "--requests=32", from, name]);
        assert!(bytes(&found) == data, "by nbdcopy from {from}");
        does("nbdcopy", ["--synchronous", to, name]);
        assert!(bytes(&found) == data, "one request after the other, from {to}");
    }
    // Another program's own code, with holes.
    does("qemu-img", ["compare", "-f", "raw", "-F", "raw", image_name, &unix]);
    let holes = std::fs::File::options().write(true).open(&image).expect("opens");
    holes.set_len(8 << 20).and_then(|()| holes.set_len(size as u64)).expect("a hole at its end");
    does("qemu-img", ["convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", image_name, &unix]);
    daemon.kill();
    let daemon = Daemon::configured(&images);
    does("qemu-img", ["compare", "-f", "raw", "-F", "raw", image_name, &daemon.uri("tank")]);
    assert_eq!(daemon.stop().0, 0);
}

/// The server's information, and the result of every command of nbdsh, are the same on both
/// addresses.
#[test]
fn every_command_by_both_ways() {
    if !requires("nbdinfo") || !requires("nbdsh") {
        return;
    }
    let (images, daemon) = served();
    for (way, list, uri) in [
        ("unix", daemon.uri(""), daemon.uri("tank")),
        ("tls", uri_in_tls(&images, &daemon, ""), uri_in_tls(&images, &daemon, "tank")),
    ] {
        let listed = common::json(&does("nbdinfo", ["--list", "--json", &list]));
        let exports = listed["exports"].as_array().expect("exports");
        let [tank] = &exports[..] else { unreachable!("one volume is served: {listed}") };
        assert_eq!(tank["export-name"], "tank", "{way}: {listed}");
        for able in ["can_flush", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_df"] {
            assert_eq!(tank[able], true, "{way} {able}: {listed}");
        }
        assert_eq!(tank["can_multi_conn"], way == "unix", "{listed}");
        assert_eq!(does("nbdsh", ["--command", &connected(&uri), "--command", EVERY_COMMAND]), "done\n");
        daemon.wait_for("it has gone", |status| status["clients"] == serde_json::json!([]));
        let map = does("nbdinfo", ["--map", "--json", &uri]);
        let map = common::json(&map);
        let mut end = 0;
        for extent in map.as_array().expect("extents") {
            assert_eq!(extent["offset"], end, "{way}: without a gap: {map}");
            end += extent["length"].as_u64().expect("a length");
        }
        assert_eq!(does("nbdinfo", ["--size", &uri]).trim(), end.to_string(), "{way}: to the end");
        let data = "h.pread(4096, 8 << 20) == bytes(range(256)) * 16 and h.pread(65536, 0) == bytes(65536)";
        let durable = format!("print({data})");
        // Data written with FUA, and flushed data, is durable whatever happens now.
        let other = if way == "unix" { uri_in_tls(&images, &daemon, "tank") } else { daemon.uri("tank") };
        assert_eq!(does("nbdsh", ["--command", &connected(&other), "--command", &durable]), "True\n");
    }
    daemon.kill();
    let daemon = Daemon::configured(&images);
    let durable = "print(h.pread(4096, 8 << 20) == bytes(range(256)) * 16)";
    assert_eq!(does("nbdsh", ["--command", &connected(&daemon.uri("tank")), "--command", durable]), "True\n");
    assert_eq!(daemon.stop().0, 0);
}

fn connected(uri: &str) -> String {
    format!(
        "h.add_meta_context('base:allocation')\nh.set_uri_allow_local_file(True)\nh.connect_uri({uri:?})\n"
    )
}

const EVERY_COMMAND: &str = "
data = bytes(range(256)) * 16
h.pwrite(data * 16, 0)
h.flush()
assert h.pread(65536, 0) == data * 16
h.zero(4096, 4096, nbd.CMD_FLAG_NO_HOLE)
h.zero(4096, 16384, nbd.CMD_FLAG_FUA)
assert h.pread(65536, 0) == data + bytes(4096) + data * 2 + bytes(4096) + data * 11
h.trim(65536, 0)
assert h.pread(65536, 0) == bytes(65536)
h.pwrite(data, 8 << 20, nbd.CMD_FLAG_FUA)
seen = []
def extents(context, offset, entries, error):
    assert context == 'base:allocation'
    seen.extend(entries)
h.block_status(1 << 20, 0, extents)
assert sum(seen[0::2]) >= 65536 and set(seen[1::2]) <= {0, 3}, seen
seen.clear()
h.block_status(4096, 8 << 20, extents, nbd.CMD_FLAG_REQ_ONE)
assert seen == [4096, 0], seen
print('done')
h.shutdown()
";

/// fio's own NBD client, which verifies what it wrote.
#[test]
fn fio_by_its_own_client() {
    if !requires("fio") {
        return;
    }
    if !run(tool("fio").arg("--enghelp")).out.lines().any(|line| line.trim() == "nbd") {
        println!("skipped: this fio has no engine for NBD");
        return;
    }
    let (images, daemon) = served();
    let uri = daemon.uri("tank");
    let common = ["--name=verify", "--ioengine=nbd", "--rw=randrw", "--bsrange=4k-128k", "--iodepth=16"];
    let judged = ["--size=64m", "--verify=crc32c", "--verify_fatal=1", "--fsync=64", "--trim_percentage=0"];
    let mut command = tool("fio");
    // The files that it leaves behind are left in this directory.
    command.current_dir(images.path("")).args(common).args(judged).arg(format!("--uri={uri}"));
    let ran = run(&mut command);
    assert_eq!(ran.exit, 0, "{ran:?}\n{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
}
