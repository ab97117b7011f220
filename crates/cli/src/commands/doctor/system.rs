//! The system as its files describe it: modules, sysfs, udev's rules. All paths lie below a root
//! directory, which a test replaces.

use bcached_control::paths;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;

/// The places that are examined.
pub(super) struct SystemPaths {
    root: PathBuf,
    /// The root of udev's rules. It is separate so that a test also excludes the machine's own
    /// rules.
    rules: PathBuf,
    /// The kernel release, as `uname -r` prints it.
    release: String,
}

/// Whether a kernel has a module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KernelModule {
    /// It exists and can be loaded.
    Loadable,
    /// It is built into the kernel.
    BuiltIn,
    /// This kernel has no module of that name.
    Absent,
    /// The list of modules is missing, as in a container.
    Unknown,
}

impl SystemPaths {
    /// This machine.
    pub(super) fn here() -> Self {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        Self { root: "/".into(), rules: paths::of_machine("/"), release }
    }

    #[cfg(test)]
    pub(super) fn at(root: &Path, release: &str) -> Self {
        Self { root: root.to_owned(), rules: root.to_owned(), release: release.to_owned() }
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns the path of a directory of udev's rules, or of a file in it.
    pub(super) fn rules(&self, path: &str) -> PathBuf {
        self.rules.join(path.trim_start_matches('/'))
    }

    pub(super) fn release(&self) -> &str {
        &self.release
    }

    /// Returns true if the kernel is at least of that version, or if its version cannot be parsed.
    pub(super) fn is_from(&self, major: u32, minor: u32) -> bool {
        let mut numbers = self.release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(own_major)), Some(Ok(own_minor))) => (own_major, own_minor) >= (major, minor),
            _ => true,
        }
    }

    pub(super) fn module(&self, name: &str) -> KernelModule {
        let folder = ["/lib/modules", "/usr/lib/modules"].map(|place| self.path(place).join(&self.release));
        let listed = |file: &str| {
            let texts = folder.iter().filter_map(|folder| std::fs::read_to_string(folder.join(file)).ok());
            texts.map(|text| text.lines().any(|line| is_module(line, name))).next()
        };
        match (listed("modules.builtin"), listed("modules.dep").or_else(|| listed("modules.order"))) {
            (Some(true), _) => KernelModule::BuiltIn,
            (_, Some(true)) => KernelModule::Loadable,
            (_, Some(false)) => KernelModule::Absent,
            (_, None) => KernelModule::Unknown,
        }
    }

    /// Returns how to make a module's device available.
    pub(super) fn mends(&self, module: &str) -> String {
        match self.module(module) {
            KernelModule::Loadable | KernelModule::Unknown => format!("modprobe {module}"),
            KernelModule::BuiltIn => {
                "it is built into this kernel: give this container the device".to_owned()
            }
            KernelModule::Absent => format!(
                "this kernel has no {module}: install linux-modules-extra-{} (Ubuntu) or kernel-modules-extra (Fedora), or use another kernel",
                self.release
            ),
        }
    }
}

/// Tells whether a line in a list of modules is that of `name`:
/// `kernel/drivers/block/ublk_drv.ko.xz: dependencies`.
fn is_module(line: &str, name: &str) -> bool {
    let path = line.split_once(':').map_or(line, |(path, _)| path);
    let file = path.rsplit('/').next().unwrap_or_default();
    // The kernel treats `-` and `_` in a module's name as equal.
    file.split_once(".ko").is_some_and(|(found, _)| found.replace('-', "_") == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_mended_by_what_this_kernel_has() {
        let root = tempfile::tempdir().expect("a folder");
        let system = SystemPaths::at(root.path(), "6.8.0-31-generic");
        assert_eq!(
            (system.module("ublk_drv"), system.mends("ublk_drv")),
            (KernelModule::Unknown, "modprobe ublk_drv".into())
        );
        let folder = root.path().join("lib/modules/6.8.0-31-generic");
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("modules.builtin"), "kernel/drivers/block/loop.ko\n").expect("a file");
        let all = "kernel/drivers/block/nbd.ko.zst:\nkernel/drivers/md/dm-mod.ko: kernel/a/ublk_drv.ko\n";
        std::fs::write(folder.join("modules.dep"), all).expect("a file");
        let found = ["nbd", "loop", "dm_mod", "ublk_drv"].map(|name| system.module(name));
        assert_eq!(
            found,
            [KernelModule::Loadable, KernelModule::BuiltIn, KernelModule::Loadable, KernelModule::Absent]
        );
        assert!(system.mends("ublk_drv").contains("linux-modules-extra-6.8.0-31-generic"));
        assert_eq!(system.mends("nbd"), "modprobe nbd");
    }

    #[test]
    fn versions_of_kernels_are_compared_as_numbers() {
        let of = |release: &str| SystemPaths::at(Path::new("/"), release);
        assert!(of("6.10.3-amd64").is_from(6, 5) && of("7.0.0").is_from(6, 5) && of("6.5").is_from(6, 5));
        assert!(!of("6.1.0-37-amd64").is_from(6, 5) && !of("5.15.0").is_from(6, 5) && of("?").is_from(6, 5));
    }
}
