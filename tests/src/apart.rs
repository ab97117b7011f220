//! Isolates programs under test from a bcached that is installed on the machine.

use std::path::Path;
use std::process::Command;

/// Makes `command`, which starts one of our programs, use the folder `machine` in `directory` for
/// its system paths, and clears the environment variables that name a bcached. Variables that the
/// caller sets afterwards take effect.
pub fn isolated<'a>(command: &'a mut Command, directory: &Path) -> &'a mut Command {
    for variable in ["CONTROL", "NOTES", "STATE", "SYSFS", "UDEV_RULES", "LOG"] {
        command.env_remove(format!("BCACHED_{variable}"));
    }
    command.env("BCACHED_ROOT", directory.join("machine"))
}
