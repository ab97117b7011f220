//! Builds the initramfs of a qemu guest, packed for one job.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::{GuestError, init_body, job_script};
use crate::requires;
use crate::uml::built_program;
use crate::vm::Also;

/// Modules in the order of insertion. A module that is built in or absent in a kernel version is
/// skipped.
const MODULES: [&str; 9] = [
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
    "lib/crc64",
    "lib/libcrc32c",
    "drivers/md/bcache/bcache",
];

/// Builds the initramfs inside `directory`, with the modules of the kernel whose tree is `modules`.
/// Returns the file.
pub(super) fn build(
    directory: &Path,
    modules: &Path,
    also: &Also,
    script: &str,
) -> Result<PathBuf, GuestError> {
    let root = directory.join("root");
    for name in ["bin", "dev", "proc", "sys", "run", "tmp", "modules"] {
        fs::create_dir_all(root.join(name)).map_err(GuestError::host("make the initramfs"))?;
    }
    let busybox = requires::program("busybox").expect("looked for before");
    add_program(&root, &busybox)?;
    let applets = output(Command::new(&busybox).arg("--list"))?;
    for applet in applets.lines().filter(|name| *name != "busybox") {
        let link = root.join("bin").join(applet);
        symlink("busybox", &link).map_err(GuestError::host(format!("link {applet}")))?;
    }
    if !also.is_bare {
        add_program(&root, &built_program("verified-io")?)?;
    }
    for program in &also.programs {
        add_program(&root, program)?;
    }
    for (from, to) in &also.files {
        place(&root, from, to)?;
    }
    let mut insert = String::new();
    for module in MODULES.into_iter().chain(also.modules.iter().copied()) {
        let (module, parameters) = module.split_once(' ').unwrap_or((module, ""));
        let packed = modules.join(module).with_extension("ko.xz");
        if packed.is_file() {
            let name = Path::new(module).file_name().expect("a path with a name").to_string_lossy();
            let plain = run(Command::new("xz").args(["--decompress", "--stdout"]).arg(&packed))?;
            write(&root.join(format!("modules/{name}.ko")), &plain)?;
            insert += &format!("insmod /modules/{name}.ko {parameters}\n");
        }
    }
    let init = format!(
        "#!/bin/sh\n\
        export PATH=/bin\n\
        mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n\
        {insert}{}poweroff -f\n",
        init_body("/job")
    );
    write(&root.join("job"), job_script(script, "/bin/verified-io").as_bytes())?;
    write(&root.join("init"), init.as_bytes())?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))
        .map_err(GuestError::host("chmod init"))?;
    let packed = directory.join("initramfs");
    // Uncompressed: the guest's emulated processor would decompress more slowly than qemu reads.
    let pack = "cd \"$1\" && find . | cpio --quiet -o -H newc > \"$2\"";
    run(Command::new("sh").args(["-c", pack, "sh"]).args([&root, &packed]))?;
    Ok(packed)
}

/// Copies a program into `/bin`.
fn add_program(root: &Path, program: &Path) -> Result<(), GuestError> {
    let name = program.file_name().expect("a program has a name").to_string_lossy();
    place(root, program, &format!("/bin/{name}"))
}

/// Copies a file to its place in the guest. For a program, also copies the libraries that it loads,
/// to where its loader looks for them.
fn place(root: &Path, from: &Path, to: &str) -> Result<(), GuestError> {
    let place = below(root, to)?;
    // An applet of busybox with that name is a link to busybox; it is replaced.
    let _ = fs::remove_file(&place);
    copy(from, &place)?;
    // Debug information is two thirds of our programs, and an emulated processor would have to
    // unpack it.
    let _as_it_is = Command::new("strip").arg("--strip-debug").arg(&place).output();
    // For a static program, ldd fails: it needs no libraries.
    let libraries = output(Command::new("ldd").arg(from)).unwrap_or_default();
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        copy(Path::new(library), &below(root, library)?)?;
    }
    Ok(())
}

/// Returns a path of the guest, whose directory is created if necessary.
fn below(root: &Path, path: &str) -> Result<PathBuf, GuestError> {
    let place = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(place.parent().expect("below the root"))
        .map_err(GuestError::host("make the initramfs"))?;
    Ok(place)
}

fn copy(from: &Path, to: &Path) -> Result<(), GuestError> {
    fs::copy(from, to).map(drop).map_err(GuestError::host(format!("copy {}", from.display())))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), GuestError> {
    fs::write(path, bytes).map_err(GuestError::host(format!("write {}", path.display())))
}

fn output(command: &mut Command) -> Result<String, GuestError> {
    run(command).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a command to its end. A failure contains its error output.
pub(super) fn run(command: &mut Command) -> Result<Vec<u8>, GuestError> {
    let output = command.output().map_err(GuestError::host(format!("start {command:?}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(GuestError::Setup(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))))
}
