//! Front ends that start with a directory.

use crate::supervisor::fronts::sentence;
use bcached_config::{DISK_BYTES, FrontendConfig};
use bcached_control::failure::{Failure, Kind};
use bcached_front_fuse::{self as fuse, FuseServer, MountError};
use bcached_front_vhost::{self as vhost, VhostServer};
use bcached_port::{BudgetPool, ExportTable};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;

/// A directory that the daemon makes itself. It is removed if the front end does not start.
struct OwnDirectory<'a> {
    path: &'a Path,
    made: std::io::Result<()>,
    is_used: bool,
}

impl<'a> OwnDirectory<'a> {
    fn make(path: &'a Path) -> Self {
        Self { path, made: std::fs::DirBuilder::new().mode(0o755).create(path), is_used: false }
    }

    /// Returns why the directory is not there.
    fn refused(&self) -> Option<&std::io::Error> {
        self.made.as_ref().err().filter(|error| error.kind() != ErrorKind::AlreadyExists)
    }

    /// Keeps the directory.
    fn keep(mut self) {
        self.is_used = true;
    }
}

impl Drop for OwnDirectory<'_> {
    fn drop(&mut self) {
        if self.made.is_ok() && !self.is_used {
            // This fails if something was put there meanwhile.
            let _is_gone = std::fs::remove_dir(self.path);
        }
    }
}

/// Makes the directory of a running front end again after it was removed. If that fails, the socket
/// that needs it reports why.
pub fn make_again(directory: &Path) {
    OwnDirectory::make(directory).keep();
}

const fn kind_of(kind: ErrorKind) -> Kind {
    match kind {
        ErrorKind::PermissionDenied => Kind::Permission,
        ErrorKind::NotFound => Kind::NotFound,
        _ => Kind::Io,
    }
}

/// Starts the disks of virtual machines, on sockets in their directory.
pub fn start_vhost(
    places: &FrontendConfig,
    exports: ExportTable,
    rings: vhost::VolumeRings,
) -> Result<VhostServer, Failure> {
    let cannot = |kind, why: String| {
        Failure::new(kind, "cannot serve disks of virtual machines").why(why).option("--export")
    };
    let directory = &*places.vhost_user;
    let made = OwnDirectory::make(directory);
    let limits = vhost::Limits { volume_bytes: DISK_BYTES, ..vhost::Limits::default() };
    let group = places.vhost_user_group.as_ref().map(|group| group.id);
    let options = vhost::Options { directory: directory.to_owned(), group, limits, rings };
    let server = VhostServer::start(options, exports).map_err(|error| match (&error, made.refused()) {
        (vhost::StartError::NoDirectory(_), Some(why)) => {
            cannot(kind_of(why.kind()), format!("cannot create {}: {why}", directory.display()))
        }
        (vhost::StartError::NotDirectory(_), _) => cannot(Kind::Usage, sentence(&error)),
        _ => cannot(Kind::Io, sentence(&error)),
    })?;
    made.keep();
    tracing::info!(event = "vhost-user-serving", "sockets for virtual machines in {}", directory.display());
    Ok(server)
}

/// Starts the volumes as files, mounted at `directory`.
pub fn start_fuse(
    (directory, allow_other): (&Path, bool),
    exports: ExportTable,
    (memory, bytes): (Arc<BudgetPool>, u64),
    trees: Vec<(String, Arc<dyn fuse::ControlTree>)>,
) -> Result<FuseServer, Failure> {
    let cannot =
        |kind, why: String| Failure::new(kind, "cannot mount volumes as files").why(why).option("--export");
    let made = OwnDirectory::make(directory);
    let own = fuse::Limits::default();
    let limits = fuse::Limits { total_bytes: bytes, file_bytes: own.file_bytes.min(bytes), ..own };
    let options = fuse::Options { directory: directory.to_owned(), allow_other, limits };
    let server = FuseServer::start_sharing(options, exports, trees, memory).map_err(|error| {
        match (&error, made.refused()) {
            (_, Some(why)) if !directory.exists() => {
                cannot(kind_of(why.kind()), format!("cannot create {}: {why}", directory.display()))
            }
            (fuse::StartError::Mount(MountError::NotEmpty(_) | MountError::NotDirectory(_)), _) => {
                cannot(Kind::Usage, sentence(&error))
            }
            (fuse::StartError::Mount(MountError::NotPermitted(_) | MountError::DeviceNotPermitted), _) => {
                cannot(Kind::Permission, sentence(&error))
            }
            _ => cannot(Kind::Io, sentence(&error)),
        }
    })?;
    made.keep();
    tracing::info!(event = "fuse-mounted", "volumes as files in {}/volumes", directory.display());
    Ok(server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_was_made_in_vain_goes_again() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("fuse");
        drop(OwnDirectory::make(&path));
        assert!(!path.exists());
        OwnDirectory::make(&path).keep();
        assert!(path.exists());
        let again = OwnDirectory::make(&path);
        assert!(again.refused().is_none());
        drop(again);
        assert!(path.exists(), "it was there before");
        let beneath = path.join("a/b");
        assert_eq!(
            OwnDirectory::make(&beneath).refused().map(std::io::Error::kind),
            Some(ErrorKind::NotFound)
        );
    }
}
